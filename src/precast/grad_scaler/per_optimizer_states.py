"""What PyTorch's scaler calls its parts, for the libraries that read them: `_per_optimizer_states` and its entries.

Invariants: a view, which tells what is and changes what is; reading an optimizer that the scaler has not met in this
iteration adds nothing to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

from torch.amp.grad_scaler import OptState

from precast.grad_scaler.optimizer_state import OptimizerState

__all__ = ["PerOptimizerStates"]

_NAMES: Final = {"stage": "stage", "found_inf_per_device": "found_inf"}
"""PyTorch's name -> the attribute of `OptimizerState`."""


class PerOptimizerStates(MutableMapping[Any, "_PerOptimizerState"]):
    """``id(optimizer)`` -> what it has done in this iteration; any other key gives that of one which did nothing."""

    def __init__(self, states: dict[Any, OptimizerState]) -> None:
        self._states = states

    def __getitem__(self, key: Any) -> _PerOptimizerState:
        return _PerOptimizerState(self._states, key)

    def __setitem__(self, key: Any, state: MutableMapping[str, Any]) -> None:
        self[key].update(state)

    def __delitem__(self, key: Any) -> None:
        self._states.pop(key).end()

    def __contains__(self, key: Any) -> bool:
        return key in self._states

    def replace(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Takes over what a program puts in the place of all of them."""
        kept = {key: dict(state) for key, state in states.items()}
        self.clear()
        self.update(kept)

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dictionary's: `default` for an optimizer that the scaler has not met."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """As a dictionary's."""
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        state = dict(self[key])
        del self[key]
        return state

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._states))

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return repr({key: dict(state) for key, state in self.items()})


class _PerOptimizerState(MutableMapping[str, Any]):
    """What one optimizer has done: "stage", and "found_inf_per_device", tensors, nonzero where a gradient was bad."""

    def __init__(self, states: dict[Any, OptimizerState], key: Any) -> None:
        self._states, self._key = states, key
        self._state = states.get(key) or OptimizerState(None)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._state, _NAMES[name])

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "stage":
            self._state.set_stage(OptState(value))
        else:
            setattr(self._state, _NAMES[name], value)
        self._states.setdefault(self._key, self._state)

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    def __repr__(self) -> str:
        return repr(dict(self))
