"""What is found out about a step, when somebody wants to know: which gradients were bad, and whether the loss was.

Invariants: making a `Findings` computes nothing; what is looked at is looked at once. Reading waits
for the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._internal.events import NonfiniteOrigin, witnesses
from precast.attachment.attachment import names_of
from precast.grad_scaler.gradients import Place, bad_gradients, bad_weights, local

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

    __slots__ = ("_bad", "_first", "_losses", "_optimizer", "_weights")

    def __init__(self, optimizer: Optimizer, losses: tuple[Tensor, ...]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._losses: tuple[Tensor, ...] | bool = losses
        self._bad: tuple[str, ...] | None = None
        self._weights: tuple[str, ...] | None = None
        self._first: NonfiniteOrigin | None = None

    def look(self) -> None:
        """Finds the bad gradients now, while they are there."""
        if self._bad is None:
            optimizer = self._optimizer()
            self._bad = (
                tuple(_names(optimizer, bad_gradients(optimizer))) if optimizer is not None else ()
            )
            if optimizer is not None:
                seen = (witness.first_of_step(optimizer) for witness in tuple(witnesses))
                self._first = next(filter(None, seen), None)

    def combine(self, gather: Callable[[Iterable[str], bool], tuple[list[str], bool]]) -> None:
        """Puts what all processes found in place of what this one did; every process calls it."""
        names, self._losses = gather(self.names, self.loss_finite)
        self._bad = tuple(names)
        if not self._losses:
            self._weights = tuple(gather(self.weights, True)[0])

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite."""
        self.look()
        return self._bad or ()

    @property
    def first(self) -> NonfiniteOrigin | None:
        """Where the step went wrong, if somebody watched it."""
        self.look()
        return self._first

    @property
    def weights(self) -> tuple[str, ...]:
        """The parameters that hold infinity or NaN themselves."""
        if self._weights is None:
            optimizer = self._optimizer()
            self._weights = (
                tuple(_names(optimizer, bad_weights(optimizer))) if optimizer is not None else ()
            )
        return self._weights

    @property
    def loss_finite(self) -> bool:
        """Whether every number of the losses was finite before they were scaled."""
        if not isinstance(self._losses, bool):
            self._losses = all(bool(loss.isfinite().all()) for loss in self._losses)
        return self._losses


def _names(optimizer: Optimizer, found: Iterable[Place]) -> Iterable[str]:
    """A name for each of the parameters found; none that another parameter of this optimizer has, too."""
    named = {
        id(parameter): name
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for witness in tuple(witnesses):
        named |= witness.names_of(parameters)
    named |= names_of(parameters)
    uses = Counter(named[key] for key in {id(parameter) for parameter in parameters} & named.keys())
    for number, place, parameter in found:
        name = named.get(id(parameter))
        where = f"group {number}, parameter {place}"
        yield where if name is None else name if uses[name] == 1 else f"{name} ({where})"
