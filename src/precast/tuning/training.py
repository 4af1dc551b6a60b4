"""Trainings of copies of a model under setups: their losses and times, memory, and the errors of gradients.

Invariants:
- seed 0 starts from the model's own weights. Each other seed moves every weight by a relative `_MOVED`, so that the
  weights round differently, and shuffles the batches;
- in float16 a gradient scaler takes its first scale from the first gradients. A step that it skips is repeated with the
  lower scale: long trainings skip one step of thousands, and in a short one a skipped step would count as an error.
"""

from __future__ import annotations

import functools
import math
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast.diagnostics.tracing.tracer import trace
from precast.errors import BrokenModelError, TuningError
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import named_parameters
from precast.policy.policy import Policy
from precast.report.tree import TreeNode, tree
from precast.tuning.recording import record
from precast.tuning.sensitivity import GroupErrors
from precast.tuning.setups import (
    FLOAT32,
    MOVED_BY_ROUNDING,
    Setup,
    Workload,
    attached,
    copy_model,
    current_time,
    move_weights,
    restore_buffers,
    seed_all,
)
from precast.tuning.sites import TunedProgram
from precast.tuning.words import TRAINING

__all__ = ["GradientMeter", "Training", "TrainingTask"]

LOOKS: Final = (3, 6, 12, 24)
"""The numbers of seeds after which the intervals are computed."""
WARMUP: Final = 2
"""The first steps of a training, whose times do not count."""
_MOVED: Final = 1e-3
_MOST_TIMED: Final = 16
_EVALUATED: Final = 4
"""The batches of the loss at the end."""
_MOST_REPEATED: Final = 40
"""The number of times a skipped step is repeated, while the loss scale decreases."""
_NOISE: Final = 1e-2
"""A gradient that changes by more than this share of itself, if weights move by `MOVED_BY_ROUNDING`, is noise."""
_SILENT: Final = 0.99
"""A gradient of which more than this share becomes zero trains nothing."""
_FIRST_SCALE: Final = 2.0**16
_LARGEST_SCALE: Final = 2.0**24

_NO_GRADIENT: Final = (
    "the loss reaches no parameter of the model that step was called with: backward leaves all of them without a "
    "gradient. step(model, batch) has to run its argument, which is a copy, and at least one parameter has to require "
    "a gradient."
)


