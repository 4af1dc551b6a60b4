"""Training or running copies of a model: the two tasks for which a policy is searched, and their errors.

Invariants:
- an error of a copy under a policy is a reason against the policy; one in float32 is the program's own;
- errors are squares of relative errors, because those of independent roundings add up;
- the error of gradients or outputs is that of the tensor where it is largest. A tensor that is rounding noise in
  float32 already, such as the gradient of a bias before a norm, does not count;
- a number that is not finite in float32 is not compared.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from precast.attachment.attachment import Attachment
from precast.diagnostics.tracing.tracer import trace
from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.report.saved_trace import data_of
from precast.report.tree import TreeNode, tree
from precast.tuning.recorder import record
from precast.tuning.setups import (
    FLOAT32,
    Setup,
    Workload,
    copy_model,
    current_time,
    exception_text,
    move_weights,
)
from precast.tuning.sites import TunedProgram
from precast.tuning.words import TRAINING, TaskWords, words_for

__all__ = ["LEAST_PAIRS", "ErrorMeter", "ModelTrial", "PrecisionErrors", "Results", "TuningTask"]
__all__ += ["are_finite"]

_NOISE: Final = 1e-2
"""A tensor that rounding changes by more than this share of itself is noise."""
_SILENT: Final = 0.99
"""A gradient of which more than this share becomes zero trains nothing."""
_MOVED_BY_ROUNDING: Final = 2.0**-22
"""The relative change of weights that shows which results are rounding noise."""

Results = tuple[float, dict[str, Tensor]]
"""The loss or metric of a batch, and the gradients or outputs by name."""


@dataclass(frozen=True)
class PrecisionErrors:
    """The errors of operations in 16 bits, as squares of relative errors; infinite where one overflows.

    Attributes:
        loss: the error of the loss, or of the metric.
        gradient: the error of the gradient of `parameter`, which changes most; or of the output.
        barred: why the operations must not run in 16 bits; empty if they may.
        flushed: the share of that gradient that becomes zero and is not zero in float32.
        silent: a parameter whose gradient becomes zero, so that it is not trained.
        alone: True if one operation was measured alone, False if it has its share of a group's error.
    """

    loss: float = math.inf
    gradient: float = math.inf
    barred: str = ""
    parameter: str = ""
    flushed: float = 0.0
    silent: str = ""
    alone: bool = False

    def fits(self, loss: float, gradient: float) -> bool:
        """Return True if both errors are at most as large as these."""
        return self.loss <= loss and self.gradient <= gradient


@dataclass
class _TensorErrors:
    """Sums over the batches for one gradient or output."""

    wrong: float = 0.0
    norm: float = 0.0
    flushed: float = 0.0

    def add(self, actual: Tensor, expected: Tensor) -> None:
        finite = expected.isfinite()
        expected, actual = expected[finite].double(), actual[finite].double()
        self.wrong += float((actual - expected).square().sum())
        self.norm += float(expected.square().sum())
        if expected.numel():
            self.flushed += float(((actual == 0) & (expected != 0)).float().mean())

    @property
    def share(self) -> float:
        return self.wrong / self.norm if self.norm else (math.inf if self.wrong else 0.0)


@dataclass(frozen=True, eq=False)
class MeterPoint:
    """One batch with a copy of the model, and its results in float32."""

    model: nn.Module
    buffers: dict[str, Tensor]
    number: int
    value: float = 0.0
    tensors: dict[str, Tensor] | None = None


def are_finite(tensors: dict[str, Tensor]) -> bool:
    """Return True if all numbers of all tensors are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


