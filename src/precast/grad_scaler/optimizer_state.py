"""What each optimizer has done since the latest `update`: which calls came, what was found in its gradients.

Libraries read and write this under the names of PyTorch's scaler: `_per_optimizer_states` and its entries.

Invariants:
- a call that comes too late is refused with an error that says what to do; whether a step is taken is the scaler's to
  decide;
- reading the state of an optimizer that the scaler has not met in this iteration adds nothing.
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
    """What one optimizer has done in this iteration; for programs it is a mapping with PyTorch's two entries."""

    optimizer: Any
    """Held, so that no other optimizer gets its id before the iteration ends; None until the scaler meets it."""
    stage: OptState = OptState.READY
    found_inf: FoundInf = field(default_factory=dict)
    scale: Tensor | None = None
    """A copy of the scale of its gradients; None until one was needed."""
    skipped: bool | Tensor | None = None
    """None before `step`; a tensor if the device decides."""
    details: NonfiniteDetails | None = None
    """What was found out about a step that was skipped."""
    largest_gradient: Tensor | None = None
    """The largest unscaled gradient, while the first scale is searched for."""
    is_stepping: bool = False
    """Whether `step` is what calls `unscale_`: then nobody can change the gradients between the two."""
    when_written: Callable[[], object] = lambda: None
    """Called when a program has written an entry."""
    _watch: BackwardWatch | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, _ENTRIES[name])

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, _ENTRIES[name], OptState(value) if name == "stage" else value)
        if self.stage is OptState.READY and self._watch is not None:  # nothing is unscaled any more
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

    def scale_of_gradients(self, now: Tensor) -> Tensor:
        """The scale of its gradients; a copy of the scale that is `now` if none was needed."""
        return now.clone() if self.scale is None else self.scale

    @property
    def device(self) -> torch.device | None:
        """The device of the scale; None while no scale was needed."""
        return None if self.scale is None else self.scale.device

    def allow(self, call: str) -> None:
        """Refuses a call that comes too late: "unscale_", "step", "closure" (a step with one), a loss's "backward"."""
        has_new_gradients = self._watch is not None and self._watch.added
        if has_new_gradients and (call, self.stage) == ("unscale_", OptState.UNSCALED):
            raise ScalerError(_UNSCALED_BEFORE_BACKWARD)
        if (call, self.stage) in _TOO_LATE:
            raise ScalerError(_TOO_LATE[call, self.stage])
        if has_new_gradients:
            raise ScalerError(_MIXED)

    def watch_for_backward(self) -> None:
        """From now on a backward pass must not reach these gradients: they are unscaled already."""
        if self.stage is OptState.UNSCALED and not self.is_stepping:
            self._watch = BackwardWatch(parameters_of(self.optimizer))

    def conclude(self, skipped: bool) -> None:
        """A step with a closure is over: what one call of the closure found need not hold for the whole step."""
        self.found_inf = {d: torch.full_like(v, skipped) for d, v in self.found_inf.items()}
        self.details = self.details if skipped else None

    def end(self) -> None:
        """The iteration is over."""
        if self._watch is not None:
            self._watch.end()


class PerOptimizerStates(dict[Any, OptimizerState]):
    """``id(optimizer)`` -> its state; a key that is not there gives the state of one that has done nothing."""

    def __missing__(self, key: Any) -> OptimizerState:
        state = OptimizerState(None)
        state.when_written = lambda: self.setdefault(key, state)
        return state

    def __setitem__(self, key: Any, state: Mapping[str, Any]) -> None:
        self[key].update(state)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def update(self, states: Mapping[Any, Mapping[str, Any]]) -> None:  # type: ignore[override]
        """Takes over states that a program has, which need not be of this class."""
        for key, state in states.items():
            self[key] = state

    def pop(self, key: Any, *default: Any) -> Any:
        """Ends a state, too."""
        if key in self:
            self[key].end()
        return super().pop(key, *default)

    def clear(self) -> None:
        """Ends all states, too."""
        for state in self.values():
            state.end()
        super().clear()


class BackwardWatch:
    """Counts how often backward passes add to the gradients of some parameters, whoever starts them.

    The parameters have hooks until `end`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.added: Counter[int] = Counter()
        """``id`` of a parameter -> how often a backward pass has added to its gradient."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._count)
            for parameter in parameters
            if parameter.requires_grad and parameter.is_leaf
        ]

    def _count(self, parameter: Tensor) -> None:
        self.added[id(parameter)] += 1

    def end(self) -> None:
        """Takes the hooks off."""
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
