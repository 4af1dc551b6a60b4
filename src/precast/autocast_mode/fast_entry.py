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
from precast.weights.native.api import NativeApi
from precast.weights.native.engine import native_engine

__all__ = ["EntrySnapshot", "FastEntry"]


class EntrySnapshot:
    """The state before an entry, from which a fast entry is made when the entry has ended."""

    __slots__ = ("_api", "_before", "_inherited")

    def __init__(self, api: NativeApi, device_type: str) -> None:
        self._api = api
        self._inherited = compile_guards.inherited_policies()
        self._before = api.snapshot(device_type)

    def __del__(self) -> None:
        if hasattr(self, "_before"):  # else Ctrl-C interrupted `__init__`
            self._api.free_snapshot(self._before)

    @staticmethod
    def of(device_type: str, bound: BoundPolicy | None) -> EntrySnapshot | None:
        """Return a snapshot of the present state; None if no fast entry can be made from it."""
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
        return EntrySnapshot(api, device_type)

    def fast_entry(self, previous: RegionState, bound: BoundPolicy) -> FastEntry:
        """Return the fast entry for entries like the one that has just ended, which put this policy in force."""
        policies = self._inherited, compile_guards.inherited_policies()
        return FastEntry(self._api, self._before, previous, (bound, *policies))


class FastEntry:
    """An entry of a region for later repetition: call ``enter(number, region, fast_entry, empty_record)``."""

    __slots__ = ("_free", "_owned", "enter", "number", "previous")

    def __init__(
        self, api: NativeApi, before: int, previous: RegionState, owned: tuple[object, ...]
    ) -> None:
        self.enter, self._free = api.enter, api.free_fast_entry
        self.previous = previous
        """The state that the entry replaced."""
        self._owned = owned  # objects that the snapshots name: they live as long as the fast entry
        self.number = api.fast_entry(before)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # else Ctrl-C interrupted `__init__`
            self._free(self.number)


def _is_heard() -> bool:
    """Return True if an observer replaces the functions that an entry calls: a trace, an exporter, a function mode."""
    return _torch.function_modes() or _torch.replaces_nesting()