class ErrorMeter(ABC):
    """Compares losses and gradients, or metrics and outputs, with those in float32."""

    subject: ClassVar[str]
    """A tensor in texts."""
    may_be_infinite: ClassVar[bool]
    """True if tensors may have numbers that are not finite in float32."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.words = words_for(workload.task)
        self.scale = 1.0
        """The loss scale."""
        self.points: list[MeterPoint] = []
        self._reliable: list[str] = []

    @abstractmethod
    def results(self, setup: Setup, model: nn.Module, number: int) -> Results:
        """Run a copy on a batch."""

    def find_scale(self, setup: Setup) -> None:  # noqa: B027 -- outputs need no loss scale
        """Set the loss scale to the largest one under which no gradient overflows with this setup."""

    def results_at(self, point: MeterPoint, setup: Setup) -> Results:
        """Return the results for a batch; buffers are restored."""
        try:
            return self.results(setup, point.model, point.number)
        finally:
            with torch.no_grad():
                for name, buffer in point.model.named_buffers():
                    if name in point.buffers and buffer.shape == point.buffers[name].shape:
                        buffer.copy_(point.buffers[name])

    def errors(self, setup: Setup) -> PrecisionErrors:
        """Return the errors under a setup; infinite where it cannot run, or a result is not finite."""
        total = 0.0
        sums = {name: _TensorErrors() for name in self._reliable}
        for point in self.points:
            try:
                value, tensors = self.results_at(point, setup)
            except TuningError:
                raise
            except Exception as error:  # an operation may raise anything
                return PrecisionErrors(barred=exception_text(error))
            if not math.isfinite(value):
                return PrecisionErrors(barred=f"the {self.words.value} is {value}")
            total += ((value - point.value) / (abs(point.value) or 1.0)) ** 2
            for name, expected in (point.tensors or {}).items():
                actual = tensors.get(name, torch.zeros_like(expected))
                has_shape = actual.shape == expected.shape
                if not has_shape or not bool((actual.isfinite() | ~expected.isfinite()).all()):
                    wrong = "overflows" if has_shape else "has another shape"
                    text = f"{self.subject.format(name)} {wrong}"
                    return PrecisionErrors(barred=text, parameter=name)
                if name in sums:
                    sums[name].add(actual, expected)
        count = len(self.points)
        worst = max(sums, key=lambda name: sums[name].share, default="")
        if not worst:
            return PrecisionErrors(total / count, 0.0)
        silent = next((name for name in sums if sums[name].flushed / count > _SILENT), "")
        share, flushed = sums[worst].share, sums[worst].flushed / count
        return PrecisionErrors(total / count, share, "", worst, flushed, silent)

    def add_points(self, model: nn.Module, batches: int) -> None:
        """Record the results in float32 of the first batches on a copy."""
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for number in range(min(batches, len(self.workload.batches))):
            point = MeterPoint(model, buffers, number)
            value, tensors = self.results_at(point, FLOAT32)
            is_finite = math.isfinite(value)
            if not is_finite or not (self.may_be_infinite or are_finite(tensors)):
                raise TuningError(
                    f"in float32 the {self.words.value} of batch {number + 1} is {value}"
                    + (f", and {self.words.changed} are not finite" if is_finite else "")
                    + ": no precision can be compared with it. Find the cause first, for example with "
                    "precast.monitor(model)."
                )
            self.points.append(replace(point, value=value, tensors=tensors))

    def find_reliable(self) -> None:
        """Find the tensors that are more than rounding noise in float32, by weights that are moved by rounding."""
        first = self.points[0]
        moved = copy_model(first.model)
        move_weights(moved, _MOVED_BY_ROUNDING, self.workload.seed, 1)
        _, others = self.results_at(replace(first, model=moved), FLOAT32)
        for name, tensor in (first.tensors or {}).items():
            sums = _TensorErrors()
            if name in others and others[name].shape == tensor.shape:
                sums.add(others[name], tensor)
            if sums.norm and sums.share < _NOISE**2:
                self._reliable.append(name)


LEAST_PAIRS: Final = 3
"""The fewest seeds or batches of a comparison."""
_MOST_TIMED: Final = 16


class ModelTrial(ABC):
    """A copy of the model that trains or runs under one setup.

    Attributes:
        losses: the loss of each step, or the metric of each batch.
        seconds: the time of each.
        failure: why it cannot continue; empty while it can.
    """

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self.workload = workload
        self.setup = setup
        self.model = copy_model(workload.model)
        self.attachment: Attachment | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.failure = ""

    @abstractmethod
    def step(self, place: int) -> tuple[float, float]:
        """Train or run on a batch, and return the loss or metric, and the seconds."""

    @abstractmethod
    def values(self) -> list[float]:
        """Return the values that are compared: the final loss of a training, or the metric of each batch."""

    def close(self) -> None:
        """Detach the policy."""
        if self.attachment is not None:
            self.attachment.detach()

    def run(self, place: int | None = None) -> None:
        """Train or run on a batch, by default on the next one; do nothing after a failure."""
        if self.failure:
            return
        place = len(self.losses) if place is None else place
        words = words_for(self.workload.task)
        try:
            loss, seconds = self.step(place)
        except TuningError:
            raise
        except Exception as error:  # of the program, or of an operation in 16 bits
            self.fail(error, f"{words.place} {place + 1}")
            return
        self.losses.append(loss)
        self.seconds.append(seconds)
        if not math.isfinite(loss):
            self.failure = f"the {words.value} of {words.place} {place + 1} is {loss}"

    def fail(self, error: Exception, subject: str) -> None:
        """Record an error in 16 bits as the failure; raise one in float32, which is the program's own."""
        if self.setup.policy is None:
            error.add_note(f"precast.tune: {subject} failed in float32")
            raise error
        self.failure = exception_text(error)


