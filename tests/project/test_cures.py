"""Each piece of advice has a trial: a test that follows it on a program with the fault, and checks the result."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from precast._internal import cures
from precast._internal.cures import Cure

_TESTS = Path(__file__).parents[1]
CURES = {name for name, value in vars(cures).items() if isinstance(value, Cure)}


def _trials(file: Path) -> Iterator[str]:
    """Yield the names in the marks `pytest.mark.trial(name)` of the tests of a file."""
    text = file.read_text(encoding="utf-8")
    if "mark.trial" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.trial":
                    yield ast.literal_eval(mark.args[0])


def test_each_piece_of_advice_has_a_trial() -> None:
    trials = {name for file in _TESTS.rglob("test_*.py") for name in _trials(file)}
    assert trials == CURES
