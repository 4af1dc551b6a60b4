"""Events of the engine, of gradient scalers and of monitors: small frozen values that observers receive.

Invariants:

- without an observer no event is created: `emit` loops over an empty tuple, and code whose event is expensive calls
  `is_observed` first;
- observers belong to the thread that entered `observe`. Events arrive in order, before the call that caused them
  returns, and that call raises an observer's exception;
- while a step tracker runs, all events have its step numbers; otherwise each scaler counts its own steps;
- a document of a run stores `NonfiniteOrigin` and `ScalerDiagnosis` as they are, so their fields are also keys of JSON;
- this file does not load PyTorch, because reports can be made where it is not installed.
"""

# ruff: noqa: RUF009 -- `may_be_missing` is `dataclasses.field`

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from precast._internal.records import may_be_missing

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = [
    "BrokenState",
    "Counters",
    "HealthEvent",
    "NonfiniteOrigin",
    "OperationNote",
    "ScalerDiagnosis",
    "ScalerListener",
    "StepEvent",
    "StepNumbers",
    "TensorRange",
    "Witness",
    "after_step",
    "emit",
    "is_observed",
    "observe",
    "scaler_listeners",
    "step_trackers",
    "witnesses",
]


@dataclass(frozen=True, slots=True)
class OperationNote:
    """The engine ran an operation in another way than the policy's rule says, such as a banned loss in float32."""

    op: str
    """The operation, as the policy spells it."""
    device_type: str
    """The device type of the region."""
    message: str
    """The replacement and its reason."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The range of one tensor that went into the first module to fail."""

    dtype: str
    """Its dtype."""
    maximum: float | None
    """The largest value; null if some were not finite."""
    minimum: float | None
    """The smallest value; null if some were not finite."""
    nonfinite: int
    """1 if some values were not finite, else 0."""
    of: str | None = may_be_missing(is_left_out=True)
    """The source, such as "the output of `encoder`"."""


@dataclass(frozen=True, slots=True)
class BrokenState:
    """A parameter or buffer that was not finite before a step began."""

    name: str
    """Its name in the model."""
    kind: Literal["parameter", "buffer"]
    """A parameter or a buffer."""
    dtype: str
    """Its dtype."""
    optimizer: str | None
    """The class of the optimizer that trains it."""
    eps: float | None
    """The eps of that optimizer, if it is zero in that dtype."""


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """The first tensor that became infinite or NaN in a training step, found by `precast.monitor`."""

    step: int
    """The number of the step, from 0; the scaler's if a scaler reports it, else the monitor's."""
    kind: Literal["output", "input", "gradient", "parameter"]
    """The tensor: a module's output, an input that no module produced, or a gradient of an output or parameter."""
    name: str
    """The module's or the parameter's name in the model."""
    what: Literal["inf", "nan"]
    """Infinity or NaN."""
    inputs: tuple[TensorRange, ...]
    """The tensors that the module received."""
    message: str
    """All of this in a sentence."""
    doubts: tuple[str, ...] = may_be_missing((), is_left_out=True)
    """Modules in which it may have begun earlier, because their tensors were written in place before they were read."""
    state: BrokenState | None = may_be_missing(is_left_out=True)
    """The module's parameter or buffer that was not finite before the step."""

    def with_step(self, step: int) -> NonfiniteOrigin:
        """Return the same origin with another step number."""
        message = self.message.replace(f"In step {self.step}", f"In step {step}", 1)
        return replace(self, step=step, message=message)


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """The counts that a monitor has read after a step."""

    step: int
    """The monitor's number of the step, from 0."""
    tensors: tuple[dict[str, Any], ...]
    """For each tensor its "kind", "name" and counts, as `Monitor.to_dict` has them for one step."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEvent:
    """A gradient scaler's `step` on one optimizer has ended.

    Creating it does not wait for a device. Reading `scale`, `loss_finite`, or any field where `skipped` is a tensor
    does.
    """

    optimizer: int
    """The optimizer: its place in the order of this iteration's first calls, from 0."""
    step: int
    """The number of iterations (calls of `update`) that this scaler had completed; in `precast run`, the run's step."""
    scale: Tensor
    """The scale of the gradients, shape (), a copy: ``float(event.scale)``."""
    skipped: bool | Tensor
    """True if a gradient was not finite, so that the parameters did not change.

    A tensor (float32, shape ()) with a fused optimizer, which decides on the device; ``bool(event.skipped)`` reads
    both.
    """
    seconds: float
    """The duration of `step` on the host, including the wait for the device and the optimizer's own step."""
    details: Any = field(repr=False)
    """The object that computes `names`, `first` and `loss_finite`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite; empty if the step was not skipped.

        The names are those in an attached model, or the optimizer's own; else group and place. With a fused optimizer
        they are computed when read: read them before `zero_grad`.
        """
        names: tuple[str, ...] = self.details.gradients if self.skipped else ()
        return names

    @property
    def nonfinite(self) -> int:
        """The number of parameters whose gradient was not finite."""
        return len(self.names)

    @property
    def first(self) -> NonfiniteOrigin | None:
        """The first tensor that became infinite or NaN, if the step was skipped and a `precast.monitor` watched it.

        With a fused optimizer it is computed when read: read it before the next forward, or use the monitor.
        """
        origin: NonfiniteOrigin | None = self.details.first if self.skipped else None
        return origin and origin.with_step(self.step)

    @property
    def loss_finite(self) -> bool:
        """True if the losses of the iteration were finite before they were scaled."""
        finite: bool = self.details.loss_finite
        return finite


