"""The first call of an attached model after other work in its process, beside the call that follows it.

Invariants:
    - The two calls of a pair are neighbours in time, and the median of their ratios is reported: the load of the
      machine cancels out of it.
    - `casts` counts the weights that the first call casts again; unlike times it does not depend on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import precast
from benchmarks.interleave import interquartile_range
from precast.engine import registration
from precast.weights import held

__all__ = ["ATTACHED", "EVENTS", "ROUNDS", "WEIGHTS", "call", "network", "run"]

ROUNDS = 31
WEIGHTS = {34: 512, 1000: 128}
"""The number of weights of a model, with their width."""
ATTACHED = (1, 8)
"""The number of attached models, of which one is called."""


def run(*, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Measure the first call after each event.

    Returns:
        One row for each event, number of weights and number of attached models.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    engine = {"engine": registration.engine()}
    for weights, width in WEIGHTS.items():
        for attached in ATTACHED:
            for row in _first_calls(weights, width, attached, rounds):
                yield row | engine


def network(weights: int, width: int) -> nn.Sequential:
    """Return a model with so many weights of that width."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(weights)))


def _first_calls(weights: int, width: int, attached: int, rounds: int) -> Iterator[dict[str, Any]]:
    model, x = network(weights, width), torch.randn(1, width)
    with ExitStack() as stack:
        for each in (model, *(network(weights, width) for _ in range(attached - 1))):
            stack.enter_context(precast.attach(each))
            call(each, x)
        for case, event in EVENTS.items():
            pairs = [_pair(model, x, event) for _ in range(rounds + 1)][1:]
            ratios = [first / following for first, following, _ in pairs]
            yield {
                "benchmark": "shared process",
                "kind": f"{weights} weights, {attached} attached",
                "case": case,
                "first_us": statistics.median(first for first, _, _ in pairs) * 1e6,
                "next_us": statistics.median(following for _, following, _ in pairs) * 1e6,
                "casts": statistics.median(casts for _, _, casts in pairs),
                "of_next": statistics.median(ratios),
                "of_next_iqr": interquartile_range(ratios),
            }


def _pair(model: nn.Module, x: torch.Tensor, event: Callable[[], None]) -> tuple[float, float, int]:
    """Return the seconds of the first call after an event and of the next one, and the casts of the first."""
    event()
    before, start = _casts(model), time.perf_counter()
    call(model, x)
    middle, casts = time.perf_counter(), _casts(model) - before
    again = time.perf_counter()
    call(model, x)
    return middle - start, time.perf_counter() - again, casts


def call(model: nn.Module, x: torch.Tensor) -> None:
    """Call a model in a region, without gradients."""
    with torch.no_grad(), precast.autocast("cpu", dtype=torch.bfloat16):
        model(x)


def _casts(model: nn.Module) -> int:
    held_parameters = (held.held_parameters[id(p)] for p in model.parameters())
    return sum(copy.writes for each in held_parameters for copy in each.copies.values())


_other, _input = nn.Linear(8, 8), torch.randn(1, 8)
_optimizer = torch.optim.SGD(_other.parameters(), lr=1e-3)


def _nothing() -> None:
    pass


def _region() -> None:
    with precast.autocast("cpu", dtype=torch.bfloat16):
        _other(_input)


def _region_without_gradients() -> None:
    with torch.no_grad():
        _region()


def _region_of_torch() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _other(_input)


def _backward() -> None:
    _other(_input).sum().backward()


def _step() -> None:
    _backward()
    _optimizer.step()


EVENTS: dict[str, Callable[[], None]] = {
    "nothing": _nothing,
    "a region of another model": _region,
    "the same without gradients": _region_without_gradients,
    "a region of torch.autocast": _region_of_torch,
    "a backward pass without a region": _backward,
    "a step of another optimizer": _step,
}
