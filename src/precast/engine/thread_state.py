"""What each thread keeps about its regions: a stack of records, the frame in force, the weight cache.

Invariants:

- PyTorch's own thread-local flags stay the one truth for *enabled* and *dtype*; a frame adds only policy;
- every entry of a region pushes one record that holds all it replaced, so any nesting, re-entry or
  recursion of the same object restores what was there;
- all of it is thread-local: a new thread starts with no region, as in PyTorch. The one thing that all threads share is
  what `install` put there, for the regions that PyTorch opens.
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
from precast.engine.compile_guards import NO_MARK, Mark
from precast.policy.policy import Policy
from precast.weights.weight_cache import WeightCache

__all__ = [
    "Frame",
    "Group",
    "InForce",
    "InForceHere",
    "Installed",
    "Record",
    "Records",
    "Registration",
    "Runner",
    "ThreadRegions",
    "a_region_is_open",
    "in_force",
    "inherited_policy",
    "installed",
    "regions",
    "write_mark",
]

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""One operation under one policy: called as ``runner(keyset, args, kwargs)``."""


@dataclass(slots=True, eq=False)
class Registration:
    """The kernels on the dispatcher, between two times that all are taken off."""

    holds: bool = True


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Frame:
    """The policy in force for one device type, and its runner for each operation that needs one."""

    policy: Policy
    runners: Mapping[str, Runner]
    registration: Registration
    """Whether the kernels that ask for the runners are still on the dispatcher."""
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
    frame: Frame | None
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
    """This thread's records, the groups entered as one, the weight cache of all, and the mark for the compiler."""

    def __init__(self) -> None:
        self.records = Records()
        _threads.append(weakref.ref(self.records, _threads.remove))
        self.groups: list[Group] = []
        # A thread of PyTorch's own ends no region, so nothing would empty its cache.
        self.cache = WeightCache(holds=not in_pool_thread())
        self.mark = NO_MARK
        self.written: Mark | None = NO_MARK
        """The mark that flags say; None from when they begin to change until they say another."""


regions = ThreadRegions()


def a_region_is_open() -> bool:
    """Whether any thread is in a region of precast's own."""
    return any(map(_is_open, list(_threads)))


def _is_open(thread: weakref.ref[Records]) -> bool:
    return bool(thread())


class InForce:
    """What holds in one thread for one device type."""

    __slots__ = ("attempts", "cache", "frame", "uses")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        """That of precast's innermost region; None outside of all."""
        self.attempts = 0
        """How many operations are being tried as PyTorch would run them, with autocast on in what they call."""
        self.cache = regions.cache
        self.uses = 0
        """How many operations have asked for weights since writes to held ones were last looked for."""


class InForceHere(threading.local):
    """`InForce` of the thread that asks; one read of a thread-local value gives a kernel all it needs."""

    def __init__(self) -> None:
        self.in_force = InForce()


_in_force: dict[str, InForceHere] = {}


def in_force(device_type: str) -> InForceHere:
    """The thread-local slot for `device_type`; kernels hold on to it."""
    return _in_force.get(device_type) or _in_force.setdefault(device_type, InForceHere())


class Installed:
    """What holds in every thread for one device type, in regions of PyTorch's own outside of all of precast's."""

    __slots__ = ("frame",)

    def __init__(self) -> None:
        self.frame: Frame | None = None


_installed: dict[str, Installed] = {}


def installed(device_type: str) -> Installed:
    """The slot for `device_type`; kernels hold on to it."""
    return _installed.get(device_type) or _installed.setdefault(device_type, Installed())


def write_mark(mark: Mark, before: Mark | None) -> None:
    """Marks this thread anew, and lends the frames that the mark speaks of to threads of PyTorch's own.

    Args:
        mark: the new mark.
        before: what `regions.written` was.
    """
    regions.written, regions.mark = None, mark
    slots = ((device, _in_force.get(device)) for device, _ in mark.policies)
    compile_guards.write(
        mark, before, {device: slot.in_force.frame for device, slot in slots if slot}
    )
    regions.written = mark


def inherited_policy(device_type: str) -> Frame | None:
    """What is in force for `device_type` in the thread that this one, a thread of PyTorch's own, works for."""
    frame: Frame | None = compile_guards.lent().get(device_type)
    return frame
