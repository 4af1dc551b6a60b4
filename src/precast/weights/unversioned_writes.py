"""The search for writes to held weights that PyTorch's version counters do not record (`p.data.mul_(2)`).

Invariants:

- every `ENTRIES_BETWEEN_CHECKS`-th entry of a region compares a part of one held copy with its parameter: the next
  copy each time and, when all have been compared, their next part. So does every `USES_BETWEEN_CHECKS`-th operation
  that takes weights, because a server may never leave its region;
- a write that was found is reported until the copies are renewed;
- nothing is compared while operations are recorded or transformed;
- a region raises the error at its entry, in a thread that uses the weight. If another thread finds the write, the next
  use of the weight raises the error;
- a write that another thread is in the middle of is no error: PyTorch moves the version counter when the operation
  ends;
- on devices other than the CPU the result of a comparison is read at the next entry, when it has long been computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from precast._torch import (
    dispatch_modes,
    is_capturing,
    is_real,
    leave_process_groups,
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
    compared_in_turn,
    lock,
    stale_message,
)
from precast.weights.held_float8 import QuantisedCopy
from precast.weights.possible_writes import invalidate_after_graphs, may_have_been_written

__all__ = [
    "ENTRIES_BETWEEN_CHECKS",
    "LONGEST_WRITE",
    "USES_BETWEEN_CHECKS",
    "check_at_entry",
    "check_at_exit",
    "check_within_region",
]

LONGEST_WRITE: Final = 1.0
"""Seconds after which an operation that another thread has begun is taken to be done: on many GiB it takes less."""

ENTRIES_BETWEEN_CHECKS: Final = 8
"""How many entries of regions share one comparison.

A comparison takes 0.2 to 0.3 ms after a network has emptied the processor's caches, mostly in the calls and not in the
numbers, and a decoder of 13 million parameters takes 3 to 6 ms for a token (2 cores, torch 2.13): at each entry the
search took 3 to 6 per cent of the time, at every eighth it takes less than one.
"""

USES_BETWEEN_CHECKS: Final = 256
"""How many operations that take weights run between two comparisons; a comparison takes as long as two of them."""

_PART: Final = 16384
"""How many numbers one comparison reads: 64 KiB of float32, a few microseconds."""


def check_at_entry() -> None:
    """What a region does when it is entered while weights are held.

    Raises:
        StaleWeightError: a parameter was written and its version counter did not move. Every entry raises it until
            the copies are renewed.
    """
    _prepare()
    found = _find_unversioned_write(compare=_is_due())
    if found is None:
        return
    parameter = found[0].parameter()
    if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
        _mark_stale(*found)  # its next use may renew the copy anyway, so the entry raises nothing
    else:
        leave_process_groups()
        raise StaleWeightError(stale_message(found[0].name, found[1]))


def check_at_exit() -> None:
    """The same for regions of PyTorch's, when they end: they cannot raise, so the next use of the weight does."""
    _prepare()
    _check_without_raising(compare=_is_due())


def check_within_region() -> None:
    """The same between two operations of a region, which may never be left; the caller counts the operations."""
    _prepare()
    _check_without_raising(compare=True)


def _prepare() -> None:
    """Does what has to be done before copies are used again, at every entry."""
    invalidate_after_graphs()
    for key in list(before_next_region):
        if (act := before_next_region.pop(key, None)) is not None:
            act()


def _check_without_raising(*, compare: bool) -> None:
    found = _find_unversioned_write(compare=compare)
    if found is not None:
        _mark_stale(*found)


def _mark_stale(held_parameter: HeldParameter, key: CopyKey) -> None:
    """Has the next use of a weight raise the error."""
    held_parameter.stale = True
    held_parameter.take_back()
    if (copy := held_parameter.copies.get(key)) is not None:
        copy.evict()


class _Comparison(NamedTuple):
    """A comparison of a copy with its parameter, whose result may not be computed yet."""

    held_parameter: HeldParameter
    key: CopyKey
    copy: Copy
    writes: int
    agrees: Tensor | None
    """None where the copy agrees for certain."""
    asked: float
    """When it was asked for, in seconds of the monotonic clock."""

    def shows_unversioned_write(self) -> bool:
        """Whether the parameter was written, and nothing has been seen of that write since."""
        copy = self.copy
        still = self.held_parameter.copies.get(self.key) is copy and copy.writes == self.writes
        parameter = copy.parameter
        if not still or self.held_parameter.suspended or parameter is None:
            return False
        if _will_be_renewed(self.held_parameter, copy, parameter):
            return False
        return self.agrees is not None and not self.agrees

    def still_shows_unversioned_write(self) -> bool:
        """The same, once no thread can be in the middle of that write."""
        while self.shows_unversioned_write():
            if threading.active_count() == 1 or self.is_old():
                return True
            time.sleep(0.001)
        return False

    def is_old(self) -> bool:
        """Whether an operation that was writing when the comparison was asked for has ended."""
        return time.monotonic() - self.asked > LONGEST_WRITE


