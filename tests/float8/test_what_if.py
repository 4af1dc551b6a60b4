"""What a monitor says of 8 bits before a rule is there is what the rule loses when it runs, on the model itself.

Invariant: what is compared is what the rule's own functions gave in the run; nothing is quantised here a second time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import precast
from precast.diagnostics.numerics.bins import what_if
from precast.diagnostics.numerics.tally import TensorTally
from precast.engine import float8_kernels
from precast.policy.policy import Policy
from precast.weights.float8 import linear as linear_module
from precast.weights.float8.formats import E4M3, E5M2, Scaling
from precast.weights.float8.quantise import Quantised, quantise

NAMES = {E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}


class Done(NamedTuple):
    """A matrix that a rule quantised, and what became of it."""

    matrix: Tensor
    scaling: Scaling
    result: Quantised

    @property
    def error(self) -> float:
        """The root mean square of the errors, beside that of the numbers."""
        exact = self.matrix.double()
        kept = self.result.data.double() * self.result.inverse.double()
        return float((kept - exact).norm() / exact.norm())

    @property
    def lost(self) -> float:
        """The share of the numbers that became zero."""
        became = (self.result.data.float() == 0) & (self.matrix != 0)
        return int(became.sum()) / int((self.matrix != 0).sum())


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Done]:
    """What the rules quantise from now on."""
    seen: list[Done] = []

    def watched(matrix: Tensor, scaling: Scaling) -> Quantised:
        result = quantise(matrix, scaling)
        seen.append(Done(matrix.detach().clone(), scaling, result))
        return result

    monkeypatch.setattr(float8_kernels, "_warned", {"cpu"})
    monkeypatch.setattr(linear_module, "quantise", watched)
    return seen


class Spread(nn.Module):
    """Gives 16-bit numbers of many sizes, which the rule takes as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() ** 3 * torch.logspace(-9, 0, 64, base=2.0)).to(torch.bfloat16)


class Wild(nn.Module):
    """Two products; the second one's input and the gradient between them span many powers of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(48, 64), nn.Linear(64, 32, bias=False)
        self.wide = Spread()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(self.body(x)))


def run(rule: str | None) -> dict[tuple[str, str], dict[str, Any]]:
    """A step under a rule, or in 16 bits, watched: what the monitor says of each tensor."""
    ops = {} if rule is None else {"linear": rule}
    policy = Policy.load("default").replace(ops=ops)
    model, x = Wild(), torch.randn(96, 48, generator=torch.Generator().manual_seed(1))
    with precast.monitor(model) as watched:
        with precast.autocast("cpu", torch.bfloat16, policy=policy):
            out = model(x)
        (out.float() ** 3).sum().backward()
        watched.end_step()
    return {(e["kind"], e["name"]): e["what_if"] for e in watched.to_dict()["modules"]}


def of(done: list[Done], dtype: torch.dtype, *shape: int) -> Done:
    """The first matrix of this shape that was quantised to a dtype."""
    return next(d for d in done if d.scaling.dtype == dtype and d.matrix.shape == shape)


def test_what_becomes_zero_in_the_monitors_words_is_what_the_rule_makes_zero(
    done: list[Done],
) -> None:
    """With scales that are powers of two, to the number: of the second product's input, and of its gradient."""
    said = run("float8_pow2")
    given, above = of(done, E4M3, 96, 64), of(done, E5M2, 96, 32)
    predicted = said["output", "wide"]["float8_e4m3fn"]["with_best"]["underflow"]
    assert predicted == pytest.approx(given.lost, abs=1e-12)
    assert predicted > 0.05
    of_gradient = said["gradient", "head"]["float8_e5m2"]["with_best"]["underflow"]
    assert of_gradient == pytest.approx(above.lost, abs=1e-12)


@pytest.mark.parametrize("rule", ["float8", "float8_rowwise", "float8_hp_grad"])
def test_the_other_rules_make_no_more_of_them_zero(rule: str, done: list[Done]) -> None:
    """Their scales are at least as large: that power of two, or more for a row without the largest number."""
    said = run(rule)
    predicted = said["output", "wide"]["float8_e4m3fn"]["with_best"]["underflow"]
    assert of(done, E4M3, 96, 64).lost <= predicted


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0, 2.0])
def test_the_predicted_error_is_that_of_the_rules_quantisation(
    dtype: torch.dtype, spread: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 256, generator=generator)
    matrix *= (spread * torch.randn(256, 256, generator=generator)).exp2()
    tally = TensorTally()
    tally.add(matrix)
    predicted = what_if([tally.read().magnitudes])[NAMES[dtype]]["error"]
    by_power = Done(matrix, s := Scaling(dtype, None, True), quantise(matrix, s))
    assert predicted == pytest.approx(by_power.error, rel=0.05)
    by_tensor = Done(matrix, s := Scaling(dtype, None, False), quantise(matrix, s))
    assert predicted == pytest.approx(by_tensor.error, rel=0.3)


def test_16_bit_formats_have_an_error_too() -> None:
    tally = TensorTally()
    matrix = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    tally.add(matrix)
    said = what_if([tally.read().magnitudes])
    for name in ("float16", "bfloat16"):
        rounded = matrix.to(getattr(torch, name)).double()
        error = float((rounded - matrix.double()).norm() / matrix.double().norm())
        assert said[name]["error"] == pytest.approx(error, rel=0.02)


def test_what_has_no_numbers_has_no_error() -> None:
    tally = TensorTally()
    tally.add(torch.zeros(4))
    assert what_if([tally.read().magnitudes])["float8_e4m3fn"]["error"] is None


@pytest.mark.parametrize(
    ("rule", "more"), [("float8_pow2", 1.15), ("float8", 1.35), ("float8_rowwise", 1.35)]
)
def test_a_layers_result_is_as_wrong_as_its_operands_say(
    rule: str, more: float, done: list[Done]
) -> None:
    """Errors of rounding are independent: that of the result is the root of the sum of the operands' squares."""
    said = run(None)["output", "body"]
    torch.manual_seed(0)
    model, x = Wild(), torch.randn(96, 48, generator=torch.Generator().manual_seed(1))
    policy = Policy.load("default").replace(ops={"linear": rule})
    with torch.no_grad(), precast.autocast("cpu", torch.bfloat16, policy=policy):
        hidden = model.body(x)
        found = F.linear(hidden, model.head.weight).double()
    exact = hidden.double() @ model.head.weight.detach().double().t()
    measured = float((found - exact).norm() / exact.norm())
    weight = TensorTally()
    weight.add(model.head.weight)
    of_weight = what_if([weight.read().magnitudes])["float8_e4m3fn"]["error"]
    predicted = math.hypot(said["float8_e4m3fn"]["error"], of_weight)
    assert predicted / more < measured < predicted * more
