"""What each thread keeps about its regions: a stack of records, the policy in force, the weight cache.

Invariants:

- PyTorch's own thread-local flags stay the one truth for *enabled* and *dtype*; precast adds only the policy;
- every entry of a region pushes one record that holds all it replaced, so any nesting, re-entry or recursion of one
  object restores what was there;
- a region that the library entered in one step lies on the library's stack, above the records of here, until somebody
  reads `regions.records`. What it has in force is a number in memory that C++ and Python share;
- all of it is thread-local: a new thread starts with no region, as in PyTorch. All threads share only what `install`
  put there, for the regions that PyTorch opens.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from precast._torch import in_pool_thread
from precast.engine import compile_guards
from precast.engine.compile_guards import NO_GUARD_ID, GuardId
from precast.engine.native.calls import Calls
from precast.policy.policy import Policy
from precast.weights.weight_cache import WeightCache

__all__ = [
    "BoundPolicy",
    "Found",
    "Group",
    "Installed",
    "Kernel",
    "NativeEngine",
    "Record",
    "Records",
    "Registration",
    "ThreadLocalState",
    "ThreadRegions",
    "ThreadState",
    "a_region_is_open",
    "inherited_policy",
    "installed",
    "native_engine",
    "regions",
    "thread_state",
    "write_guard_id",
]

Kernel = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""One operation under one policy: called as ``kernel(keyset, args, kwargs)``."""


@dataclass(slots=True, eq=False)
class Registration:
    """The set of kernels that is on the dispatcher; `holds` turns False when they are taken off."""

    holds: bool = True
    number: int = field(default_factory=itertools.count(1).__next__)
    """What the library knows it by."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class BoundPolicy:
    """A policy made ready for one device type: its kernel for each operation that needs one."""

    policy: Policy
    kernels: Mapping[str, Kernel]
    registration: Registration
    """The kernels on the dispatcher that look up `kernels`; the policy is bound anew when they have been taken off."""
    pending: tuple[str, ...] = ()
    """Operations with a rule that no library has defined yet."""
    is_pytorchs: bool = False
    """Whether the policy says what PyTorch's own tables say, wherever PyTorch works."""

    meaning: str | None = None
    """The policy's fingerprint; None where it is exactly PyTorch's, also in what raises an error."""

    delegated: frozenset[str] = frozenset()
    """The operations that compiled kernels do without the reference."""

    native: int = 0
    """What compiled kernels know what it says by, which other bound policies may say too; 0 where there are none."""

    number: int = field(default_factory=itertools.count(1).__next__)
    """What this thread's memory says while it is in force."""

    shortcuts: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """How regions with this policy, outside of all others or inside one with it, are entered in one step."""

    def __post_init__(self) -> None:
        number = self.number
        _bound_policies[number] = weakref.ref(self, lambda _: _bound_policies.pop(number, None))


_bound_policies: Final[dict[int, weakref.ref[BoundPolicy]]] = {}


@dataclass(slots=True, eq=False, init=False)
class Record:
    """One entry of a region: whose it is, and what it replaced; empty until `fill`."""

    owner: object
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    bound_policy: BoundPolicy | None
    optimizes_torchscript: bool
    nesting: list[int]
    """PyTorch's count of open regions when this one was counted, and when it was no longer."""

    def fill(self, owner: object, found: Found, nesting: list[int]) -> None:
        """Says whose entry it is, what it found, and how it was counted."""
        self.owner, self.nesting = owner, nesting
        (
            self.device_type,
            self.enabled,
            self.dtype,
            self.cache_enabled,
            self.bound_policy,
            self.optimizes_torchscript,
        ) = found


Found = tuple[str, bool, torch.dtype, bool, BoundPolicy | None, bool]
"""What an entry found: the fields of `Record` from `device_type` to `optimizes_torchscript`."""

Group = tuple[object, list[tuple[Any, Record]]]
"""Regions that were entered as one: the object that was, and each region with its record."""


