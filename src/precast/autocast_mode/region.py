"""`autocast`, the region in which operations run in the precision that a policy prescribes.

Invariants:

- a region object is only a description. An entry stores the state that it replaces on the thread's stack, so one object
  can be entered by recursion or by several threads at once, and each exit restores the state before its entry;
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
    "policies_in_exports",
    "policy_of_region",
    "precision_in_graph",
    "put_in_force",
    "record_for_export",
]

# Plain integers: comparison with a member of an enumeration would take time in each region.
_ONE_OF_SEVERAL, _OUTERMOST = int(RegionExit.ONE_OF_SEVERAL), int(RegionExit.OUTERMOST)


class autocast(DecoratorRegion):  # noqa: N801 -- the name that PyTorch gave it
    """A region in which operations run in the precision that a policy prescribes.

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
            policy_key = (
                (None, policy.fingerprint) if isinstance(policy, Policy) else (policy, None)
            )
            self._steps = _traced_region(
                *_torch_arguments(device_type, dtype, enabled, cache_enabled, *policy_key)
            )
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
            self._enter(record)
        except BaseException:
            _end_all([record])
            raise
        return self

    def _enter(self, record: RegionRecord) -> None:
        """Enter the region and fill `record`, an empty one. After an exception, the caller restores the state in it."""
        if held.attached and self.enabled:
            unversioned_writes.check_at_entry()
        entry = self._fast_entry
        if entry is None or not entry.enter(entry.address, self, entry, record):
            self._enter_step_by_step(record)

    def _enter_step_by_step(self, record: RegionRecord) -> None:
        """Enter by the fast entry of an equal region, if there is one, or step by step."""
        device = self.device
        state = thread_state(device).state
        outer = state.bound_policy
        bound = self._bound_policy(outer)
        key = (outer is None, *self._flags(), self.cache_enabled)
        # Not for regions inside another policy: the entry would keep that policy alive.
        shared_entries = {} if bound is None or outer not in {None, bound} else bound.fast_entries
        entry: FastEntry | None = shared_entries.get(key)
        if entry is not None and entry is not self._fast_entry:
            self._fast_entry = entry
            if entry.enter(entry.address, self, entry, record):
                return
        if _torch.function_modes():
            record_for_export(self._flags(), self.cache_enabled, bound)
        new_entry = FastEntry.begin(device, bound)
        previous = present_state(device)
        record.fill(self, previous, [])
        regions.records.append(record)
        # Only now, because `unregister` first sets `is_active` to False and then looks for records.
        if bound is not None and bound is not outer and not bound.registration.is_active:
            bound = registration.bind(bound.policy, device)
        if bound is not None and not bound.matches_torch:
            _torch.optimize_torchscript(False)  # its autocast pass applies PyTorch's policy
        if bound is not outer:
            put_in_force(state, device, bound)
        torch.set_autocast_enabled(device, self.enabled)
        torch.set_autocast_dtype(device, self.fast_dtype)
        # A trace replaces the function that increments PyTorch's count. No signal interrupts `extend`, which calls it
        # and records the result.
        record.nesting.extend(map(call, (torch.autocast_increment_nesting,)))
        if self.cache_enabled is not None:
            torch.set_autocast_cache_enabled(self.cache_enabled)
        if new_entry is not None and bound is not None and not regions.guard_id.repeats:
            new_entry.complete(previous, bound)
            self._fast_entry = shared_entries[key] = new_entry

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
            statuses.extend(map(native_engine.leave, (self,)))  # no signal interrupts this
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

    def _leave_step_by_step(self, ended: list[RegionRecord]) -> None:
        if _torch.function_modes():
            _torch.export_region(None)
        records = regions.records
        if records and records[-1].owner is self:
            ended.append(records[-1])
            _end(records[-1])
        else:
            _leave_nesting(_splice_out(self))
            _warn_out_of_order(self)

    def _bound_policy(self, surrounding: BoundPolicy | None) -> BoundPolicy | None:
        """Return the policy inside the region. A disabled region has one too, as code inside may enable autocast."""
        if self.policy is not None:
            return registration.bind(self.policy, self.device)
        device = self.device
        return surrounding or installed(device).bound_policy or registration.bind_default(device)

    def _flags(self) -> tuple[str, torch.dtype, bool]:
        return self.device, self.fast_dtype, self.enabled

    def _region_for_trace(self) -> autocast:
        """Return an equal region. One that is older than the trace of a function cannot be entered in its graph."""
        return autocast(
            self.device, self.fast_dtype, self.enabled, self.cache_enabled, policy=self.policy
        )

    def __repr__(self) -> str:
        policy = f", policy={self.policy.name!r}" if self.policy else ""
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self.enabled}{policy})"


