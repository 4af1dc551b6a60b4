"""The comparisons of `examples/two_runs.py` find what its page says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("two_runs")
    sys.modules.pop("two_runs")


def test_a_compiled_model_and_an_upgrade_differ_by_rounding(program: Any, tmp_path: Path) -> None:
    for comparison in (program.compiled, program.upgraded):
        difference = comparison(tmp_path)
        assert difference.within_bound, difference
        assert difference.cause is None or difference.cause.kind == "order", difference
        assert difference.steps[0].output is not None
        assert difference.steps[0].loss is not None
    assert any("PyTorch 2.12.1 against" in note for note in difference.notes)
    assert {point.module for point in difference.growth} >= {"embed", "blocks.1.qkv", "head"}


def test_two_processes_and_a_server_agree_with_one_trainer(program: Any, tmp_path: Path) -> None:
    difference = program.two_processes(tmp_path)
    assert difference.within_bound, difference
    assert difference.cause.kind == "order", difference
    assert len(difference.steps) == 2
    for form, modules in (("converted", {"embed", "blocks.1.qkv", "head"}), ("exported", {""})):
        difference = program.served(tmp_path, form)
        assert difference.within_bound, difference
        assert not difference.causes
        assert {point.module for point in difference.growth} >= modules
