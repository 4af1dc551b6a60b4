"""autocast: the region in which operations run in the precision that a policy gives them.

Invariants:

- the object is only a description; what an entry replaced is kept on the thread's stack, so one object can be
  entered twice, by recursion or by several threads at once, and each exit restores what its entry found;
- nothing has changed when an error is raised: arguments are checked when the object is made, and an entry or exit that
  Ctrl-C interrupts restores what its record says;
- PyTorch's own flags are set too, so `torch.is_autocast_enabled` and `torch.get_autocast_dtype` tell the truth.
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
from precast.autocast_mode.shortcut import Shortcut, Start
from precast.engine import registration
from precast.engine.native.calls import ONE_OF_SEVERAL, OUTERMOST
from precast.engine.thread_state import (
    BoundPolicy,
    Group,
    Record,
    ThreadState,
    installed,
    native_engine,
    regions,
    thread_state,
    write_guard_id,
)
from precast.errors import PrecastWarning, RegionError
from precast.policy.policy import DEVICE_TYPES, Policy, policy_of
from precast.weights import held, unversioned_writes

__all__ = [
    "Regions",
    "autocast",
    "current",
    "disable",
    "in_graph",
    "policy_said",
    "put_in_force",
    "rewriting_regions",
    "write_down",
]


class autocast(DecoratorRegion):  # noqa: N801 -- the name that PyTorch gave it
    """A region in which operations run in the precision that a policy gives them.

    Context manager and decorator, with the signature of `torch.autocast`. Thread-local, nestable, re-entrant.

    Args:
        device_type: the device type of the tensors it is for, as `tensor.device.type` says it: "cuda", "cpu" ...
        dtype: the lower precision, torch.bfloat16, torch.float16 or a name such as "bf16". None is the surrounding
            region's or, outside of all, PyTorch's default: float16 on CUDA, bfloat16 on CPU.
        enabled: whether the policy is applied; False is an island of full precision in a surrounding region.
        cache_enabled: whether weights are cast once and kept until the outermost region ends. None is as around.
        policy: a `Policy`, the name of a preset or the path of a policy file. None is the surrounding region's or,
            outside of all, the one that is installed, or else "default".

    Raises:
        RegionError: a device type or dtype that cannot be; nothing has changed then.
        PolicyError: a policy that cannot be read.

    Examples:
        >>> linear = torch.nn.Linear(4, 2)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     linear(torch.ones(3, 4)).dtype
        torch.bfloat16
    """

    _shortcut: Shortcut | None = None

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
            said = (None, policy.fingerprint) if isinstance(policy, Policy) else (policy, None)
            self._steps = _traced(*_plan(device_type, dtype, enabled, cache_enabled, *said))
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
        record = Record()
        try:  # Ctrl-C may come between any two steps: what is restored is what the record says
            self.enter_as(record)
        except BaseException:
            _end_all([record])
            raise
        return self

    def enter_as(self, record: Record) -> None:
        """Enters the region; the caller ends this record, which is empty before, if that is interrupted."""
        if held.attached and self.enabled:
            unversioned_writes.check_at_entry()
        known = self._shortcut
        if known is None or not known.enter(known.number, self, known, record):
            self._enter_otherwise(record)

    def _enter_otherwise(self, record: Record) -> None:
        """Enters by the shortcut that another object has found, or step by step."""
        device = self.device
        here = thread_state(device).state
        outside = here.bound_policy
        bound = self._bound_policy(outside)
        way = (outside is None, *self._flags(), self.cache_enabled)
        # What a policy kept for regions inside another policy's would keep the other alive.
        shared = {} if bound is None or outside not in {None, bound} else bound.shortcuts
        known: Shortcut | None = shared.get(way)
        if known is not None and known is not self._shortcut:
            self._shortcut = known
            if known.enter(known.number, self, known, record):
                return
        if _torch.function_modes():
            self._write_down(bound)
        start = Start.of(device, bound)
        found = (
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
            outside,
            _torch.optimizes_torchscript(),
        )
        record.fill(self, found, [])
        regions.records.append(record)
        # Only now: who takes the kernels off says so first, and then looks for records.
        if bound is not None and bound is not outside and not bound.registration.holds:
            bound = registration.bind(bound.policy, device)
        if bound is not None and not bound.is_pytorchs:
            _torch.optimize_torchscript(False)  # it knows PyTorch's own policy alone
        if bound is not outside:
            put_in_force(here, device, bound)
        torch.set_autocast_enabled(device, self.enabled)
        torch.set_autocast_dtype(device, self.fast_dtype)
        # PyTorch's count is changed and kept in one step that nothing interrupts, by what a trace may listen with.
        record.nesting.extend(map(call, (torch.autocast_increment_nesting,)))
        if self.cache_enabled is not None:
            torch.set_autocast_cache_enabled(self.cache_enabled)
        if start is not None and bound is not None and not regions.guard_id.repeats:
            self._shortcut = shared[way] = start.shortcut(found, bound)

    def __getstate__(self) -> dict[str, object]:
        """What a copy or a pickle has: all but the way in that this process knows."""
        return {name: value for name, value in vars(self).items() if name != "_shortcut"}

    @_torch.runs_uncompiled
    def __exit__(self, *exc_info: object) -> None:
        found: list[Record] = []  # gets the record before anything is changed
        left: list[int] = []
        try:
            if _is_traced():
                next(self._steps, None)
                return
            left.extend(map(native_engine.leave, (self,)))  # one step that nothing interrupts
            if left[0] == 0:
                self._leave_step_by_step(found)
            elif left[0] != ONE_OF_SEVERAL:
                _ended(self.device, left[0])
        except RegionError:
            raise
        except BaseException:  # Ctrl-C, say: what is done already is not done twice
            if found:
                _end(found[0])
            elif left in ([], [0]):
                self.__exit__()
            else:
                _ended(self.device, left[0])
            raise

    def _leave_step_by_step(self, found: list[Record]) -> None:
        if _torch.function_modes():
            _torch.export_region(None)
        records = regions.records
        if records and records[-1].owner is self:
            found.append(records[-1])
            _end(records[-1])
        else:
            _leave_nesting(_splice_out(self))
            _warn_out_of_order(self)

    def _bound_policy(self, surrounding: BoundPolicy | None) -> BoundPolicy | None:
        """The policy to be in force inside; a disabled region has one too: code in it may enable autocast again."""
        if self.policy is not None:
            return registration.bind(self.policy, self.device)
        device = self.device
        return surrounding or installed(device).bound_policy or registration.bind_default(device)

    def _flags(self) -> tuple[str, torch.dtype, bool]:
        return self.device, self.fast_dtype, self.enabled

    def _write_down(self, bound: BoundPolicy | None) -> None:
        """Tells an exporter that runs the program of this region, as PyTorch's region does."""
        write_down(self._flags(), self.cache_enabled, bound)

    def anew(self) -> autocast:
        """The same region as another object: one that existed before cannot enter the graph of a compiled function."""
        return autocast(
            self.device, self.fast_dtype, self.enabled, self.cache_enabled, policy=self.policy
        )

    def __repr__(self) -> str:
        policy = f", policy={self.policy.name!r}" if self.policy else ""
        return f"autocast({self.device!r}, dtype={self.fast_dtype}, enabled={self.enabled}{policy})"


