"""Fast entry: a region that was entered before from the same state is entered in one call of the library.

Invariants:

- a fast entry holds the state before and after one entry. The library uses it only if the state before is the same
  again, and nobody observes the functions of PyTorch that an entry calls; otherwise the region is entered step by step;
- its changes are made in a single step that no signal of Python's interrupts, and so is their restoration;
- the region object keeps it, and so does the policy in force inside, for equal regions.
"""

from __future__ import annotations

from precast import _torch
from precast.engine import compile_guards
from precast.engine.thread_state import BoundPolicy, RegionState, regions
from precast.weights.native.api import NativeApi, native_engine

__all__ = ["FastEntry"]


class FastEntry:
    """An entry of a region for later repetition: call ``enter(number, region, fast_entry, empty_record)``.

    It is created before the entry, with a snapshot of the state, and completed when the entry has ended.
    """

    __slots__ = ("_api", "_before", "_owned", "enter", "number", "previous")

    def __init__(self, api: NativeApi, device_type: str) -> None:
        self._api, self.enter = api, api.enter
        self._owned: tuple[object, ...] = (compile_guards.inherited_policies(),)
        self._before: int = api.snapshot(device_type)

    def __del__(self) -> None:
        if hasattr(self, "_before"):  # else Ctrl-C interrupted `__init__`
            self._api.free_snapshot(self._before)
        if hasattr(self, "number"):
            self._api.free_fast_entry(self.number)

    @staticmethod
    def begin(device_type: str, bound: BoundPolicy | None) -> FastEntry | None:
        """Return a fast entry from the present state; None if none can be made from it."""
        api = native_engine.api
        if (
            api is None
            or not native_engine.is_used
            or bound is None
            or bound.undefined_operations
            or _is_heard()
        ):
            return None
        regions.register_thread()
        if compile_guards.inherited_policies() is None:
            return None  # the exit restores the inherited policies, and before a thread's first region there are none
        # A repeated guard id is written at each entry, to drop compiled code.
        if regions.written_guard_id is not regions.guard_id or regions.guard_id.repeats:
            return None
        return FastEntry(api, device_type)

    def complete(self, previous: RegionState, bound: BoundPolicy) -> None:
        """Complete it when the entry has replaced a state and put this policy in force."""
        self.previous = previous
        # The snapshots name these objects: they live as long as the fast entry.
        self._owned = (bound, *self._owned, compile_guards.inherited_policies())
        self.number: int = self._api.fast_entry(self._before)


def _is_heard() -> bool:
    """Return True if an observer replaces the functions that an entry calls: a trace, an exporter, a function mode."""
    return _torch.function_modes() or _torch.replaces_nesting()
