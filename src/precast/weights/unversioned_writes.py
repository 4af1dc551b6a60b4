"""Search for writes to held weights that PyTorch's version counters do not record (`p.data.mul_(2)`).

Invariants:

- every `ENTRIES_BETWEEN_CHECKS`-th region entry compares a part of one held copy with its parameter: the next copy
  each time and, after all copies, their next part. Every `USES_BETWEEN_CHECKS`-th operation that takes weights does
  the same, because a server may never leave its region;
- a write that samples show (`samples.py`) is no error, because the next use makes a new cast;
- another detected write is reported until the copies are rewritten;
- nothing is compared while operations are recorded or transformed;
- a region entry raises the error, in a thread that uses the weight. If another thread detects the write, the next use
  of the weight raises it;
- a write that another thread is still executing is no error: PyTorch increments the version counter at its end;
- on devices other than the CPU a result is read at a later entry, after it has arrived on the CPU: nothing waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from precast._torch import (
    HostCopy,
    abort_process_groups,
    dispatch_modes,
    is_capturing,
    is_real,
    stream_of,
    without_torch_function,
)
from precast.errors import StaleWeightError
from precast.weights.held import (
    Copy,
    CopyHandle,
    CopyKey,
    HeldParameter,
    before_next_region,
    comparison_queue,
    lock,
    stale_message,
)
from precast.weights.held_float8 import QuantisedCopy
from precast.weights.possible_writes import needs_recast
from precast.weights.view_cache import is_dense

__all__ = [
    "ENTRIES_BETWEEN_CHECKS",
    "LONGEST_WRITE",
    "USES_BETWEEN_CHECKS",
    "check_at_entry",
    "check_at_exit",
    "check_within_region",
]

LONGEST_WRITE: Final = 1.0
"""Seconds after which a concurrent operation is assumed to have ended. Writing many GiB takes less."""

ENTRIES_BETWEEN_CHECKS: Final = 8
"""Region entries per comparison.

A comparison takes 0.2 to 0.3 ms when a network has emptied the processor's caches, mostly for the calls. A decoder of
13 million parameters takes 3 to 6 ms per token (2 cores, torch 2.13): comparing at each entry took 3 to 6 per cent of
the time, at every eighth entry it takes less than one.
"""

USES_BETWEEN_CHECKS: Final = 256
"""Operations that take weights per comparison. A comparison takes as long as two of them."""

_PART: Final = 16384
"""Elements per comparison: 64 KiB of float32, read in a few microseconds."""


def check_at_entry() -> None:
    """Search for unversioned writes at the entry of a region, while weights are held.

    Raises:
        StaleWeightError: a parameter was written without moving its version counter. Every entry raises it until the
            copies are rewritten.
    """
    _prepare()
    write = _find_unversioned_write(compare=_is_due())
    if write is None:
        return
    parameter = write[0].parameter()
    if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
        _mark_stale(*write)  # its next use may rewrite the copy anyway, so the entry raises nothing
    else:
        abort_process_groups()
        raise StaleWeightError(stale_message(write[0].name, write[1]))


def check_at_exit() -> None:
    """Search at the end of a region of PyTorch's. It cannot raise, so the next use of the weight does."""
    _check_without_raising(compare=_is_due())


def check_within_region() -> None:
    """Search between two operations of a region, which may never be left. The caller counts the operations."""
    _check_without_raising(compare=True)


def _prepare() -> None:
    """Do the work that is due before copies are used again, at every entry."""
    for key in list(before_next_region):
        if (task := before_next_region.pop(key, None)) is not None:
            task()


def _check_without_raising(*, compare: bool) -> None:
    _prepare()
    write = _find_unversioned_write(compare=compare)
    if write is not None:
        _mark_stale(*write)


def _mark_stale(held_parameter: HeldParameter, key: CopyKey) -> None:
    """Make the next use of a weight raise the error."""
    held_parameter.stale = True
    held_parameter.take_back()
    if (copy := held_parameter.copies.get(key)) is not None:
        copy.evict()


class _Comparison(NamedTuple):
    """A comparison of a copy with its parameter. The result may not be computed yet."""

    held_parameter: HeldParameter
    key: CopyKey
    copy: Copy
    writes: int
    matches: HostCopy | None
    """The result; None if they are equal."""
    requested_at: float
    """Time of the comparison on the monotonic clock, in seconds."""

    def shows_unversioned_write(self) -> bool:
        """Return True if the values differ and the copy has not been rewritten, invalidated or dropped since."""
        copy = self.copy
        is_present = self.held_parameter.copies.get(self.key) is copy and copy.writes == self.writes
        parameter = copy.parameter
        if not is_present or self.held_parameter.suspended or parameter is None:
            return False
        if _will_be_rewritten(self.held_parameter, copy, parameter):
            return False
        return self.matches is not None and not self.matches.read()

    def confirms_unversioned_write(self) -> bool:
        """Return the same, after waiting until no thread can still be executing that write."""
        while self.shows_unversioned_write():
            if threading.active_count() == 1 or self.is_old():
                return True
            time.sleep(0.001)
        return False

    def is_old(self) -> bool:
        """Return True if an operation that was running at the time of the comparison has ended."""
        return time.monotonic() - self.requested_at > LONGEST_WRITE