# In a graph of `torch.compile`, a region of PyTorch's represents one of precast's: its `cache_enabled` is text that
# names the policy, except for PyTorch's own. When the graph runs or is traced again, precast's region is entered.
_is_traced = torch.compiler.is_dynamo_compiling
_graph_policies: Final[dict[str, Policy]] = {}
"""The policies that graphs name, by fingerprint."""


@_torch.traced_as_constant
def _torch_arguments(  # noqa: PLR0917 -- Dynamo passes positional arguments
    device_type: str,
    dtype: torch.dtype | str | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: str | None,
    fingerprint: str | None,
) -> tuple[str, torch.dtype, bool, bool | str | None]:
    """Return the arguments of the PyTorch region that represents a region of precast's in a graph."""
    if dtype is None:
        _torch.guard_autocast_dtype(device_type)
    resolved = policy if fingerprint is None else policy_of(fingerprint)
    region = autocast(device_type, dtype, enabled, cache_enabled, policy=resolved)
    bound = region._bound_policy(thread_state(device_type).state.bound_policy)
    return (*region._flags(), _policy_text(bound, cache_enabled))


@_torch.traced_as_constant
def precision_in_graph(device_type: str) -> tuple[str, torch.dtype, bool, bool | str | None]:
    """Return these arguments for the precision in force, which a compiled function enters again in its backward."""
    region = _CapturedRegion(device_type)
    return (*region._flags(), _policy_text(region._captured, region.cache_enabled))


def _policy_text(bound: BoundPolicy | None, cache_enabled: bool | None) -> bool | str | None:
    """Return the `cache_enabled` of a region in a graph, with the name of the policy where it needs one."""
    if bound is None or (torch.compiler.is_exporting() and bound.distinct_fingerprint is None):
        return cache_enabled
    if torch.compiler.is_exporting() and not _exports.rewrites:
        refuse_export(bound.policy)
    _graph_policies[bound.policy.fingerprint] = bound.policy
    _torch.on_graph_region(_region_in_graph, _end_after_error)
    return f"precast {__version__} {bound.policy.fingerprint} {cache_enabled}"


class _ExportState(threading.local):
    """The state of a thread: `rewrites` is True while it runs `precast.export`, which replaces regions by casts."""

    rewrites = False


_exports: Final = _ExportState()


@contextmanager
def policies_in_exports() -> Iterator[None]:
    """Name the policy of each region in the graphs that are exported; the caller replaces these regions by casts."""
    previous, _exports.rewrites = _exports.rewrites, True
    try:
        yield
    finally:
        _exports.rewrites = previous


def record_for_export(
    flags: tuple[str, torch.dtype, bool], cache_enabled: bool | None, bound: BoundPolicy | None
) -> None:
    """Record the entry of a region in the exported graph, if the program is being exported.

    Raises:
        RegionError: the exported program would contain the region, and cannot name its policy.
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
    return _graph_policies[text.split()[-2]] if isinstance(text, str) else None


def refuse_export(policy: Policy) -> NoReturn:
    """Raise the error for a region that an exported program cannot represent."""
    raise RegionError(
        f"torch.export cannot record a region with the policy {policy.name!r}: an exported program can only contain "
        'regions of PyTorch. Use policy="torch" there, or export without the region and call the program in one.'
    )


def _traced_region(
    device: str, dtype: torch.dtype, enabled: bool, cache: Any
) -> Generator[None, None, None]:
    with torch.autocast(device, dtype, enabled, cache):
        yield


def _region_in_graph(device: str, dtype: torch.dtype, enabled: bool, text: str) -> autocast:
    *_, fingerprint, cache = text.split()
    cache_enabled = None if cache == "None" else cache == "True"
    return autocast(device, dtype, enabled, cache_enabled, policy=_graph_policies[fingerprint])


def _end_after_error(run: Callable[[], Any]) -> Any:
    """Call `run`, which executes a graph. If it raises, end the regions that the graph has not left."""
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
    """Several regions that are entered together, from `current_precision` or `disable`. Re-entrant, for any thread."""

    def __init__(self, members: Callable[[], tuple[autocast, ...]]) -> None:
        self._members = members

    @_torch.never_compiled
    def __enter__(self) -> Regions:
        entered: list[tuple[autocast, RegionRecord]] = []
        try:
            for region in self._members():
                entered.append((region, RegionRecord()))
                region._enter(entered[-1][1])
            regions.groups.append((self, entered))
        except BaseException:  # after an error or Ctrl-C, end the regions that were entered
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
    """Return the precision in force in this thread, to be entered in another thread, in a callback or in backward.

    Args:
        device_type: capture this device type only; None captures all for which PyTorch or a region has set one.

    Examples:
        >>> with autocast("cpu"):
        ...     precision = current_precision()
        >>> with precision:  # perhaps in another thread
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
    """Wrap the function of a checkpoint so that its rerun has the current policy. PyTorch restores its flags only."""
    if not regions.is_open:
        return function
    region = current_precision()

    def rerun(*args: Any, **kwargs: Any) -> Any:
        with region:
            return function(*args, **kwargs)

    return rerun


