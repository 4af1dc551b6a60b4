"""Runs the tests on several versions of PyTorch, each in an environment of its own under `.venvs/`.

    python -m tools.versions                  the oldest and the newest that precast supports and pip can find
    python -m tools.versions 2.11.0 2.12.1    these
    python -m tools.versions --pytest tests/policy/test_tables.py    all that follows is pytest's

Where wheels come from is pip's to know: a CUDA build runs on the CPU too, but brings some GB of libraries.

Invariants:
    - Progress goes to stderr, and with `--json` one object to stdout.
    - The exit code is 0 only if every version was installed and passed.
    - `docs/data/versions.json` is written by whole runs alone: one row for each version of PyTorch and Python.
    - Not part of the package.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from precast._internal import torch_versions

__all__ = [
    "Run",
    "found_by_pip",
    "main",
    "merged",
    "numbers",
    "oldest_and_newest",
    "read_report",
    "say",
]

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venvs"
RESULTS = ROOT / "docs" / "data" / "versions.json"


@dataclass(frozen=True)
class Run:
    """The tests on one version of PyTorch.

    Attributes:
        torch: as PyTorch spells its version, with the build: `2.13.0+cpu`.
        python: the version of Python.
        passed: how many tests passed.
        skipped: how many were skipped, for want of a GPU or on this version.
        failed: how many failed or could not be run.
        failures: their names.
        seconds: how long it took, without the installation.
        date: the day of the run (UTC).
    """

    torch: str
    python: str
    passed: int
    skipped: int
    failed: int
    failures: tuple[str, ...]
    seconds: int
    date: str


def main(arguments: Sequence[str]) -> int:
    """Run the tests; 0 if all passed."""
    chosen = _parser().parse_args(arguments)
    versions = chosen.versions or oldest_and_newest(found_by_pip(chosen.python))
    runs = []
    for number, version in enumerate(versions, 1):
        label = f"torch {version} ({number} of {len(versions)})"
        run = _run(version, label, chosen)
        say(f"{label}: {run.passed} passed, {run.skipped} skipped, {run.failed} failed")
        runs.append(run)
    if not chosen.pytest:
        _write(run for run in runs if run.passed)
    if chosen.json:
        print(json.dumps({"runs": [asdict(run) for run in runs]}, indent=2))
    return int(any(run.failed or not run.passed for run in runs))


def found_by_pip(python: str) -> list[str]:
    """All versions of PyTorch that pip can find for a Python."""
    command = [python, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = re.search(r"Available versions: (.+)", done.stdout)
    if listed is None:
        raise SystemExit(
            f"pip finds no PyTorch: {done.stderr.strip()}\nName versions: python -m tools.versions 2.13.0"
        )
    return listed[1].split(", ")


def oldest_and_newest(versions: Iterable[str]) -> list[str]:
    """Of these versions, the two ends of what precast supports."""
    supported = [v for v in versions if torch_versions.parse(v) in torch_versions.supported()]
    if not supported:
        raise SystemExit("pip finds no PyTorch that precast supports")
    supported.sort(key=numbers)
    return list(dict.fromkeys([supported[0], supported[-1]]))


def read_report(path: Path) -> tuple[int, int, tuple[str, ...]]:
    """Read pytest's JUnit file: the numbers of passed and of skipped tests, and the names of the others."""
    passed = skipped = 0
    failures = []
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(dict.fromkeys(failures))


def merged(before: Iterable[dict[str, object]], runs: Iterable[Run]) -> list[dict[str, object]]:
    """The rows of earlier runs, with those of the same versions replaced; the oldest PyTorch first."""
    rows = {(row["torch"], row["python"]): row for row in before}
    rows |= {(run.torch, run.python): asdict(run) for run in runs}
    return sorted(rows.values(), key=lambda row: (numbers(str(row["torch"])), str(row["python"])))


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0), to be sorted by."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def say(what: str) -> None:
    """A line of progress."""
    print(what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.versions")
    parser.add_argument("versions", nargs="*", help="versions of PyTorch, such as 2.11.0")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environments")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--remove", action="store_true", help="remove each environment after its run"
    )
    parser.add_argument(
        "--pytest", nargs=argparse.REMAINDER, default=[], help="arguments for pytest"
    )
    return parser


def _run(version: str, label: str, chosen: argparse.Namespace) -> Run:
    home = (
        ENVIRONMENTS
        / f"torch-{version}-python-{_ask(chosen.python, 'platform', 'python_version()')}"
    )
    say(f"{label}: installing into {home.relative_to(ROOT)}")
    try:
        python = _install(home, version, chosen.python)
        _call(str(python), "-m", "tools.native_library")
        say(f"{label}: testing")
        return _test(python, chosen.pytest)
    except subprocess.CalledProcessError as error:
        return Run(version, "?", 0, 0, 1, (f"cannot be installed: {error}",), 0, _today())
    finally:
        if chosen.remove:
            shutil.rmtree(home, ignore_errors=True)


def _install(home: Path, version: str, python: str) -> Path:
    """The Python of an environment with precast, its tests' packages and that PyTorch; made where it is not there."""
    sources = [ROOT / "pyproject.toml", ROOT / "lint" / "pyproject.toml", ROOT / "constraints.txt"]
    inside, stamp = home / "bin" / "python", home / ".installed"
    if stamp.exists() and all(stamp.stat().st_mtime > source.stat().st_mtime for source in sources):
        return inside
    _call(python, "-m", "venv", "--clear", str(home))
    constraints = home / "constraints.txt"
    lines = sources[-1].read_text(encoding="utf-8").splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    pip = ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    packages = [f"torch=={version}", "--editable", f"{ROOT}[dev]", "--editable", f"{ROOT}/lint"]
    _call(str(inside), *pip, "--constraint", str(constraints), *packages)
    stamp.touch()
    return inside


def _call(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def _test(python: Path, arguments: Sequence[str]) -> Run:
    versions = _ask(python, "torch", "__version__"), _ask(python, "platform", "python_version()")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        spread = ["--numprocesses", "auto", "--dist", "worksteal"]
        tests = ["--quiet", *spread, f"--junitxml={report}", *arguments]
        run = subprocess.run(
            [str(python), "-m", "pytest", *tests], cwd=ROOT, stdout=sys.stderr, check=False
        )
        passed, skipped, failures = read_report(report) if report.exists() else (0, 0, ())
    if run.returncode and not failures:
        failures = (f"pytest ended with code {run.returncode}",)
    seconds = round(time.monotonic() - started)
    return Run(*versions, passed, skipped, len(failures), failures, seconds, _today())


def _ask(python: str | Path, module: str, what: str) -> str:
    code = f"import {module}; print({module}.{what})"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def _write(runs: Iterable[Run]) -> None:
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"runs": merged(before, runs)}, indent=2)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def _today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
