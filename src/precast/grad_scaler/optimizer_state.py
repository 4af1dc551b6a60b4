"""The state of each optimizer since the latest `update`: the calls made for it, and the checks of its gradients.

Libraries read and write it under the names of PyTorch's scaler: `_per_optimizer_states` and its entries.

Invariants:
- a call that comes too late raises an error that says what to do; the scaler decides whether a step is taken;
- reading the state of an optimizer that is new in this iteration adds no entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from precast._internal import cures
from precast.errors import ScalerError
from precast.grad_scaler.gradients import FoundInf
from precast.grad_scaler.nonfinite import NonfiniteDetails
from precast.optim.partial_steps import parameters_of

__all__ = ["BackwardWatch", "OptimizerState", "PerOptimizerStates"]


_ENTRIES: Final = {"stage": "stage", "found_inf_per_device": "found_inf"}
"""PyTorch's name -> the attribute of `OptimizerState`."""


@dataclass(eq=False, slots=True)
class OptimizerState(MutableMapping[str, Any]):
    """The state of one optimizer in this iteration; a mapping with PyTorch's two entries, for programs."""

    optimizer: Any
    """Referenced, so that its id is not reused before the iteration ends; None until the scaler uses the optimizer."""
    stage: OptState = OptState.READY
    found_inf: FoundInf = field(default_factory=dict)
    scale: Tensor | None = None
    """A copy of the scale of its gradients; None until it is needed."""
    skipped: bool | Tensor | None = None
    """None before `step`; a tensor if the device decides."""
    details: NonfiniteDetails | None = None
    """The details of a skipped step."""
    largest_gradient: Tensor | None = None
    """The largest unscaled gradient, during the search for the first scale."""
    is_stepping: bool = False
    """True if `step` calls `unscale_`: then the user cannot change the gradients between the two."""
    when_written: Callable[[], object] = lambda: None
    """Called after a program has written an entry."""
    _watch: BackwardWatch | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, _ENTRIES[name])

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, _ENTRIES[name], OptState(value) if name == "stage" else value)
        if (
            self.stage is OptState.READY and self._watch is not None
        ):  # the gradients are scaled again
            self._watch.end()
            self._watch = None
        self.when_written()

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_ENTRIES)

    def __len__(self) -> int:
        return len(_ENTRIES)

    def __repr__(self) -> str:
        return repr(dict(self))

    def scale_of_gradients(self, current: Tensor) -> Tensor:
        """Return the scale of its gradients; a copy of the `current` scale if none was stored."""
        return current.clone() if self.scale is None else self.scale

    @property
    def device(self) -> torch.device | None:
        """The device of the scale; None while no scale is stored."""
        return None if self.scale is None else self.scale.device

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
        self.found_inf = {d: torch.full_like(v, skipped) for d, v in self.found_inf.items()}
        self.details = self.details if skipped else None

    def end(self) -> None:
        """End the iteration."""
        if self._watch is not None:
            self._watch.end()


class PerOptimizerStates(dict[Any, OptimizerState]):
    """Maps ``id(optimizer)`` to its state; a missing key gives the state of an unused optimizer."""

    def __missing__(self, key: Any) -> OptimizerState:
        state = OptimizerState(None)
        state.when_written = lambda: self.setdefault(key, state)
        return state

    def __setitem__(self, key: Any, state: Mapping[str, Any]) -> None:
        self[key].update(state)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def update(self, states: Mapping[Any, Mapping[str, Any]]) -> None:  # type: ignore[override]
        """Replace states by a program's, which may be of another class."""
        for key, state in states.items():
            self[key] = state

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a state and end it."""
        if key in self:
            self[key].end()
        return super().pop(key, *default)

    def clear(self) -> None:
        """Remove all states and end them."""
        for state in self.values():
            state.end()
        super().clear()


class BackwardWatch:
    """Counts how often backward passes add to the gradients of some parameters, whoever starts them.

    The parameters have hooks until `end`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.added: Counter[int] = Counter()
        """Maps ``id`` of a parameter to the number of backward passes that added to its gradient."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._count)
            for parameter in parameters
            if parameter.requires_grad and parameter.is_leaf
        ]

    def _count(self, parameter: Tensor) -> None:
        self.added[id(parameter)] += 1

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


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
