"""The number of instructions of a network of tiny layers under each variant, which does not depend on other load.

`python -m benchmarks.instructions` prints it; with `--write` it also puts it into docs/performance.md. Valgrind counts
(`callgrind`); it offers programs no AVX512, so PyTorch's kernels are those for AVX2. Where it is missing, the command
says so and fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import variants
from benchmarks.machine import about
from benchmarks.networks import mlp
from benchmarks.sections import put

__all__ = ["KINDS", "WORKS", "counted"]

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = (
    "<!-- figures: python -m benchmarks.instructions --write -->\n",
    "<!-- end of how many instructions -->",
)
WORKS = (variants.INFERENCE, variants.TRAINING)
KINDS = (variants.BASELINE, "precast", "attached", variants.BY_HAND)
_TIMES, _UNCOUNTED = 20, 5
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


def counted() -> Iterator[tuple[str, str, float]]:
    """Each work, each variant of it, and the instructions of one call.

    Raises:
        click.ClickException: valgrind is not installed, or it failed.
    """
    if shutil.which("valgrind") is None:
        raise click.ClickException(
            "valgrind counts the instructions, and is not installed; on Debian: apt install valgrind"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [
            f"--callgrind-out-file={folder}/counts",
            sys.executable,
            "-m",
            "benchmarks.instructions",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--inside"], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise click.ClickException(f"valgrind failed: {done.stderr.strip()[-500:]}")
        for number, (work, kind) in enumerate(json.loads(done.stdout.splitlines()[-1]), 1):
            text = Path(folder, f"counts.{number}").read_text(encoding="utf-8")
            yield work, kind, int(_TOTAL.findall(text)[-1]) / _TIMES


def _run_inside() -> None:
    """Run the calls of each variant under valgrind, one after the other."""
    torch.set_num_threads(1)
    setting = variants.Setting(torch.device("cpu"), torch.bfloat16)
    cases = [(work, kind) for work in WORKS for kind in KINDS]
    for work, kind in cases:
        prepared = variants.prepare(kind, mlp(), work, setting)
        prepared.before()
        _repeat(prepared.work, _UNCOUNTED)
        _control("--instr=on")
        _repeat(prepared.work, _TIMES)
        _control("--dump")
        _control("--instr=off")
        prepared.close()
    print(json.dumps(cases))


def _repeat(work: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        work()


def _control(option: str) -> None:
    """Tells the valgrind that runs this process."""
    command = ["callgrind_control", option, str(os.getpid())]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def _table(counts: dict[tuple[str, str], float]) -> str:
    lines = [f"| work | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    for work in WORKS:
        first = counts[work, variants.BASELINE]
        ratios = [f"{counts[work, kind] / first:.3f}" for kind in KINDS[1:]]
        lines.append(f"| {work} | {first / 1e6:.2f} million | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--inside", is_flag=True, hidden=True)
@click.option("--write", is_flag=True, help="Put the figures into docs/performance.md.")
def main(inside: bool, write: bool) -> None:
    """Count the instructions of a network of tiny layers."""
    if inside:
        return _run_inside()
    text = _table({(work, kind): count for work, kind, count in counted()})
    machine = about()
    text += (
        f"\nOn {machine['date']}: Python {machine['python']}, PyTorch {machine['torch']}, "
        f"the {machine['engine']} engine.\n"
    )
    click.echo(text)
    if write:
        put(PAGE, BEGIN, END, text)
    return None


if __name__ == "__main__":
    main()