class Records(list[Record]):
    """The open regions of one thread, outermost first."""

    __slots__ = ("__weakref__",)


_threads: list[weakref.ref[Records]] = []


class NativeEngine:
    """The library of compiled kernels, once it is loaded: they look up in C++ what is in force in a thread."""

    __slots__ = ("calls", "leave")

    def __init__(self) -> None:
        self.calls: Calls | None = None
        self.leave: Callable[[object], int] = lambda _: 0
        """`calls.leave`, which leaves no region while there is no library."""

    def load(self, calls: Calls) -> None:
        """Has the library in use, for as long as the process lives."""
        self.calls, self.leave = calls, calls.leave


native_engine: Final = NativeEngine()


class ThreadRegions(threading.local):
    """This thread's records, the regions entered as one, its weight cache, and the guard id for the compiler."""

    def __init__(self) -> None:
        self._records = Records()
        _threads.append(weakref.ref(self._records, _threads.remove))
        self.groups: list[Group] = []
        # A thread of PyTorch's own ends no region, so nothing would empty its cache.
        self.is_pytorchs = in_pool_thread()
        self.cache = WeightCache(holds=not self.is_pytorchs, is_threads=True)
        self._guard_id, self._written = c_int64(NO_GUARD_ID.number), c_int64(NO_GUARD_ID.number)
        self._lends, self._open = c_int64(), c_int64()
        self.is_known = False
        """Whether compiled kernels know this thread; until then its operations run on the reference."""

    @property
    def records(self) -> Records:
        """The open regions, outermost first."""
        if self._open.value:
            self._take_over()
        return self._records

    @property
    def depth(self) -> int:
        """The number of open regions; this needs no records."""
        return self._open.value + len(self._records)

    @property
    def is_open(self) -> bool:
        """Whether a region is open; this needs no records."""
        return bool(self._open.value or self._records)

    @property
    def guard_id(self) -> GuardId:
        """The guard id of the policies that are in force."""
        return compile_guards.by_number[self._guard_id.value]

    @guard_id.setter
    def guard_id(self, guard_id: GuardId) -> None:
        self._guard_id.value = guard_id.number

    @property
    def written_guard_id(self) -> GuardId | None:
        """The guard id that the flags hold; None while they are being changed."""
        return compile_guards.by_number.get(self._written.value)

    @written_guard_id.setter
    def written_guard_id(self, guard_id: GuardId | None) -> None:
        self._written.value = 0 if guard_id is None else guard_id.number

    def note_lending(self) -> None:
        """Notes that this thread has given its policies to PyTorch's own threads, as with every change of them."""
        self._lends.value = True

    def _take_over(self) -> None:
        """Takes the regions that the library has entered among the records."""
        calls = native_engine.calls
        assert calls is not None
        for index in range(self._open.value):
            calls.fill_record(index)
        # One step that no signal interrupts: a region is on one of the two stacks.
        self._records.extend(iter(calls.take_record, None))

    def introduce(self) -> None:
        """Tells compiled kernels whose thread this is, and what is in force in it."""
        calls = native_engine.calls
        if self.is_known or calls is None:
            return
        for device_type, slot in list(_thread_states.items()):
            slot.state.share(calls.bound_number(device_type))
        before = self._guard_id, self._written, self._lends, self._open
        numbers = tuple(calls.thread_numbers())
        for number, known in zip(numbers, before, strict=True):
            number.value = known.value
        self._guard_id, self._written, self._lends, self._open = numbers
        calls.this_thread(2 if self.is_pytorchs else 1)
        self.is_known = True


regions = ThreadRegions()


def a_region_is_open() -> bool:
    """Whether any thread is in a region of precast's own."""
    calls = native_engine.calls
    return any(map(_is_open, list(_threads))) or (calls is not None and bool(calls.any_open()))


def _is_open(thread: weakref.ref[Records]) -> bool:
    return bool(thread())