class TuningTask(ABC):
    """Training or running copies of a model.

    Attributes:
        allowed_change: the relative error that a gradient or output may have.
        looks: the numbers of rounds after which intervals are computed.
        warmup: the first steps of a trial, whose times do not count.
        steps: the least and the most steps of a training.
    """

    allowed_change: ClassVar[float]
    looks: tuple[int, ...]
    warmup: ClassVar[int]
    steps: tuple[int, int]

    words: ClassVar[TaskWords]

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @property
    def is_training(self) -> bool:
        """True if each round adds a pair of losses; else only the first round adds pairs, one for each batch."""
        return self.words is TRAINING

    @property
    @abstractmethod
    def meter(self) -> ErrorMeter:
        """The meter of errors, which is made when it is first used."""

    @abstractmethod
    def forward(self, model: Any) -> Any:
        """Run the first batch."""

    @abstractmethod
    def open(self, setup: Setup, number: int) -> ModelTrial:
        """Return the copy that trains or runs under a setup in a round."""

    @abstractmethod
    def needed_bytes(self, setup: Setup) -> int:
        """Return the memory of a setup, in bytes."""

    def release(self, trial: ModelTrial) -> None:
        """Close a copy after its round."""
        trial.close()

    def close(self) -> None:  # noqa: B027 -- trainings share none
        """Close the copies that rounds share."""

    def traced_trial(self, setup: Setup) -> ModelTrial:
        """Return a copy that shows the rules of the policy in a trace."""
        return self.open(setup, 0)

    def record(self, base: Policy, low: torch.dtype) -> TunedProgram:
        """Record the operations of a step or run."""
        workload = self.workload
        return record(
            workload.model,
            self.forward,
            base,
            low=low,
            device=workload.device_type,
            is_inference=not self.is_training,
        )

    def seconds(self) -> float:
        """Return the time of the shortest of the steps or runs in float32 that fit into a second, at least two."""
        trial = self.open(FLOAT32, 0)
        times: list[float] = []
        end = time.monotonic() + 1.0
        for number in range(_MOST_TIMED):
            if times and (trial.failure or (number >= 2 and time.monotonic() > end)):
                break
            start = current_time(self.workload.device_type)
            trial.run(0)
            times.append(current_time(self.workload.device_type) - start)
        self.release(trial)
        return min(times)

    def traced(self, setup: Setup) -> list[TreeNode]:
        """Return the modules of a second step or run, with their dtypes, times and casts."""
        with closing(self.traced_trial(setup)) as trial:
            trial.run(0)
            with trace(trial.model) as recorded:
                trial.run(0)
        return tree(data_of(recorded))
