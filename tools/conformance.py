"""Shows what precast has in common with PyTorch's autocast, and writes it to `docs/conformance.md` and its data.

    python -m tools.conformance                     tests/conformance and 10000 random programs; writes the page
    python -m tools.conformance --programs 10000    these random programs alone; writes nothing
    python -m tools.conformance --programs 500 --page    the tests and these programs; writes the page
    python -m tools.conformance --render            the page again, from its data

Invariants:
    - The same seed draws the same programs, however many processes run them.
    - Nothing is written unless all tests passed and every program was equal or explained.
    - Not part of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from precast._internal.atomic_write import replace
from tests.conformance.programs.compare import Report, compare
from tests.conformance.programs.draw import cases
from tests.conformance.systems import SYSTEMS
from tools.conformance_page import render

__all__ = ["main", "run_programs"]

DOCS = Path(__file__).parent.parent / "docs"
DATA, PAGE = DOCS / "data" / "conformance.json", DOCS / "conformance.md"
AT_ONCE = 50
"""The number of programs that are drawn from one seed."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 if nothing is unexplained."""
    chosen = _parser().parse_args(arguments)
    console = Console()
    if chosen.render:
        _write(json.loads(DATA.read_text(encoding="utf-8")))
        return 0
    seed = random.randrange(2**30) if chosen.seed is None else chosen.seed
    writes = chosen.page or chosen.programs is None
    code, sections = _tests(chosen.processes) if writes else (0, [])
    report = run_programs(chosen.programs or 10_000, seed, chosen.processes)
    _show(report, seed, console)
    if code or report.unexplained:
        return 1
    if writes:
        _write(_about() | {"sections": sections, "programs": _programs(report, seed)} | _others())
    return 0


def run_programs(count: int, seed: int, processes: int) -> Report:
    """Runs random programs on PyTorch and on every system, in several processes, and shows how far it is."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's advice on deprecated calls
    parts = [(min(AT_ONCE, count - begin), seed + begin) for begin in range(0, count, AT_ONCE)]
    # Not forked: threads of PyTorch's would not be there.
    with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        done = pool.imap_unordered(_compare, parts)
        reports = track(done, f"{count} programs, seed {seed}", len(parts), console=_progress())
        return sum(reports, Report())


def _tests(processes: int) -> tuple[int, list[dict[str, Any]]]:
    """The sections of `tools.conformance_tests`, from a process of its own: pytest wants to be the first to import."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sections.json"
        module = ["-m", "tools.conformance_tests", str(processes), str(path)]
        code = subprocess.run([sys.executable, *module], cwd=DOCS.parent, check=False).returncode
        return code, json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _compare(part: tuple[int, int]) -> Report:
    return compare(cases(*part), SYSTEMS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance")
    parser.add_argument("--programs", type=int, help="run so many random programs")
    parser.add_argument("--seed", type=int, help="draws the programs; printed where none is given")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", action="store_true", help="run the tests too; write the page")
    parser.add_argument("--render", action="store_true", help="write the page from its data")
    return parser


def _progress() -> Console:
    return Console(file=sys.stderr)


def _show(report: Report, seed: int, console: Console) -> None:
    table = Table("system", "programs", "equal", "explained", "unexplained")
    for system in _programs(report, seed)["systems"]:
        explained = (
            f"{' + '.join(e['divergence_points'])}: {e['programs']}" for e in system["explained"]
        )
        unexplained = sum(name == system["name"] for name, *_ in report.unexplained)
        numbers = map(str, (report.programs, system["equal"]))
        table.add_row(system["name"], *numbers, "\n".join(explained), str(unexplained))
    console.print(table)
    for name, case, what in report.unexplained:
        console.print(f"\n{name}: {what}\n{case!r}", markup=False, highlight=False, soft_wrap=True)


def _programs(report: Report, seed: int) -> dict[str, Any]:
    return {
        "count": report.programs,
        "steps": report.steps,
        "seed": seed,
        "unexplained": len(report.unexplained),
        "systems": [
            {
                "name": system.name,
                "equal": report.equal[system.name],
                "explained": list(_explained(report, system.name)),
            }
            for system in SYSTEMS
        ],
    }


def _explained(report: Report, name: str) -> Iterator[dict[str, Any]]:
    for (system, points), count in sorted(report.explained.items()):
        if system == name:
            yield {"divergence_points": list(points), "programs": count}


def _about() -> dict[str, Any]:
    """Return the date, the versions and the processor of the run."""
    capabilities = torch.cpu.get_capabilities()
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": capabilities.get("cpu_name", capabilities.get("architecture", "a CPU")),
    }


def _others() -> dict[str, Any]:
    """Return the results of `make test-clients` and `make test-versions`; empty if they have not run."""
    results = {name: _read(DOCS / "data" / f"{name}.json") for name in ("clients", "versions")}
    programs = results["clients"].get("clients", [])
    libraries = sorted({(each["library"], each["version"]) for each in programs})
    return {
        "clients": [
            _library(name, version, [p for p in programs if p["library"] == name])
            for name, version in libraries
        ],
        "versions": results["versions"].get("runs", []),
    }


def _library(name: str, version: str, programs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "library": f"{name} {version}",
        "programs": len(programs),
        "tensors": sum(program["tensors"] for program in programs),
        "identical": sum(program["identical"] for program in programs),
    }


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write(results: dict[str, Any]) -> None:
    DATA.parent.mkdir(exist_ok=True)
    replace(DATA, (json.dumps(results, indent=2) + "\n").encode())
    replace(PAGE, render(results).encode())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
