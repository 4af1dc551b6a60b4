"""The benchmark of float8 products on a GPU: its logic, with small shapes and planted times on the CPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import float8
from benchmarks.float8 import RULES, Shape, pays_from, run, said

CPU = torch.device("cpu")
SMALL = (Shape(16, 32, 48), Shape(32, 64, 64))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="float8 is emulated")
        yield


def row(kind: str, shape: Shape, faster: float, *, compiled: bool = False) -> dict[str, Any]:
    return {**shape._asdict(), "kind": kind, "compiled": compiled, "faster": faster}


def test_a_cpu_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        float8.main, ["--device", "cpu", "--json", str(tmp_path / "float8.json")]
    )
    assert done.exit_code == 0
    assert done.output.startswith("skipped: cpu emulates float8")
    document = json.loads((tmp_path / "float8.json").read_text())
    assert (
        document["skipped"]
        == "cpu emulates float8, whose time tells nothing: cpu has no kernel for 8 bits"
    )
    assert "rows" not in document


@pytest.mark.parametrize("compiled", [False, True])
def test_every_rule_has_a_row_for_every_shape(compiled: bool) -> None:
    shapes = SMALL[:1] if compiled else SMALL
    rows = [*run(CPU, shapes, rounds=3, compiles=(compiled,))]
    ours = [each for each in rows if each["kind"] in RULES]
    assert len(ours) == len(RULES) * len(shapes)
    # What there is no time for is smaller than what there was.
    assert [Shape(r["tokens"], r["inputs"], r["outputs"]) for r in ours[:: len(RULES)]] == [
        *shapes[::-1]
    ]
    for each in ours:
        assert each["compiled"] is compiled
        assert 0 < each["ratio_low"] <= each["ratio"] <= each["ratio_high"]
        assert 0 <= each["faster"] <= 1


def test_what_cannot_run_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = float8._under

    def refused(shape: Shape, device: torch.device, rule: str, *, compiled: bool) -> Any:
        if rule == "float8":
            raise RuntimeError("no kernel\nat a line")
        return plain(shape, device, rule, compiled=compiled)

    monkeypatch.setattr(float8, "_under", refused)
    rows = [*run(CPU, SMALL[:1], rounds=3, compiles=(False,))]
    [broken] = [each for each in rows if each["kind"] == "float8"]
    assert broken["error"] == "no kernel"
    assert {"kind": "float8", "compiled": False, "from": None, "shapes": 1} in pays_from(rows)
    assert len([each for each in rows if "ratio" in each and each["kind"] in RULES]) == 2


def test_what_ends_it_early_leaves_the_rows_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {**row("float8", SMALL[0], 1.0), "benchmark": "float8"}

    def some(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        yield first
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(float8, "run", some)
    file = tmp_path / "float8.json"
    asked = ["--device", "cpu", "--emulated", "--json", str(file)]
    done = CliRunner().invoke(float8.main, asked)
    assert done.exit_code == 0
    document = json.loads(file.read_text())
    assert document["rows"] == [first]
    assert "the driver is gone" in document["ended"]
    assert "float8 (eager) from 16 x 32 -> 48 of 1" in done.output
    assert "ended early" in done.output


def test_a_rule_pays_from_the_smallest_shape_above_which_all_are_faster() -> None:
    small, middle, large = Shape(1, 1, 1), Shape(2, 2, 2), Shape(4, 4, 4)
    rows = [
        *(row("float8", s, f) for s, f in ((large, 1.0), (small, 0.2), (middle, 0.9))),
        # Faster at a small shape by chance, and not at a larger one.
        *(row("float8_rowwise", s, f) for s, f in ((small, 1.0), (middle, 0.5), (large, 1.0))),
        *(row("float8_hp_grad", s, f) for s, f in ((small, 1.0), (large, 0.89))),
        row("float8", small, 1.0, compiled=True),
    ]
    found = {(each["kind"], each["compiled"]): each["from"] for each in pays_from(rows)}
    assert found == {
        ("float8", False): middle._asdict(),
        ("float8_rowwise", False): large._asdict(),
        ("float8_hp_grad", False): None,
        ("float8", True): small._asdict(),
    }
    words = said({"pays_from": pays_from(rows), "rows": rows, "torchao": "0.18.0"})
    assert "float8 (eager) from 2 x 2 -> 2 of 3" in words
    assert "float8_hp_grad (eager) at no size of 2" in words
    assert "torchao" not in words
