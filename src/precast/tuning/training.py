"""Trainings of copies of a model under setups: their losses and times, memory, and the errors of gradients.

Invariants:
- seed 0 starts from the model's own weights. Each other seed moves every weight by a relative `_MOVED`, so that the
  weights round differently, and shuffles the batches;
- in float16 a gradient scaler takes its first scale from the first gradients. A step that it skips is repeated with the
  lower scale: long trainings skip one step of thousands, and in a short one a skipped step would count as an error.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import statistics
from contextlib import closing, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._torch import saved_for_backward
from precast.errors import BrokenModelError, TuningError
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import named_parameters
from precast.tuning.setups import (
    FLOAT32,
    Setup,
    Workload,
    attached,
    copy_model,
    current_time,
    exception_text,
    move_weights,
    seed_all,
)
from precast.tuning.tasks import ErrorMeter, ModelTrial, Results, TuningTask, are_finite
from precast.tuning.words import TRAINING

__all__ = ["GradientMeter", "Training", "TrainingTask"]

_MOVED: Final = 1e-3
_EVALUATED: Final = 4
"""The batches of the loss at the end."""
_MOST_REPEATED: Final = 40
"""The number of times a skipped step is repeated, while the loss scale decreases."""
_LARGEST_SCALE: Final = 2.0**24
_USUAL_SCALE: Final = 2.0**16

_NO_GRADIENT: Final = (
    "the loss reaches no parameter of the model that step was called with: backward leaves all of them without a "
    "gradient. step(model, batch) has to run its argument, which is a copy, and at least one parameter has to require "
    "a gradient."
)


class Training(ModelTrial):
    """A copy of the model that is trained under one setup."""

    def __init__(self, workload: Workload, setup: Setup, seed: int) -> None:
        super().__init__(workload, setup)
        self.seed = seed
        if seed:
            move_weights(self.model, _MOVED, workload.seed, seed)
        self._order = list(range(len(workload.batches)))
        random.Random(repr((workload.seed, seed))).shuffle(self._order)
        self.optimizer = _optimizer_of(workload, self.model)
        self._scaler = GradScaler(
            workload.device_type, init_scale="auto", enabled=setup.dtype is torch.float16
        )
        self.attachment = attached(self.model, setup)

    def step(self, place: int) -> tuple[float, float]:
        """Train on the next batch, and return the loss and the seconds."""
        workload = self.workload
        batch = workload.batches[self._order[place % len(self._order)]]
        for _ in range(_MOST_REPEATED):
            seed_all(workload.seed, self.seed, place)
            start = current_time(workload.device_type)
            loss, is_skipped = self._try_step(batch)
            if not is_skipped:
                return float(loss.detach()), current_time(workload.device_type) - start
        raise BrokenModelError(f"gradients overflow in step {place + 1} under every loss scale")

    def _try_step(self, batch: Any) -> tuple[Tensor, bool]:
        """Return the loss, and True if the scaler skipped the step of a finite loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.setup.region(self.workload.device_type):
            loss = self.workload.loss(self.model, batch)
        if not loss.requires_grad:
            raise TuningError(_NO_GRADIENT)
        self._scaler.scale(loss).backward()
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise TuningError(_NO_GRADIENT)
        self._scaler.step(self.optimizer)
        last = self._scaler.last_step(self.optimizer) if self._scaler.is_enabled() else None
        self._scaler.update()
        return loss, last is not None and bool(last.skipped) and bool(loss.isfinite())

    def values(self) -> list[float]:
        """Return the mean loss, or metric, of some batches; NaN after a failure."""
        if self.failure:
            return [math.nan]
        numbers = range(min(_EVALUATED, len(self.workload.batches)))
        try:
            with self.setup.region(self.workload.device_type):
                return [statistics.fmean(map(self._value, numbers))]
        except TuningError:
            raise
        except Exception as error:  # the metric may take float32 alone
            self.fail(error, "the metric")
            return [math.nan]

    def _value(self, number: int) -> float:
        if self.workload.metric is not None:
            return self.workload.measure(self.model, number)
        seed_all(self.workload.seed, number)
        return float(self.workload.loss(self.model, self.workload.batches[number]).detach())


