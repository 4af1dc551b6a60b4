"""Details of the infinite or NaN values in a step, computed on demand: gradients, parameters, buffers, loss.

Invariants: creating `NonfiniteDetails` computes nothing; each detail is computed once. Reading waits for the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._internal.events import NonfiniteOrigin, witnesses
from precast.grad_scaler.gradients import Place, bad_gradients, bad_parameters
from precast.grad_scaler.memory import is_finite, memory_of
from precast.optim.partial_steps import parameters_of
from precast.optim.shards import part_of
from precast.policy.module_names import named_buffers
from precast.policy.module_plan import attached_models, names_of

__all__ = ["NonfiniteDetails", "loss_to_keep"]

_SMALL = 64  # losses with at most this many values are stored whole


def loss_to_keep(loss: Tensor) -> Tensor:
    """Return a tensor that is finite if the loss is, without its graph: a small loss itself, else its maximum.

    A small loss that is a view into larger memory, such as one element of activations, is copied, so that the rest of
    this memory can be freed.
    """
    loss = part_of(loss.detach())
    if loss.numel() > _SMALL:
        return loss.abs().amax()
    is_plain = type(loss) is Tensor and loss.layout is torch.strided
    is_part = is_plain and loss.untyped_storage().nbytes() > _SMALL * loss.itemsize
    return loss.clone() if is_part else loss


class NonfiniteDetails:
    """The details of one step, as documented in `StepEvent`."""

    def __init__(self, optimizer: Optimizer, losses: tuple[Tensor, ...]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._losses = losses

    def look_up(self) -> None:
        """Search for the bad gradients now, before they are overwritten."""
        self._gradients_and_origin  # noqa: B018 -- a property that is computed when it is read

    def combine(self, gather: Callable[[Iterable[str], bool], tuple[list[str], bool]]) -> None:
        """Replace this process's results by those of all processes; every process has to call it."""
        names, self.loss_finite = gather(self.gradients, self.loss_finite)
        self._gradients_and_origin = tuple(names), self.first
        if not self.loss_finite:
            self.parameters = tuple(gather(self.parameters, True)[0])
            self.buffers = tuple(gather(self.buffers, True)[0])

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the parameters with gradients that are not finite."""
        return self._gradients_and_origin[0]

    @property
    def first(self) -> NonfiniteOrigin | None:
        """The origin of the values that are not finite, if a monitor watched the step."""
        return self._gradients_and_origin[1]

    @cached_property
    def _gradients_and_origin(self) -> tuple[tuple[str, ...], NonfiniteOrigin | None]:
        optimizer = self._optimizer()
        if optimizer is None:
            return (), None
        origins = (witness.first_of_step(optimizer) for witness in tuple(witnesses))
        return _names(optimizer, bad_gradients(optimizer)), next(filter(None, origins), None)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that hold infinity or NaN themselves."""
        optimizer = self._optimizer()
        return () if optimizer is None else _names(optimizer, bad_parameters(optimizer))

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of buffers that hold NaN, in the models that have parameters of the optimizer.

        Infinity alone may be intentional, as in a mask.
        """
        optimizer = self._optimizer()
        return () if optimizer is None else tuple(_bad_buffers(optimizer))

    @cached_property
    def loss_finite(self) -> bool:
        """True if all values of the losses were finite before they were scaled."""
        losses, self._losses = self._losses, ()
        return all(bool(loss.isfinite().all()) for loss in losses)


def _bad_buffers(optimizer: Optimizer) -> Iterator[str]:
    trained = {id(parameter) for parameter in parameters_of(optimizer)}
    models = [model for model, _ in attached_models()]
    models += [model for witness in tuple(witnesses) for model in witness.models()]
    examined: set[int] = set()
    for model in sorted(models, key=lambda model: -len([*model.modules()])):
        if trained.isdisjoint(map(id, model.parameters())):
            continue
        for name, buffer in named_buffers(model):
            if id(buffer) not in examined and _has_nan(buffer):
                yield name
            examined.add(id(buffer))


def _has_nan(buffer: Tensor) -> bool:
    can_have = (buffer.is_floating_point() or buffer.is_complex()) and not buffer.is_meta
    return can_have and not is_finite(buffer) and bool(memory_of(buffer.detach()).isnan().any())


def _names(optimizer: Optimizer, places: Iterable[Place]) -> tuple[str, ...]:
    """Return the names of parameters; with group and place if another parameter of the optimizer has the same name."""
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

    return tuple(name_of(*place) for place in places)