# What `torch.compile` sees of a region: one of PyTorch's, whose `cache_enabled` says the policy where that is not
# PyTorch's own. When the graph runs or is traced further, a real region is entered in its place.
_is_traced = torch.compiler.is_dynamo_compiling
_in_graphs: Final[dict[str, Policy]] = {}
"""The policies that graphs name, by fingerprint."""


@_torch.traced_as_constant
def _plan(  # noqa: PLR0917 -- Dynamo hands on what it has
    device_type: str,
    dtype: torch.dtype | str | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: str | None,
    fingerprint: str | None,
) -> tuple[str, torch.dtype, bool, bool | str | None]:
    """The arguments for a region of PyTorch's that mean one of ours, where it stands."""
    if dtype is None:
        _torch.guard_autocast_dtype(device_type)
    asked = policy if fingerprint is None else policy_of(fingerprint)
    region = autocast(device_type, dtype, enabled, cache_enabled, policy=asked)
    bound = region._bound_policy(thread_state(device_type).state.bound_policy)
    return (*region._flags(), _said(bound, cache_enabled))


@_torch.traced_as_constant
def in_graph(device_type: str) -> tuple[str, torch.dtype, bool, bool | str | None]:
    """The same for what is in force, for a compiled function to enter it again in its backward."""
    here = _Captured(device_type)
    return (*here._flags(), _said(here._captured, here.cache_enabled))


def _said(bound: BoundPolicy | None, cache_enabled: bool | None) -> bool | str | None:
    if bound is None or (torch.compiler.is_exporting() and bound.meaning is None):
        return cache_enabled
    if torch.compiler.is_exporting() and not _exports.rewrites:
        refuse_export(bound.policy)
    _in_graphs[bound.policy.fingerprint] = bound.policy
    _torch.on_graph_region(_region_in_graph, _end_after_error)
    return f"precast {__version__} {bound.policy.fingerprint} {cache_enabled}"


