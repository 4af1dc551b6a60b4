"""The state of each thread: its open regions, the policy in force, and the weight cache.

Invariants:

- PyTorch's thread-local flags define *enabled* and *dtype*; precast adds the policy only;
- each entry of a region pushes one record with all state that it replaces, so nested, repeated and recursive entries of
  one object restore the previous state;
- a region that the library has entered in one call is on the library's stack, above the records of this file, until
  `regions.records` is read. The policy in force is a number in memory that C++ and Python share;
- everything is thread-local: a new thread starts outside of regions, as in PyTorch. Threads share only the installed
  policy, which applies to PyTorch's regions.
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

from precast._torch import in_pool_thread, optimizes_torchscript
from precast.engine import compile_guards
from precast.engine.compile_guards import NO_GUARD_ID, GuardId
from precast.policy.policy import Policy
from precast.weights.native.api import native_engine
from precast.weights.native.boundary import ThreadKind, ThreadNumbers
from precast.weights.weight_cache import WeightCache

__all__ = [
    "BoundPolicy",
    "InstalledPolicy",
    "Kernel",
    "RegionGroup",
    "RegionRecord",
    "RegionStack",
    "RegionState",
    "Registration",
    "ThreadLocalState",
    "ThreadRegions",
    "ThreadState",
    "any_region_open",
    "inherited_policy",
    "installed",
    "present_state",
    "regions",
    "thread_state",
    "write_guard_id",
]

Kernel = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""The kernel of one operation with one policy, called as ``kernel(keyset, args, kwargs)``."""


@dataclass(slots=True, eq=False)
class Registration:
    """A set of kernels on the dispatcher. `is_active` becomes False when they are removed."""

    is_active: bool = True
    number: int = field(default_factory=itertools.count(1).__next__)
    """The number of the registration in the library."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class BoundPolicy:
    """A policy prepared for one device type: a kernel for each operation that needs one."""

    policy: Policy
    kernels: Mapping[str, Kernel]
    registration: Registration
    """The kernels on the dispatcher that look up `kernels`. When they are removed, the policy has to be bound again."""
    undefined_operations: tuple[str, ...] = ()
    """Operations with a rule that no library has defined yet."""
    definitions: tuple[int, ...] = ()
    """The result of `_torch.definition_counts` at the last search for these operations."""
    matches_torch: bool = False
    """True if the policy is the same as PyTorch's tables, except for errors."""

    distinct_fingerprint: str | None = None
    """The policy's fingerprint; None if it equals PyTorch's, including errors."""

    native_policy: int = 0
    """The address of the policy in the library, equal for policies with the same actions; 0 without the library."""

    number: int = field(default_factory=itertools.count(1).__next__)
    """The number that is in the shared memory of a thread while the policy is in force."""

    fast_entries: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """Fast entries of regions with this policy, outside of all regions or in one with this policy."""

    def __post_init__(self) -> None:
        number = self.number
        _bound_policies[number] = weakref.ref(self, lambda _: _bound_policies.pop(number, None))


_bound_policies: Final[dict[int, weakref.ref[BoundPolicy]]] = {}


@dataclass(slots=True, eq=False, init=False)
class RegionRecord:
    """One entry of a region: the region and the state that the entry replaced. Empty until `fill`."""

    owner: object
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    bound_policy: BoundPolicy | None
    optimizes_torchscript: bool
    nesting: list[int]
    """PyTorch's count of open regions after the entry and, once it has ended, after the exit."""

    def fill(self, owner: object, previous: RegionState, nesting: list[int]) -> None:
        """Set the region, the state that it replaced, and the count of open regions."""
        self.owner, self.nesting = owner, nesting
        (
            self.device_type,
            self.enabled,
            self.dtype,
            self.cache_enabled,
            self.bound_policy,
            self.optimizes_torchscript,
        ) = previous


RegionState = tuple[str, bool, torch.dtype, bool, BoundPolicy | None, bool]
"""The replaced state: the fields of `RegionRecord` from `device_type` to `optimizes_torchscript`."""

RegionGroup = tuple[object, list[tuple[Any, RegionRecord]]]
"""A `Regions` object, and each region that it has entered, with the record."""


class RegionStack(list[RegionRecord]):
    """The open regions of one thread, outermost first."""

    __slots__ = ("__weakref__",)


_threads: list[weakref.ref[RegionStack]] = []


class ThreadRegions(threading.local):
    """The open regions of this thread, its weight cache and its guard id."""

    def __init__(self) -> None:
        self._records = RegionStack()
        _threads.append(weakref.ref(self._records, _threads.remove))
        self.groups: list[RegionGroup] = []
        # A thread of PyTorch's own enters no regions, so nothing would empty its cache.
        self.is_pytorch_thread = in_pool_thread()
        self.cache = WeightCache(holds=not self.is_pytorch_thread, is_threads=True)
        self.numbers = ThreadNumbers(NO_GUARD_ID.number, NO_GUARD_ID.number)
        """In memory that is shared with compiled code once the thread is registered."""
        self.is_registered = False
        """False until `register_thread`: the operations of the thread then run on the reference engine."""

    @property
    def records(self) -> RegionStack:
        """The open regions, outermost first."""
        if self.numbers.open:
            self._import_native_records()
        return self._records

    @property
    def depth(self) -> int:
        """The number of open regions, without reading `records`."""
        return self.numbers.open + len(self._records)

    @property
    def is_open(self) -> bool:
        """True if a region is open, without reading `records`."""
        return bool(self.numbers.open or self._records)

    @property
    def guard_id(self) -> GuardId:
        """The guard id of the policies in force."""
        return compile_guards.by_number[self.numbers.guard_id]

    @guard_id.setter
    def guard_id(self, guard_id: GuardId) -> None:
        self.numbers.guard_id = guard_id.number

    @property
    def written_guard_id(self) -> GuardId | None:
        """The guard id in the flags; None while it is being changed."""
        return compile_guards.by_number.get(self.numbers.written_guard_id)

    @written_guard_id.setter
    def written_guard_id(self, guard_id: GuardId | None) -> None:
        self.numbers.written_guard_id = 0 if guard_id is None else guard_id.number

    def _import_native_records(self) -> None:
        api = native_engine.api
        assert api is not None
        for index in range(self.numbers.open):
            api.fill_record(index)
        # No signal interrupts `extend`, so each region is on exactly one of the two stacks.
        self._records.extend(iter(api.take_record, None))

    def register_thread(self) -> None:
        """Register this thread in the library, with its state."""
        api = native_engine.api
        if self.is_registered or api is None:
            return
        for device_type, slot in list(_thread_states.items()):
            slot.state.move_number(api.bound_number(device_type).contents)
        shared = api.thread_numbers()
        shared[0], self.numbers = self.numbers, shared.contents
        api.register_thread(ThreadKind.PYTORCH if self.is_pytorch_thread else ThreadKind.PYTHON)
        self.is_registered = True


