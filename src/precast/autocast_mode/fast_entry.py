"""Repeated entries of a region from the same state, each in one call of the library.

Invariants:

- a fast entry holds the thread's state before and after one entry. The library repeats it only from the same state, and
  only if nothing observes the functions of PyTorch that an entry calls. Otherwise the region is entered step by step;
- no Python signal handler runs during the changes of an entry, or while the exit restores the state;
- the region object refers to its fast entry, and the bound policy to those that equal regions can use.
"""

from __future__ import annotations

from precast import _torch
from precast.engine import compile_guards
from precast.engine.thread_state import BoundPolicy, RegionState, regions
from precast.weights.native.api import NativeApi, native_engine

__all__ = ["FastEntry"]


class FastEntry:
    """A recorded entry of a region. ``enter(address, region, fast_entry, empty_record)`` repeats it.

    It is created before the entry that it records, with a snapshot of the state, and completed after this entry.
    """

    __slots__ = ("_api", "_references", "_snapshot", "address", "enter", "previous")

    def __init__(self, api: NativeApi, device_type: str) -> None:
        self._api, self.enter = api, api.enter
        self._references: tuple[object, ...] = (compile_guards.inherited_policies(),)
        self._snapshot: int = api.snapshot(device_type)

    def __del__(self) -> None:
        if hasattr(self, "_snapshot"):  # else Ctrl-C interrupted `__init__`
            self._api.free_snapshot(self._snapshot)
        if hasattr(self, "address"):
            self._api.free_fast_entry(self.address)

    @staticmethod
    def begin(device_type: str, bound: BoundPolicy | None) -> FastEntry | None:
        """Return a fast entry for the current state; None if an entry from this state cannot be repeated."""
        api = native_engine.api
        if (
            api is None
            or not native_engine.is_used
            or bound is None
            or bound.undefined_operations
            or _is_observed()
        ):
            return None
        regions.register_thread()
        if compile_guards.inherited_policies() is None:
            return None  # the exit has to restore them, and there are none before a thread's first region
        # A repeated guard id is written at each entry, to drop compiled code.
        if regions.written_guard_id is not regions.guard_id or regions.guard_id.repeats:
            return None
        return FastEntry(api, device_type)

    def complete(self, previous: RegionState, bound: BoundPolicy) -> None:
        """Record the state after the entry, which has replaced `previous` and put `bound` in force."""
        self.previous = previous
        # The snapshots have the addresses of these objects, which must live as long as the fast entry.
        self._references = (bound, *self._references, compile_guards.inherited_policies())
        self.address: int = self._api.fast_entry(self._snapshot)


def _is_observed() -> bool:
    """Return True if a trace, an exporter or a function mode observes the functions that an entry calls."""
    return _torch.function_modes() or _torch.replaces_nesting()
