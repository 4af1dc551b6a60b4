"""An optimizer's turn in an iteration: what was called, what was found, how a fused optimizer is told.

Invariants: calls out of order are refused with what to do; the decisions are the scaler's.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from precast import _torch
from precast._internal.callers import callers_level
from precast.errors import ScalerError
from precast.grad_scaler.findings import Findings
from precast.grad_scaler.gradients import Verdicts, moved
from precast.weights import low_precision_gradients

__all__ = ["Record", "lent", "step_given", "verdict_on", "verdict_so_far"]


@dataclass(eq=False, slots=True)
class Record:
    """What one optimizer has done in this iteration."""

    optimizer: Any  # held, so that no other optimizer gets its id before the iteration ends; None until it is met
    stage: OptState = OptState.READY
    found_inf: Verdicts = field(default_factory=dict)
    scale: Tensor | None = None
    """The scale of its gradients, a copy; None until one was needed."""
    skipped: bool | Tensor | None = None
    """None before `step`; a tensor where the device decides."""
    findings: Findings | None = None
    """What was found where it was skipped."""
    peak: Tensor | None = None
    """The largest unscaled gradient, while the first scale is searched for."""
    is_stepping: bool = False
    """Whether `unscale_` is called by `step`, which lets nobody at the gradients after it."""
    _watch: _Watch | None = None

    def allow(self, call: str) -> None:
        """Refuses a call of the scaler ("unscale_", "step") that comes too late."""
        if (call, self.stage) in _TOO_LATE:
            raise ScalerError(_TOO_LATE[call, self.stage])
        if self._watch is not None and self._watch.seen:
            raise ScalerError(_MIXED)

    def watch(self) -> None:
        """From now on backward must not reach these gradients: they are unscaled already."""
        if self.stage is OptState.UNSCALED and self._watch is None and not self.is_stepping:
            self._watch = _Watch(self.optimizer)

    def go_to(self, stage: OptState) -> None:
        """A program says where the optimizer is: at the beginning nothing has been unscaled."""
        self.stage = stage
        if stage is OptState.READY and self._watch is not None:
            self._watch.end()
            self._watch = None

    def end(self) -> None:
        """The iteration is over."""
        for each in low_precision_gradients.of(self.optimizer):
            each.factor = None  # it was skipped
        if self._watch is not None:
            self._watch.end()


class _Watch:
    """Sees whether backward adds to the gradients of an optimizer's parameters, whoever calls it.

    It has hooks on them only from `unscale_` to the end of the iteration, when normally no backward comes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen = False
        me = weakref.ref(self)

        def saw(_: Tensor) -> None:
            watch = me()
            if watch is not None:
                watch.seen = True

        self._hooks = [
            parameter.register_post_accumulate_grad_hook(saw)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter.is_leaf
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


_TOO_LATE = {
    ("unscale_", OptState.UNSCALED): (
        "unscale_() was called twice for an optimizer since the last update(): its gradients are "
        "unscaled already. Call it once, after the last backward() and before step()."
    ),
    ("unscale_", OptState.STEPPED): (
        "unscale_() was called after step() for the same optimizer: its gradients are used up. "
        "Call unscale_() before step(), and update() at the end of the iteration."
    ),
    ("step", OptState.STEPPED): (
        "step() was called twice for an optimizer since the last update(): call update() once, at "
        "the end of each iteration, after the steps of all optimizers."
    ),
}
_MIXED = (
    "backward() added scaled gradients to those that unscale_() had unscaled: their sum means "
    "nothing, and no parameter was changed. Call unscale_() after the last backward(). After an "
    "iteration that was broken off (an exception, Ctrl-C) call optimizer.zero_grad() and "
    "scaler.update(), then begin the next one."
)


def verdict_on(
    device: torch.device, records: Iterable[Record], where: str = "for this optimizer."
) -> Tensor:
    """The sum of the verdicts in `records`, on `device`; `where` they should have been is for the error."""
    found = [moved(v, device) for record in records for v in record.found_inf.values()]
    if found:
        return functools.reduce(torch.add, found)
    raise ScalerError(
        f"No inf checks were recorded {where} "  # PyTorch's words, which programs look for
        "That is, no gradients were checked in this iteration: no parameter of the optimizer has one, or "
        "step() was not called. Call scale(loss).backward(), step(optimizer), then update(); leave "
        "an optimizer out whose parameters took no part in the loss."
    )


def verdict_so_far(scale: Tensor, record: Record) -> Tensor:
    """As `verdict_on` beside `scale`; good where nothing was checked."""
    return verdict_on(scale.device, [record]) if record.found_inf else torch.zeros_like(scale)


def step_given(
    scaler: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """PyTorch's first contract with optimizers that scale: they take the scaler and ask it."""
    warnings.warn(
        _torch.warning_of_old_contract(),
        FutureWarning,
        stacklevel=callers_level(),
    )
    result: float | None = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    return result


@contextmanager
def lent(optimizer: Optimizer, **attributes: Any) -> Iterator[None]:
    """Sets attributes that a fused optimizer reads in `step`, and takes them away again."""
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(optimizer, name)
