"""A policy that was found is measured again: it holds, or does not, or the time is too short to tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning.checking import check
from precast.tuning.setups import Workload
from precast.tuning.training import TrainingTask
from tests.tuning.test_tuner import SGD, Wide, batches, in_16_bits, step

DEFAULT = Policy.load("default")
HEAD = DEFAULT.replace(name="tuned", modules={"head": "fp32"})
ASKED = {
    "base": DEFAULT,
    "dtype": torch.bfloat16,
    "objective": "memory",
    "tolerance": 0.05,
    "budget": 600.0,
}


def workload(step=step, model: nn.Module | None = None) -> Workload:
    return Workload(model or Wide(), step, tuple(batches()), SGD, "cpu")


@pytest.fixture(autouse=True)
def _short_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingTask, "steps", (4, 6))


def test_the_base_policy_holds_where_it_keeps_less_than_float32() -> None:
    found = check(workload(), DEFAULT, **ASKED)
    assert found.outcome == "holds"
    assert "default keeps 0.54 of the memory of float32" in found.because
    assert list(found.proof.figures) == ["float32", "default"]


def test_a_policy_that_keeps_more_than_the_base_does_not_hold() -> None:
    found = check(workload(), HEAD, **ASKED)
    assert found.outcome == "does not hold"
    assert "tuned is worse than default: it keeps 2.12 of the memory of default" in found.because


def test_a_policy_that_trains_worse_does_not_hold() -> None:
    def spoilt(model: nn.Module, batch) -> torch.Tensor:
        loss = step(model, batch)
        return loss + 0.2 * loss.detach() if in_16_bits() else loss

    found = check(workload(spoilt), DEFAULT, **ASKED)
    assert found.outcome == "does not hold"
    assert found.because[0].startswith("the loss of default is worse than that of float32 by +")


def test_a_base_that_fails_is_no_measure() -> None:
    class Fails(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.head(torch.tanh(self.body(x)))
            return found * float("inf") if found.dtype is torch.bfloat16 else found

    in_float32 = DEFAULT.replace(modules={"body": "fp32", "head": "fp32"})
    found = check(workload(model=Fails()), in_float32, **ASKED)
    assert found.outcome == "holds"
    assert "default does not train as well as float32, so it is not compared" in found.because[-1]


@pytest.mark.parametrize(
    ("slow_in_16_bits", "outcome"), [(True, "does not hold"), (False, "holds")]
)
def test_the_time_is_compared(slow_in_16_bits: bool, outcome: str, clock: list[float]) -> None:
    def slow(model: nn.Module, batch) -> torch.Tensor:
        clock[0] += 0.02 if in_16_bits() is slow_in_16_bits else 0.004
        return step(model, batch)

    asked = ASKED | {"objective": "time", "tolerance": 0.1}
    assert check(workload(slow), DEFAULT, **asked).outcome == outcome
    # Where float32 was the answer, it is the other way round.
    asked = asked | {"dtype": torch.float32}
    other = "holds" if slow_in_16_bits else "does not hold"
    assert check(workload(slow), Policy("float32", {}, "promote"), **asked).outcome == other


def test_too_short_a_time_tells_nothing() -> None:
    with pytest.raises(
        TuningError, match=r"too small: a step of this model in float32 takes .* about \d+s"
    ):
        check(workload(), DEFAULT, **ASKED | {"budget": 1e-3})
