"""Measurement of the errors of setups against float32, on a few batches.

Invariants:
- errors are squares of relative errors, because those of independent roundings add up;
- the error of gradients or outputs is that of the tensor where it is largest. A tensor that is rounding noise in
  float32 already, such as the gradient of a bias before a norm, does not count;
- a number that is not finite in float32 is not compared.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from precast.errors import TuningError
from precast.tuning.setups import (
    FLOAT32,
    Setup,
    Workload,
    copy_model,
    exception_text,
    move_weights,
)
from precast.tuning.words import words_for

__all__ = ["ErrorMeter", "PrecisionErrors", "Results", "are_finite"]

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
        gradient: the error of the gradient that changes most, or of the output.
        barred: why the operations must not run in 16 bits; empty if they may.
        parameter: the parameter of that gradient; empty in a share of a group's error.
        flushed: the share of that gradient that becomes zero and is not zero in float32.
        silent: a parameter whose gradient becomes zero, so that it is not trained; empty if there is none.
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
        """Record the results in float32 of the first batches on a copy.

        Raises:
            TuningError: one is not finite.
        """
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
