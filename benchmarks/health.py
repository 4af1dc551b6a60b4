"""What `precast.monitor` adds to a training step: in steps that it counts, in the others, and at its default interval.

`python -m benchmarks.health` prints it; with `--write` it also puts it into docs/health.md. Figures are ratios to the
same step without a monitor, within a round, taken in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

import precast
from benchmarks import networks
from benchmarks.interleave import Variant, compare
from benchmarks.networks import Network
from benchmarks.sections import put
from benchmarks.tables import about
from precast.health.monitor import DEFAULT_EVERY

__all__ = ["cost", "watched_step"]

PAGE = Path(__file__).parent.parent / "docs" / "health.md"
BEGIN, END = "<!-- figures: python -m benchmarks.health --write -->\n", "<!-- end of figures -->"
HEAD = "| network | a step that is not counted | a step that is | on average |\n|---|---|---|---|\n"
_NEVER = 10**9
_SHAPES = ((1, 16), (1, 128))


def watched_step(network: Network, every: int | None) -> Callable[[], None]:
    """A training step in bfloat16 under a monitor that counts so often; under none where `every` is None."""
    model, [(inputs, target)] = network.seeded(torch.device("cpu"), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor: Any = None if every is None else precast.monitor(model, every=every)

    def step() -> None:
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=torch.bfloat16):
            loss = network.loss(model(inputs).float(), target)
        loss.backward()
        optimizer.step()

    vars(step)["monitor"] = monitor  # lives as long as the step
    return step


def cost(chosen: list[Network], *, rounds: int = 21) -> Iterator[list[str]]:
    """A row for each network: the three ratios, and the spread of the first."""
    for network in chosen:
        kinds = {"plain": None, "not counted": _NEVER, "counted": 1}
        variants = {}
        for kind, every in kinds.items():
            step = watched_step(network, every)
            step()  # the first is counted whatever the interval
            variants[kind] = Variant(step)
        found = compare(variants, rounds=rounds, calls=1, untimed=1)
        quiet, spread = found.ratio("not counted", "plain")
        counted, _ = found.ratio("counted", "plain")
        average = quiet + (counted - quiet) / DEFAULT_EVERY
        ratios = (f"{quiet:.3f} (iqr {spread:.3f})", f"{counted:.2f}", f"{average:.3f}")
        yield [network.case, *ratios]


@click.command()
@click.option("--rounds", default=21, show_default=True)
@click.option("--write", is_flag=True, help="Put the figures into docs/health.md.")
def main(rounds: int, write: bool) -> None:
    """Measure what a monitor costs."""
    torch.set_num_threads(1)
    machine = about()
    chosen = [networks.decoder(512, batch, length) for batch, length in _SHAPES]
    lines = ["| " + " | ".join(row) + " |\n" for row in cost(chosen, rounds=rounds)]
    where = f"\n{machine['cpu']}, one thread, PyTorch {machine['torch']}, load {machine['load']}.\n"
    text = HEAD + "".join(lines) + where
    click.echo(text)
    if write:
        put(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
