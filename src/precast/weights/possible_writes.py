"""Detection of writes that do not increment a tensor's version counter, from the gradients of the weight.

Training code writes through `.data`: optimizers that are not PyTorch's, clipping and averaging of weights, broadcasts.
The counter does not record such a write. On the CPU a write to a whole weight changes its samples (`samples.py`); a
write to a part of it, such as the rows that got a gradient, may be seen here alone.

Invariants:

- a weight without an observed optimizer may have been written once it has got a gradient, or while it has one;
- a weight with an observed optimizer is written by its steps. It may also have been written if its gradient was set
  to None without a step, as when one network is trained through another;
- where samples cannot be read, on devices other than the CPU, a trained weight may have been written between training
  and evaluation, in either direction;
- a write to a weight also writes the other weights in its memory;
- gradients of other weights, and the regions of other models, do not matter.
"""

from __future__ import annotations

from torch import Tensor, is_grad_enabled

from precast._torch import version_of
from precast.weights.held_copy import Copy
from precast.weights.held_parameter import HeldParameter

__all__ = ["needs_recast", "record_usage"]


def record_usage(
    held_parameter: HeldParameter, copy: Copy, parameter: Tensor, *, in_use: bool
) -> None:
    """Record the gradients and the use at a write. If the write was not `in_use`, keep `trains` of the last use."""
    record = copy.record
    record.received_at_write = _received(held_parameter)
    record.had_gradient_at_write = _has_gradient(held_parameter, parameter)
    record.has_optimizer = held_parameter.has_observed_optimizer()
    copy.other_versions = _other_versions(held_parameter)
    if in_use:
        copy.trains = _trains(held_parameter, parameter)


def needs_recast(held_parameter: HeldParameter, copy: Copy, parameter: Tensor) -> bool:
    """Return True if a parameter may have been written since it was copied without moving its version counter."""
    if copy.other_versions != _other_versions(held_parameter):
        return True
    if not parameter.is_cpu and copy.trains is not _trains(held_parameter, parameter):
        return True
    record = copy.record
    has_new_gradient = _received(held_parameter) != record.received_at_write
    has_gradient = _has_gradient(held_parameter, parameter)
    if held_parameter.has_observed_optimizer():
        return has_new_gradient and not has_gradient
    return has_new_gradient or has_gradient or bool(record.had_gradient_at_write)


def _others(held_parameter: HeldParameter) -> list[Tensor]:
    """Return the other held parameters in the memory of a parameter."""
    others = (other.parameter() for other in held_parameter.overlapping)
    return [other for other in others if other is not None]


def _other_versions(held_parameter: HeldParameter) -> tuple[int, ...]:
    return tuple(map(version_of, _others(held_parameter))) if held_parameter.overlapping else ()


def _received(held_parameter: HeldParameter) -> int:
    """Return the number of gradients that were computed through casts of its copies, and of others in its memory."""
    together = (held_parameter, *held_parameter.overlapping)
    return sum(copy.record.received for each in together for copy in each.copies.values())


def _has_gradient(held_parameter: HeldParameter, parameter: Tensor) -> bool:
    together = (parameter, *_others(held_parameter))
    return any(each.requires_grad and each.grad is not None for each in together)


def _trains(held_parameter: HeldParameter, parameter: Tensor) -> bool:
    """Return True if gradients are recorded here for the parameter, or for another in its memory."""
    together = (parameter, *_others(held_parameter))
    return is_grad_enabled() and any(each.requires_grad for each in together)
