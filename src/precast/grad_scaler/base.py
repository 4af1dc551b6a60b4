"""The scale itself: its settings, the device that it lives on, how it is saved and copied.

Invariants:
- scale and growth tracker live on the device of the first scaled loss, and stay the same tensors: a
  captured CUDA graph reads them;
- what a method answers when the scaler is off stands above it (`off`), not inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import Card, Displayed
from precast.errors import ScalerError
from precast.grad_scaler import states
from precast.grad_scaler.display import card
from precast.grad_scaler.ledger import Ledger
from precast.grad_scaler.names import States
from precast.grad_scaler.search import FIRST, Search
from precast.grad_scaler.settings import (
    AUTO,
    DEFAULT_LIMITS,
    MOST_TRACKED,
    checked_limits,
    checked_settings,
    device_type_of,
    is_usable,
    require_count,
    require_flag,
    require_number,
)
from precast.grad_scaler.turns import Record

__all__ = ["Scale", "off"]

_HISTORY = 100  # steps, unless the user says how many
Method = TypeVar("Method", bound=Callable[..., Any])


def off(answer: Callable[..., Any]) -> Callable[[Method], Method]:
    """Gives a method its answer for a scaler that is off: called with the method's arguments.

    Only that answer enters a compiled graph: what the scaler remembers changes in each iteration, and a graph would be
    compiled again for it.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def chosen(self: Scale, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs) if self._enabled else answer(*args, **kwargs)

        _torch.never_compiled(method)
        return cast(Method, _torch.runs_uncompiled(chosen))

    return decorate


