"""The page of a search: its content, no markup from the program, and no network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from precast.errors import MissingExtraError, OutputError
from precast.report import page as report_page
from precast.tuning import page, tuner
from precast.tuning.result import TuningResult
from precast.tuning.training import TrainingTask
from tests.tuning.test_tuner import tune

BAD = "</script><b>&"


@pytest.fixture(scope="module")
def result() -> TuningResult:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingTask, "steps", (8, 12))
        return tune()


def data_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def test_the_page_has_the_answer_what_was_tried_and_the_policy(result: TuningResult) -> None:
    text = page.html(result._evidence, result.text)
    before_script = text.partition('<script type="application/json"')[0]
    for word in (result.name, "the memory of float32", "Wide", "default", "[measured]", "equal"):
        assert word in before_script
    data = data_of(text)
    assert [point["name"] for point in data["points"]][:2] == ["float32", "default"]
    assert [point["is_answer"] for point in data["points"]].count(True) == 1
    kept = {point["name"]: point["cost"][1] for point in data["points"]}
    assert kept["default"] < kept["float32"]
    assert len(data["curves"][0]["mean"]) == result._evidence.proof.steps


def test_the_tree_shows_the_model_as_it_ran_under_the_answer(result: TuningResult) -> None:
    nodes = {node["name"]: node for node in data_of(page.html(result._evidence, ""))["nodes"]}
    assert set(nodes) >= {"", "body", "head"}
    assert "bfloat16" in nodes["body"]["dtypes"]
    assert nodes["body"]["seconds"] > 0
    assert nodes["body"]["casts"] > 0
    assert 0 < nodes["body"]["gradient"] <= nodes[""]["gradient"] < 1


def test_the_page_asks_for_nothing_and_text_is_no_markup(result: TuningResult) -> None:
    result._evidence.model, before = BAD, result._evidence.model
    try:
        text = page.html(result._evidence, BAD)
    finally:
        result._evidence.model = before
    assert BAD not in text
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in text
    assert "default-src 'none'" in text
    own = text.partition('<script type="application/json"')[0]
    assert not re.search(r'(src|href)="(?!#)', own)


def test_a_search_that_proved_nothing_has_a_page_too() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuner.SearchBudget, "steps_for", lambda *_: 0)
        found = tune()
    text = page.html(found._evidence, found.text)
    assert '<p class="level">Undecided</p>' in text
    assert '<p class="level">Proven</p>' not in text
    assert data_of(text)["points"] == []


def test_what_is_saved(result: TuningResult, tmp_path: Path) -> None:
    result.save(tmp_path / "a.toml")
    assert {path.name for path in tmp_path.iterdir()} == {"a.toml", "a.json", "a.html"}
    result.save(tmp_path / "b.toml", page=False)
    assert not (tmp_path / "b.html").exists()
    result.save(tmp_path / "c.toml", page=tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    (tmp_path / "mine.html").write_text("my own")
    with pytest.raises(OutputError, match="was not written by precast"):
        result.save(tmp_path / "mine.toml")
    assert (tmp_path / "mine.html").read_text() == "my own"


def test_without_the_packages_of_the_page_it_is_left_out_unless_asked_for(
    result: TuningResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise MissingExtraError("jinja2")

    monkeypatch.setattr(report_page, "needed", missing)
    result.save(tmp_path / "a.toml")
    assert {path.name for path in tmp_path.iterdir()} == {"a.toml", "a.json"}
    with pytest.raises(MissingExtraError):
        result.save(tmp_path / "b.toml", page=True)
    assert not (tmp_path / "b.toml").exists()
