"""What was infinite or NaN in a step, for whoever asks: which gradients, which parameters, and whether the loss was.

Invariants: making `NonfiniteDetails` computes nothing; each thing is looked up once. Reading waits for the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._internal.events import NonfiniteOrigin, witnesses
from precast.attachment.attachment import names_of
from precast.grad_scaler.gradients import Place, bad_gradients, bad_parameters
from precast.grad_scaler.memory import local
from precast.weights.partial_steps import parameters_of

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

    def __init__(self, optimizer: Optimizer, losses: tuple[Tensor, ...]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._losses = losses

    def look_up(self) -> None:
        """Looks for the bad gradients now, while they are there."""
        self._found  # noqa: B018 -- which is computed when it is read

    def combine(self, gather: Callable[[Iterable[str], bool], tuple[list[str], bool]]) -> None:
        """Replaces what this process found by what all of them did; every process has to call it."""
        names, self.loss_finite = gather(self.gradients, self.loss_finite)
        self._found = tuple(names), self.first
        if not self.loss_finite:
            self.parameters = tuple(gather(self.parameters, True)[0])

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients were not finite."""
        return self._found[0]

    @property
    def first(self) -> NonfiniteOrigin | None:
        """Where the step went wrong, if a monitor watched it."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[tuple[str, ...], NonfiniteOrigin | None]:
        optimizer = self._optimizer()
        if optimizer is None:
            return (), None
        seen = (witness.first_of_step(optimizer) for witness in tuple(witnesses))
        return _names(optimizer, bad_gradients(optimizer)), next(filter(None, seen), None)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that hold infinity or NaN themselves."""
        optimizer = self._optimizer()
        return () if optimizer is None else _names(optimizer, bad_parameters(optimizer))

    @cached_property
    def loss_finite(self) -> bool:
        """Whether every number of the losses was finite before they were scaled."""
        losses, self._losses = self._losses, ()
        return all(bool(loss.isfinite().all()) for loss in losses)


def _names(optimizer: Optimizer, found: Iterable[Place]) -> tuple[str, ...]:
    """The names of the parameters found; with group and place if another parameter of this optimizer has the same."""
    parameters = parameters_of(optimizer)
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        own = group.get("param_names") or ()
        names |= {id(p): name for p, name in zip(group["params"], own, strict=False)}
    for witness in tuple(witnesses):
        names |= witness.names_of(parameters)
    names |= names_of(parameters)
    uses = Counter(names[key] for key in {id(parameter) for parameter in parameters} & names.keys())

    def name_of(number: int, place: int, parameter: Tensor) -> str:
        name, where = names.get(id(parameter)), f"group {number}, parameter {place}"
        if name is None:
            return where
        return name if uses[name] == 1 else f"{name} ({where})"

    return tuple(name_of(*place) for place in found)