class Scale(torch.amp.GradScaler, Displayed):
    """A scale with its settings; `GradScaler` says what it is used for.

    It is a subclass of PyTorch's class because trainers ask ``isinstance(scaler,
    torch.amp.GradScaler)`` before they call `unscale_`, and that class leaves no other way to be
    recognised. None of its logic runs: all public methods, and the private names that optimizers,
    trainers and other programs call, read or write, are defined here, in `Steps` and in `GradScaler`.
    """

    def __init__(self, device: str, enabled: bool, settings: dict[str, Any]) -> None:
        self._device = device_type_of(device)
        self._enabled = require_flag("enabled", enabled) and is_usable(self._device)
        self._init_scale = settings["init_scale"]
        self._growth_factor = settings["growth_factor"]
        self._backoff_factor = settings["backoff_factor"]
        self._growth_interval = settings["growth_interval"]
        self._init_growth_tracker = 0
        self._limits = DEFAULT_LIMITS
        self._search: Search | None = None
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._records: dict[int, Record] = {}
        self._iterations = 0
        self._check_settings(settings)
        self._ledger = Ledger(int(settings["history"]) if self._enabled else 0)

    @off(lambda: 1.0)
    def get_scale(self) -> float:
        """The scale now (waits for the device); 1.0 if the scaler is off."""
        return self._init_scale if self._scale is None else float(self._scale.item())

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor of growth, above 0; 1.0 keeps the scale from growing."""
        self._growth_factor = require_number("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after a skipped step."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor of shrinking, above 0; 1.0 keeps the scale from shrinking."""
        self._backoff_factor = require_number("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Good iterations in a row until the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of iterations until the scale grows, at least 1."""
        self._growth_interval = require_count("growth_interval", new_interval)
        if self._enabled:
            self._let_grow()

    def is_enabled(self) -> bool:
        """Whether this scaler scales."""
        return self._enabled

    @off(dict)
    def state_dict(self) -> dict[str, Any]:
        """Five numbers, which `torch.amp.GradScaler` loads too; empty if the scaler is off.

        Limits that are not the defaults, and a search that goes on, stand under ``"precast"``.
        """
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
            **states.extras(self._limits, self._searching),
        }

    @off(lambda *_, **__: None)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class, `torch.amp.GradScaler`, `ShardedGradScaler` or Apex.

        The empty state of a scaler that was off changes nothing, and a scaler that is off loads
        nothing. A scale outside the limits is moved to the nearest, with a warning.

        Raises:
            ScalerError: Entries are missing, or have impossible values; nothing has changed then.
        """
        self._take(states.read(state_dict, self._limits))

    def _take(self, state: states.State | None) -> None:
        """Takes over a state that was read and checked."""
        if state is None:
            return
        self._growth_factor = state.growth_factor or self._growth_factor
        self._backoff_factor = state.backoff_factor or self._backoff_factor
        self._growth_interval = state.growth_interval or self._growth_interval
        self._limits = state.limits or self._limits
        self._ledger.resume(state.growth_tracker)
        self._search = Search(self._ledger.counters.backoffs) if state.searching else None
        self._init_scale = state.scale
        self._init_growth_tracker = state.growth_tracker
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(self._init_scale)
            self._growth_tracker.fill_(self._init_growth_tracker)
        self._let_grow()

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise ScalerError(
                "a GradScaler was pickled or copied inside an iteration: do it after update()."
            )
        return {**self.__dict__, **self._resting_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Goes on for a scaler that was pickled or copied: one of this class, or of PyTorch's."""
        if "_records" in state:
            vars(self).update({**state, "_records": {}})
        else:
            self._go_on_for_pytorchs(state)

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    @property  # type: ignore[override]
    def _per_optimizer_states(self) -> States:
        return States(self._records)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Any) -> None:
        kept = {key: dict(state) for key, state in states.items()}
        self._per_optimizer_states.clear()
        self._per_optimizer_states.update(kept)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._started(funcname)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        tracker = self._init_growth_tracker
        self._growth_tracker = torch.full((), tracker, dtype=torch.int32, device=dev)

    @off(lambda: 0)
    def _get_growth_tracker(self) -> int:
        tracker = self._growth_tracker
        return self._init_growth_tracker if tracker is None else int(tracker.item())

    # From here on the names are ours alone.

    def _go_on_for_pytorchs(self, state: dict[str, Any]) -> None:
        """Becomes what a scaler of PyTorch's was, whose attributes these are; the limits are the defaults."""
        make: Any = type(self).__init__
        make(self, state["_device"], enabled=False)
        if state["_enabled"]:
            self._enabled, self._ledger = True, Ledger(_HISTORY)
            names = ("growth_factor", "backoff_factor", "growth_interval")
            numbers = {name: state[f"_{name}"] for name in names}
            scale, tracker = state["_init_scale"], state["_init_growth_tracker"]
            self.load_state_dict({"scale": scale, "_growth_tracker": tracker, **numbers})

    @_torch.never_compiled
    def _card(self) -> Card:
        what = f"GradScaler on {self._device}"
        if not self._enabled:
            return Card(what, ["off"])
        scale = self._init_scale if self._scale is None else self._scale
        return card(what, scale, self._ledger, searching=self._searching)

    @off(lambda *_: None)  # settings that are never used may be what a configuration left there
    def _check_settings(self, settings: dict[str, Any]) -> None:
        first = settings["init_scale"]
        if isinstance(first, str) and first == AUTO:
            self._search = Search()
            first = _within(FIRST, settings["min_scale"], settings["max_scale"])
        names = ("growth_factor", "backoff_factor", "growth_interval")
        vars(self).update(checked_settings(first, *(settings[name] for name in names)))
        floor, ceiling = settings["min_scale"], settings["max_scale"]
        self._limits = checked_limits(self._init_scale, floor, ceiling, settings)
        require_count("history", settings["history"], least=0)

    @off(dict)
    def _resting_state(self) -> dict[str, Any]:
        """Python's numbers for the device's: an unpickled scaler may start on another device."""
        return {
            "_init_scale": self.get_scale(),
            "_init_growth_tracker": self._get_growth_tracker(),
            "_scale": None,
            "_growth_tracker": None,
        }

    def _let_grow(self) -> None:
        """Has the next good iteration grow the scale where there were enough: the tracker is compared by ``==``."""
        most = self._growth_interval - 1
        self._ledger.good = min(self._ledger.good, most)
        self._init_growth_tracker = min(self._init_growth_tracker, most)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=min(most, MOST_TRACKED))

    @property
    def _searching(self) -> bool:
        """Whether the first scale is still to be found."""
        return self._search is not None and self._search.found_at is None

    def _measures(self) -> bool:
        """Whether the gradients of this iteration are measured."""
        search, scale = self._search, self._scale
        if search is None or (scale is not None and _torch.is_captured(scale)):
            return False
        return search.measures(self._iterations, self._growth_interval)

    def _started(self, call: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise ScalerError(
                f"{call}() was called before any loss was scaled: there is nothing to divide by. "
                "Write scaler.scale(loss).backward() instead of loss.backward()."
            )
        return self._scale, self._growth_tracker


def _within(first: float, floor: Any, ceiling: Any) -> float:
    """Where a search begins: its own first scale, moved into limits that are numbers."""
    first = max(first, floor) if isinstance(floor, int | float) else first
    return min(first, ceiling) if isinstance(ceiling, int | float) else first
