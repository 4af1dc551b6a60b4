"""The cost of `precast.GradScaler` beside PyTorch's, its waits, and the steps until it has found its scale.

`python -m benchmarks.scaler` prints all three; with `--write` it also puts them into docs/scaler.md.
Times are ratios within a round, taken in turns; waits and skipped steps are counted, and the same on
every run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import precast
from benchmarks import networks
from benchmarks.cuda_graphs import counted_waits
from benchmarks.interleave import Variant, compare
from benchmarks.machine import about
from benchmarks.networks import Network
from benchmarks.sections import put
from precast.diagnostics.hardware.machine import synchronize

__all__ = ["Search", "rows_on", "searches", "waits_of"]

PAGE = Path(__file__).parent.parent / "docs" / "scaler.md"
BEGIN, END = "<!-- figures: python -m benchmarks.scaler --write -->\n", "<!-- end of figures -->"
STEPS = 24
_SCALERS: dict[str, Callable[..., Any]] = {
    "torch": torch.amp.GradScaler,
    "precast": precast.GradScaler,
}
_OPTIMIZERS: dict[str, dict[str, bool]] = {
    "foreach Adam": {"foreach": True},
    "fused Adam": {"fused": True},
}


_CPU = torch.device("cpu")


class Steps:
    """Scale, step and update, over and over, on gradients that are there."""

    def __init__(
        self,
        scaler: Any,
        optimizer: dict[str, bool],
        count: int,
        side: int,
        device: torch.device = _CPU,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(2 * count, side, side, generator=generator).to(device)
        self._parameters = [torch.nn.Parameter(n.clone()) for n in numbers[:count]]
        self._gradients = [n.clone() for n in numbers[count:]]
        self._optimizer = torch.optim.Adam(self._parameters, **optimizer)  # type: ignore[arg-type]
        self._scaler, self._loss = scaler, torch.ones((), device=device)

    def __call__(self) -> None:
        self._scaler.scale(self._loss)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._scaler.step(self._optimizer)
        self._scaler.update()


def rows_on(
    device: torch.device, *, rounds: int = 31, calls: int = 20, count: int = 200, side: int = 8
) -> Iterator[dict[str, Any]]:
    """For each optimizer the time of a step under precast's scaler, its ratio to PyTorch's, and the values read."""
    for name, optimizer in _OPTIMIZERS.items():
        steps = {
            kind: Steps(make(device.type, 1.0), optimizer, count, side, device)
            for kind, make in _SCALERS.items()
        }
        variants = {
            kind: Variant(step, finish=partial(synchronize, device)) for kind, step in steps.items()
        }
        result = compare(variants, rounds=rounds, calls=calls)
        ratio, spread = result.ratio("precast", "torch")
        waits = {f"waits_{kind}": waits_of(step, device) for kind, step in steps.items()}
        yield {
            "case": name,
            "parameters": count,
            "median_ms": result.median("precast") * 1e3,
            "ratio": ratio,
            "ratio_iqr": spread,
            **waits,
        }


class _Reads(TorchDispatchMode):
    """Counts the values that are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def waits_of(work: Callable[[], object], device: torch.device) -> int:
    """Return the number of waits for the device: on the CPU the number of values read, each of which would wait."""
    if device.type != "cuda":
        with _Reads() as reads:
            work()
        count: int = reads.count
        return count
    with counted_waits() as waits:
        work()
    return waits[0]


class Search:
    """The scales of a run of a network in float16, and which of its steps were skipped."""

    def __init__(self, network: Network, init_scale: Any, steps: int, interval: int) -> None:
        self.scales: list[float] = []
        self.skipped = 0
        model, batches = network.seeded(torch.device("cpu"), networks.MOST_BATCHES)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        scaler = precast.GradScaler("cpu", init_scale, growth_interval=interval)
        for number in range(steps):
            self.scales.append(scaler.get_scale())
            optimizer.zero_grad()
            inputs, target = batches[number % len(batches)]
            with precast.autocast("cpu", dtype=torch.float16):
                loss: Tensor = network.loss(model(inputs), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        self.skipped = scaler.counters.skipped

    def steps_until(self, plateau: float) -> int | None:
        """Steps before the first whose scale is within 2x of `plateau`; None if there is none."""
        near = (i for i, s in enumerate(self.scales) if plateau / 2 <= s <= plateau * 2)
        return next(near, None)


def searches(*, steps: int = STEPS, only: str = "") -> Iterator[list[str]]:
    """A row for each network: its plateau; skipped steps, and steps until near it, by first scale.

    The plateau is what a scale swings around that grows every second good iteration: its median in
    the second half of such a run.
    """
    for name, network in _networks():
        if only not in name:
            continue
        quick = Search(network, "auto", steps, 2)
        half = quick.scales[steps // 2 :]
        plateau = statistics.median(half)
        row = [name, f"2^{torch.tensor(plateau).log2().item():g}"]
        for first in (2.0**16, "auto"):
            search = Search(network, first, steps, 2000)
            until = search.steps_until(plateau)
            row += [str(search.skipped), f"over {steps}" if until is None else str(until)]
        yield row


def _networks() -> Iterator[tuple[str, Network]]:
    cpu = torch.device("cpu")
    yield "demo checkerboard", networks.checkerboard(cpu)
    yield "transformer, width 128", networks.decoder(128, 4, 32)
    yield "convolutional, width 8", networks.convolutional(8, 4, 16)


_STEPS_HEAD = [
    *("a step", "ratio to torch's scaler (median)", "spread"),
    *("torch: waits a step", "precast: waits a step"),
]
_SEARCHES_HEAD = [
    *("network in float16", "plateau", "2^16: skipped", "2^16: steps until within 2x"),
    *('"auto": skipped', '"auto": steps until within 2x'),
]


def _cells(row: dict[str, Any]) -> list[str]:
    figures = f"{row['ratio']:.2f}", f"{row['ratio_iqr']:.2f}"
    case = f"{row['case']}, {row['parameters']} parameters"
    return [case, *figures, str(row["waits_torch"]), str(row["waits_precast"])]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


@click.command()
@click.option("--write", is_flag=True, help="Put the tables into docs/scaler.md.")
def main(write: bool) -> None:
    """Measure precast's gradient scaler beside PyTorch's."""
    torch.set_num_threads(1)
    machine = about()
    where = (
        f"Measured with PyTorch {machine['torch']} on {machine['cpu']}, one thread, load "
        f"{machine['load']}, on {machine['date']}.\n"
    )
    tables = _table(_STEPS_HEAD, map(_cells, rows_on(_CPU))), _table(_SEARCHES_HEAD, searches())
    text = "\n".join([where, *tables])
    click.echo(text)
    if write:
        put(PAGE, BEGIN, END, f"\n{text}\n")


if __name__ == "__main__":
    main()
