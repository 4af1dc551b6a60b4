"""The cost of watching: a training step of a decoder of width 512, traced, counted, monitored and plain, in turns.

A ratio is taken within a round, so that the load of the machine cancels. "plain" and "ended" are the same step before a
trace and after one has ended: their ratio is 1, as nothing of a trace is left. A monitor counts the numbers of a step
now and then; what it costs at its default interval is made of a step that it does not count and of one that it does.
The memory of a recorded step is counted, not timed: the peak of its tensors beside that of the plain step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import precast
from benchmarks import networks
from benchmarks.interleave import Comparison, Variant, compare
from benchmarks.networks import Network
from benchmarks.observe import observe
from benchmarks.variants import Prepared
from precast.comparison.recorder import Level
from precast.diagnostics.hardware.machine import synchronize
from precast.diagnostics.numerics.monitoring import DEFAULT_EVERY

__all__ = ["BASELINE", "CASES", "HEALTH", "MEMORY", "ROUNDS", "TARGETS", "WATCHES", "run"]

ROUNDS = 15
WIDTH = 512
CASES = ((1, 16), (4, 64), (8, 128))
"""Batch and length."""
BASELINE = "plain"
HEALTH = f"monitored, every {DEFAULT_EVERY}th counted"
"""The ratio that is computed from the two steps of a monitor."""
MEMORY: Mapping[str, Level] = {
    "recorded, modules: memory": "modules",
    "recorded, operations: memory": "operations",
}
"""The rows of the peak of memory, by what is recorded."""
TARGETS: Mapping[str, float] = {
    "counted": 1.03,
    "traced": 3.0,
    HEALTH: 1.03,
    "recorded, modules": 1.3,
    "recorded, operations": 2.5,
    **dict.fromkeys(MEMORY, 1.05),
}
"""The most that a step may take of a plain one's time or memory."""
_NEVER = 10**9
_UNTIMED = 2
"""The first step of a monitor is counted whatever its interval, and read when the second begins."""

RunObserver = Callable[[Any, torch.optim.Optimizer], Any]
"""Makes the context manager that watches a model and its optimizer."""


@contextmanager
def _recorded(model: Any, level: Level) -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory() as folder,
        precast.record(f"{folder}/a.run", model, level=level),
    ):
        yield


WATCHES: dict[str, RunObserver] = {
    "counted": lambda model, _: precast.trace(model, full=False),
    "traced": lambda model, _: precast.trace(model),
    "monitored, not counted": lambda model, _: precast.monitor(model, every=_NEVER),
    "monitored, counted": lambda model, _: precast.monitor(model, every=1),
    "recorded, modules": lambda model, _: _recorded(model, "modules"),
    "recorded, operations": lambda model, _: _recorded(model, "operations"),
}
"""The steps that are measured beside the plain one, by observer."""


def run(
    *,
    rounds: int = ROUNDS,
    cases: tuple[tuple[int, int], ...] = CASES,
    width: int = WIDTH,
    device: torch.device | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each case and each way to watch."""
    device = device or torch.device("cpu")
    for batch, length in cases:
        network = networks.decoder(width, batch, length)
        variants = _variants(network, device)
        comparison = compare(variants, rounds=rounds, calls=2, untimed=_UNTIMED)
        for name in comparison.rounds:
            times = comparison.median(name) * 1e3, comparison.spread(name) * 1e3
            yield _row(network, name, times, comparison.ratio(name, BASELINE))
        yield _row(network, HEALTH, (None, None), _at_default_interval(comparison))
        plain = _peak(network, device)
        for name, level in MEMORY.items():
            yield _row(network, name, (None, None), (_peak(network, device, level) / plain, 0.0))


def _peak(network: Network, device: torch.device, level: Level | None = None) -> int:
    """The peak of tensor memory in a step, with weights, gradients and the state of the optimizer."""

    def make() -> Prepared:
        model, _, step = _step(network, device)
        stack = ExitStack()
        if level is not None:
            stack.enter_context(_recorded(model, level))
        return Prepared(step, stack.close)

    return observe(make, device).peak_bytes


def _step(
    network: Network, device: torch.device
) -> tuple[Any, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A model, its optimizer, and a training step."""
    model, [(inputs, target)] = network.seeded(device, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> Tensor:
        with precast.autocast(device.type, dtype=torch.bfloat16):
            loss: Tensor = network.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def _variants(network: Network, device: torch.device) -> dict[str, Variant]:
    model, optimizer, step = _step(network, device)
    finish = partial(synchronize, device)
    watched = {
        name: _watched(step, watch, model, optimizer, finish) for name, watch in WATCHES.items()
    }
    plain = Variant(step, finish=finish)
    return {BASELINE: plain, **watched, "ended": plain}


def _at_default_interval(comparison: Comparison) -> tuple[float, float]:
    """The ratio, and the spread of the part that is nearly all of it."""
    quiet, spread = comparison.ratio("monitored, not counted", BASELINE)
    every_step, _ = comparison.ratio("monitored, counted", BASELINE)
    return quiet + (every_step - quiet) / DEFAULT_EVERY, spread


def _row(
    network: Network, name: str, times: tuple[Any, Any], ratio: tuple[float, float]
) -> dict[str, Any]:
    return {
        "benchmark": "observing",
        "case": network.case,
        "kind": name,
        "median_ms": times[0],
        "iqr_ms": times[1],
        "ratio": ratio[0],
        "ratio_iqr": ratio[1],
        "target": TARGETS.get(name),
    }


def _watched(
    step: Callable[[], object],
    watch: RunObserver,
    model: Any,
    optimizer: torch.optim.Optimizer,
    finish: Callable[[], None],
) -> Variant:
    """The step while something watches; what that takes to begin and end is not timed."""
    open_now: list[Any] = []

    def begin() -> None:
        open_now.append(watch(model, optimizer))
        open_now[-1].__enter__()

    def end() -> None:
        open_now.pop().__exit__(None, None, None)

    return Variant(step, begin, end, finish)
