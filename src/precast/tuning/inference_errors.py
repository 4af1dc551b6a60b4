"""Measures what 16 bits cost in accuracy where a model is only run: the errors of its metric and of its outputs.

Invariants:
- errors are squares of relative errors, because those of independent roundings add up;
- outputs are those of the model's first call for each batch, as later ones may depend on choices made by earlier ones.
  The error is that of the tensor in which it is largest, and infinite where a number is not finite that is in float32;
- a tensor whose numbers in float32 are rounding noise is left out: float64, or where that cannot run weights that are
  moved by `_UNIT`, changes it much;
- each run uses the same weights, buffers, batches and random numbers.
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment.attachment import attach
from precast.errors import PrecastWarning, TuningError
from precast.tuning.sensitivity import Errors
from precast.tuning.serving import Calls, measured_metric
from precast.tuning.training import FLOAT32, Setup, Workload, copied, move_weights

__all__ = ["InferenceMeter"]

_UNIT: Final = 2.0**-22
_NOISE: Final = 1e-2
"""Outputs that differ by more than this share of themselves in float64 are noise."""
_BATCHES: Final = 4


@dataclass(frozen=True, eq=False)
class _Seen:
    """What one batch gives."""

    metric: float
    outputs: list[Tensor]


class InferenceMeter:
    """Compares setups with float32 on a few batches."""

    def __init__(self, workload: Workload) -> None:
        """Runs a copy in float32, and to find noise in float64.

        Raises:
            TuningError: the metric in float32 is not finite, or no number.
        """
        self.workload = workload
        self.scale = 1.0
        self._model = copied(workload.model).requires_grad_(False)
        self._buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        self._numbers = range(min(_BATCHES, len(workload.batches)))
        self._wanted = [self._run(FLOAT32, self._model, number) for number in self._numbers]
        for number, seen in enumerate(self._wanted):
            if not math.isfinite(seen.metric):
                raise TuningError(
                    f"in float32 the metric of batch {number + 1} is {seen.metric}: no precision can be compared with "
                    "it. Find out why first, for example with precast.monitor(model)."
                )
        self._reliable = self._found_reliable()

    def errors(self, setup: Setup) -> Errors:
        """The errors under a setup; infinite where the metric or an output is not finite, or it cannot run."""
        metric = worst = 0.0
        for number, wanted in zip(self._numbers, self._wanted, strict=True):
            try:
                found = self._run(setup, self._model, number)
            except TuningError:
                raise
            except Exception as error:  # an operation may raise anything
                return _infinite(f"{type(error).__name__}: {error}")
            if not math.isfinite(found.metric):
                return _infinite(f"the metric is {found.metric}")
            metric += ((found.metric - wanted.metric) / (abs(wanted.metric) or 1.0)) ** 2
            changed = self._changed(found.outputs, wanted.outputs)
            if not math.isfinite(changed):
                return _infinite("an output overflows")
            worst = max(worst, changed)
        return Errors(metric / len(self._wanted), worst)

    def find_scale(self, setup: Setup) -> None:
        """Does nothing: without gradients there is no loss scale."""

    def _changed(self, found: list[Tensor], wanted: list[Tensor]) -> float:
        """The largest square of the relative error of an output."""
        worst = 0.0
        for place, (mine, theirs) in enumerate(zip(found, wanted, strict=False)):
            if mine.shape != theirs.shape:
                return math.inf
            finite = theirs.isfinite()
            if not bool((mine.isfinite() | ~finite).all()):
                return math.inf
            if place in self._reliable:
                worst = max(worst, _relative(mine[finite], theirs[finite]))
        return worst

    def _run(self, setup: Setup, model: nn.Module, number: int, batch: Any = None) -> _Seen:
        """Runs a batch and keeps what the first call gives."""
        workload = self.workload
        attachment = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecastWarning)
            if setup.policy is not None:
                attachment = attach(model, setup.policy, hold=False)
        calls = Calls(model, keeps=True)
        region = nullcontext() if setup.policy is None else setup.region(workload.device_type)
        try:
            with region:
                metric = measured_metric(workload, model, number, batch)
            outputs = [
                t.detach().clone() for t in tensors_in(calls.result) if t.is_floating_point()
            ]
            return _Seen(metric, outputs)
        finally:
            calls.close()
            if attachment is not None:
                attachment.detach()
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in self._buffers and buffer.shape == self._buffers[name].shape:
                        buffer.copy_(self._buffers[name])

    def _found_reliable(self) -> set[int]:
        """The places of the outputs that are more than rounding noise in float32."""
        first = self._wanted[0].outputs
        others = self._more_precise()
        if others is None:
            moved = copied(self._model)
            move_weights(moved, _UNIT, self.workload.seed, 1)
            others = self._run(FLOAT32, moved, 0).outputs
        found = set()
        for place, (mine, theirs) in enumerate(zip(first, others, strict=False)):
            finite = mine.isfinite() & theirs.isfinite() if mine.shape == theirs.shape else None
            if finite is not None and _relative(mine[finite], theirs[finite]) < _NOISE**2:
                found.add(place)
        return found

    def _more_precise(self) -> list[Tensor] | None:
        """The outputs of the first batch in float64; None where the model or the metric cannot run in it."""
        try:
            doubled = copied(self._model).double()
            batch = map_tensors(
                self.workload.batches[0], lambda t: t.double() if t.is_floating_point() else t
            )
            outputs = self._run(FLOAT32, doubled, 0, batch).outputs
        except (
            Exception
        ):  # of the program, which may make float32 tensors of its own, or out of memory
            return None
        return outputs if all(each.dtype is torch.float64 for each in outputs) else None


def _relative(mine: Tensor, theirs: Tensor) -> float:
    """The square of the relative error of all numbers together."""
    wanted = theirs.double()
    norm = float(wanted.square().sum())
    wrong = float((mine.double() - wanted).square().sum())
    return wrong / norm if norm else (math.inf if wrong else 0.0)


def _infinite(failure: str) -> Errors:
    return Errors(math.inf, math.inf, failure=failure)