def scalar_loss(workload: Workload, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch.

    Raises:
        TuningError: it is not a tensor of one floating-point number.
    """
    assert workload.step is not None, "a training has a step"
    loss = workload.step(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = (
            f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
            if isinstance(loss, Tensor)
            else repr(type(loss))
        )
        raise TuningError(
            f"step(model, batch) returned {what}; it has to return the loss, a tensor of one floating-point number, "
            "on which backward can be called"
        )
    return loss.reshape(())


@dataclass(eq=False)
class Training:
    """A copy of the model that is trained under one setup.

    Attributes:
        workload: the workload.
        setup: the setup.
        seed: the seed.
        losses: the loss of each step.
        seconds: the time of each step.
        failure: why it cannot continue; empty while it can.
    """

    workload: Workload
    setup: Setup
    seed: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def __post_init__(self) -> None:
        workload = self.workload
        self.model = copy_model(workload.model)
        if self.seed:
            move_weights(self.model, _MOVED, workload.seed, self.seed)
        self._order = list(range(len(workload.batches)))
        random.Random(repr((workload.seed, self.seed))).shuffle(self._order)
        self.optimizer = workload.optimizer(
            [each for each in self.model.parameters() if each.requires_grad]
        )
        self._scaler = GradScaler(
            workload.device_type, init_scale="auto", enabled=self.setup.dtype is torch.float16
        )
        self._attachment = attached(self.model, self.setup)

    def close(self) -> None:
        """Detach the policy."""
        if self._attachment is not None:
            self._attachment.detach()

    def run(self, _place: int = 0) -> None:
        """Train on the next batch; do nothing after a failure."""
        if self.failure:
            return
        number = len(self.losses)
        batch = self.workload.batches[self._order[number % len(self._order)]]
        try:
            self._step(batch, number)
        except TuningError:
            raise
        except BrokenModelError as broken:
            self.failure = str(broken)
        except Exception as error:
            if self.setup.policy is None:
                raise
            self.failure = f"{type(error).__name__}: {error}"

    def _step(self, batch: Any, number: int) -> None:
        device_type = self.workload.device_type
        for _ in range(_MOST_REPEATED):
            seed_all(self.workload.seed, self.seed, number)
            start = current_time(device_type)
            loss, is_skipped = self._try_step(batch)
            if not is_skipped:
                break
        else:
            self.failure = f"gradients overflow in step {number + 1} under every loss scale"
        self.seconds.append(current_time(device_type) - start)
        self.losses.append(float(loss.detach()))
        if not math.isfinite(self.losses[-1]):
            self.failure = f"the loss of step {number + 1} is {self.losses[-1]}"

    def _try_step(self, batch: Any) -> tuple[Tensor, bool]:
        """Return the loss, and True if the scaler skipped the step of a finite loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.setup.region(self.workload.device_type):
            loss = scalar_loss(self.workload, self.model, batch)
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
        workload, values = self.workload, []
        for number, batch in enumerate(workload.batches[:_EVALUATED]):
            seed_all(workload.seed, number)
            with self.setup.region(workload.device_type):
                if workload.metric is None:
                    value: Tensor | float = scalar_loss(workload, self.model, batch)
                else:
                    value = workload.metric(self.model, batch)
            values.append(float(value.detach() if isinstance(value, Tensor) else value))
        return [math.fsum(values) / len(values)]


@dataclass
class TrainingTask:
    """The task of a search for training."""

    workload: Workload
    words = TRAINING
    allowed_change = 0.3
    """The relative error that the gradient of a parameter may have. Gradients of two batches differ by more."""
    looks = LOOKS
    warmup = WARMUP
    least_pairs = LOOKS[0]
    steps = (8, 50)
    """The least and the most steps of a training."""
    is_training = True

    def length(self, steps: int) -> int:
        """Return the number of steps of a training."""
        return steps

    def open(self, setup: Setup, number: int) -> Training:
        """Return a new copy, with the number of the round as its seed."""
        return Training(self.workload, setup, number)

    def close(self) -> None:
        """Do nothing: no copy is shared."""

    @functools.cached_property
    def meter(self) -> GradientMeter:
        """The meter of gradients and losses."""
        return GradientMeter(self.workload)

    def record(self, base: Policy, low: torch.dtype) -> TunedProgram:
        """Record the operations of a step."""
        workload = self.workload
        return record(
            workload.model,
            lambda model: scalar_loss(workload, model, workload.batches[0]),
            base,
            low=low,
            device=workload.device_type,
        )

    def seconds(self) -> float:
        """Return the time of the shortest of the steps that fit into a second, at least two."""
        training = Training(self.workload, FLOAT32, 0)
        end = time.monotonic() + 1.0
        try:
            for number in range(_MOST_TIMED):
                if number >= 2 and time.monotonic() > end:
                    break
                training.run()
        finally:
            training.close()
        return min(training.seconds)

    def needed_bytes(self, setup: Setup) -> int:
        """Return the bytes that autograd keeps for the backward pass of one step, without the parameters."""
        training = Training(self.workload, setup, 0)
        parameters = {p.untyped_storage().data_ptr() for p in training.model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage  # keeps the address from being used again
            return tensor

        try:
            seed_all(self.workload.seed, 0)
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                setup.region(self.workload.device_type),
            ):
                scalar_loss(self.workload, training.model, self.workload.batches[0])
        finally:
            training.close()
        return sum(storage.nbytes() for storage in kept.values())

    def traced(self, setup: Setup) -> list[TreeNode]:
        """Return the modules of the second step of a training, with their dtypes, times and casts."""
        training = Training(self.workload, setup, 0)
        try:
            training.run()
            with trace(training.model) as recorded:
                training.run()
        finally:
            training.close()
        return tree(recorded.data)


@dataclass(frozen=True, eq=False)
class _Point:
    """One batch at one time in training, with its loss and gradients in float32."""

    model: nn.Module
    buffers: dict[str, Tensor]
    batch: Any
    number: int
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)


