"""Compares the choice of a search with every other choice, in random networks of 8 to 10 modules.

What is compared is what the choices cost by the costs that were measured of operations, casts and hooks, within half of
the errors that were measured of all operations together.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast.policy.policy import Policy
from precast.tuning.choosing import Budget, choose, total
from precast.tuning.costs import Costs, measure
from precast.tuning.recording import record
from precast.tuning.sensitivity import Meter, measure_sensitivity
from precast.tuning.sites import Choice, Program
from precast.tuning.training import Workload, random_states_kept

__all__ = ["compared"]

_EQUAL: Final = 1e-9
_FREE: Final = ("tanh", "norm", "gelu")
_WIDTHS: Final = (16, 128, 512)
"""In layers of the narrow ones casts cost more than 16 bits save, and in the wide ones less."""


def compared(networks: int) -> Iterator[dict[str, Any]]:
    """For each network the cost of the choice that was found, and the least of all."""
    for seed in range(networks):
        yield _compared(seed)


def _compared(seed: int) -> dict[str, Any]:
    base = Policy.load("default")
    with random_states_kept():
        torch.manual_seed(seed)
        model, batch = _network(random.Random(seed))

        def step(model: nn.Module, batch: Tensor) -> Tensor:
            loss: Tensor = model(batch).float().square().mean()
            return loss

        workload = Workload(model, step, (batch,), torch.optim.AdamW, "cpu")
        program = record(model, lambda model: step(model, batch), base)
        costs = measure(program)
        errors = measure_sensitivity(
            Meter(workload, steps=2), program, base, loss=1e-6, gradient=1e-6
        )
    each = {frozenset({site}): known.gradient for site, known in errors.sites.items()}
    limit = Budget("gradient", each, sum(each.values()) / 2)
    found = choose(program, costs, budgets=[limit])
    best, tried = _best(program, costs, limit)
    least = total(program, costs, best)
    is_same = all(found.choice[site] is best[site] for site in program.sites)
    return {
        "seed": seed,
        "modules": sum(not any(True for _ in module.children()) for module in model.modules()),
        "operations": len(program.sites),
        "choices": tried,
        "in_16_bits": sum(dtype is program.low for dtype in found.choice.values()),
        "found": found.total,
        "least": least,
        "is_same": is_same,
        "spread": _spread(costs, found.choice),
        "is_right": is_same or found.total <= least * (1 + _EQUAL),
        "within_noise": found.total - least <= _spread(costs, found.choice),
    }


def _best(program: Program, costs: Costs, limit: Budget) -> tuple[Choice, int]:
    """The choice that costs least within the limit, and how many different ones there are."""
    best: tuple[float, Choice] | None = None
    seen = set()
    for bits in itertools.product((False, True), repeat=len(program.sites)):
        choice = program.choose(site for site, low in zip(program.sites, bits, strict=True) if low)
        key = tuple(choice[site] for site in program.sites)
        if key in seen or limit.used(choice) > limit.limit:
            continue
        seen.add(key)
        cost = total(program, costs, choice)
        if best is None or cost < best[0]:
            best = cost, choice
    assert best is not None, "everything in float32 has no error"
    return best[1], len(seen)


def _spread(costs: Costs, choice: Choice) -> float:
    """Of the time of a choice, in seconds."""
    known = [
        costs.sites[site][dtype].spread for site, dtype in choice.items() if site in costs.sites
    ]
    return float(sum(spread**2 for spread in known) ** 0.5)


def _network(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """A chain of linear layers, among them some that cost little and have errors of their own."""
    count, width = draw.randrange(8, 11), draw.choice(_WIDTHS)
    batch = torch.randn(draw.choice([64, 256]), width)
    layers: list[nn.Module] = []
    for number in range(count):
        kind = draw.choice(_FREE) if number % 2 and draw.random() < 0.7 else "linear"
        if kind == "linear":
            wide = draw.choice(_WIDTHS)
            layers.append(nn.Linear(width, wide))
            width = wide
        else:
            layers.append({"tanh": nn.Tanh(), "norm": nn.LayerNorm(width), "gelu": nn.GELU()}[kind])
    return nn.Sequential(*layers), batch
