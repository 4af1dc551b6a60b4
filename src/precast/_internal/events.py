"""Events of the engine, the scaler and monitors: small frozen values that are given to observers.

Invariants:
- without an observer no event is made: `emit` loops over an empty tuple, and code whose event costs something to make
  asks `observed()` first;
- observers belong to the thread that entered `observe`. Events arrive in order, before the call that caused them
  returns, and an observer's exception is raised by that call;
- while a tracker counts the steps of the process, all events have its numbers; else each scaler counts its own steps;
- this file does not load PyTorch, so that reports can be made where it is not installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = [
    "BrokenState",
    "HealthEvent",
    "NonfiniteOrigin",
    "OperationNote",
    "ScalerDiagnosis",
    "ScalerListener",
    "StepEvent",
    "StepNumbers",
    "Witness",
    "after_step",
    "emit",
    "observe",
    "observed",
    "scaler_listeners",
    "step_trackers",
    "witnesses",
]


@dataclass(frozen=True, slots=True)
class OperationNote:
    """The engine did something worth knowing, such as running a banned loss in float32."""

    op: str
    """The operation, as the policy spells it."""
    device: str
    """The device type of the region."""
    message: str
    """What was done instead, and why."""


@dataclass(frozen=True, slots=True)
class BrokenState:
    """A parameter or buffer that was not finite before a step began."""

    name: str
    """Its name in the model."""
    kind: Literal["parameter", "buffer"]
    dtype: str
    optimizer: str | None
    """The class of the optimizer that trains it."""
    eps: float | None
    """The eps of that optimizer, if it is zero in that dtype."""


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """Where numbers first became infinite or NaN in a training step, as `precast.monitor` saw it."""

    step: int
    """The number of the step, from 0, as the scaler counts them if a scaler tells of it, else as the monitor does."""
    kind: Literal["output", "input", "gradient", "parameter"]
    """A module's output, its input (from outside or between), its output's gradient, or a parameter's gradient."""
    name: str
    """Of the module or parameter, as the model names it."""
    what: Literal["inf", "nan"]
    inputs: tuple[dict[str, Any], ...]
    """What it was made from: of each tensor where it is from ("of"), its "dtype", its "maximum" and "minimum" (None
    where they were not finite), and "nonfinite": 0, or 1 where there were some, not counted."""
    message: str
    """A sentence that says all this."""
    doubts: tuple[str, ...] = ()
    """Modules in which it may have begun earlier: their tensors were written in place before they were examined."""
    state: BrokenState | None = None
    """The parameter or buffer of the module that was not finite before the step."""

    def numbered(self, step: int) -> NonfiniteOrigin:
        """The same origin with another number for its step."""
        message = self.message.replace(f"In step {self.step}", f"In step {step}", 1)
        return replace(self, step=step, message=message)


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """The figures that a monitor has read after a step."""

    step: int
    """The monitor's number of the step, from 0."""
    tensors: tuple[dict[str, Any], ...]
    """Of each tensor its "kind", "name" and figures, as `Monitor.as_dict` has them for one step."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEvent:
    """A gradient scaler's `step` on one optimizer has ended.

    Making it waits for no device; reading `scale`, `loss_finite`, and anything where `skipped` is a
    tensor, does.
    """

    optimizer: int
    """Which optimizer: its place in the order of this iteration's first calls, from 0."""
    step: int
    """How many iterations (calls of `update`) this scaler had completed before; in `precast run`, the run's step."""
    scale: Tensor
    """The scale of the gradients, shape (), a copy: ``float(event.scale)``."""
    skipped: bool | Tensor
    """Whether a gradient was not finite, so that the parameters were left alone.

    A tensor (float32, shape ()) with a fused optimizer, which decides on the device;
    ``bool(event.skipped)`` reads either.
    """
    seconds: float
    """How long `step` took on the host, with the wait for the device and the optimizer's own step."""
    details: Any = field(repr=False)
    """The object that `names`, `first` and `loss_finite` ask."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite; none where the step was not skipped.

        By the name in an attached model, or the optimizer's own; else by group and place. With a
        fused optimizer they are looked for when they are read: ask before `zero_grad`.
        """
        found: tuple[str, ...] = self.details.gradients if self.skipped else ()
        return found

    @property
    def nonfinite(self) -> int:
        """How many parameters had a gradient that was not finite."""
        return len(self.names)

    @property
    def first(self) -> NonfiniteOrigin | None:
        """Where numbers first became infinite or NaN, if the step was skipped and a `precast.monitor` watched it.

        With a fused optimizer it is looked for when it is read: ask before the next forward, or ask the monitor.
        """
        found: NonfiniteOrigin | None = self.details.first if self.skipped else None
        return found and found.numbered(self.step)

    @property
    def loss_finite(self) -> bool:
        """Whether the losses of the iteration were finite before they were scaled."""
        finite: bool = self.details.loss_finite
        return finite