class _Exports(threading.local):
    """Whether this thread exports for `precast.export`, which puts casts in the place of regions of any policy."""

    rewrites = False


_exports: Final = _Exports()


@contextmanager
def rewriting_regions() -> Iterator[None]:
    """Has exported programs name the policy of each region: who opens this takes the regions out of the graph again."""
    before, _exports.rewrites = _exports.rewrites, True
    try:
        yield
    finally:
        _exports.rewrites = before


def write_down(
    flags: tuple[str, torch.dtype, bool], cache_enabled: bool | None, bound: BoundPolicy | None
) -> None:
    """Tells an exporter, if one runs the program, that a region with a policy begins.

    Raises:
        RegionError: the exported program would keep the region, and cannot say its policy.
    """
    has_meaning = bound is not None and bound.meaning is not None
    said = _said(bound, cache_enabled) if has_meaning and _exports.rewrites else cache_enabled
    if _torch.export_region((*flags, said)) and has_meaning and not _exports.rewrites:
        assert bound is not None
        _torch.export_region(None)
        refuse_export(bound.policy)


def policy_said(said: object) -> Policy | None:
    """The policy that a region in a graph names; None where it is one of PyTorch's own."""
    return _in_graphs[said.split()[-2]] if isinstance(said, str) else None


def refuse_export(policy: Policy) -> NoReturn:
    """Raises the error for a region that an exported program cannot say."""
    raise RegionError(
        f"torch.export cannot write down a region with the policy {policy.name!r}: an exported program knows PyTorch's "
        'own regions alone. Use policy="torch" there, or export without the region, and call the program in one.'
    )


def _traced(
    device: str, dtype: torch.dtype, enabled: bool, cache: Any
) -> Generator[None, None, None]:
    with torch.autocast(device, dtype, enabled, cache):
        yield


def _region_in_graph(device: str, dtype: torch.dtype, enabled: bool, said: str) -> autocast:
    *_, fingerprint, cache = said.split()
    cache_enabled = None if cache == "None" else cache == "True"
    return autocast(device, dtype, enabled, cache_enabled, policy=_in_graphs[fingerprint])


def _end_after_error(run: Callable[[], Any]) -> Any:
    """Call `run`; where it raises, end the regions that it has left open, as a graph does."""
    depth, nesting = regions.depth, _torch.autocast_nesting()
    try:
        return run()
    except BaseException:
        _end_all(regions.records[depth:])
        for _ in range(nesting, _torch.autocast_nesting()):  # of regions of PyTorch's own
            if torch.autocast_decrement_nesting() == 0:
                _torch.clear_autocast_cache()
                registration.clear_cache()
        raise


class Regions(DecoratorRegion):
    """Several regions entered as one; what `current` and `disable` return. Re-entrant, and for any thread."""

    def __init__(self, members: Callable[[], tuple[autocast, ...]]) -> None:
        self._members = members

    @_torch.never_compiled
    def __enter__(self) -> Regions:
        entered: list[tuple[autocast, Record]] = []
        try:
            for region in self._members():
                entered.append((region, Record()))
                region.enter_as(entered[-1][1])
            regions.groups.append((self, entered))
        except BaseException:  # where one cannot be entered, or Ctrl-C comes, those before it end
            if regions.groups and regions.groups[-1][1] is entered:
                regions.groups.pop()
            _end_all([record for _, record in entered])
            raise
        return self

    @_torch.never_compiled
    def __exit__(self, *exc_info: object) -> None:
        found: list[Group] = []
        try:
            _leave_group(self, found)
        except RegionError:
            raise
        except BaseException:
            _leave_group(self, found, again=True)
            raise


@_torch.never_compiled
def current(device_type: str | None = None) -> Regions:
    """The precision in force in this thread, to enter elsewhere: in another thread, in a callback, in backward.

    Args:
        device_type: for this device type alone; None is for all that PyTorch or a region has set here.

    Examples:
        >>> with autocast("cpu"):
        ...     here = current()
        >>> with here:  # perhaps in another thread
        ...     torch.is_autocast_enabled("cpu")
        True
    """
    devices = _autocast_devices() if device_type is None else (device_type,)
    captured = tuple(_Captured(device) for device in devices)
    return Regions(lambda: captured)


