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

from precast import _torch
from precast.policy import Policy
from precast.weights import WeightCache

__all__ = [
    "ActiveFrame",
    "Frame",
    "Record",
    "Runner",
    "ThreadRegions",
    "active",
    "regions",
    "torchscript_pass",
]

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""One operation under one policy: called as ``runner(keyset, args, kwargs)``."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The policy in force for one device type, and its runner for each operation that needs one."""

    device_type: str
    policy: Policy
    runners: Mapping[str, Runner]
    pending: tuple[str, ...] = ()
    """Operations with a rule that no library has defined yet."""


@dataclass(slots=True, eq=False)
class Record:
    """One entry of a region: whose it is, and what it replaced."""

    owner: object
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    frame: Frame | None


class ThreadRegions(threading.local):
    """This thread's records, outermost first, the groups entered as one, and the weight cache of all."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.groups: list[tuple[AbstractContextManager[object], ...]] = []
        self.cache = WeightCache()


class TorchScriptPass:
    """TorchScript's own autocast pass: off while a region of ours is open anywhere, else as it was.

    The pass writes PyTorch's casts into a scripted graph, once and whatever the policy. Always off would be wrong
    too: without it a `with torch.autocast` inside a scripted function does nothing (torch 2.13).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = True

    def hold(self) -> None:
        """One more region is open."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = _torch.set_torchscript_autocast(False)

    def release(self) -> None:
        """One less; the last one restores what was there."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                _torch.set_torchscript_autocast(self._before)


regions = ThreadRegions()
torchscript_pass = TorchScriptPass()


class ActiveFrame(threading.local):
    """The frame in force for one device type in this thread, None outside all regions; and the thread's cache."""

    frame: Frame | None = None

    def __init__(self) -> None:
        self.cache = regions.cache


_active: dict[str, ActiveFrame] = {}


def active(device_type: str) -> ActiveFrame:
    """The thread-local slot for `device_type`; kernels hold on to it."""
    return _active.setdefault(device_type, ActiveFrame())