class _Search:
    """How far the search has come, for all threads together."""

    entries = 0
    """How many regions were entered or left since the last comparison."""
    turn = 0
    """Which of `compared_in_turn` is next."""
    rounds = 0
    """How often all have been compared; it chooses the part that is compared next."""
    comparisons: ClassVar[list[_Comparison]] = []
    """Those whose result is to be read, or to be reported again."""


def _is_due() -> bool:
    """Counts an entry; whether it is one that compares."""
    _Search.entries += 1
    if _Search.entries < ENTRIES_BETWEEN_CHECKS:
        return False
    _Search.entries = 0
    return True


def _find_unversioned_write(*, compare: bool) -> tuple[HeldParameter, CopyKey] | None:
    """Reads the results that have come, and if asked makes one more comparison; gives the weight that was written."""
    if not (compare or _Search.comparisons) or not compared_in_turn:
        return None
    if dispatch_modes() or not is_real() or is_capturing():
        return None
    with without_torch_function():
        ready, _Search.comparisons = _Search.comparisons, []
        if compare:
            for comparison in _next_comparisons():
                agrees = comparison.agrees
                if agrees is not None:
                    (ready if agrees.is_cpu else _Search.comparisons).append(comparison)
        for comparison in ready:
            if (found := _judged(comparison)) is not None:
                return found
    return None


def _next_comparisons() -> Iterator[_Comparison]:
    """Those of the next held parameter, one for each of its copies."""
    waiting, turn = tuple(compared_in_turn), _Search.turn
    if turn >= len(waiting):
        turn, _Search.rounds = 0, _Search.rounds + 1
    _Search.turn = turn + 1
    if waiting:
        yield from _compared(waiting[turn], _Search.rounds)


def _judged(comparison: _Comparison) -> tuple[HeldParameter, CopyKey] | None:
    """What a comparison has found, if this thread is to raise the error; otherwise it is kept or passed on."""
    held_parameter, key = comparison.held_parameter, comparison.key
    if threading.get_ident() in held_parameter.threads:
        if comparison.still_shows_unversioned_write():
            _Search.comparisons.append(comparison)  # until the copies are renewed
            return held_parameter, key
    elif comparison.shows_unversioned_write():
        if comparison.is_old():
            _mark_stale(held_parameter, key)
        elif all(other.copy is not comparison.copy for other in _Search.comparisons):
            _Search.comparisons.append(comparison)  # until the write has ended
    return None


def _compared(held_parameter: HeldParameter, part: int) -> Iterator[_Comparison]:
    parameter = held_parameter.parameter()
    if parameter is None or held_parameter.suspended:
        return
    for key, copy in list(held_parameter.copies.items()):
        with lock:
            if _will_be_renewed(held_parameter, copy, parameter):
                continue
            # Before the comparison: a write that begins after this is not taken for one that came before it.
            handle = copy.new_handle()
        if copy.stream == stream_of(parameter.device) or copy.has_run():
            agrees = _agrees(handle, parameter, part)
            yield _Comparison(held_parameter, key, copy, handle.writes, agrees, time.monotonic())


def _will_be_renewed(held_parameter: HeldParameter, copy: Copy, parameter: Tensor) -> bool:
    """Whether the copy will be written again before it is used, so that it does not matter what it holds now."""
    return not copy.is_fresh_for(parameter) or may_have_been_written(
        held_parameter, copy, parameter
    )


def _agrees(handle: CopyHandle, parameter: Tensor, part: int) -> Tensor | None:
    """Compare part of a copy with its parameter; None says that they agree, without a tensor."""
    copy = handle.tensor
    with torch.inference_mode(False), torch.no_grad():
        source = parameter.detach()
        if source.shape != copy.shape:
            return None  # given another shape by another thread, meanwhile
        if isinstance(handle.copy, QuantisedCopy):
            assert handle.scales is not None
            rows = _rows(source.shape, part)
            same = handle.copy.agrees(copy, handle.scales[0], source, rows)
            return None if same.is_cpu and same else same
        as_in_memory = copy.stride() == source.stride()
        held, source = (_part(t, part, as_in_memory) for t in (copy, source))
        cast = source.to(held.dtype)
        if cast.is_cpu and torch.equal(cast, held):
            return None
        return ((cast == held) | (cast.isnan() & held.isnan())).all()


def _rows(shape: torch.Size, part: int) -> slice:
    """Some of a matrix' rows; others in each part, until all had their turn."""
    count = max(1, _PART // shape[1])
    parts = -(-shape[0] // count)
    start = part % parts * count
    return slice(start, start + count)


def _part(tensor: Tensor, part: int, as_in_memory: bool) -> Tensor:
    """Some of a tensor's numbers, neighbours in memory if possible; others in each part, until all had their turn."""
    dense = as_in_memory and _is_dense(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.reshape(-1)
    parts = max(1, -(-flat.numel() // _PART))
    start = part % parts * _PART
    return flat[start : start + _PART]


def _is_dense(tensor: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        or tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    )