# The first wrapper is the outermost, so the rules for modules apply inside the region.
_torch.checkpoint_wrappers.insert(0, _rerun_in_region)


def _autocast_devices() -> tuple[str, ...]:
    """Return the device types with autocast enabled, or a region of precast's, in this thread."""
    entered = {record.device_type for record in regions.records}
    unused = _torch.UNUSED_DEVICE_TYPES  # `compile_guards` uses their flags
    return tuple(
        d
        for d in DEVICE_TYPES
        if d in entered or (d not in unused and torch.is_autocast_enabled(d))
    )


class _CapturedRegion(autocast):
    """A region with the precision in force where it is created. Its bound policy is None if that was PyTorch's."""

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
        _torch.checkpoints.begin()  # otherwise done when kernels are registered, here for no policy
        registration.engine()  # the library cannot be loaded while a region is open
        return self._captured


def _end_all(entered: list[RegionRecord]) -> None:
    """Restore the state in those of these records that are still on the stack, innermost first."""
    for record in reversed(regions.records):
        if any(record is each for each in entered):
            _end(record)


def _clear_caches(device_type: str, status: int) -> None:
    """Empty the caches if the library has left the outermost region, of all or of precast's."""
    if status == _OUTERMOST or not (regions.is_open or installed(device_type).bound_policy):
        registration.clear_cache()


def _end(record: RegionRecord) -> None:
    """Restore the state in a record and remove it from this thread's stack. After an interrupt, call this again."""
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
    """Remove the latest record of `owner` and return it. The records above it will restore the state in it."""
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
    """Leave the latest entry of `owner`, innermost region first; with `again`, only the regions that are still open."""
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
        f"{owner!r} was not entered in this thread, which leaves it. A region belongs to one thread: to enter its "
        "precision in another, use `region = precast.current_precision()` here and `with region:` there."
    )


def _warn_out_of_order(owner: autocast) -> None:
    warnings.warn(
        f"{owner!r} ended before a region that was entered in it. This happens if a generator is suspended in a "
        "region, which is then also in force in its caller. Decorate the generator function: `@precast.autocast(...)`.",
        PrecastWarning,
        stacklevel=3,
    )


def put_in_force(state: ThreadState, device_type: str, bound: BoundPolicy | None) -> None:
    """Apply a policy to this thread's operations and to the guards of compiled functions."""
    guard_id = regions.guard_id.with_policy(
        device_type, None if bound is None else bound.distinct_fingerprint
    )
    previous = regions.written_guard_id
    if guard_id is previous:
        state.set_policy(bound)
        return
    # None until the guard id is written. If that is interrupted, `_restore_device` writes it.
    regions.written_guard_id = None
    state.set_policy(bound)
    write_guard_id(guard_id, previous)


def _restore_device(record: RegionRecord) -> None:
    state = thread_state(record.device_type).state
    if state.bound_policy is not record.bound_policy or regions.written_guard_id is None:
        put_in_force(state, record.device_type, record.bound_policy)
    torch.set_autocast_enabled(record.device_type, record.enabled)
    torch.set_autocast_dtype(record.device_type, record.dtype)


def _restore_thread(record: RegionRecord) -> None:
    torch.set_autocast_cache_enabled(record.cache_enabled)
    _torch.optimize_torchscript(record.optimizes_torchscript)
