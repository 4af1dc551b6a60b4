"""Detection of writes that do not increment a tensor's version counter, from how the weight is used.

Training code writes through `.data`: optimizers that are not PyTorch's, clipping and averaging of weights, broadcasts.
The counter does not record such a write, but the uses of the weight before and after it differ.

Invariants:

- a weight without an observed optimizer may have been written once it has got a gradient, or while it has one;
- a weight with an observed optimizer is written by its steps. It may also have been written if its gradient was set
  to None without a step, as when one network is trained through another;
- a trained weight may have been written between training and evaluation, in either direction;
- after a thread has recorded a graph, any weight may have got a gradient, so copies for evaluation are rewritten;
- a write to a weight also writes the other weights in its memory.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

from torch import Tensor, is_grad_enabled

from precast._torch import next_sequence, version_of
from precast.weights.held_copy import Copy, UsageContext, lock
from precast.weights.held_parameter import HeldParameter

__all__ = [
    "invalidate_after_graphs",
    "needs_recast",
    "record_usage",
]


def _usage(held_parameter: HeldParameter, parameter: Tensor) -> UsageContext:
    """Return the present usage context of a parameter in this thread."""
    if not held_parameter.overlapping:
        trains = parameter.requires_grad
        received = sum([copy.record.received for copy in held_parameter.copies.values()])
        has_gradient = trains and parameter.grad is not None
        return UsageContext(trains and is_grad_enabled(), trains, received, has_gradient, ())
    overlapping = (h.parameter() for h in held_parameter.overlapping)
    others = [other for other in overlapping if other is not None]
    parameters = (parameter, *others)
    received = sum(
        c.record.received
        for h in (held_parameter, *held_parameter.overlapping)
        for c in h.copies.values()
    )
    trainable = any(p.requires_grad for p in parameters)
    return UsageContext(
        trainable and is_grad_enabled(),
        trainable,
        received,
        trainable and any(p.grad is not None for p in parameters),
        tuple(map(version_of, others)),
    )


_evaluation_weights: Final[weakref.WeakSet[HeldParameter]] = weakref.WeakSet()
"""Trainable weights with a copy that was written for evaluation. Such a copy is used without calls to Python."""


class _LastSequence(threading.local):
    """The sequence number of this thread's next graph node, when last read."""

    def __init__(self) -> None:
        self.sequence = next_sequence()


_last: Final = _LastSequence()


def record_usage(
    held_parameter: HeldParameter, copy: Copy, parameter: Tensor, *, in_use: bool
) -> None:
    """Record the usage context of a write. If the write was not `in_use`, keep `trains` of the last use."""
    current, previous = _usage(held_parameter, parameter), copy.usage
    if not in_use and previous is not None:
        current = UsageContext(previous.trains, *current[1:])
    copy.usage = current
    if current.is_trainable and not current.trains:
        _evaluation_weights.add(held_parameter)


def needs_recast(held_parameter: HeldParameter, copy: Copy, parameter: Tensor) -> bool:
    """Return True if a parameter may have been written since it was copied without moving its version counter."""
    current, recorded = _usage(held_parameter, parameter), copy.usage
    if recorded is None or current.versions != recorded.versions:
        return True
    if not (current.is_trainable or recorded.is_trainable):
        return False
    if current.trains is not recorded.trains:
        return True
    has_new_gradient = current.received != recorded.received
    if held_parameter.has_observed_optimizer():
        return has_new_gradient and not current.has_gradient
    return has_new_gradient or current.has_gradient or recorded.has_gradient


def invalidate_after_graphs() -> None:
    """Invalidate copies that were made for evaluation, if this thread has recorded a graph since the last call."""
    sequence = next_sequence()
    if sequence == _last.sequence:
        return
    _last.sequence = sequence
    if _evaluation_weights:
        with lock:
            weights = list(_evaluation_weights)
            _evaluation_weights.clear()
            for held_parameter in weights:
                if not held_parameter.has_observed_optimizer():
                    held_parameter.invalidate()
