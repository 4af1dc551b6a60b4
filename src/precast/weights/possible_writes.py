"""When a held weight may have been written although its version counter did not move.

Training writes through `.data`: optimizers that are not PyTorch's, weights that are clipped, averaged, exchanged for
their average, broadcast. The counter does not record such a write, but a program does other things around it, which are
seen here.

Invariants:

- a weight that no optimizer of PyTorch's kind steps may have been written since it got a gradient, or while it has one;
- a weight that such an optimizer steps is written by its steps, which are listened to. It may also have been written
  where its gradient was set to None without a step, as when one network is trained through another;
- a weight that is trained may have been written between training and evaluation, either way;
- after a thread has recorded a graph, any weight may have got a gradient: copies for evaluation are then renewed;
- what writes a weight writes all weights in the same memory.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

from torch import Tensor, is_grad_enabled

from precast._torch import next_sequence, version_of
from precast.weights.held_copy import Copy, lock
from precast.weights.held_parameter import HeldParameter
from precast.weights.held_record import Circumstances

__all__ = [
    "invalidate_after_graphs",
    "may_have_been_written",
    "note_circumstances",
]


def _circumstances(held_parameter: HeldParameter, parameter: Tensor) -> Circumstances:
    """Those of this moment and thread."""
    if not held_parameter.overlapping:
        trains = parameter.requires_grad
        received = sum([copy.record.received for copy in held_parameter.copies.values()])
        has_gradient = trains and parameter.grad is not None
        return Circumstances(trains and is_grad_enabled(), trains, received, has_gradient, ())
    overlapping = (h.parameter() for h in held_parameter.overlapping)
    others = [other for other in overlapping if other is not None]
    together = (parameter, *others)
    received = sum(
        c.record.received
        for h in (held_parameter, *held_parameter.overlapping)
        for c in h.copies.values()
    )
    trainable = any(p.requires_grad for p in together)
    return Circumstances(
        trainable and is_grad_enabled(),
        trainable,
        received,
        trainable and any(p.grad is not None for p in together),
        tuple(map(version_of, others)),
    )


_evaluated: Final[weakref.WeakSet[HeldParameter]] = weakref.WeakSet()
"""Weights that are trained, with copies that were written where no gradient is recorded: these are used unasked."""


class _Here(threading.local):
    """The number of the next node of a graph in this thread, when it was last looked at."""

    def __init__(self) -> None:
        self.sequence = next_sequence()


_here: Final = _Here()


def note_circumstances(
    held_parameter: HeldParameter, copy: Copy, parameter: Tensor, *, in_use: bool
) -> None:
    """Notes the circumstances in which a copy was written; where it was not for a use, it keeps what it is used for."""
    now, before = _circumstances(held_parameter, parameter), copy.circumstances
    if not in_use and before is not None:
        now = Circumstances(before.trains, *now[1:])
    copy.circumstances = now
    if now.is_trainable and not now.trains:
        _evaluated.add(held_parameter)


def may_have_been_written(held_parameter: HeldParameter, copy: Copy, parameter: Tensor) -> bool:
    """Whether a parameter may have been written since it was copied, although no counter says so."""
    now, then = _circumstances(held_parameter, parameter), copy.circumstances
    if then is None or now.versions != then.versions:
        return True
    if not (now.is_trainable or then.is_trainable):
        return False
    if now.trains is not then.trains:
        return True
    got_one = now.received != then.received
    if held_parameter.is_stepped():
        return got_one and not now.has_gradient
    return got_one or now.has_gradient or then.has_gradient


def invalidate_after_graphs() -> None:
    """Doubts what was copied for evaluation, if this thread has made a graph since it asked last."""
    sequence = next_sequence()
    if sequence == _here.sequence:
        return
    _here.sequence = sequence
    if _evaluated:
        with lock:
            some = list(_evaluated)
            _evaluated.clear()
            for held_parameter in some:
                if not held_parameter.is_stepped():
                    held_parameter.invalidate()
