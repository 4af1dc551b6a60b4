"""The figures of docs/tune.md are those that were measured, in both languages."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tools.tuning_proof import data, page

_LANGUAGES = sorted(page._WORDS)
_WHERE = {
    "command": "python -m tools.tuning_proof real",
    "machine": "a machine",
    "threads": 2,
    "load": 0.1,
    "torch": "2.13",
    "date": "2026-01-02",
}
_ROW: dict[str, Any] = {
    "network": "GAT",
    "objective": "time",
    "tolerance": 0.01,
    "answer": "default",
    "is": "default",
    "steps": 24,
    "search_seconds": 61.0,
    "setups": [
        {
            "name": name,
            "step": step,
            "ratio": ratio,
            "kept_bytes": 2**20,
            "loss_difference": [-0.001, 0.0, 0.001],
            "failure": "",
        }
        for name, step, ratio in (("float32", 0.2, [1, 1, 1]), ("default", 0.1, [0.49, 0.5, 0.51]))
    ],
    "beside": {
        "best_of_the_others": "float32",
        "ratio": [0.49, 0.5, 0.51],
        "within": "yes",
    },
    "where": _WHERE,
}


@pytest.mark.parametrize("language", _LANGUAGES)
def test_the_page_has_the_figures_that_were_measured(language: str) -> None:
    text = page._PAGES[language].read_text(encoding="utf-8")
    _, _, rest = text.partition(page._BEGINS + "\n")
    found, _, _ = rest.partition(page._ENDS)
    assert found == "\n".join(["", *page.tables(data.read(), language), ""]), (
        "run: python -m tools.tuning_proof render"
    )


@pytest.mark.parametrize("language", _LANGUAGES)
def test_a_network_is_shown_beside_the_others_and_a_failure_is_said(language: str) -> None:
    failed = {"network": "UNet", "failure": "MissingExtraError: monai"}
    lines = [*page.tables({"real time": {"GAT": _ROW, "UNet": failed}}, language)]
    [shown] = [line for line in lines if line.startswith("| GAT | `default` | 100.0")]
    assert "0.500 (0.490-0.510)" in shown
    assert "-0.10% … +0.10%" in shown
    assert any("0.500 (0.490-0.510)" in line and "`float32`" in line for line in lines)
    assert any("UNet" in line and "MissingExtraError: monai" in line for line in lines)


@pytest.mark.parametrize("language", _LANGUAGES)
def test_what_is_unknown_is_a_dash(language: str) -> None:
    row = copy.deepcopy(_ROW)
    row["setups"][1] |= {"step": None, "ratio": [None] * 3, "loss_difference": [None] * 3}
    lines = [*page.tables({"real time": {"GAT": row}}, language)]
    [shown] = [line for line in lines if line.startswith("| GAT | `default` | -")]
    assert shown.split("|")[4].strip() == "-"
    assert shown.split("|")[6].strip() == "-"


@pytest.mark.parametrize("language", _LANGUAGES)
def test_where_nothing_was_measured_that_is_said(language: str) -> None:
    assert [*page.tables({}, language)] == [page._WORDS[language]["none"], ""]


def test_a_part_is_kept_beside_the_others(tmp_path) -> None:
    path = tmp_path / "tuning.json"
    data.put("growth", {"sizes": []}, path=path)
    data.put("real time", {"seconds": float("inf")}, "GAT", path=path)
    data.put("real time", {"seconds": 2.0}, "ViT", path=path)
    assert data.read(path) == {
        "growth": {"sizes": []},
        "real time": {"GAT": {"seconds": None}, "ViT": {"seconds": 2.0}},
    }