@dataclass(frozen=True, slots=True)
class ScalerDiagnosis:
    """What a gradient scaler reports if neither a lower scale nor the next batch helps."""

    reason: Literal["weights", "loss", "floor", "skips"]
    """Parameters or buffers are not finite; the loss is not; the scale does not fall; a limit on skips was passed."""
    step: int
    """How many iterations this scaler had completed before."""
    scale: float
    """The scale of the gradients."""
    names: tuple[str, ...]
    """The parameters whose gradients were not finite; "optimizer 1: weight" where there were several optimizers."""
    message: str
    """What was seen, and what to look at."""
    first: NonfiniteOrigin | None = None
    """Where it began, if a `precast.monitor` was watching."""


class Witness(Protocol):
    """A monitor, as gradient scalers of all threads see it: they tell it of their steps, and ask it about bad ones."""

    def names_of(self, parameters: Iterable[Tensor]) -> dict[int, str]:
        """``id`` of each of `parameters` that it knows -> its name."""

    def models(self) -> list[nn.Module]:
        """Return the models that it watches."""

    def first_of_step(self, optimizer: Optimizer) -> NonfiniteOrigin | None:
        """Where the step that is being taken went wrong; None if that was not seen."""

    def stepped(self, optimizer: Optimizer, event: StepEvent) -> None:
        """A step has ended, skipped or not."""

    def judged(self, verdict: ScalerDiagnosis) -> None:
        """No lower scale helps against what was found in the iteration that ends."""


witnesses: Final[list[Witness]] = []
"""All monitors that watch now."""


class ScalerListener(Protocol):
    """An observer of the calls of gradient scalers, in all threads. Its methods raise nothing."""

    def scaled(self, scaler: Any) -> None:
        """A loss was multiplied by the scale."""

    def unscales(self, scaler: Any, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are about to be divided by the scale, or to be used by its step."""

    def updated(self, scaler: Any) -> None:
        """An iteration of the scaler has ended."""


scaler_listeners: Final[list[ScalerListener]] = []
"""The listeners that are told now."""


class StepNumbers(Protocol):
    """What counts the steps of the process."""

    @property
    def number(self) -> int:
        """The number of the step that runs."""

    def before_step(self, optimizer: Optimizer) -> int:
        """The number of the step that an optimizer is about to take or to skip."""

    def after_step(self, optimizer: Optimizer) -> int:
        """The number of the step that an optimizer has just taken or skipped."""


step_trackers: Final[list[StepNumbers]] = []
"""Those that count now; the number of the first one holds."""


def after_step(optimizer: Optimizer, own: int) -> int:
    """The number of the step that `optimizer` has just taken or skipped; `own` where nobody counts."""
    return step_trackers[0].after_step(optimizer) if step_trackers else own


class _Here(threading.local):
    callbacks: tuple[Callable[[Any], None], ...] = ()


_here = _Here()


@contextmanager
def observe(callback: Callable[[Any], None]) -> Iterator[None]:
    """Calls `callback(event)` for every event of this thread until the `with` ends.

    An event is a `StepEvent` or a `ScalerDiagnosis` of a gradient scaler, a `HealthEvent` of a monitor, or an
    `OperationNote` of the engine. Observers nest: each gets every event, the outermost first.

    Examples:
        >>> import precast, torch
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> scaler = precast.GradScaler("cpu")
        >>> seen = []
        >>> with precast.observe(seen.append):
        ...     scaler.scale(parameter.sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> [type(event).__name__ for event in seen]
        ['StepEvent']
    """
    _here.callbacks = (*_here.callbacks, callback)
    try:
        yield
    finally:
        _here.callbacks = _without_last(_here.callbacks, callback)


def observed() -> bool:
    """Whether this thread has an observer: ask before making an event that costs something."""
    return bool(_here.callbacks)


def emit(event: object) -> None:
    """Hands `event` to this thread's observers."""
    for callback in _here.callbacks:
        callback(event)


def _without_last(callbacks: tuple[Any, ...], callback: Any) -> tuple[Any, ...]:
    """Takes out one entry, so that observers that end out of order do not end each other."""
    place = max(i for i, known in enumerate(callbacks) if known is callback)
    return callbacks[:place] + callbacks[place + 1 :]
