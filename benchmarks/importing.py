"""The time that `import precast` adds to `import torch`: alone, and with the first use of its names.

`python -m benchmarks.importing` prints it; with `--write` it also puts it into docs/performance.md. Each figure is the
time that a process computes which was forked from one that has loaded PyTorch, the least of several, with compiled
bytecode on disk: others on the machine disturb the least the least.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.machine import about
from benchmarks.sections import put

__all__ = ["CASES", "TARGETS", "cost"]

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = (
    "<!-- figures: python -m benchmarks.importing --write -->\n",
    "<!-- end of what an import costs -->",
)
HEAD = "| after `import torch` | ms | at most |\n|---|---|---|\n"
CASES = (
    "import precast",
    "from precast import autocast",
    "from precast import GradScaler, attach, autocast",
    "from precast import *",
)
TARGETS = {"import precast": 30.0}
"""The most milliseconds that it may take."""

_PROGRAM = """
import json, os, sys, time
import torch

for statement in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        begin = time.process_time()
        exec(statement)
        print(time.process_time() - begin, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def cost(rounds: int) -> Iterator[tuple[str, float]]:
    """Each case, and its milliseconds; the cases take turns."""
    statements = list(CASES) * (rounds + 1)  # the first round writes bytecode
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    program = [sys.executable, "-c", _PROGRAM, json.dumps(statements)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    seconds = [float(line) for line in done.stdout.split()]
    for number, name in enumerate(CASES):
        yield name, 1e3 * min(seconds[number :: len(CASES)][1:])


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--write", is_flag=True, help="Put the figures into docs/performance.md.")
def main(rounds: int, write: bool) -> None:
    """Measure what an import costs."""
    machine = about()
    targets = {name: f"{most:.0f}" for name, most in TARGETS.items()}
    rows = [f"| `{n}` | {ms:.1f} | {targets.get(n, '')} |\n" for n, ms in cost(rounds)]
    where = (
        f"\nOn {machine['date']}: {machine['cpu']}, Python {machine['python']}, PyTorch {machine['torch']}, "
        f"load {machine['load']}.\n"
    )
    text = HEAD + "".join(rows) + where
    click.echo(text)
    if write:
        put(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
