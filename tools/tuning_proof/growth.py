"""Measures how the time of a search grows with the number of modules.

The network is a chain of residual blocks of three modules. It is measured with the errors that a search allows, and
with so little that every group has to be halved until no more groups are measured, which is the worst case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precast.policy.policy import Policy
from precast.tuning.choosing import Budget, choose
from precast.tuning.costs import measure
from precast.tuning.policy_text import short_policy
from precast.tuning.recording import record
from precast.tuning.sensitivity import Meter, Sensitivity, measure_sensitivity
from precast.tuning.training import Setup, Workload, random_states_kept, run_losses

__all__ = ["SIZES", "grown"]

SIZES = (10, 30, 100, 300, 1000)
_ERRORS = {"usual": (1e-2, 0.3), "worst": (1e-9, 1e-9)}
T = TypeVar("T")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = 0.1 * torch.tanh(self.up(self.norm(x)))
        return x + added


def grown(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """For each number of modules the processor time of each part of a search, in seconds."""
    _measured(9, *_ERRORS["usual"])  # what loads when it is first used
    for size in sizes:
        for case, (loss, gradient) in _ERRORS.items():
            yield {"case": case, **_measured(size, loss, gradient)}


def _measured(size: int, loss: float, gradient: float) -> dict[str, Any]:
    base, clock = Policy.load("default"), _Clock()
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(max(1, size // 3))))
    batch = torch.randn(4, 8)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch).float(), batch)

    workload = Workload(model, step, (batch,), torch.optim.AdamW, "cpu")
    with random_states_kept():
        program = clock.timed("record", lambda: record(model, lambda m: step(m, batch), base))
        costs = clock.timed("costs", lambda: measure(program))
        meter = clock.timed("errors", lambda: Meter(workload))
        found = clock.timed(
            "errors",
            lambda: measure_sensitivity(meter, program, base, loss=loss, gradient=gradient),
        )
        limits = list(_limits(found))
        chosen = clock.timed("choice", lambda: choose(program, costs, budgets=limits))
        policy = clock.timed("policy", lambda: short_policy(chosen.choice, program, base))
        setup = Setup("tuned", policy, program.low)
        clock.timed("training of 8 steps", lambda: run_losses(workload, setup, 0, 8))
    return {
        "modules": sum(1 for _ in model.modules()),
        "operations": len(program.sites),
        "runs": found.runs,
        "chosen_is_proven": chosen.is_proven,
        "seconds": clock.seconds,
        "total": sum(clock.seconds.values()),
    }


def _limits(found: Sensitivity) -> Iterator[Budget]:
    """Half of all errors, so that the choice has to weigh them."""
    for name in ("loss", "gradient"):
        errors = {frozenset({site}): getattr(each, name) for site, each in found.sites.items()}
        yield Budget(name, errors, sum(errors.values()) / 2)


class _Clock:
    """Adds up the processor time of parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, work: Callable[[], T]) -> T:
        """What the work returns."""
        begun = time.process_time()
        result = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - begun
        return result
