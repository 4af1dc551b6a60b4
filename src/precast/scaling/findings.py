"""What is found out about a step, when somebody wants to know: which gradients were bad, and whether the loss was.

Invariants: making a `Findings` computes nothing; what is looked at is looked at once. Reading waits
for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast.attachment import names_of
from precast.events import First, witnesses
from precast.scaling.gradients import bad_gradients, local

__all__ = ["Findings", "noted"]

_SMALL = 64  # numbers of a loss that are kept as they are


def noted(loss: Tensor) -> Tensor:
    """As much of a loss as says whether it was finite, without its graph and other memory; shape () if it was large."""
    loss = local(loss.detach())
    if loss.numel() > _SMALL:
        return loss.abs().amax()
    is_plain = type(loss) is Tensor and loss.layout is torch.strided
    is_part = is_plain and loss.untyped_storage().nbytes() > _SMALL * loss.itemsize
    return loss.clone() if is_part else loss  # not the activations that it is one number of


class Findings:
    """About one step; `StepEvent` has the same words for each."""

    __slots__ = ("_bad", "_first", "_losses", "_optimizer")

    def __init__(self, optimizer: Optimizer, losses: tuple[Tensor, ...]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._losses: tuple[Tensor, ...] | bool = losses
        self._bad: tuple[str, ...] | None = None
        self._first: First | None = None

    def look(self) -> None:
        """Finds the bad gradients now, while they are there."""
        if self._bad is None:
            optimizer = self._optimizer()
            self._bad = tuple(_names(optimizer)) if optimizer is not None else ()
            if optimizer is not None:
                seen = (witness.first_of_step(optimizer) for witness in tuple(witnesses))
                self._first = next(filter(None, seen), None)

    def replace(self, names: Iterable[str], loss_finite: bool) -> None:
        """Puts what all processes found in place of what this one did."""
        self._bad, self._losses = tuple(names), loss_finite

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite."""
        self.look()
        return self._bad or ()

    @property
    def first(self) -> First | None:
        """Where the step went wrong, if somebody watched it."""
        self.look()
        return self._first

    @property
    def loss_finite(self) -> bool:
        """Whether every number of the losses was finite before they were scaled."""
        if not isinstance(self._losses, bool):
            self._losses = all(bool(loss.isfinite().all()) for loss in self._losses)
        return self._losses


def _names(optimizer: Optimizer) -> Iterable[str]:
    bad = list(bad_gradients(optimizer))
    parameters = [parameter for _, _, parameter in bad]
    known: dict[int, str] = {}
    for witness in tuple(witnesses):
        known |= witness.names_of(parameters)
    known |= names_of(parameters)
    for number, place, parameter in bad:
        group = optimizer.param_groups[number]
        given = group.get("param_names")
        place_in_optimizer = f"group {number}, parameter {place}"
        yield known.get(id(parameter)) or (given[place] if given else place_in_optimizer)
