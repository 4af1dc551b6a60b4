"""autocast: the region in which operations run in the precision that a policy gives them.

Invariants:

- the object is only a description; the state that an entry replaces is kept on the thread's stack. So one object can be
  entered twice, by recursion or by several threads at once, and each exit restores the state before its entry;
- after an error nothing has changed: arguments are checked when the object is created, and an entry or exit that Ctrl-C
  interrupts restores the state in its record;
- PyTorch's own flags are set too, so `torch.is_autocast_enabled` and `torch.get_autocast_dtype` are right.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from operator import call
from typing import Any, Final, NoReturn

import torch

from precast import _torch
from precast._internal.version import __version__
from precast.autocast_mode.arguments import (
    ACCEPTED,
    REQUIRED,
    check_device_type,
    check_dtype,
    cuda_is_usable,
    dtype_of,
    refuse_dtype_type,
)
from precast.autocast_mode.decorator import DecoratorRegion
from precast.autocast_mode.fast_entry import FastEntry
from precast.engine import registration
from precast.engine.thread_state import (
    BoundPolicy,
    RegionGroup,
    RegionRecord,
    ThreadState,
    installed,
    present_state,
    regions,
    thread_state,
    write_guard_id,
)
from precast.errors import PrecastWarning, RegionError
from precast.policy.policy import DEVICE_TYPES, Policy, policy_of
from precast.weights import held, unversioned_writes
from precast.weights.native.api import native_engine
from precast.weights.native.boundary import RegionExit

__all__ = [
    "Regions",
    "autocast",
    "current_precision",
    "disable",
    "in_graph",
    "naming_policies",
    "policy_of_region",
    "put_in_force",
    "record_for_export",
]

# Plain integers: comparison with a member of an enumeration would take time in each region.
_ONE_OF_SEVERAL, _OUTERMOST = int(RegionExit.ONE_OF_SEVERAL), int(RegionExit.OUTERMOST)


class autocast(DecoratorRegion):  # noqa: N801 -- the name that PyTorch gave it
    """A region in which operations run in the precision that a policy gives them.

    Context manager and decorator, with the signature of `torch.autocast`. Thread-local, nestable, re-entrant.

    Args:
        device_type: the device type of its tensors, as in `tensor.device.type`: "cuda", "cpu" ...
        dtype: the lower precision, torch.bfloat16, torch.float16 or a name such as "bf16". None is the surrounding
            region's or, outside of all regions, PyTorch's default: float16 on CUDA, bfloat16 on CPU.
        enabled: apply the policy. With False, operations inside a surrounding region run in full precision.
        cache_enabled: cast weights once and keep them until the outermost region ends. None is the surrounding setting.
        policy: a `Policy`, the name of a preset or the path of a policy file. None is the surrounding region's or,
            outside of all regions, the installed one, or else "default".

    Raises:
        RegionError: an invalid device type or dtype; nothing has changed then.
        PolicyError: a policy that cannot be read.

    Examples:
        >>> linear = torch.nn.Linear(4, 2)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     linear(torch.ones(3, 4)).dtype
        torch.bfloat16
    """

    _fast_entry: FastEntry | None = None

    @_torch.runs_uncompiled
    def __init__(
        self,
        device_type: str = REQUIRED,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | os.PathLike[str] | None = None,
    ) -> None:
        if _is_traced():
            named = (None, policy.fingerprint) if isinstance(policy, Policy) else (policy, None)
            self._steps = _traced_region(*_plan(device_type, dtype, enabled, cache_enabled, *named))
            return
        if type(device_type) is not str or device_type not in ACCEPTED:
            check_device_type(device_type)
        self.device = device_type
        self.enabled = bool(enabled) and (device_type != "cuda" or cuda_is_usable())
        lower = dtype_of(dtype) if isinstance(dtype, str) else dtype
        self.fast_dtype = torch.get_autocast_dtype(device_type) if lower is None else lower
        if self.enabled and (device_type, self.fast_dtype) not in ACCEPTED:
            check_dtype(self.fast_dtype, device_type)
        elif type(self.fast_dtype) is not torch.dtype:
            refuse_dtype_type(self.fast_dtype)
        self.cache_enabled = cache_enabled
        self.policy = (
            policy if policy is None or isinstance(policy, Policy) else Policy.load(policy)
        )

    @_torch.runs_uncompiled
    def __enter__(self) -> autocast:
        if _is_traced():
            next(self._steps)
            return self
        record = RegionRecord()
        try:  # Ctrl-C may come between any two steps: the state in the record is restored
            self._enter_as(record)
        except BaseException:
            _end_all([record])
            raise
        return self

    def _enter_as(self, record: RegionRecord) -> None:
        """Enter the region. If that is interrupted, the caller ends this record, which is empty before."""
        if held.attached and self.enabled:
            unversioned_writes.check_at_entry()
        entry = self._fast_entry
        if entry is None or not entry.enter(entry.number, self, entry, record):
            self._enter_step_by_step(record)

    def _enter_step_by_step(self, record: RegionRecord) -> None:
        """Enter by the fast entry of an equal region, if there is one, or step by step."""
        device = self.device
        state = thread_state(device).state
        outside = state.bound_policy
        bound = self._bound_policy(outside)
        key = (outside is None, *self._flags(), self.cache_enabled)
        # Not for regions inside another policy: the entry would keep that policy alive.
        shared = {} if bound is None or outside not in {None, bound} else bound.fast_entries
        entry: FastEntry | None = shared.get(key)
        if entry is not None and entry is not self._fast_entry:
            self._fast_entry = entry
            if entry.enter(entry.number, self, entry, record):
                return
        if _torch.function_modes():
            record_for_export(self._flags(), self.cache_enabled, bound)
        new_entry = FastEntry.begin(device, bound)
        previous = present_state(device)
        record.fill(self, previous, [])
        regions.records.append(record)
        # Only now, because `unregister` first sets `holds` to False and then looks for records.
        if bound is not None and bound is not outside and not bound.registration.holds:
            bound = registration.bind(bound.policy, device)
        if bound is not None and not bound.matches_torch:
            _torch.optimize_torchscript(False)  # it applies PyTorch's policy only
        if bound is not outside:
            put_in_force(state, device, bound)
        torch.set_autocast_enabled(device, self.enabled)
        torch.set_autocast_dtype(device, self.fast_dtype)
        # PyTorch's count is changed and recorded in a single step without interrupts, by the function that a trace
        # replaces.
        record.nesting.extend(map(call, (torch.autocast_increment_nesting,)))
        if self.cache_enabled is not None:
            torch.set_autocast_cache_enabled(self.cache_enabled)
        if new_entry is not None and bound is not None and not regions.guard_id.repeats:
            new_entry.complete(previous, bound)
            self._fast_entry = shared[key] = new_entry

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a copy or a pickle, without the fast entry of this process."""
        return {name: value for name, value in vars(self).items() if name != "_fast_entry"}

    @_torch.defers_signals
    @_torch.runs_uncompiled
    def __exit__(self, *exc_info: object) -> None:
        records: list[RegionRecord] = []  # gets the record before anything is changed
        statuses: list[int] = []
        try:
            if _is_traced():
                next(self._steps, None)
                return
            statuses.extend(map(native_engine.leave, (self,)))  # a single step without interrupts
            if statuses[0] == 0:
                self._leave_step_by_step(records)
            elif statuses[0] != _ONE_OF_SEVERAL:
                _clear_caches(self.device, statuses[0])
        except RegionError:
            raise
        except BaseException:  # such as Ctrl-C: steps that are done are not repeated
            if records:
                _end(records[0])
            elif statuses in ([], [0]):
                self.__exit__()
            else:
                _clear_caches(self.device, statuses[0])
            raise

    def _leave_step_by_step(self, ending: list[RegionRecord]) -> None:
        if _torch.function_modes():
            _torch.export_region(None)
        records = regions.records
        if records and records[-1].owner is self:
            ending.append(records[-1])
            _end(records[-1])
        else:
            _leave_nesting(_splice_out(self))
            _warn_out_of_order(self)

    def _bound_policy(self, surrounding: BoundPolicy | None) -> BoundPolicy | None:
        """Return the policy in force inside. A disabled region has one too, because code inside may enable autocast."""
        if self.policy is not None:
            return registration.bind(self.policy, self.device)
        device = self.device
        return surrounding or installed(device).bound_policy or registration.bind_default(device)

    def _flags(self) -> tuple[str, torch.dtype, bool]:
        return self.device, self.fast_dtype, self.enabled

    def _region_for_trace(self) -> autocast:
        """Return an equal region; an object created before the trace cannot enter the graph of a compiled function."""
        return autocast(
            self.device, self.fast_dtype, self.enabled, self.cache_enabled, policy=self.policy
        )

    def __repr__(self) -> str:
        policy = f", policy={self.policy.name!r}" if self.policy else ""
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self.enabled}{policy})"


