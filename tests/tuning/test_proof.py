"""Trainings side by side tell setups apart, or say that they cannot."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning.proof import Interval, outcome_of, prove
from precast.tuning.setups import Setup, Workload
from precast.tuning.training import TrainingTask

DEFAULT = Setup("default", Policy.load("default"), torch.bfloat16)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def _task(step=_loss) -> TrainingTask:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(32, 8, generator=generator) for _ in range(4)]
    batches = tuple((x, x.sum(1, keepdim=True).sin() + 2) for x in inputs)
    return TrainingTask(
        Workload(Small(), step, batches, lambda p: torch.optim.SGD(p, lr=0.05), "cpu")
    )


def test_a_policy_that_trains_as_well_is_equal() -> None:
    found = prove(_task(), [DEFAULT], steps=8, tolerance=0.05)
    compared = found.comparison("default", "float32")
    assert compared.loss == "equal"
    assert compared.is_as_good
    assert -0.05 < compared.difference.low <= compared.difference.high <= 0.05
    assert found.ended == "proven"
    assert found.seeds == 3
    assert len(found.figures["default"].seconds) == 3 * 6
    assert found.figures["default"].kept_bytes < found.figures["float32"].kept_bytes


def test_what_spoils_the_loss_is_worse_and_the_other_one_better() -> None:
    def spoilt(model: nn.Module, batch) -> torch.Tensor:
        loss = _loss(model, batch)
        return loss + 0.2 * loss.detach() if torch.is_autocast_enabled("cpu") else loss

    found = prove(_task(spoilt), [DEFAULT], steps=4, tolerance=0.01)
    assert found.comparison("default", "float32").loss == "worse"
    assert not found.comparison("default", "float32").is_as_good


def test_more_seeds_are_trained_where_few_do_not_tell() -> None:
    """A difference with as much noise as tolerance takes more than the first three seeds."""
    drawn = torch.Generator().manual_seed(1)

    def noisy(model: nn.Module, batch) -> torch.Tensor:
        noise = 1 + 0.006 * torch.randn((), generator=drawn)
        loss = _loss(model, batch)
        return loss * noise if torch.is_autocast_enabled("cpu") else loss

    found = prove(_task(noisy), [DEFAULT], steps=2, tolerance=0.01)
    assert found.comparison("default", "float32").loss == "equal"
    assert found.seeds in (6, 12)


def test_a_failure_is_worse_and_is_left_out_of_later_seeds() -> None:
    def overflows(model: nn.Module, batch) -> torch.Tensor:
        loss = _loss(model, batch)
        return loss * math.inf if torch.is_autocast_enabled("cpu") else loss

    found = prove(_task(overflows), [DEFAULT], steps=4, tolerance=0.01)
    assert found.comparison("default", "float32").loss == "worse"
    assert "the loss of step 1 is inf" in found.comparison("default", "float32").because
    assert found.seeds == 3
    assert len(found.figures["default"].curves) == 1


def test_where_the_time_ends_nothing_is_claimed() -> None:
    found = prove(_task(), [DEFAULT], steps=4, tolerance=0.05, deadline=time.monotonic())
    assert found.ended == "time"
    assert found.seeds == 0
    assert found.comparison("default", "float32").loss == "cannot tell"
    assert found.comparison("default", "float32").time == "cannot tell"


def test_an_interrupt_keeps_what_was_found() -> None:
    def interrupt(text: str) -> None:
        assert text.endswith(": float32, default")
        if text.startswith("round 3"):
            raise KeyboardInterrupt

    found = prove(_task(), [DEFAULT], steps=4, tolerance=0.05, progress=interrupt)
    assert found.ended == "interrupted"
    assert found.seeds == 2
    assert len(found.figures["float32"].finals) == 2


def test_float32_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(TuningError, match="float32 fails: the loss of step 1 is nan"):
        prove(_task(lambda m, b: _loss(m, b) * math.nan), [DEFAULT], steps=2, tolerance=0.1)


def test_a_slower_setup_is_slower(clock: list[float]) -> None:
    def slow(model: nn.Module, batch) -> torch.Tensor:
        clock[0] += 0.012 if torch.is_autocast_enabled("cpu") else 0.004
        return _loss(model, batch)

    found = prove(_task(slow), [DEFAULT], steps=12, tolerance=0.05, timed=True)
    assert found.comparison("default", "float32").time == "worse"
    assert found.comparison("default", "float32").ratio.low > 1.5


class Slow(Setup):
    """Float32 that takes 20 ms longer, by the clock of its test."""

    now: ClassVar[list[float]] = [0.0]

    @contextmanager
    def region(self, _device_type: str) -> Iterator[None]:
        self.now[0] += 0.02
        yield


def test_what_is_slower_for_certain_gets_no_more_seeds(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes as long and cannot be told from float32 gets all of them."""

    def even(model: nn.Module, batch) -> torch.Tensor:
        """A step that takes 10 ms in each precision."""
        clock[0] += 0.01
        return _loss(model, batch)

    monkeypatch.setattr(Slow, "now", clock)
    slow = Slow("slow", None, torch.float32)
    found = prove(_task(even), [slow, DEFAULT], steps=6, tolerance=1e-7, timed=True)
    assert found.seeds == 24
    assert len(found.figures["slow"].finals) == 3
    assert len(found.figures["float32"].finals) == 24
    assert found.comparison("slow", "float32").time == "worse"
    assert found.comparison("slow", "float32").seeds == 3


def test_without_times_what_is_slower_is_trained_as_the_others() -> None:
    slow = Slow("slow", None, torch.float32)
    task = _task()
    task.looks = (3, 6)
    found = prove(task, [slow, DEFAULT], steps=2, tolerance=1e-7)
    assert len(found.figures["slow"].finals) == 6


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (-0.5, -0.02, "better"),
        (-0.5, 0.009, "equal"),
        (-0.009, 0.009, "equal"),
        (-0.009, 0.02, "cannot tell"),
        (0.009, 0.02, "cannot tell"),
        (0.02, 0.5, "worse"),
        (-math.inf, math.inf, "cannot tell"),
        (math.nan, math.nan, "cannot tell"),
    ],
)
def test_an_outcome_is_of_the_whole_interval(low: float, high: float, outcome: str) -> None:
    assert outcome_of(Interval(low, (low + high) / 2, high), 0.01) == outcome