def _optimizer_of(workload: Workload, model: nn.Module) -> Optimizer:
    """Return a new optimizer of the model's trainable parameters.

    Raises:
        TuningError: There are none, the optimizer cannot be made, or its step needs a closure.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        raise TuningError(
            "no parameter of the model requires a gradient, so nothing can be trained. Let some require one, or pass "
            "step=None and a metric to search for inference"
        )
    try:
        optimizer = workload.optimizer(parameters)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except Exception as error:
        raise TuningError(f"optimizer(parameters) failed: {exception_text(error)}") from error
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TuningError(
            f"{type(optimizer).__name__} calls a closure that computes the loss several times in one step; tune needs "
            "an optimizer that steps once for each loss, such as torch.optim.AdamW"
        )
    return optimizer


class TrainingTask(TuningTask):
    """The task of a search for training. Gradients of two batches differ by more than `allowed_change`."""

    words = TRAINING
    allowed_change = 0.3
    looks = (3, 6, 12, 24)
    warmup = 2
    steps = (8, 50)

    def open(self, setup: Setup, number: int) -> Training:
        """Return a new copy, with the number of the round as its seed."""
        return Training(self.workload, setup, number)

    @functools.cached_property
    def meter(self) -> GradientMeter:
        """The meter of gradients and losses."""
        return GradientMeter(self.workload)

    def forward(self, model: nn.Module) -> Tensor:
        """Return the loss of the first batch."""
        return self.workload.loss(model, self.workload.batches[0])

    def needed_bytes(self, setup: Setup) -> int:
        """Return the bytes that autograd keeps for the backward pass of one step, without the parameters."""
        seed_all(self.workload.seed, 0)
        with (
            closing(self.open(setup, 0)) as training,
            saved_for_backward(training.model.parameters()) as saved,
            setup.region(self.workload.device_type),
        ):
            self.forward(training.model)
        return sum(storage.nbytes() for storage in saved.values())


class GradientMeter(ErrorMeter):
    """Compares losses and gradients with those in float32, before and after some steps of training.

    In float16 the loss scale is the one that a gradient scaler would reach.
    """

    subject = "the gradient of {}"
    may_be_infinite = False

    def __init__(self, workload: Workload, *, steps: int = 8, batches: int = 2) -> None:
        super().__init__(workload)
        self._last_scale = 1.0
        training = Training(workload, FLOAT32, 0)
        self.add_points(copy_model(training.model), batches)
        for _ in range(steps):
            training.run()
        if training.failure:
            raise TuningError(f"the training in float32 fails: {training.failure}")
        if steps:
            self.add_points(copy_model(training.model), batches)
        self.find_reliable()

    def find_scale(self, setup: Setup) -> None:
        """Set the loss scale to the largest one under which no gradient overflows with this setup, from 1 to 2**24."""
        self.scale = _LARGEST_SCALE
        try:
            _, gradients = self.results_at(self.points[0], setup)
        except TuningError:
            raise
        except Exception:  # an operation may raise anything
            gradients = {"": torch.tensor(math.nan)}
        # Where no scale helps, the forward pass overflows.
        self.scale = self._last_scale if are_finite(gradients) else _USUAL_SCALE

    def results(self, setup: Setup, model: nn.Module, number: int) -> Results:
        """Run with the loss scale, and with lower ones while a gradient overflows and the loss does not."""
        self._last_scale = self.scale if setup.dtype is torch.float16 else 1.0
        while True:
            loss, gradients = self._run(setup, model, number)
            if are_finite(gradients) or not math.isfinite(loss) or self._last_scale <= 1:
                return loss, gradients
            self._last_scale /= 2

    def _run(self, setup: Setup, model: nn.Module, number: int) -> Results:
        """Return the loss and the gradients of one batch, the latter divided by the scale."""
        workload = self.workload
        try:
            with attached(model, setup) or nullcontext():
                seed_all(workload.seed, number)
                with setup.region(workload.device_type):
                    loss = workload.loss(model, workload.batches[number])
                if not loss.requires_grad:
                    raise TuningError(_NO_GRADIENT)
                (loss.float() * self._last_scale).backward()
            gradients = {
                name: parameter.grad.detach().to_dense() / self._last_scale
                for name, parameter in named_parameters(model)
                if parameter.grad is not None
            }
        finally:
            model.zero_grad(set_to_none=True)
        if not gradients:
            raise TuningError(_NO_GRADIENT)
        return float(loss.detach()), gradients
