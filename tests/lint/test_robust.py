"""`precast-lint check` on what is hard to read: nested deeply, named oddly, or more than a rule can take."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from precast_lint.checking import engine
from precast_lint.cli import main
from precast_lint.running import runner
from precast_lint.running.runner import RunMode, run_text
from precast_lint.selecting.registry import load
from precast_lint.selecting.settings import LintSettings

OLD = "import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n"

DEEP = {
    "brackets": "x = " + "[" * 20_000 + "]" * 20_000,
    "brackets of another Python": "print 'x'\nx = " + "(" * 20_000 + ")" * 20_000,
    "signs": "x = " + "-" * 20_000 + "1",
    "a sum": "x = " + "+".join(["1"] * 20_000),
    "attributes": "x = a" + ".b" * 20_000,
    "calls": "x = a" + "()" * 20_000,
    "negations": "x = " + "not " * 20_000 + "1",
    "elif": "if a:\n    pass\n" + "elif a:\n    pass\n" * 20_000,
    "an annotation": f"x: '{'-' * 20_000}1'",
}
LONG = {
    "a sum": "x = " + " + ".join(["'a'"] * 800),
    "texts": "x = (" + "'a' " * 800 + ")",
    "elif": "if a:\n    pass\n" + "elif a:\n    pass\n" * 800,
    "calls": "x = a" + ".b()" * 200,
}
AGAIN = {  # lines of a class, and how much more four times as many may take
    "a name is bound": ("    x = 1\n", 5),
    "a name is bound to what is made of it": ("    x = f(x)\n", 5),
    "an attribute is itself": ("    def f(self): self.x = self.x; torch.autocast(self.x)\n", 5),
    "a softmax is written out": ("    y = torch.exp(y) / torch.exp(y).sum(-1)\n", 20),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.precast.check]\n")
    return tmp_path


def precast_(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("kind", DEEP)
def test_what_is_nested_too_deeply_is_one_finding_not_the_end_of_the_process(kind: str) -> None:
    """LibCST's parser overflows the stack of such files, or takes minutes."""
    text = OLD + DEEP[kind] + "\n"
    report = run_text("a.py", text.encode(), LintSettings(), RunMode())
    assert not report.failed
    assert report.note is None
    codes = [finding.code for finding in report.findings]
    assert codes == (["AMP001"] if kind == "an annotation" else ["AMP900"])


def test_a_cell_that_is_nested_too_deeply_is_one_finding() -> None:
    cells = [{"cell_type": "code", "source": text} for text in (OLD, DEEP["brackets"])]
    report = run_text("a.ipynb", json.dumps({"cells": cells}).encode(), LintSettings(), RunMode())
    assert [finding.code for finding in report.findings] == ["AMP900", "AMP001"]


@pytest.mark.parametrize("what", AGAIN)
def test_what_is_written_again_and_again_costs_little_each_time(what: str) -> None:
    """A name that a file binds a thousand times took minutes."""
    lines, more = AGAIN[what]

    def steps(times: int) -> int:
        text = OLD + "class A:\n" + lines * times
        return calls(lambda: run_text("a.py", text.encode(), LintSettings(), RunMode()))

    steps(2)  # loads what is loaded once
    assert steps(48) <= more * steps(12)


@pytest.mark.parametrize("kind", LONG)
def test_what_programs_write_is_read(kind: str) -> None:
    text = OLD + LONG[kind] + "\n"
    report = run_text(
        "a.py", text.encode(), LintSettings(codes=frozenset({"AMP001"})), RunMode(fix=True)
    )
    assert (report.findings, report.fixed) == ([], ["AMP001"])


def calls(what: Callable[[], object]) -> int:
    """The number of calls and returns in Python."""
    records = 0

    def count(*event: object) -> None:
        nonlocal records
        records += 1

    gc.disable()  # what it calls for other tests' garbage is not counted
    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
        gc.enable()
    return records