class ThreadState:
    """What is in force in one thread for one device type."""

    __slots__ = ("_bound_policy", "_device_type", "attempts", "number", "uses")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._bound_policy: BoundPolicy | None = None
        """What `follow` has put in force, so that it lives as long as it is."""
        self.number = c_int64()
        """The number of `bound_policy`, 0 for none, in memory that compiled code shares."""
        self.attempts = 0
        """How many operations are being tried as PyTorch would run them, with autocast on in what they call."""
        self.uses = 0
        """How many operations have taken weights since a held copy was last compared with its parameter."""
        calls = native_engine.calls
        if calls is not None and regions.is_known:
            self.share(calls.bound_number(device_type))

    @property
    def bound_policy(self) -> BoundPolicy | None:
        """The policy of precast's innermost region; None outside of all regions. `follow` changes it."""
        number = self.number.value
        if number == 0:
            return None
        kept = self._bound_policy
        return kept if kept is not None and kept.number == number else _bound_policies[number]()

    def follow(self, bound: BoundPolicy | None) -> None:
        """Has a policy in force, in compiled kernels too."""
        self._bound_policy = bound
        number = 0 if bound is None else bound.number
        calls = native_engine.calls
        if calls is not None:
            native = 0 if bound is None else bound.native
            calls.put_in_force(calls.device(self._device_type), native, number)
        self.number.value = number

    def share(self, number: c_int64) -> None:
        """From now on the number of what is in force is in this memory, which compiled code reads and writes too."""
        number.value, self.number = self.number.value, number
        self.follow(self.bound_policy)

    def is_attempt(self) -> bool:
        """Whether an operation is being tried, in Python or in compiled kernels."""
        calls = native_engine.calls
        return bool(
            self.attempts or (calls is not None and calls.attempts(calls.device(self._device_type)))
        )


class ThreadLocalState(threading.local):
    """`ThreadState` of the thread that asks; one read of a thread-local value gives a kernel all it needs."""

    def __init__(self, device_type: str) -> None:
        self.state = ThreadState(device_type)


_thread_states: dict[str, ThreadLocalState] = {}


def thread_state(device_type: str) -> ThreadLocalState:
    """The thread-local slot for `device_type`; kernels hold on to it."""
    return _thread_states.get(device_type) or _thread_states.setdefault(
        device_type, ThreadLocalState(device_type)
    )


class Installed:
    """What holds in every thread for one device type, in regions of PyTorch's own outside of all of precast's."""

    __slots__ = ("_device_type", "bound_policy")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.bound_policy: BoundPolicy | None = None
        """The installed policy, made ready; None where there is none. `follow` changes it."""

    def follow(self, bound: BoundPolicy | None) -> None:
        """Installs a policy, in compiled kernels too."""
        self.bound_policy = bound
        calls = native_engine.calls
        if calls is not None:
            known = (0, 0) if bound is None else (bound.native, bound.number)
            calls.install(calls.device(self._device_type), *known)


_installed: dict[str, Installed] = {}


def installed(device_type: str) -> Installed:
    """The slot for `device_type`; kernels hold on to it."""
    return _installed.get(device_type) or _installed.setdefault(device_type, Installed(device_type))


def write_guard_id(guard_id: GuardId, before: GuardId | None) -> None:
    """Writes a guard id for this thread, and gives its policies to PyTorch's own threads that work for this one.

    Args:
        guard_id: the new guard id.
        before: what `regions.written_guard_id` was.
    """
    regions.written_guard_id, regions.guard_id = None, guard_id
    slots = ((device, _thread_states.get(device)) for device, _ in guard_id.policies)
    compile_guards.write(
        guard_id, before, {device: slot.state.bound_policy for device, slot in slots if slot}
    )
    regions.written_guard_id = guard_id
    regions.note_lending()


def inherited_policy(device_type: str) -> BoundPolicy | None:
    """What is in force for `device_type` in the thread that this one, a thread of PyTorch's own, works for."""
    bound_policy: BoundPolicy | None = (compile_guards.inherited() or {}).get(device_type)
    return bound_policy
