"""Enters and leaves a region in one call to the library, where it was entered from the same state before.

Invariants:

- a shortcut is what one entry found and what it left behind. It is taken only where all of that is the same again, and
  nobody listens to PyTorch's functions that an entry calls; otherwise the region is entered step by step;
- what it changes is changed in one step that no signal of Python's interrupts. What Python keeps itself is marked as
  unfinished around that step, so that the region's record restores it whenever an interrupt comes;
- one that many objects share belongs to the default policy, which lives as long as its registration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from precast import _torch
from precast.engine import registration
from precast.engine.compile_guards import GuardId
from precast.engine.entry_point import watchers
from precast.engine.native.calls import Calls
from precast.engine.thread_state import (
    BoundPolicy,
    Record,
    installed,
    native_engine,
    regions,
    thread_state,
)
from precast.weights.native_copies import native

__all__ = ["Shortcut", "Start"]

_INCREMENT, _DECREMENT = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


class Start:
    """What an entry finds, for a shortcut to be made of when it has ended."""

    __slots__ = ("_before", "_guard_id")

    def __init__(self, calls: Calls, device_type: str) -> None:
        self._before = _Snapshot(calls, device_type)
        self._guard_id = regions.guard_id

    @staticmethod
    def of(device_type: str, bound: BoundPolicy | None) -> Start | None:
        """The state now; None where no shortcut can be made of it."""
        calls = native_engine.calls
        if calls is None or not native.is_used or bound is None or bound.pending or _is_heard():
            return None
        regions.introduce()
        if regions.written_guard_id is not regions.guard_id:
            return None
        return Start(calls, device_type)

    def shortcut(self, record: Record, bound: BoundPolicy) -> Shortcut:
        """The shortcut for entries like the one that has ended with this record and policy."""
        return Shortcut(record, bound, self._before, self._guard_id)


class Shortcut:
    """One region as it was entered once."""

    __slots__ = (
        "_after",
        "_before",
        "_bound",
        "_enter",
        "_everywhere",
        "_found",
        "_guard_after",
        "_guard_before",
        "_installed",
        "_leave",
        "_outside",
        "_registration",
        "_thread",
    )

    def __init__(
        self, record: Record, bound: BoundPolicy, before: _Snapshot, guard_before: GuardId
    ) -> None:
        calls = native_engine.calls
        assert calls is not None
        self._enter, self._leave = calls.enter, calls.leave
        self._registration = bound.registration
        self._found = (
            record.device_type,
            record.enabled,
            record.dtype,
            record.cache_enabled,
            record.bound_policy,
            record.optimizes_torchscript,
        )
        self._thread = thread_state(record.device_type)
        self._everywhere = installed(record.device_type)
        self._installed = self._everywhere.bound_policy
        self._outside, self._bound = record.bound_policy, bound
        self._before, self._after = before, _Snapshot(calls, record.device_type)
        self._guard_before, self._guard_after = guard_before, regions.guard_id

    def enter(self, owner: object) -> bool:
        """Enters the region; False, and nothing is changed, where it has to be entered step by step."""
        here = self._thread.state
        if (
            watchers
            or here.bound_policy is not self._outside
            or regions.written_guard_id is not self._guard_before
            or self._everywhere.bound_policy is not self._installed
            or not (native.is_used and regions.lends)
        ):
            return False
        record = Record(owner, *self._found)
        record.shortcut = self
        regions.records.append(record)
        # Asked only now: who takes the kernels off says so first, and then looks for records.
        if not self._registration.holds:
            regions.records.pop()
            return False
        regions.written_guard_id, here.bound_policy = None, self._bound
        record.nesting.extend(map(self._enter, self._before, self._after))
        if record.nesting[0] < 0:
            record.nesting.clear()
            regions.written_guard_id, here.bound_policy = self._guard_before, self._outside
            regions.records.pop()
            return False
        regions.guard_id = regions.written_guard_id = self._guard_after
        return True

    def leave(self, record: Record) -> bool:
        """Leaves the thread's innermost region, which is this; False, and nothing is changed, where it cannot."""
        here = self._thread.state
        if (
            watchers
            or here.bound_policy is not self._bound
            or regions.written_guard_id is not self._guard_after
        ):
            return False
        nesting = record.nesting
        regions.written_guard_id, here.bound_policy = None, self._outside
        nesting.extend(map(self._leave, self._before, self._after))
        if nesting[1] < 0:
            del nesting[1:]
            regions.written_guard_id, here.bound_policy = self._guard_after, self._bound
            return False
        regions.guard_id = regions.written_guard_id = self._guard_before
        records = regions.records
        records.pop()
        if nesting[1] == 0 or (not records and self._everywhere.bound_policy is None):
            registration.clear_cache()
        return True


class _Snapshot(tuple[int]):
    """A snapshot of the library's, which is freed with this; as a tuple, it can be an argument of `map`."""

    _free: Callable[[int], None]

    def __new__(cls, calls: Calls, device_type: str) -> _Snapshot:
        self = super().__new__(cls, (calls.snapshot(device_type),))
        self._free = calls.free_snapshot
        return self

    def __del__(self) -> None:
        self._free(self[0])


def _is_heard() -> bool:
    """Whether somebody listens to what an entry of a region calls: a trace, an exporter, a function mode."""
    return (
        _torch.function_modes()
        or torch.autocast_increment_nesting is not _INCREMENT
        or torch.autocast_decrement_nesting is not _DECREMENT
    )
