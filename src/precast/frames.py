"""What each thread keeps about its regions: a stack of records, the frame in force, the weight cache.

Invariants:

- PyTorch's own thread-local flags stay the one truth for *enabled* and *dtype*; a frame adds only policy;
- every entry of a region pushes one record that holds all it replaced, so any nesting, re-entry or
  recursion of the same object restores what was there;
- all of it is thread-local: a new thread starts with no region, as in PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from precast.policy import Policy
from precast.weights import WeightCache

__all__ = [
    "Frame",
    "InForce",
    "InForceHere",
    "Record",
    "Runner",
    "ThreadRegions",
    "in_force",
    "regions",
]

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""One operation under one policy: called as ``runner(keyset, args, kwargs)``."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The policy in force for one device type, and its runner for each operation that needs one."""

    policy: Policy
    runners: Mapping[str, Runner]
    pending: tuple[str, ...] = ()
    """Operations with a rule that no library has defined yet."""
    is_pytorchs: bool = False
    """Whether the policy says what PyTorch's own tables say, wherever PyTorch works."""


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


class ThreadRegions(threading.local):
    """This thread's records, outermost first, the groups entered as one, and the weight cache of all."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.groups: list[tuple[AbstractContextManager[object], ...]] = []
        self.cache = WeightCache()


regions = ThreadRegions()


class InForce:
    """What holds in one thread for one device type."""

    __slots__ = ("attempts", "cache", "frame")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        """The innermost region's; None outside of all."""
        self.attempts = 0
        """How many operations are being tried as PyTorch would run them, with autocast on in what they call."""
        self.cache = regions.cache


class InForceHere(threading.local):
    """`InForce` of the thread that asks; one read of a thread-local value gives a kernel all it needs."""

    def __init__(self) -> None:
        self.in_force = InForce()


_in_force: dict[str, InForceHere] = {}


def in_force(device_type: str) -> InForceHere:
    """The thread-local slot for `device_type`; kernels hold on to it."""
    return _in_force.get(device_type) or _in_force.setdefault(device_type, InForceHere())