class _SearchState:
    """The progress of the search, shared by all threads."""

    entries = 0
    """Regions entered or left since the last comparison."""
    turn = 0
    """The index of the next parameter in `comparison_queue`."""
    rounds = 0
    """Completed passes over the queue. Selects the part of each copy that is compared."""
    comparisons: ClassVar[list[_Comparison]] = []
    """Comparisons whose result is to be read, or reported again."""


def _is_due() -> bool:
    """Count an entry; return True if it should compare."""
    _SearchState.entries += 1
    if _SearchState.entries < ENTRIES_BETWEEN_CHECKS:
        return False
    _SearchState.entries = 0
    return True


def _find_unversioned_write(*, compare: bool) -> tuple[HeldParameter, CopyKey] | None:
    """Read the available results, after one more comparison if `compare`; return the weight that was written."""
    if not (compare or _SearchState.comparisons) or not comparison_queue:
        return None
    if dispatch_modes() or not is_real() or is_capturing():
        return None
    with without_torch_function():
        comparisons, _SearchState.comparisons = _SearchState.comparisons, []
        if compare:
            comparisons += _next_comparisons()
        for comparison in comparisons:
            if (write := _report_or_defer(comparison)) is not None:
                return write
    return None


def _next_comparisons() -> Iterator[_Comparison]:
    """Yield one comparison for each copy of the next parameter in the queue."""
    turn = _SearchState.turn
    if turn >= len(comparison_queue):
        turn, _SearchState.rounds = 0, _SearchState.rounds + 1
    _SearchState.turn = turn + 1
    for held_parameter in comparison_queue[turn : turn + 1]:  # another thread may shorten the queue
        yield from _comparisons_of(held_parameter, _SearchState.rounds)


def _report_or_defer(comparison: _Comparison) -> tuple[HeldParameter, CopyKey] | None:
    """Return the weight if this thread is to raise the error. Otherwise keep the result, or mark the weight stale."""
    held_parameter, key = comparison.held_parameter, comparison.key
    if comparison.matches is None:
        return None
    if not comparison.matches.has_arrived():
        _SearchState.comparisons.append(comparison)
        return None
    if threading.get_ident() in held_parameter.threads:
        if comparison.confirms_unversioned_write():
            _SearchState.comparisons.append(comparison)  # until the copies are rewritten
            return held_parameter, key
    elif comparison.shows_unversioned_write():
        if comparison.is_old():
            _mark_stale(held_parameter, key)
        elif all(other.copy is not comparison.copy for other in _SearchState.comparisons):
            _SearchState.comparisons.append(comparison)  # until the write has ended
    return None


def _comparisons_of(held_parameter: HeldParameter, part: int) -> Iterator[_Comparison]:
    parameter = held_parameter.parameter()
    if parameter is None or held_parameter.suspended:
        return
    for key, copy in list(held_parameter.copies.items()):
        with lock:
            if _will_be_rewritten(held_parameter, copy, parameter):
                continue
            # Before the comparison: a write that begins later must not count as one that came before it.
            handle = copy.new_handle()
        if copy.stream == stream_of(parameter.device) or copy.is_written():
            matches = _matches(handle, parameter, part)
            result = None if matches is None else HostCopy(matches)
            yield _Comparison(held_parameter, key, copy, handle.writes, result, time.monotonic())


def _will_be_rewritten(held_parameter: HeldParameter, copy: Copy, parameter: Tensor) -> bool:
    """Return True if the copy will be rewritten before its next use, so that its present values do not matter."""
    if not copy.is_valid_for(parameter) or needs_recast(held_parameter, copy, parameter):
        return True
    if copy.has_sampled_values(parameter, compares_all=True):
        return False
    copy.invalidate()
    return True


def _matches(handle: CopyHandle, parameter: Tensor, part: int) -> Tensor | None:
    """Compare a part of a copy with its parameter. None means that they are equal."""
    copy = handle.tensor
    with torch.inference_mode(False), torch.no_grad():
        source = parameter.detach()
        if source.shape != copy.shape:
            return None  # another thread has changed the shape
        if isinstance(handle.copy, QuantisedCopy):
            assert handle.scales is not None
            rows = _rows(source.shape, part)
            equal = handle.copy.matches(copy, handle.scales[0], source, rows)
            return None if equal.is_cpu and equal else equal
        as_in_memory = copy.stride() == source.stride()
        held, source = (_part(t, part, as_in_memory) for t in (copy, source))
        cast = source.to(held.dtype)
        if cast.is_cpu and torch.equal(cast, held):
            return None
        return ((cast == held) | (cast.isnan() & held.isnan())).all()


def _rows(shape: torch.Size, part: int) -> slice:
    """Return some rows of a matrix; successive parts cover all rows in turn."""
    count = max(1, _PART // shape[1])
    parts = -(-shape[0] // count)
    start = part % parts * count
    return slice(start, start + count)


def _part(tensor: Tensor, part: int, as_in_memory: bool) -> Tensor:
    """Return some elements of a tensor, adjacent in memory if possible; successive parts cover all elements in turn."""
    dense = as_in_memory and is_dense(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.reshape(-1)
    parts = max(1, -(-flat.numel() // _PART))
    start = part % parts * _PART
    return flat[start : start + _PART]