# In a graph of `torch.compile` a region is one of PyTorch's, whose `cache_enabled` names the policy unless that is
# PyTorch's own. When the graph runs or is traced further, a region of precast's is entered in its place.
_is_traced = torch.compiler.is_dynamo_compiling
_in_graphs: Final[dict[str, Policy]] = {}
"""The policies named in graphs, by fingerprint."""


@_torch.traced_as_constant
def _plan(  # noqa: PLR0917 -- Dynamo passes positional arguments
    device_type: str,
    dtype: torch.dtype | str | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: str | None,
    fingerprint: str | None,
) -> tuple[str, torch.dtype, bool, bool | str | None]:
    """Return the arguments of PyTorch's region that represents one of precast's in a graph."""
    if dtype is None:
        _torch.guard_autocast_dtype(device_type)
    chosen = policy if fingerprint is None else policy_of(fingerprint)
    region = autocast(device_type, dtype, enabled, cache_enabled, policy=chosen)
    bound = region._bound_policy(thread_state(device_type).state.bound_policy)
    return (*region._flags(), _policy_text(bound, cache_enabled))


@_torch.traced_as_constant
def in_graph(device_type: str) -> tuple[str, torch.dtype, bool, bool | str | None]:
    """Return the same for the precision in force, for a compiled function to enter it again in its backward."""
    region = _CapturedRegion(device_type)
    return (*region._flags(), _policy_text(region._captured, region.cache_enabled))


