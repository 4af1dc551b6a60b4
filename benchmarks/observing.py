"""What watching costs: a training step of a decoder of width 512, traced, counted and plain, in turns.

A ratio is taken within a round, so that the load of the machine cancels. "plain" and "ended" are the same step before a
trace and after one has ended: their ratio is 1, as nothing of a trace is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import precast
from benchmarks import networks
from benchmarks.interleave import Variant, compare

__all__ = ["BASELINE", "CASES", "ROUNDS", "TARGETS", "run"]

ROUNDS = 15
WIDTH = 512
CASES = ((1, 16), (4, 64))
"""Batch and length."""
BASELINE = "plain"
TARGETS: Mapping[str, float] = {"counted": 1.03, "traced": 3.0}
"""The most that a step may take of a plain one's time."""

Watch = Callable[[Any, torch.optim.Optimizer], Any]
"""Makes the context manager that watches a model and its optimizer."""


def _traced(model: torch.nn.Module, _: torch.optim.Optimizer) -> Any:
    return precast.trace(model)


def _counted(model: torch.nn.Module, _: torch.optim.Optimizer) -> Any:
    return precast.trace(model, full=False)


WATCHES: dict[str, Watch] = {"counted": _counted, "traced": _traced}
"""What is measured, beside the plain step; one entry for each thing that watches."""


def run(
    *, rounds: int = ROUNDS, cases: tuple[tuple[int, int], ...] = CASES
) -> Iterator[dict[str, Any]]:
    """A row for each case and each way to watch."""
    for batch, length in cases:
        network = networks.decoder(WIDTH, batch, length)
        model, batches = network.seeded(torch.device("cpu"), 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        inputs, target = batches[0]

        def step(
            model: Any = model,
            optimizer: Any = optimizer,
            loss_of: Any = network.loss,
            inputs: Any = inputs,
            target: Any = target,
        ) -> None:
            with precast.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model(inputs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        variants = {BASELINE: Variant(step)}
        variants |= {
            name: _watched(step, watch, model, optimizer) for name, watch in WATCHES.items()
        }
        variants["ended"] = Variant(step)
        comparison = compare(variants, rounds=rounds, calls=2)
        for name in variants:
            ratio, spread = comparison.ratio(name, BASELINE)
            yield {
                "benchmark": "observing",
                "case": network.case,
                "kind": name,
                "median_ms": comparison.median(name) * 1e3,
                "iqr_ms": comparison.spread(name) * 1e3,
                "ratio": ratio,
                "ratio_iqr": spread,
                "target": TARGETS.get(name),
            }


def _watched(
    step: Callable[[], None], watch: Watch, model: Any, optimizer: torch.optim.Optimizer
) -> Variant:
    """The step while something watches; what that takes to begin and end is not timed."""
    open_now: list[Any] = []

    def begin() -> None:
        open_now.append(watch(model, optimizer))
        open_now[-1].__enter__()

    def end() -> None:
        open_now.pop().__exit__(None, None, None)

    return Variant(step, begin, end)