def _failing(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    def fail(source: object) -> None:
        raise failure

    rule = load("AMP001")
    assert rule is not None
    broken = type("Broken", (), {"code": "AMP001", "check": staticmethod(fail)})
    monkeypatch.setattr(engine, "load", lambda code: broken if code == "AMP001" else load(code))


class Panic(BaseException):
    """An error of an extension in Rust, which is no `Exception`."""


@pytest.mark.parametrize("failure", [KeyError("x"), Panic("x")])
def test_a_rule_that_fails_on_a_file_leaves_the_others(
    here: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    (here / "a.py").write_text(OLD)
    (here / "b.py").write_text("import apex.amp\napex.amp.init()\n")
    _failing(monkeypatch, failure)
    result = precast_("check", "--output-format", "concise")
    assert result.exit_code == 2
    assert "b.py:2:1: AMP009" in result.stdout
    assert result.stderr.startswith("error: skipped a.py: AMP001 failed on a.py: ")
    (here / "b.py").unlink()
    alone = precast_("check")
    assert "passed" not in alone.stdout
    assert "1 file could not be checked" in alone.stdout
    assert precast_("check", "--exit-zero").exit_code == 2


def test_a_process_that_dies_takes_one_file_with_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2 * runner._FEW):
        (here / f"f{number:02}.py").write_text(OLD)
    check_text = runner.run_text
    parent = os.getpid()

    def dies(filename: str, *rest: object) -> object:
        if "f05" in filename:
            assert os.getpid() != parent
            os.kill(os.getpid(), signal.SIGKILL)
        return check_text(filename, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run_text", dies)
    result = precast_("check", "--jobs", "2", "--output-format", "concise")
    assert result.exit_code == 2
    assert result.stdout.count("AMP001") == 2 * runner._FEW - 1
    assert "error: skipped f05.py" in result.stderr


def test_a_name_that_is_no_text_is_printed_somehow(here: Path) -> None:
    (here / os.fsdecode(b"\xff.py")).write_text(OLD)
    for kind in ("full", "concise", "json", "github"):
        result = precast_("check", "--output-format", kind)
        assert result.exit_code == 1, result.exception
    assert precast_("check", "--diff").exit_code == 1
    assert precast_("check", "--fix").exit_code == 0


def _cells(*sources: object) -> bytes:
    return json.dumps({"cells": [{"cell_type": "code", "source": s} for s in sources]}).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.py", b"# coding: rot13\n" + OLD.encode()),
        ("a.py", b"# coding: nonsense\n" + OLD.encode()),
        ("a.py", OLD.encode("utf-16")),
        ("a.ipynb", b'{"autocast": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        ("a.ipynb", b'{"autocast": 1, "cells": [3]}'),
        ("a.ipynb", b'{"autocast": 1, "cells": {"a": 1}}'),
    ],
)
def test_what_cannot_be_read_is_a_note_and_no_defect(name: str, data: bytes) -> None:
    report = run_text(name, data, LintSettings(), RunMode(fix=True))
    assert report.note is not None
    assert report.note.startswith("it can't be read: ")
    assert not report.failed


@pytest.mark.parametrize("odd", [None, 3, ["import torch", 3], {"a": 1}])
def test_a_cell_without_text_is_left_alone(odd: object) -> None:
    report = run_text("a.ipynb", _cells(odd, OLD), LintSettings(), RunMode(fix=True))
    assert (report.note, report.fixed) == (None, ["AMP001"])
    assert report.after is not None
    assert json.loads(report.after)["cells"][0]["source"] == odd


def test_lines_of_a_cell_end_where_jupyter_ends_them() -> None:
    lines = ['x = "\x0c\u2028"\n', *OLD.splitlines(keepends=True)]
    report = run_text("a.ipynb", _cells(lines), LintSettings(), RunMode())
    assert [finding.row for finding in report.findings] == [4]
    fixed = run_text("a.ipynb", _cells(lines), LintSettings(), RunMode(fix=True))
    assert fixed.after is not None
    changed = json.loads(fixed.after)["cells"][0]["source"]
    assert len(changed) == len(lines)
    assert [a for a, b in zip(changed, lines, strict=True) if a != b] == [
        'with torch.amp.autocast("cuda"):\n'
    ]


NOTEBOOK = {
    "a magic without a percent sign": (
        ["cd examples\n"],
        ["pip install x\n", *OLD.splitlines(True)],
    ),
    "an indented cell": ([f"    {line}" for line in OLD.splitlines(True)],),
    "a line that is not indented": ([f"  {OLD.splitlines(True)[0]}", "x = 1\n"], OLD),
}


@pytest.mark.parametrize("kind", NOTEBOOK)
def test_a_cell_that_ipython_runs_is_python(kind: str) -> None:
    report = run_text("a.ipynb", _cells(*NOTEBOOK[kind]), LintSettings(), RunMode(fix=True))
    assert (report.note, report.findings, report.fixed) == (None, [], ["AMP001"])
    assert b"torch.amp.autocast" in (report.after or b"")


def test_an_import_is_indented_as_the_first_cell() -> None:
    cell = "  from torch import cuda\n  scaler = cuda.amp.GradScaler()\n"
    report = run_text("a.ipynb", _cells(cell), LintSettings(), RunMode(fix=True))
    fixed = json.loads(report.after or b"")["cells"][0]["source"].splitlines()
    assert fixed[0] == "  import torch"


def test_outputs_of_a_notebook_are_not_searched() -> None:
    cells = [{"cell_type": "code", "source": "x = (", "outputs": ["torch.cuda.amp.autocast"]}]
    report = run_text("a.ipynb", json.dumps({"cells": cells}).encode(), LintSettings(), RunMode())
    assert report.findings == []


def test_a_notebook_keeps_its_byte_order_mark() -> None:
    mark = b"\xef\xbb\xbf"
    report = run_text("a.ipynb", mark + _cells(OLD), LintSettings(), RunMode(fix=True))
    assert report.fixed == ["AMP001"]
    assert (report.after or b"").startswith(mark + b'{"cells"')
