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
from typing import Any

import torch

from precast._torch import in_pool_thread
from precast.engine import compile_guards
from precast.engine.compile_guards import NO_GUARD_ID, GuardId
from precast.policy.policy import Policy
from precast.weights.weight_cache import WeightCache

__all__ = [
    "BoundPolicy",
    "Group",
    "Installed",
    "Kernel",
    "Record",
    "Records",
    "Registration",
    "ThreadLocalState",
    "ThreadRegions",
    "ThreadState",
    "a_region_is_open",
    "inherited_policy",
    "installed",
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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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


Group = tuple[object, list[tuple[Any, Record]]]
"""Regions that were entered as one: the object that was, and each region with its record."""


class Records(list[Record]):
    """The open regions of one thread, outermost first."""

    __slots__ = ("__weakref__",)


_threads: list[weakref.ref[Records]] = []


class ThreadRegions(threading.local):
    """This thread's records, the regions entered as one, its weight cache, and the guard id for the compiler."""

    def __init__(self) -> None:
        self.records = Records()
        _threads.append(weakref.ref(self.records, _threads.remove))
        self.groups: list[Group] = []
        # A thread of PyTorch's own ends no region, so nothing would empty its cache.
        self.cache = WeightCache(holds=not in_pool_thread())
        self.guard_id = NO_GUARD_ID
        self.written_guard_id: GuardId | None = NO_GUARD_ID
        """The guard id that the flags hold; None while they are being changed."""


regions = ThreadRegions()


def a_region_is_open() -> bool:
    """Whether any thread is in a region of precast's own."""
    return any(map(_is_open, list(_threads)))


def _is_open(thread: weakref.ref[Records]) -> bool:
    return bool(thread())


class ThreadState:
    """What is in force in one thread for one device type."""

    __slots__ = ("attempts", "bound_policy", "cache", "uses")

    def __init__(self) -> None:
        self.bound_policy: BoundPolicy | None = None
        """The policy of precast's innermost region; None outside of all regions."""
        self.attempts = 0
        """How many operations are being tried as PyTorch would run them, with autocast on in what they call."""
        self.cache = regions.cache
        self.uses = 0
        """How many operations have taken weights since a held copy was last compared with its parameter."""


class ThreadLocalState(threading.local):
    """`ThreadState` of the thread that asks; one read of a thread-local value gives a kernel all it needs."""

    def __init__(self) -> None:
        self.state = ThreadState()


_thread_states: dict[str, ThreadLocalState] = {}


def thread_state(device_type: str) -> ThreadLocalState:
    """The thread-local slot for `device_type`; kernels hold on to it."""
    return _thread_states.get(device_type) or _thread_states.setdefault(
        device_type, ThreadLocalState()
    )


class Installed:
    """What holds in every thread for one device type, in regions of PyTorch's own outside of all of precast's."""

    __slots__ = ("bound_policy",)

    def __init__(self) -> None:
        self.bound_policy: BoundPolicy | None = None


_installed: dict[str, Installed] = {}


def installed(device_type: str) -> Installed:
    """The slot for `device_type`; kernels hold on to it."""
    return _installed.get(device_type) or _installed.setdefault(device_type, Installed())


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


def inherited_policy(device_type: str) -> BoundPolicy | None:
    """What is in force for `device_type` in the thread that this one, a thread of PyTorch's own, works for."""
    bound_policy: BoundPolicy | None = compile_guards.inherited().get(device_type)
    return bound_policy