def _policy_text(bound: BoundPolicy | None, cache_enabled: bool | None) -> bool | str | None:
    if bound is None or (torch.compiler.is_exporting() and bound.distinct_fingerprint is None):
        return cache_enabled
    if torch.compiler.is_exporting() and not _exports.rewrites:
        refuse_export(bound.policy)
    _in_graphs[bound.policy.fingerprint] = bound.policy
    _torch.on_graph_region(_region_in_graph, _end_after_error)
    return f"precast {__version__} {bound.policy.fingerprint} {cache_enabled}"


class _ExportState(threading.local):
    """True while this thread runs `precast.export`, which replaces regions of any policy by casts."""

    rewrites = False


_exports: Final = _ExportState()


@contextmanager
def naming_policies() -> Iterator[None]:
    """Name the policy of each region in exported graphs; the caller removes the regions from the graph again."""
    before, _exports.rewrites = _exports.rewrites, True
    try:
        yield
    finally:
        _exports.rewrites = before


def record_for_export(
    flags: tuple[str, torch.dtype, bool], cache_enabled: bool | None, bound: BoundPolicy | None
) -> None:
    """Record the begin of a region in an export, if one runs the program.

    Raises:
        RegionError: the exported program would keep the region, and cannot name its policy.
    """
    is_distinct = bound is not None and bound.distinct_fingerprint is not None
    cache: bool | str | None = cache_enabled
    if is_distinct and _exports.rewrites:
        cache = _policy_text(bound, cache_enabled)
    if _torch.export_region((*flags, cache)) and is_distinct and not _exports.rewrites:
        assert bound is not None
        _torch.export_region(None)
        refuse_export(bound.policy)


def policy_of_region(text: object) -> Policy | None:
    """Return the policy that a region in a graph names; None for a region of PyTorch's."""
    return _in_graphs[text.split()[-2]] if isinstance(text, str) else None


def refuse_export(policy: Policy) -> NoReturn:
    """Raise the error for a region that an exported program cannot represent."""
    raise RegionError(
        f"torch.export cannot write down a region with the policy {policy.name!r}: an exported program knows PyTorch's "
        'own regions alone. Use policy="torch" there, or export without the region, and call the program in one.'
    )


def _traced_region(
    device: str, dtype: torch.dtype, enabled: bool, cache: Any
) -> Generator[None, None, None]:
    with torch.autocast(device, dtype, enabled, cache):
        yield


