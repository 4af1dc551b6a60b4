"""The state of each optimizer since the latest `update`: the calls made for it, and the checks of its gradients.

Libraries read and write it under the names of PyTorch's scaler: `_per_optimizer_states` and its entries.

Invariant: a call that comes too late raises an error that says what to do; the scaler decides whether a step is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from precast._internal import cures
from precast.errors import ScalerError
from precast.grad_scaler.gradients import FoundInf
from precast.grad_scaler.nonfinite import NonfiniteDetails
from precast.optim.partial_steps import parameters_of

__all__ = ["BackwardWatch", "OptimizerState", "PerOptimizerStates"]


class OptimizerState(dict[str, Any]):
    """The state of one optimizer in this iteration: a dictionary with PyTorch's two entries, for programs."""

    def __init__(self, optimizer: Any = None, **entries: Any) -> None:
        super().__init__({"stage": OptState.READY, "found_inf_per_device": {}, **entries})
        self.optimizer = optimizer
        """Referenced, so that its id is not reused before the iteration ends; None until the scaler uses it."""
        self.scale: Tensor | None = None
        """A copy of the scale of its gradients; None until it is needed."""
        self.skipped: bool | Tensor | None = None
        """None before `step`; a tensor if the device decides."""
        self.details: NonfiniteDetails | None = None
        """The details of a skipped step."""
        self.largest_gradient: Tensor | None = None
        """The largest unscaled gradient, during the search for the first scale."""
        self.is_stepping = False
        """True if `step` calls `unscale_`: then the user cannot change the gradients between the two."""
        self._watch: BackwardWatch | None = None

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self.stage is OptState.READY:  # the gradients are scaled again
            self._watch = None

    @property
    def stage(self) -> OptState:
        """The latest call of the scaler for this optimizer."""
        stage: OptState = self["stage"]
        return stage

    @property
    def found_inf(self) -> FoundInf:
        """The results of the checks of its gradients."""
        found_inf: FoundInf = self["found_inf_per_device"]
        return found_inf

    @property
    def device(self) -> torch.device | None:
        """The device of the scale; None while no scale is stored."""
        return None if self.scale is None else self.scale.device

    def scale_of_gradients(self, current: Tensor) -> Tensor:
        """Return the scale of its gradients; a copy of the `current` scale if none was stored."""
        return current.clone() if self.scale is None else self.scale

    def allow(self, call: str) -> None:
        """Raise an error for a late call: "unscale_", "step", "closure" (a step with one), or a loss's "backward"."""
        has_new_gradients = self._watch is not None and self._watch.added
        if has_new_gradients and (call, self.stage) == ("unscale_", OptState.UNSCALED):
            raise ScalerError(_UNSCALED_BEFORE_BACKWARD)
        if (call, self.stage) in _TOO_LATE:
            raise ScalerError(_TOO_LATE[call, self.stage])
        if has_new_gradients:
            raise ScalerError(_MIXED)

    def watch_for_backward(self) -> None:
        """Detect backward passes that add to these gradients, which are unscaled already."""
        if self.stage is OptState.UNSCALED and not self.is_stepping:
            self._watch = BackwardWatch(parameters_of(self.optimizer))

    def conclude(self, skipped: bool) -> None:
        """End a step with a closure: the result of one call of the closure need not hold for the whole step."""
        results = {d: torch.full_like(value, skipped) for d, value in self.found_inf.items()}
        self["found_inf_per_device"] = results
        self.details = self.details if skipped else None


class PerOptimizerStates(dict[Any, OptimizerState]):
    """Maps ``id(optimizer)`` to its state; a missing key gets the state of an unused optimizer, as in PyTorch."""

    def __missing__(self, key: Any) -> OptimizerState:
        return self.setdefault(key, OptimizerState())

    def __setitem__(self, key: Any, state: Mapping[str, Any]) -> None:
        """Store a state, which may be a plain dictionary of a program's."""
        own = state if isinstance(state, OptimizerState) else OptimizerState(**state)
        super().__setitem__(key, own)


class BackwardWatch:
    """Counts how often backward passes add to the gradients of some parameters, whoever starts them.

    The parameters have hooks until `end`, or until this object is freed.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.added: Counter[int] = Counter()
        """Maps ``id`` of a parameter to the number of backward passes that added to its gradient."""
        added = self.added  # not the object itself, which the hooks would keep alive
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p: added.update((id(p),)))
            for parameter in parameters
            if parameter.requires_grad and parameter.is_leaf
        ]

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    __del__ = end


_TOO_LATE = {
    ("unscale_", OptState.UNSCALED): (
        "unscale_() was called twice for an optimizer since the last update(): its gradients are "
        f"unscaled already. {cures.UNSCALE_ONCE.text}"
    ),
    ("unscale_", OptState.STEPPED): (
        "unscale_() was called after step() for the same optimizer: its gradients are used up. "
        f"{cures.UNSCALE_BEFORE_STEP.text}"
    ),
    ("step", OptState.STEPPED): (
        "step() was called twice for an optimizer since the last update(): "
        f"{cures.UPDATE_ONCE.text}"
    ),
    ("backward", OptState.STEPPED): (
        f"backward() was called after step() for the same optimizer: {cures.UPDATE_FIRST.text}"
    ),
    ("closure", OptState.UNSCALED): (
        "step() got a closure after unscale_(): the closure computes new gradients, which "
        f"step() unscales itself. {cures.CLIP_IN_CLOSURE.text}"
    ),
}
_UNSCALED_BEFORE_BACKWARD = (
    "unscale_() was called twice for an optimizer since the last update(). "
    f"{cures.UPDATE_MISSING.text}"
)
_MIXED = (
    "backward() added scaled gradients to those that unscale_() had unscaled: their sum means "
    f"nothing, and no parameter was changed. {cures.UNSCALE_LAST.text}"
)
