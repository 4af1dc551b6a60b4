"""Measurements in a process of their own: with the reference engine, and in the environment of the clients.

Invariants:
    - Rows come as they are measured, a line of JSON each.
    - A process that cannot begin, or fails, gives a row that says why, after those that it measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["CLIENTS", "clients", "overhead_of_reference", "skipped"]

_ROOT = Path(__file__).parent.parent
CLIENTS = _ROOT / ".venvs" / "clients" / "bin" / "python"
"""The Python of the clients' environment, which `make bench` and `make bench-clients` make."""
_SIZES = ("small", "medium")
_MODELS = ("GPT-2", "Llama")
_WORKS = ("training step", "inference")
_SHOWN = 300

Rows = Iterator[dict[str, Any]]


def overhead_of_reference(rounds: int) -> Rows:
    """Measure the cost of calls and regions on the reference engine, in another process."""
    return _rows("overhead", ["--rounds", str(rounds)], {"PRECAST_ENGINE": "reference"})


def clients(rounds: int) -> Rows:
    """The models of other libraries that have a target."""
    if not CLIENTS.exists():
        yield skipped("clients", "the clients' environment is not there; write: make bench")
        return
    chosen = {"--size": _SIZES, "--model": _MODELS, "--work": _WORKS}
    options = [word for option, words in chosen.items() for one in words for word in (option, one)]
    yield from _rows("clients", ["--rounds", str(rounds), *options], python=CLIENTS)


def _rows(
    command: str,
    options: list[str],
    environment: dict[str, str] | None = None,
    python: Path | None = None,
) -> Rows:
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            [str(python or sys.executable), "-m", "benchmarks", command, *options, "--lines"],
            cwd=_ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=complaints,
            encoding="utf-8",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"benchmark"'):  # other libraries print, too
                yield json.loads(line)
        if process.wait() != 0:
            complaints.seek(0)
            last = complaints.read().strip()[-_SHOWN:]
            yield skipped(
                command, f"`benchmarks {command}` ended with {process.returncode}: {last}"
            )


def skipped(benchmark: str, why: str) -> dict[str, Any]:
    """A row in place of those of a whole kind of measurement."""
    return {"benchmark": benchmark, "case": "all", "skipped": why}