def _region_in_graph(device: str, dtype: torch.dtype, enabled: bool, text: str) -> autocast:
    *_, fingerprint, cache = text.split()
    cache_enabled = None if cache == "None" else cache == "True"
    return autocast(device, dtype, enabled, cache_enabled, policy=_in_graphs[fingerprint])


def _end_after_error(run: Callable[[], Any]) -> Any:
    """Call `run`; if it raises, end the regions that it has left open, as a graph does."""
    depth, nesting = regions.depth, _torch.autocast_nesting()
    try:
        return run()
    except BaseException:
        _end_all(regions.records[depth:])
        for _ in range(nesting, _torch.autocast_nesting()):  # regions of PyTorch's
            if torch.autocast_decrement_nesting() == 0:
                _torch.clear_autocast_cache()
                registration.clear_cache()
        raise


class Regions(DecoratorRegion):
    """Several regions entered as one; returned by `current_precision` and `disable`. Re-entrant, and for any thread."""

    def __init__(self, members: Callable[[], tuple[autocast, ...]]) -> None:
        self._members = members

    @_torch.never_compiled
    def __enter__(self) -> Regions:
        entered: list[tuple[autocast, RegionRecord]] = []
        try:
            for region in self._members():
                entered.append((region, RegionRecord()))
                region._enter_as(entered[-1][1])
            regions.groups.append((self, entered))
        except BaseException:  # after an error or Ctrl-C, end those that were entered
            if regions.groups and regions.groups[-1][1] is entered:
                regions.groups.pop()
            _end_all([record for _, record in entered])
            raise
        return self

    @_torch.defers_signals
    @_torch.never_compiled
    def __exit__(self, *exc_info: object) -> None:
        groups: list[RegionGroup] = []
        try:
            _leave_group(self, groups)
        except RegionError:
            raise
        except BaseException:
            _leave_group(self, groups, again=True)
            raise


@_torch.never_compiled
def current_precision(device_type: str | None = None) -> Regions:
    """Return the precision in force in this thread, to enter it elsewhere: in another thread, a callback, or backward.

    Args:
        device_type: capture this device type only; None captures all that PyTorch or a region has set here.


    Examples:
        >>> with autocast("cpu"):
        ...     here = current_precision()
        >>> with here:  # perhaps in another thread
        ...     torch.is_autocast_enabled("cpu")
        True
    """
    devices = _autocast_devices() if device_type is None else (device_type,)
    captured = tuple(_CapturedRegion(device) for device in devices)
    return Regions(lambda: captured)


@_torch.never_compiled
def disable() -> Regions:
    """Return a region in which autocast is off for every device type.

    Examples:
        >>> with autocast("cpu"), disable():
        ...     torch.is_autocast_enabled("cpu")
        False
    """
    return Regions(lambda: tuple(autocast(device, enabled=False) for device in _autocast_devices()))


def _rerun_in_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a checkpoint's function so that its rerun has the policy in force here; PyTorch restores its flags only."""
    if not regions.is_open:
        return function
    region = current_precision()

    def rerun(*args: Any, **kwargs: Any) -> Any:
        with region:
            return function(*args, **kwargs)

    return rerun


# The first in the list is the outermost: rules for modules apply inside of the region.
_torch.checkpoint_wrappers.insert(0, _rerun_in_region)


def _autocast_devices() -> tuple[str, ...]:
    """Return the device types with autocast on in this thread, or with a region of precast's."""
    entered = {record.device_type for record in regions.records}
    unused = _torch.UNUSED_DEVICE_TYPES  # their flags are not the program's, see `compile_guards`
    return tuple(
        d
        for d in DEVICE_TYPES
        if d in entered or (d not in unused and torch.is_autocast_enabled(d))
    )


class _CapturedRegion(autocast):
    """A region with the bound policy in force where it was created; without one where that was PyTorch's own."""

    @_torch.never_compiled
    def __init__(self, device: str) -> None:
        check_device_type(device)
        self.device = device
        self.enabled = torch.is_autocast_enabled(device)
        self.fast_dtype = torch.get_autocast_dtype(device)
        self.cache_enabled = torch.is_autocast_cache_enabled()
        self._captured = thread_state(device).state.bound_policy
        self.policy = None if self._captured is None else self._captured.policy

    def _bound_policy(self, surrounding: BoundPolicy | None) -> BoundPolicy | None:  # noqa: ARG002
        _torch.checkpoints.begin()  # without a policy, no kernels are registered here
        registration.engine()  # the library cannot be loaded while a region is open
        return self._captured


