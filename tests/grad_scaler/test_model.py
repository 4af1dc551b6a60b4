"""Any sequence of good and bad gradients, against a model of the specification in Python's float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import BrokenModelError
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import KINDS, bits

Tensor = torch.Tensor
RATE, MOMENTUM = 0.5, 0.75
FLOOR, INTERVAL, SKIPS = 2.0**-3, 3, 5


@dataclass
class Model:
    """What the documentation says, in numbers: SGD with momentum on one number an optimizer."""

    parameters: list[float]
    scale: float = 8.0
    good: int = 0
    bad: int = 0
    momenta: dict[int, float] = field(default_factory=dict)

    def iterate(self, gradients: list[float | None]) -> str:
        """One iteration: what `update` is to do."""
        found_bad = False
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if not math.isfinite(gradient):
                found_bad = True
                continue
            before = self.momenta.get(number)
            self.momenta[number] = gradient if before is None else MOMENTUM * before + gradient
            self.parameters[number] -= RATE * self.momenta[number]
        self.good, self.bad = (0, self.bad + 1) if found_bad else (self.good + 1, 0)
        if found_bad and self.bad >= SKIPS:
            return "raise"
        if found_bad:
            self.scale = max(self.scale / 2, FLOOR)
        elif self.good == INTERVAL:
            self.scale, self.good = self.scale * 2, 0
        return "go on"


gradients = (
    st.none() | st.integers(-8, 8).map(float) | st.sampled_from([math.inf, -math.inf, math.nan])
)
iterations = st.lists(gradients, min_size=3, max_size=3).filter(
    lambda g: any(x is not None for x in g)
)


@settings(max_examples=200)
@given(
    script=st.lists(iterations, max_size=20),
    kinds=st.lists(st.sampled_from(["plain", "foreach"]), min_size=3, max_size=3),
    unscale=st.booleans(),
)
def test_parameters_and_scale_are_those_of_the_model(
    script: list[list[float | None]], kinds: list[str], unscale: bool
) -> None:
    model = Model([1.0, 2.0, 3.0])
    parameters = [
        torch.nn.Parameter(torch.tensor([x], dtype=torch.float64)) for x in model.parameters
    ]
    # A fused SGD whose first step is skipped leaves its momentum uninitialised, in PyTorch too.
    optimizers = [
        torch.optim.SGD([p], lr=RATE, momentum=MOMENTUM, foreach=kind == "foreach")
        for p, kind in zip(parameters, kinds, strict=True)
    ]
    scaler = GradScaler(
        "cpu", 8.0, growth_interval=INTERVAL, min_scale=FLOOR, max_consecutive_skips=SKIPS
    )
    for iteration in script:
        scaler.scale(torch.ones(()))
        for parameter, optimizer, gradient in zip(parameters, optimizers, iteration, strict=True):
            if gradient is None:
                continue
            parameter.grad = torch.full_like(parameter, gradient * scaler.get_scale())
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        if model.iterate(iteration) == "raise":
            with pytest.raises(BrokenModelError):
                scaler.update()
        else:
            scaler.update()
        assert [p.item() for p in parameters] == model.parameters
        assert scaler.get_scale() == model.scale


@settings(max_examples=60)
@given(
    script=st.lists(st.sampled_from([1.0, -2.0, 0.5, math.inf, math.nan]), max_size=12),
    kind=st.sampled_from([kind for kind in KINDS if "adam" in kind or kind == "sgd"]),
)
def test_skipped_steps_change_nothing_in_an_optimizer(script: list[float], kind: str) -> None:
    """An optimizer under a scaler is one that never saw the bad gradients."""

    def everything(parameter: Tensor, optimizer: Any) -> list[Any]:
        moments = [
            v for s in optimizer.state.values() for k, v in sorted(s.items()) if v is not None
        ]
        return [bits(parameter), *map(bits, moments)]

    scaled, plain = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizers = [KINDS[kind]([p]) for p in (scaled, plain)]
    scaler = GradScaler("cpu", init_scale=1024.0, on_verdict="ignore")
    for gradient in script:
        scaler.scale(torch.ones(()))
        scaled.grad = torch.full_like(scaled, gradient * scaler.get_scale())
        before = everything(scaled, optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        if math.isfinite(gradient):
            plain.grad = torch.full_like(plain, gradient)
            optimizers[1].step()
        elif optimizers[0].state and len(before) > 1:
            assert everything(scaled, optimizers[0]) == before
        if optimizers[1].state:
            assert everything(scaled, optimizers[0]) == everything(plain, optimizers[1])
        else:
            assert bits(scaled) == bits(plain)
