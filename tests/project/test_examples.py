"""The programs in `examples/` run as they are, print what their page says, and fit a terminal."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
PROGRAMS = sorted(EXAMPLES.glob("[0-9]*.py"))
RUN_BY_ANOTHER = {"09_before.py": "09_fix.py"}


def row_of(program: Path) -> str:
    """The last cell of a program's row."""
    (row,) = re.findall(rf"^\| \[{program.name}\]\({program.name}\) .*\|$", PAGE, re.M)
    return row.split("|")[-2]


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.name not in RUN_BY_ANOTHER], ids=lambda p: p.stem
)
def test_a_program_prints_what_its_page_says(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(program), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if len(line) > 80] == []
    for quoted in re.findall("`([^`]+)`", row_of(program)):
        assert quoted in re.sub(" +", " ", printed)


def test_every_program_is_on_the_page_and_short() -> None:
    linked = re.findall(r"\]\((\w+\.py)\)", PAGE)
    assert sorted(linked) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    for program in EXAMPLES.glob("*.py"):
        assert len(program.read_text(encoding="utf-8").splitlines()) < 140, program.name


def test_the_distributed_recipe_is_run_elsewhere() -> None:
    tests = Path(__file__).parents[1] / "processes" / "test_processes.py"
    assert "distributed.py" in tests.read_text(encoding="utf-8")
