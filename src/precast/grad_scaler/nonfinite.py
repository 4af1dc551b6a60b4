"""What was infinite or NaN in a step, for whoever asks: which gradients, which parameters, and whether the loss was.

Invariants: making `NonfiniteDetails` computes nothing; each thing is looked up once. Reading waits for the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._internal.events import NonfiniteOrigin, witnesses
from precast.attachment.attachment import attached_models, names_of
from precast.grad_scaler.gradients import Place, bad_gradients, bad_parameters
from precast.grad_scaler.memory import is_finite, local, memory_of
from precast.optim.partial_steps import parameters_of
from precast.policy.module_names import named_buffers

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
            self.buffers = tuple(gather(self.buffers, True)[0])

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
    def buffers(self) -> tuple[str, ...]:
        """The names of the buffers that hold NaN, of the models that have parameters of the optimizer.

        Infinity alone may be meant, as in a mask.
        """
        optimizer = self._optimizer()
        return () if optimizer is None else tuple(_bad_buffers(optimizer))

    @cached_property
    def loss_finite(self) -> bool:
        """Whether every number of the losses was finite before they were scaled."""
        losses, self._losses = self._losses, ()
        return all(bool(loss.isfinite().all()) for loss in losses)


def _bad_buffers(optimizer: Optimizer) -> Iterator[str]:
    trained = {id(parameter) for parameter in parameters_of(optimizer)}
    models = [model for model, _ in attached_models()]
    models += [model for witness in tuple(witnesses) for model in witness.models()]
    examined: set[int] = set()
    for model in sorted(models, key=_size, reverse=True):
        if trained.isdisjoint(map(id, model.parameters())):
            continue
        for name, buffer in named_buffers(model):
            if id(buffer) not in examined and _has_nan(buffer):
                yield name
            examined.add(id(buffer))


def _size(model: nn.Module) -> int:
    return sum(1 for _ in model.modules())


def _has_nan(buffer: Tensor) -> bool:
    can_have = (buffer.is_floating_point() or buffer.is_complex()) and not buffer.is_meta
    return can_have and not is_finite(buffer) and bool(memory_of(buffer.detach()).isnan().any())


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