def _end_all(entered: list[RegionRecord]) -> None:
    """End the entries of this list that are still open, innermost first."""
    for record in reversed(regions.records):
        if any(record is each for each in entered):
            _end(record)


def _clear_caches(device_type: str, status: int) -> None:
    """Empty the caches if the library has left the outermost region, or the outermost of precast's."""
    if status == _OUTERMOST or not (regions.is_open or installed(device_type).bound_policy):
        registration.clear_cache()


def _end(record: RegionRecord) -> None:
    """Restore the state in a record and remove it from this thread's stack; finish that if it was interrupted."""
    _restore_device(record)
    _restore_thread(record)
    _leave_nesting(record)


def _leave_nesting(record: RegionRecord) -> None:
    """Decrement PyTorch's count of open regions once, and empty the caches after the outermost one."""
    if len(record.nesting) == 1:
        record.nesting.extend(map(call, (torch.autocast_decrement_nesting,)))
    records = regions.records
    if records and records[-1] is record:
        records.pop()
    if record.nesting[1:] == [0]:
        _torch.clear_autocast_cache()
        registration.clear_cache()
    elif not records and installed(record.device_type).bound_policy is None:
        regions.cache.clear()


def _splice_out(owner: autocast) -> RegionRecord:
    """Remove `owner`'s latest record from below others, which then restore its state."""
    records = regions.records
    index = next((i for i in reversed(range(len(records))) if records[i].owner is owner), None)
    if index is None:
        raise _wrong_thread_error(owner)
    record = records.pop(index)
    later = records[index:]
    if later:
        later[0].cache_enabled = record.cache_enabled
        later[0].optimizes_torchscript = record.optimizes_torchscript
    else:
        _restore_thread(record)
    above = next((r for r in later if r.device_type == record.device_type), None)
    if above is None:
        _restore_device(record)
    else:
        above.enabled, above.dtype, above.bound_policy = (
            record.enabled,
            record.dtype,
            record.bound_policy,
        )
    return record


def _leave_group(owner: Regions, groups: list[RegionGroup], *, again: bool = False) -> None:
    """Leave an object's latest entry, innermost region first; with `again`, only the regions that are still open."""
    if not groups:
        groups.extend([group for group in regions.groups if group[0] is owner][-1:])
    if not groups:
        raise _wrong_thread_error(owner)
    for region, record in reversed(groups[0][1]):
        if not again or any(record is each for each in regions.records):
            region.__exit__(None, None, None)
    regions.groups[:] = [other for other in regions.groups if other is not groups[0]]


def _wrong_thread_error(owner: object) -> RegionError:
    return RegionError(
        f"{owner!r} ends in a thread that it was not entered in (or was never entered). A region belongs to its "
        "thread: to take it to another, use `region = precast.current_precision()` and `with region:` there."
    )


def _warn_out_of_order(owner: autocast) -> None:
    warnings.warn(
        f"{owner!r} ended while a region entered after it was still open. A suspended generator does that, and its "
        "region was in force in its caller. Decorate the generator function instead: `@precast.autocast(...)`.",
        PrecastWarning,
        stacklevel=3,
    )


def put_in_force(state: ThreadState, device_type: str, bound: BoundPolicy | None) -> None:
    """Make a policy that of this thread's operations, and of the guards of compiled functions."""
    guard_id = regions.guard_id.with_policy(
        device_type, None if bound is None else bound.distinct_fingerprint
    )
    before = regions.written_guard_id
    if guard_id is before:
        state.follow(bound)
        return
    # None until it is written: after an interrupt in between, the record's restoration writes it.
    regions.written_guard_id = None
    state.follow(bound)
    write_guard_id(guard_id, before)


def _restore_device(record: RegionRecord) -> None:
    state = thread_state(record.device_type).state
    if state.bound_policy is not record.bound_policy or regions.written_guard_id is None:
        put_in_force(state, record.device_type, record.bound_policy)
    torch.set_autocast_enabled(record.device_type, record.enabled)
    torch.set_autocast_dtype(record.device_type, record.dtype)


def _restore_thread(record: RegionRecord) -> None:
    torch.set_autocast_cache_enabled(record.cache_enabled)
    _torch.optimize_torchscript(record.optimizes_torchscript)