regions = ThreadRegions()


def any_region_open() -> bool:
    """Return True if any thread is in a region of precast's own."""
    api = native_engine.api
    return any(map(_is_open, list(_threads))) or (api is not None and bool(api.any_open()))


def _is_open(thread: weakref.ref[RegionStack]) -> bool:
    return bool(thread())


class ThreadState:
    """The state of one thread for one device type."""

    __slots__ = ("_bound_policy", "_device_type", "number", "reruns", "uses")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._bound_policy: BoundPolicy | None = None
        """The argument of the last `set_policy`, which must live while it is in force."""
        self.number = c_int64()
        """The number of `bound_policy`, 0 for none, in memory shared with compiled code."""
        self.reruns = 0
        """The number of operations that are being promoted, with autocast off inside them."""
        self.uses = 0
        """The number of operations on weights since a held copy was last compared with its parameter."""
        api = native_engine.api
        if api is not None and regions.is_registered:
            self.move_number(api.bound_number(device_type).contents)

    @property
    def bound_policy(self) -> BoundPolicy | None:
        """The policy of the innermost region of precast's; None outside of all regions. `set_policy` changes it."""
        number = self.number.value
        if number == 0:
            return None
        bound = self._bound_policy
        return bound if bound is not None and bound.number == number else _bound_policies[number]()

    def set_policy(self, bound: BoundPolicy | None) -> None:
        """Put a policy in force, in compiled kernels too."""
        self._bound_policy = bound
        number = 0 if bound is None else bound.number
        api = native_engine.api
        if api is not None:
            native_policy = 0 if bound is None else bound.native_policy
            api.put_in_force(self._device_type, native_policy, number)
        self.number.value = number

    def move_number(self, number: c_int64) -> None:
        """Move the policy's number to memory that compiled code reads and writes too."""
        number.value, self.number = self.number.value, number
        self.set_policy(self.bound_policy)


class ThreadLocalState(threading.local):
    """The thread-local `ThreadState`. One read of a thread-local variable gives a kernel everything that it needs."""

    def __init__(self, device_type: str) -> None:
        self.state = ThreadState(device_type)


_thread_states: dict[str, ThreadLocalState] = {}


def thread_state(device_type: str) -> ThreadLocalState:
    """Return the thread-local slot for `device_type`; kernels keep a reference to it."""
    return _thread_states.get(device_type) or _thread_states.setdefault(
        device_type, ThreadLocalState(device_type)
    )


def present_state(device: str) -> RegionState:
    """Return the state of this thread that a region, or a rule for a module, replaces on a device type."""
    return (
        device,
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        thread_state(device).state.bound_policy,
        optimizes_torchscript(),
    )


class InstalledPolicy:
    """The policy of one device type in regions of PyTorch's, in all threads, outside of precast's regions."""

    __slots__ = ("_device_type", "bound_policy")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.bound_policy: BoundPolicy | None = None
        """The installed policy; None without one. `set_policy` changes it."""

    def set_policy(self, bound: BoundPolicy | None) -> None:
        """Install a policy, in compiled kernels too."""
        self.bound_policy = bound
        api = native_engine.api
        if api is not None:
            numbers = (0, 0) if bound is None else (bound.native_policy, bound.number)
            api.install(self._device_type, *numbers)


_installed: dict[str, InstalledPolicy] = {}


def installed(device_type: str) -> InstalledPolicy:
    """Return the slot for `device_type`; kernels keep a reference to it."""
    return _installed.get(device_type) or _installed.setdefault(
        device_type, InstalledPolicy(device_type)
    )


def write_guard_id(guard_id: GuardId, before: GuardId | None) -> None:
    """Replace the guard id `before` of this thread, and pass the policies to PyTorch's threads that work for it."""
    regions.written_guard_id, regions.guard_id = None, guard_id
    slots = ((device, _thread_states.get(device)) for device, _ in guard_id.policies)
    compile_guards.write(
        guard_id, before, {device: slot.state.bound_policy for device, slot in slots if slot}
    )
    regions.written_guard_id = guard_id
    regions.numbers.policies_inherited = True  # PyTorch's own threads have the policies now


def inherited_policy(device_type: str) -> BoundPolicy | None:
    """Return the policy in force in the thread for which this one, a thread of PyTorch's own, works."""
    bound_policy: BoundPolicy | None = (compile_guards.inherited_policies() or {}).get(device_type)
    return bound_policy
