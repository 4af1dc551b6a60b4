"""The search for writes to held weights that no version counter saw (`p.data.mul_(2)`).

Invariants:

- each entry of a region compares a part of one held weight with its parameter: the next weight at each entry, and
  once all had their turn, the next part; so does every 256th operation that takes weights, as a server may never
  leave its region;
- what is found stays found until the copies are renewed;
- nothing is compared while operations are recorded or transformed;
- a thread gets the error for weights that it uses, at an entry; where another thread's entry found the write, the next
  use of the weight raises it;
- what another thread is in the middle of writing is no unseen write: the counter moves when the operation ends;
- on other devices than the CPU the answer is read at the next entry, when it has long been computed.
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
    is_functorch_active,
    leave_process_groups,
    stream_of,
    without_torch_function,
)
from precast.errors import StaleWeightError
from precast.weights.held import (
    Copy,
    HeldParameter,
    before_next_region,
    compared_in_turn,
    lock,
    stale_message,
)
from precast.weights.possible_writes import invalidate_after_graphs, may_have_been_written

__all__ = [
    "LONGEST_WRITE",
    "USES_BETWEEN_CHECKS",
    "check_at_entry",
    "check_without_raising",
]

LONGEST_WRITE: Final = 1.0
"""Seconds after which no operation that another thread has begun still writes: one on many GiB takes less."""

USES_BETWEEN_CHECKS: Final = 256
"""How many operations that take weights a region runs before it looks again: one look takes as long as two of them."""

_YES: Final = torch.tensor(True, device="cpu")
_GUARD_ELEMENTS: Final = 16384
"""How many numbers one check compares: 64 KiB of float32, some us."""


def check_at_entry() -> None:
    """What a region does when it is entered, while there are held weights.

    Raises:
        StaleWeightError: a parameter was written and its version is as before. Every entry raises it until the copies
            are renewed.
    """
    invalidate_after_graphs()
    found = _find_unversioned_write()
    if found is None:
        return
    parameter = found[0].parameter()
    if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
        _mark_stale(*found)  # a use that evaluates would have it copied again
    else:
        leave_process_groups()
        raise StaleWeightError(stale_message(found[0].name, found[1]))


def check_without_raising() -> None:
    """The same where no error can be raised: the next use of that weight raises it.

    Regions of PyTorch's call it as they end, and operations call it now and then, as a region may never be left.
    """
    invalidate_after_graphs()
    found = _find_unversioned_write()
    if found is not None:
        _mark_stale(*found)


def _mark_stale(held_parameter: HeldParameter, dtype: torch.dtype) -> None:
    """Has the next use of a weight raise the error."""
    held_parameter.stale = True
    if (copy := held_parameter.copies.get(dtype)) is not None:
        copy.evict()


class _Answer(NamedTuple):
    """Whether a copy agrees with its parameter, as a tensor that may not be computed yet."""

    held_parameter: HeldParameter
    dtype: torch.dtype
    copy: Copy
    writes: int
    agrees: Tensor
    asked: float
    """When, in seconds of the monotonic clock."""

    def shows_unversioned_write(self) -> bool:
        """Whether the parameter was written, and nothing has been seen of it since."""
        copy = self.copy
        still = self.held_parameter.copies.get(self.dtype) is copy and copy.writes == self.writes
        parameter = copy.parameter
        if not still or self.held_parameter.suspended or parameter is None:
            return False
        if not copy.is_fresh_for(parameter) or may_have_been_written(
            self.held_parameter, copy, parameter
        ):
            return False  # it will be copied again before it is used
        return not self.agrees

    def still_shows_unversioned_write(self) -> bool:
        """The same, once no thread can be in the middle of that write."""
        while self.shows_unversioned_write():
            if threading.active_count() == 1 or self.is_old():
                return True
            time.sleep(0.001)
        return False

    def is_old(self) -> bool:
        """Whether what was being written then has been written."""
        return time.monotonic() - self.asked > LONGEST_WRITE


class _Search:
    """Where the search for unseen writes stands: the parameter, and how many rounds are behind."""

    turn = 0
    rounds = 0
    answers: ClassVar[list[_Answer]] = []


def _find_unversioned_write() -> tuple[HeldParameter, torch.dtype] | None:
    """Compares a part of one held weight with its parameter: another at each call, another part in each round."""
    for key in list(before_next_region):
        if (act := before_next_region.pop(key, None)) is not None:
            act()
    if dispatch_modes() or is_functorch_active() or is_capturing():
        return None
    waiting, turn = tuple(compared_in_turn), _Search.turn
    if turn >= len(waiting):
        turn, _Search.rounds = 0, _Search.rounds + 1
    if not waiting:
        return None
    with without_torch_function():
        asked, _Search.answers = _Search.answers, []
        for answer in _compared(waiting[turn], _Search.rounds):
            (asked if answer.agrees.is_cpu else _Search.answers).append(answer)
        for answer in asked:
            if threading.get_ident() in answer.held_parameter.threads:
                if answer.still_shows_unversioned_write():
                    _Search.answers.append(answer)  # until the copies are renewed
                    return answer.held_parameter, answer.dtype
            elif answer.shows_unversioned_write():
                if answer.is_old():
                    _mark_stale(answer.held_parameter, answer.dtype)
                elif all(other.copy is not answer.copy for other in _Search.answers):
                    _Search.answers.append(answer)  # until the write has ended
    _Search.turn = turn + 1
    return None


def _compared(held_parameter: HeldParameter, part: int) -> Iterator[_Answer]:
    parameter = held_parameter.parameter()
    if parameter is None or held_parameter.suspended:
        return
    for dtype, copy in list(held_parameter.copies.items()):
        with lock:
            if not copy.is_fresh_for(parameter) or may_have_been_written(
                held_parameter, copy, parameter
            ):
                continue  # it will be copied again before it is used
            handle = (
                copy.new_handle()
            )  # first: what is written from now on is no fault of what was written before
        if copy.stream == stream_of(parameter.device) or copy.has_run():
            agrees = _agrees(handle.tensor, parameter, part)
            yield _Answer(held_parameter, dtype, copy, handle.writes, agrees, time.monotonic())


def _agrees(copy: Tensor, parameter: Tensor, part: int) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        source = parameter.detach()
        if source.shape != copy.shape:
            return _YES  # given another shape by another thread, meanwhile
        as_in_memory = copy.stride() == source.stride()
        held, source = (_part(t, part, as_in_memory) for t in (copy, source))
        cast = source.to(held.dtype)
        if cast.is_cpu and torch.equal(cast, held):
            return _YES
        return ((cast == held) | (cast.isnan() & held.isnan())).all()


def _part(tensor: Tensor, part: int, as_in_memory: bool) -> Tensor:
    """Some of a tensor's numbers, neighbours in memory if possible; others in each part, until all had their turn."""
    dense = as_in_memory and _is_dense(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.reshape(-1)
    parts = max(1, -(-flat.numel() // _GUARD_ELEMENTS))
    start = part % parts * _GUARD_ELEMENTS
    return flat[start : start + _GUARD_ELEMENTS]


def _is_dense(tensor: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        or tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    )
