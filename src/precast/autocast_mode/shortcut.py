"""Enters a region in one call to the library, where it was entered from the same state before.

Invariants:

- a shortcut is what one entry found and what it left behind. The library takes it only where all of that is the same
  again, and nobody listens to PyTorch's functions that an entry calls; otherwise the region is entered step by step;
- what it changes is changed in one step that no signal of Python's interrupts, and so is what leaving it restores;
- it is kept by the object that has found it, and by the policy that it puts in force for objects that are alike.
"""

from __future__ import annotations

from precast import _torch
from precast.engine import compile_guards
from precast.engine.native.calls import Calls
from precast.engine.thread_state import BoundPolicy, Found, native_engine, regions
from precast.weights.native_copies import native

__all__ = ["Shortcut", "Start"]


class Start:
    """What an entry finds, for a shortcut to be made of when it has ended."""

    __slots__ = ("_before", "_calls", "_lent")

    def __init__(self, calls: Calls, device_type: str) -> None:
        self._calls = calls
        self._lent = compile_guards.inherited()
        self._before = calls.snapshot(device_type)

    def __del__(self) -> None:
        self._calls.free_snapshot(self._before)

    @staticmethod
    def of(device_type: str, bound: BoundPolicy | None) -> Start | None:
        """The state now; None where no shortcut can be made of it."""
        calls = native_engine.calls
        if calls is None or not native.is_used or bound is None or bound.pending or _is_heard():
            return None
        regions.introduce()
        if compile_guards.inherited() is None:
            return None  # the way out has to lend what was lent before, and before a thread's first region nothing is
        # A guard id that repeats is written each time, as that drops what was compiled.
        if regions.written_guard_id is not regions.guard_id or regions.guard_id.repeats:
            return None
        return Start(calls, device_type)

    def shortcut(self, found: Found, bound: BoundPolicy) -> Shortcut:
        """The shortcut for entries like the one that has ended now, and put this policy in force."""
        lent = self._lent, compile_guards.inherited()
        return Shortcut(self._calls, self._before, found, (bound, *lent))


class Shortcut:
    """One region as it was entered once; `enter` is called with its `number`, the region, it and an empty record."""

    __slots__ = ("_free", "_keeps", "enter", "found", "number")

    def __init__(self, calls: Calls, before: int, found: Found, keeps: tuple[object, ...]) -> None:
        self.enter, self._free = calls.enter, calls.free_shortcut
        self.found = found
        """What the entry found."""
        self._keeps = keeps  # what the snapshots name, so that it lives as long as they do
        self.number = calls.shortcut(before)

    def __del__(self) -> None:
        self._free(self.number)


def _is_heard() -> bool:
    """Return True if somebody listens to the functions that an entry calls: a trace, an exporter, a function mode."""
    return _torch.function_modes() or _torch.replaces_nesting()
