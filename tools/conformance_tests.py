"""Runs `tests/conformance/` with pytest and counts its cases, file by file.

    python -m tools.conformance_tests 2 sections.json    in two processes

Invariants:
    - A test counts as one case, or as the number that it gives as its property "cases".
    - A file is called what its constant `SECTION` says, or else its docstring's first line.
    - Not part of the package.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Section", "run", "title"]

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "conformance"


@dataclass
class Section:
    """The results of one file of tests."""

    file: str
    title: str
    cases: int = 0
    equal: int = 0
    skipped: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """The number of skipped tests for each reason."""


class _Counter:
    """A plugin of pytest that counts."""

    def __init__(self) -> None:
        self.sections: dict[str, Section] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test when it is over: its call, or a setup that did not come to a call."""
        if report.when != "call" and (report.when == "teardown" or report.passed):
            return
        file = report.nodeid.partition("::")[0]
        section = self.sections.setdefault(file, Section(file, title(ROOT / file)))
        cases = sum(int(str(v)) for name, v in report.user_properties if name == "cases") or 1
        if report.skipped:
            section.skipped += 1
            reason = _reason(report)
            section.reasons[reason] = section.reasons.get(reason, 0) + 1
            return
        section.cases += cases
        section.equal += cases if report.passed else 0


def run(processes: int) -> tuple[int, list[dict[str, Any]]]:
    """Runs the tests.

    Returns:
        pytest's exit code, and a section for each file in the order of their names.
    """
    counter = _Counter()
    arguments = [str(TESTS), "--quiet", "--numprocesses", str(processes)]
    code = pytest.main(arguments, plugins=[counter])
    return int(code), [asdict(counter.sections[file]) for file in sorted(counter.sections)]


def title(file: Path) -> str:
    """Return the subject of a file of tests, without its full stop."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SECTION":
            return str(ast.literal_eval(node.value))
    [first, *_] = (ast.get_docstring(module) or file.stem).splitlines()
    return first.rstrip(".")


def _reason(report: pytest.TestReport) -> str:
    assert isinstance(report.longrepr, tuple)
    return str(report.longrepr[2]).removeprefix("Skipped: ")


if __name__ == "__main__":
    exit_code, sections = run(int(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(sections), encoding="utf-8")
    raise SystemExit(exit_code)
