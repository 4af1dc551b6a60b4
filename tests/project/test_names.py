"""Names in `src` and `lint`: a class name is unique, and a variable's name is no participle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("src", "lint/src") for path in (ROOT / folder).rglob("*.py"))
PARTICIPLE = re.compile(
    r"asked|begun|counted|drawn|found|given|gone|got|kept|known|learnt|left|lent|made|meant|met|noted|said|seen|taken"
    r"|told|wanted|written"
)

# Where a participle is a variable's name today: the module in `src/precast`, and the name.
EXCEPTIONS = {
    ("diagnostics/hardware/machine.py", "left"),  # with `right`: the operands of a product
    ("report/schema.py", "made"),
}


def _variables(tree: ast.Module) -> Iterator[str]:
    """Yield the names of variables and parameters, without leading and trailing underscores."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id.strip("_")
        elif isinstance(node, ast.arg):
            yield node.arg.strip("_")


def test_a_class_name_is_unique() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_variable_is_not_named_by_a_participle() -> None:
    uses = {
        (path.relative_to(ROOT).as_posix().removeprefix("src/precast/"), name)
        for path in FILES
        for name in _variables(ast.parse(path.read_bytes()))
        if PARTICIPLE.fullmatch(name)
    }
    assert uses - EXCEPTIONS == set(), "name the thing: `module`, not `found`"


@pytest.mark.parametrize("text", ["found = 1", "def f(*, told_=None): pass", "a, (b, _known) = c"])
def test_a_participle_is_noticed(text: str) -> None:
    assert any(map(PARTICIPLE.fullmatch, _variables(ast.parse(text))))