@_torch.never_compiled
def disable() -> Regions:
    """A region in which autocast is off for every device type, without naming one.

    Examples:
        >>> with autocast("cpu"), disable():
        ...     torch.is_autocast_enabled("cpu")
        False
    """
    return Regions(lambda: tuple(autocast(device, enabled=False) for device in _autocast_devices()))


def _again_in_this_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint runs again in backward: in the policy in force here, where PyTorch restores its flags alone."""
    if not regions.is_open:
        return function
    here = current()

    def again(*args: Any, **kwargs: Any) -> Any:
        with here:
            return function(*args, **kwargs)

    return again


# The first in the list is the outermost: rules for modules act inside of the region.
_torch.checkpoint_wrappers.insert(0, _again_in_this_region)


def _autocast_devices() -> tuple[str, ...]:
    """The device types for which this thread has autocast on, or a region of ours."""
    entered = {record.device_type for record in regions.records}
    marked = _torch.UNUSED_DEVICE_TYPES  # their flags are not the program's: see `compile_guards`
    return tuple(
        d
        for d in DEVICE_TYPES
        if d in entered or (d not in marked and torch.is_autocast_enabled(d))
    )


class _Captured(autocast):
    """A region with the very policy that was in force where it was captured; none where that was PyTorch's own."""

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
        _torch.wrap_checkpoints()  # no kernels are registered here where none was in force
        registration.engine()  # the library cannot be loaded while a region is open
        return self._captured


def _end_all(entered: list[Record]) -> None:
    """Ends what is open of these entries, the innermost first."""
    for record in reversed(regions.records):
        if any(record is one for one in entered):
            _end(record)


def _ended(device_type: str, left: int) -> None:
    """Empties the caches when the library has left the outermost region, or the outermost of precast's own."""
    if left == OUTERMOST or not (regions.is_open or installed(device_type).bound_policy):
        registration.clear_cache()


def _end(record: Record) -> None:
    """Restores what a record says and takes it off this thread's stack; where that was begun already, the rest."""
    _restore_device(record)
    _restore_thread(record)
    _leave_nesting(record)


def _leave_nesting(record: Record) -> None:
    """Counts one open region less, once for each that was counted, and empties the caches behind the outermost."""
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


def _splice_out(owner: autocast) -> Record:
    """Takes `owner`'s latest record out from under others, which then restore what it would have."""
    records = regions.records
    index = next((i for i in reversed(range(len(records))) if records[i].owner is owner), None)
    if index is None:
        raise _ended_elsewhere(owner)
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


def _leave_group(owner: Regions, found: list[Group], *, again: bool = False) -> None:
    """Leaves an object's latest entry, the innermost region first; `again`, what is still open of it."""
    if not found:
        found.extend([group for group in regions.groups if group[0] is owner][-1:])
    if not found:
        raise _ended_elsewhere(owner)
    for region, record in reversed(found[0][1]):
        if not again or any(record is known for known in regions.records):
            region.__exit__(None, None, None)
    regions.groups[:] = [other for other in regions.groups if other is not found[0]]


def _ended_elsewhere(owner: object) -> RegionError:
    return RegionError(
        f"{owner!r} ends in a thread that it was not entered in (or was never entered). A region belongs to its "
        "thread: to take it to another, use `region = precast.current()` and `with region:` there."
    )


def _warn_out_of_order(owner: autocast) -> None:
    warnings.warn(
        f"{owner!r} ended while a region entered after it was still open. A suspended generator does that, and its "
        "region was in force in its caller. Decorate the generator function instead: `@precast.autocast(...)`.",
        PrecastWarning,
        stacklevel=3,
    )


def put_in_force(here: ThreadState, device_type: str, bound: BoundPolicy | None) -> None:
    """Has this thread's operations follow a policy, and says so where compiled functions look."""
    guard_id = regions.guard_id.after(device_type, None if bound is None else bound.meaning)
    before = regions.written_guard_id
    if guard_id is before:
        here.follow(bound)
        return
    # None until it is written: an interrupt in between leaves that to whoever restores the record.
    regions.written_guard_id = None
    here.follow(bound)
    write_guard_id(guard_id, before)


def _restore_device(record: Record) -> None:
    here = thread_state(record.device_type).state
    if here.bound_policy is not record.bound_policy or regions.written_guard_id is None:
        put_in_force(here, record.device_type, record.bound_policy)
    torch.set_autocast_enabled(record.device_type, record.enabled)
    torch.set_autocast_dtype(record.device_type, record.dtype)


def _restore_thread(record: Record) -> None:
    torch.set_autocast_cache_enabled(record.cache_enabled)
    _torch.optimize_torchscript(record.optimizes_torchscript)