class GradientMeter:
    """Compares losses and gradients with those in float32, on a few batches before and after some steps of training.

    Errors are squares of relative errors, because those of independent roundings add up. The error of gradients is that
    of the parameter where it is largest; gradients that are rounding noise in float32 already do not count, as that of
    a bias before a norm. In float16 the loss scale is the one that a gradient scaler would reach.
    """

    def __init__(self, workload: Workload, *, steps: int = 8, batches: int = 2) -> None:
        """Train a copy in float32, and record its gradients before and after.

        Raises:
            TuningError: the loss in float32 is not finite, or no parameter gets a gradient.
        """
        self.workload = workload
        self.scale = 1.0
        self._points: list[_Point] = []
        training = Training(workload, FLOAT32, 0)
        self._add_points(copy_model(training.model), batches)
        for _ in range(steps):
            training.run()
        if training.failure:
            raise TuningError(f"the training in float32 fails: {training.failure}")
        if steps:
            self._add_points(copy_model(training.model), batches)
        self._reliable = self._reliable_parameters()

    def errors(self, setup: Setup) -> GroupErrors:
        """Return the errors under a setup; infinite where it cannot run, or the loss or a gradient is not finite."""
        total_loss = 0.0
        wrong = dict.fromkeys(self._reliable, 0.0)
        norms = dict.fromkeys(self._reliable, 0.0)
        flushed = dict.fromkeys(self._reliable, 0.0)
        for point in self._points:
            try:
                loss, gradients = self._run_scaled(setup, point)
            except TuningError:
                raise
            except Exception as error:
                return GroupErrors.infinite(f"{type(error).__name__}: {error}")
            if not math.isfinite(loss):
                return GroupErrors.infinite(f"the loss is {loss}")
            total_loss += ((loss - point.loss) / (abs(point.loss) or 1.0)) ** 2
            for name in self._reliable:
                expected = point.gradients[name]
                actual = gradients.get(name)
                actual = torch.zeros_like(expected) if actual is None else actual
                if not bool(actual.isfinite().all()):
                    return replace(
                        GroupErrors.infinite(f"the gradient of {name} overflows"), parameter=name
                    )
                wrong[name] += float((actual - expected).double().square().sum())
                norms[name] += float(expected.double().square().sum())
                flushed[name] += float(((actual == 0) & (expected != 0)).float().mean())
        count = len(self._points)
        shares = {name: wrong[name] / norms[name] for name in self._reliable}
        worst = max(shares, key=shares.__getitem__, default="")
        silent = next((name for name in self._reliable if flushed[name] / count > _SILENT), "")
        share = flushed.get(worst, 0.0) / count
        return GroupErrors(total_loss / count, shares.get(worst, 0.0), worst, share, silent)

    def find_scale(self, setup: Setup) -> None:
        """Set the loss scale to the largest one under which no gradient overflows with this setup, from 1 to 2**24."""
        self.scale = _FIRST_SCALE
        point = self._points[0]
        if not self._is_finite(setup, point):
            while self.scale > 1 and not self._is_finite(setup, point):
                self.scale /= 2
            if self.scale <= 1:  # the forward pass overflows, and no scale helps
                self.scale = _FIRST_SCALE
            return
        while self.scale < _LARGEST_SCALE:
            self.scale *= 2
            if not self._is_finite(setup, point):
                self.scale /= 2
                return

    def _is_finite(self, setup: Setup, point: _Point) -> bool:
        try:
            loss, gradients = self._run(setup, point, self.scale)
        except TuningError:
            raise
        except Exception:
            return False
        return math.isfinite(loss) and _are_finite(gradients)

    def _run_scaled(self, setup: Setup, point: _Point) -> tuple[float, dict[str, Tensor]]:
        """Run with the loss scale, and with lower ones while a gradient overflows and the loss does not."""
        scale = self.scale if setup.dtype is torch.float16 else 1.0
        while True:
            loss, gradients = self._run(setup, point, scale)
            if _are_finite(gradients) or not math.isfinite(loss) or scale <= 1:
                return loss, gradients
            scale /= 2

    def _run(self, setup: Setup, point: _Point, scale: float) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and the gradients of one batch, the latter divided by the scale."""
        workload, model = self.workload, point.model
        attachment = attached(model, setup)
        try:
            seed_all(workload.seed, point.number)
            with setup.region(workload.device_type):
                loss = scalar_loss(workload, model, point.batch)
            if not loss.requires_grad:
                raise TuningError(_NO_GRADIENT)
            (loss.float() * scale).backward()
            gradients = {
                name: parameter.grad.detach().to_dense() / scale
                for name, parameter in named_parameters(model)
                if parameter.grad is not None
            }
            if not gradients:
                raise TuningError(_NO_GRADIENT)
            return float(loss.detach()), gradients
        finally:
            if attachment is not None:
                attachment.detach()
            model.zero_grad(set_to_none=True)
            restore_buffers(model, point.buffers)

    def _add_points(self, model: nn.Module, batches: int) -> None:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for number, batch in enumerate(self.workload.batches[:batches]):
            point = _Point(model, buffers, batch, number)
            loss, gradients = self._run(FLOAT32, point, 1.0)
            if not math.isfinite(loss) or not _are_finite(gradients):
                raise TuningError(
                    f"in float32 the loss of batch {number + 1} is {loss}"
                    + ("" if not math.isfinite(loss) else ", and a gradient is not finite")
                    + ": no precision can be compared with it. Find the cause first, for example with "
                    "precast.monitor(model)."
                )
            self._points.append(replace(point, loss=loss, gradients=gradients))

    def _reliable_parameters(self) -> tuple[str, ...]:
        """Return the parameters whose gradients are more than rounding noise in float32."""
        first = self._points[0]
        moved = copy_model(first.model)
        move_weights(moved, MOVED_BY_ROUNDING, self.workload.seed, 1)
        _, others = self._run(FLOAT32, replace(first, model=moved), 1.0)
        return tuple(
            name
            for name, gradient in first.gradients.items()
            if name in others and all(name in point.gradients for point in self._points)
            if bool((others[name] - gradient).norm() < _NOISE * gradient.norm())
        )


def _are_finite(gradients: dict[str, Tensor]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients.values())
