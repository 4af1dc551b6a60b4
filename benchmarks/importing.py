"""What `import precast` adds to `import torch`: alone, and with the first use of its names, which loads what they need.

`python -m benchmarks.importing` prints it; with `--write` it also puts it into docs/performance.md. Each figure is the
time that a fresh process computes, the least of several, with compiled bytecode on disk: others on the machine disturb
the least the least.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.sections import put
from benchmarks.tables import about

__all__ = ["CASES", "TARGETS", "cost"]

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = (
    "<!-- figures: python -m benchmarks.importing --write -->\n",
    "<!-- end of what an import costs -->",
)
HEAD = "| after `import torch` | ms | at most |\n|---|---|---|\n"
CASES = {
    "import precast": "import precast",
    "from precast import autocast": "from precast import autocast",
    "from precast import GradScaler, attach, autocast": "from precast import GradScaler, attach, autocast",
    "from precast import *": "from precast import *",
}
"""What is shown -> what is run."""
TARGETS = {"import precast": 30.0}
"""The most milliseconds that it may take."""

_PROGRAM = """
import time
import torch
begin = time.process_time()
{statement}
print(time.process_time() - begin)
"""


def cost(rounds: int) -> Iterator[tuple[str, float]]:
    """Each case, and its milliseconds; the cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds + 1):  # the first writes bytecode
        for name, statement in CASES.items():
            times[name].append(_seconds(statement))
    for name, found in times.items():
        yield name, 1e3 * min(found[1:])


def _seconds(statement: str) -> float:
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    program = [sys.executable, "-c", _PROGRAM.format(statement=statement)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


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
