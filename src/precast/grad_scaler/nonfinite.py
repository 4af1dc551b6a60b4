"""What was infinite or NaN in a step, for whoever asks: which gradients, which parameters, and whether the loss was.

Invariants: making `NonfiniteDetails` computes nothing; each thing is looked up once. Reading waits for the device.
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
from precast.grad_scaler.gradients import Place, bad_gradients, bad_parameters
from precast.grad_scaler.memory import local

__all__ = ["NonfiniteDetails", "loss_to_keep"]

_SMALL = 64  # numbers of a loss that are kept as they are


def loss_to_keep(loss: Tensor) -> Tensor:
    """As much of a loss as says whether it was finite, without its graph: a small loss itself, else its maximum.

    A small loss that is a view into larger memory, such as one number of activations, is copied, so that the rest of
    this memory is not kept.
    """
    loss = local(loss.detach())
    if loss.numel() > _SMALL:
        return loss.abs().amax()
    is_plain = type(loss) is Tensor and loss.layout is torch.strided
    is_part = is_plain and loss.untyped_storage().nbytes() > _SMALL * loss.itemsize
    return loss.clone() if is_part else loss


class NonfiniteDetails:
    """The details of one step; `StepEvent` describes each of them."""

    __slots__ = ("_first", "_gradients", "_losses", "_optimizer", "_parameters")

    def __init__(self, optimizer: Optimizer, losses: tuple[Tensor, ...]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._losses: tuple[Tensor, ...] | bool = losses
        self._gradients: tuple[str, ...] | None = None
        self._parameters: tuple[str, ...] | None = None
        self._first: NonfiniteOrigin | None = None

    def look_up(self) -> None:
        """Looks for the bad gradients now, while they are there."""
        if self._gradients is not None:
            return
        self._gradients = self._names(bad_gradients)
        optimizer = self._optimizer()
        if optimizer is not None:
            seen = (witness.first_of_step(optimizer) for witness in tuple(witnesses))
            self._first = next(filter(None, seen), None)

    def combine(self, gather: Callable[[Iterable[str], bool], tuple[list[str], bool]]) -> None:
        """Replaces what this process found by what all of them did; every process has to call it."""
        names, self._losses = gather(self.gradients, self.loss_finite)
        self._gradients = tuple(names)
        if not self._losses:
            self._parameters = tuple(gather(self.parameters, True)[0])

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients were not finite."""
        self.look_up()
        return self._gradients or ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that hold infinity or NaN themselves."""
        if self._parameters is None:
            self._parameters = self._names(bad_parameters)
        return self._parameters

    @property
    def first(self) -> NonfiniteOrigin | None:
        """Where the step went wrong, if a monitor watched it."""
        self.look_up()
        return self._first

    @property
    def loss_finite(self) -> bool:
        """Whether every number of the losses was finite before they were scaled."""
        if not isinstance(self._losses, bool):
            self._losses = all(bool(loss.isfinite().all()) for loss in self._losses)
        return self._losses

    def _names(self, search: Callable[[Optimizer], Iterable[Place]]) -> tuple[str, ...]:
        """The names of what `search` finds; of an optimizer that is gone, none."""
        optimizer = self._optimizer()
        return () if optimizer is None else tuple(_named(optimizer, search(optimizer)))


def _named(optimizer: Optimizer, found: Iterable[Place]) -> Iterable[str]:
    """The names of the parameters found; with group and place if another parameter of this optimizer has the same."""
    names = {
        id(parameter): name
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names") or (), strict=False)
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for witness in tuple(witnesses):
        names |= witness.names_of(parameters)
    names |= names_of(parameters)
    uses = Counter(names[key] for key in {id(parameter) for parameter in parameters} & names.keys())
    for number, place, parameter in found:
        name = names.get(id(parameter))
        where = f"group {number}, parameter {place}"
        yield where if name is None else name if uses[name] == 1 else f"{name} ({where})"
