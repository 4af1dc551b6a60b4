"""What each thread keeps about its regions: a stack of records, the policy in force, the weight cache.

Invariants:

- PyTorch's own thread-local flags stay the one truth for *enabled* and *dtype*; precast adds only the policy;
- every entry of a region pushes one record that holds all it replaced, so any nesting, re-entry or recursion of one
  object restores what was there;
- all of it is thread-local: a new thread starts with no region, as in PyTorch. All threads share only what `install`
  put there, for the regions that PyTorch opens.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
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
    """What compiled kernels know it by; 0 where there are none."""


@dataclass(slots=True, eq=False)
class Record:
    """One entry of a region: whose it is, and what it replaced."""

    owner: object
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    bound_policy: BoundPolicy | None
    optimizes_torchscript: bool
    nesting: list[int] = field(default_factory=list)
    """PyTorch's count of open regions when this one was counted, and when it was no longer."""
    shortcut: Any = None
    """How the library entered the region in one step, if it did; it leaves it so."""


Group = tuple[object, list[tuple[Any, Record]]]
"""Regions that were entered as one: the object that was, and each region with its record."""


class Records(list[Record]):
    """The open regions of one thread, outermost first."""

    __slots__ = ("__weakref__",)


_threads: list[weakref.ref[Records]] = []


class NativeEngine:
    """The library of compiled kernels, once it is loaded: they look up in C++ what is in force in a thread."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: Calls | None = None


native_engine: Final = NativeEngine()


class ThreadRegions(threading.local):
    """This thread's records, the regions entered as one, its weight cache, and the guard id for the compiler."""

    def __init__(self) -> None:
        self.records = Records()
        _threads.append(weakref.ref(self.records, _threads.remove))
        self.groups: list[Group] = []
        # A thread of PyTorch's own ends no region, so nothing would empty its cache.
        self.is_pytorchs = in_pool_thread()
        self.cache = WeightCache(holds=not self.is_pytorchs, is_threads=True)
        self.guard_id = NO_GUARD_ID
        self.written_guard_id: GuardId | None = NO_GUARD_ID
        """The guard id that the flags hold; None while they are being changed."""
        self.lends = False
        """Whether this thread has given its policies to PyTorch's own threads, as it does with every change of them."""
        self.is_known = False
        """Whether compiled kernels know this thread; until then its operations run on the reference."""

    def introduce(self) -> None:
        """Tells compiled kernels whose thread this is, and what is in force in it."""
        calls = native_engine.calls
        if self.is_known or calls is None:
            return
        for device_type, slot in list(_thread_states.items()):
            bound = slot.state.bound_policy
            calls.put_in_force(calls.device(device_type), 0 if bound is None else bound.native)
        calls.this_thread(2 if self.is_pytorchs else 1)
        self.is_known = True


regions = ThreadRegions()


def a_region_is_open() -> bool:
    """Whether any thread is in a region of precast's own."""
    return any(map(_is_open, list(_threads)))


def _is_open(thread: weakref.ref[Records]) -> bool:
    return bool(thread())


class ThreadState:
    """What is in force in one thread for one device type."""

    __slots__ = ("_device_type", "attempts", "bound_policy", "uses")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.bound_policy: BoundPolicy | None = None
        """The policy of precast's innermost region; None outside of all regions. `follow` changes it."""
        self.attempts = 0
        """How many operations are being tried as PyTorch would run them, with autocast on in what they call."""
        self.uses = 0
        """How many operations have taken weights since a held copy was last compared with its parameter."""

    def follow(self, bound: BoundPolicy | None) -> None:
        """Has a policy in force, in compiled kernels too."""
        self.bound_policy = bound
        calls = native_engine.calls
        if calls is not None:
            calls.put_in_force(
                calls.device(self._device_type), 0 if bound is None else bound.native
            )

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
            calls.install(calls.device(self._device_type), 0 if bound is None else bound.native)


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
    regions.written_guard_id, regions.lends = guard_id, True


def inherited_policy(device_type: str) -> BoundPolicy | None:
    """What is in force for `device_type` in the thread that this one, a thread of PyTorch's own, works for."""
    bound_policy: BoundPolicy | None = compile_guards.inherited().get(device_type)
    return bound_policy