@dataclass(frozen=True, slots=True)
class ScalerDiagnosis:
    """A gradient scaler's report that neither a lower scale nor the next batch can help."""

    reason: Literal["weights", "loss", "floor", "skips"]
    """Parameters or buffers are not finite; the loss is not; the scale does not fall; a limit on skips was passed."""
    step: int
    """The number of completed iterations of the scaler; in a document, the run's step."""
    scale: float
    """The scale of the gradients."""
    names: tuple[str, ...]
    """The parameters whose gradients were not finite; "optimizer 1: weight" if there were several optimizers."""
    message: str = may_be_missing("", is_left_out=True)
    """The observation, and advice on where to look."""
    first: NonfiniteOrigin | None = may_be_missing(is_left_out=True)
    """The first tensor that was not finite, if a monitor ran."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Numbers of events since the scaler was created; state dicts do not contain them."""

    steps: int = 0
    """Calls of `step`, including skipped ones."""
    skipped: int = 0
    """Skipped steps."""
    consecutive_skips: int = 0
    """Iterations in a row, up to the latest, with a skipped step."""
    growths: int = 0
    """Times the scale was raised, or would have been if not for `max_scale`."""
    backoffs: int = 0
    """Times the scale was lowered, or would have been if not for `min_scale`."""


class Witness:
    """A monitor, as the gradient scalers of all threads see it: they report steps, and query it about skipped ones."""

    def names_of(self, parameters: Iterable[Tensor]) -> dict[int, str]:  # noqa: ARG002
        """Return the names of those of `parameters` that it watches, by ``id``."""
        return {}

    def models(self) -> list[nn.Module]:
        """Return the models that it watches."""
        return []

    def first_of_step(self, optimizer: Optimizer) -> NonfiniteOrigin | None:  # noqa: ARG002
        """Return the first tensor of the current step that was not finite; None if there was none."""
        return None

    def on_step(self, optimizer: Optimizer, event: StepEvent) -> None:
        """Handle the end of a step, skipped or not."""

    def on_diagnosis(self, diagnosis: ScalerDiagnosis) -> None:
        """Handle the diagnosis of the iteration that ends."""


witnesses: Final[list[Witness]] = []
"""All active monitors."""


class ScalerListener(Protocol):
    """An observer of the calls of gradient scalers, in all threads. Its methods do not raise."""

    def on_scale(self, scaler: Any) -> None:
        """Handle the multiplication of a loss by the scale."""

    def on_unscale(self, scaler: Any, optimizer: Optimizer) -> None:
        """Handle that gradients of an optimizer are about to be divided by the scale, or used by its step."""

    def on_update(self, scaler: Any) -> None:
        """Handle the end of an iteration of the scaler."""


scaler_listeners: Final[list[ScalerListener]] = []
"""All active listeners."""


class StepNumbers(Protocol):
    """A counter of the steps of the process."""

    @property
    def number(self) -> int:
        """The number of the current step."""

    def before_step(self, optimizer: Optimizer) -> int:
        """Return the number of the step that an optimizer is about to take or to skip."""

    def after_step(self, optimizer: Optimizer) -> int:
        """Return the number of the step that an optimizer has just taken or skipped."""


step_trackers: Final[list[StepNumbers]] = []
"""All active counters; the first one numbers the steps."""


def after_step(optimizer: Optimizer, own: int) -> int:
    """Return the number of the step that `optimizer` has just taken or skipped; `own` without a step tracker."""
    return step_trackers[0].after_step(optimizer) if step_trackers else own


class _ThreadObservers(threading.local):
    callbacks: tuple[Callable[[Any], None], ...] = ()


_observers = _ThreadObservers()


@contextmanager
def observe(callback: Callable[[Any], None]) -> Iterator[None]:
    """Call `callback(event)` for every event of this thread until the `with` ends.

    An event is a `StepEvent` or a `ScalerDiagnosis` of a gradient scaler, a `HealthEvent` of a monitor, or an
    `OperationNote` of the engine. Observers nest: each gets every event, the outermost first.

    Examples:
        >>> import precast, torch
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> scaler = precast.GradScaler("cpu")
        >>> events = []
        >>> with precast.observe(events.append):
        ...     scaler.scale(parameter.sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        >>> [type(event).__name__ for event in events]
        ['StepEvent']
    """
    _observers.callbacks = (*_observers.callbacks, callback)
    try:
        yield
    finally:
        _observers.callbacks = _without_last(_observers.callbacks, callback)


def is_observed() -> bool:
    """Return True if this thread has an observer. Call it before creating an expensive event."""
    return bool(_observers.callbacks)


def emit(event: object) -> None:
    """Pass `event` to this thread's observers."""
    for callback in _observers.callbacks:
        callback(event)


def _without_last(callbacks: tuple[Any, ...], callback: Any) -> tuple[Any, ...]:
    """Remove the last entry of `callback`, because observers may end out of order."""
    place = max(i for i, each in enumerate(callbacks) if each is callback)
    return callbacks[:place] + callbacks[place + 1 :]
