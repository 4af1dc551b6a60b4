"""Averages, in float32, of weights that are stored in bfloat16 alone: in bfloat16 their increments would be lost.

Invariants:

- a deep copy of a module has float32 parameters that `bfloat16_weights` has converted, with equal values;
  pickles and state dicts have what is stored, and nothing of precast's is in any of the three;
- `torch.optim.swa_utils.AveragedModel` reads float32 values, with what was rounded away of them, wherever its average
  is float32 and the weight bfloat16: PyTorch's functions for a list of tensors (`lerp`) take one dtype alone;
- an average in bfloat16 of a weight that learns by rounding is warned of, once for each average.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast._torch import on_average, on_deepcopy
from precast.errors import PrecastWarning

__all__ = ["copy_in_float32", "read_in_float32"]

FullValue = Callable[[Tensor], Tensor | None]
"""Gives the float32 value of a weight that learns by rounding, and None for another one."""

_warned: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()


def copy_in_float32(model: nn.Module, parameters: Iterable[Tensor]) -> list[Callable[[], None]]:
    """Have deep copies of a model, and of its modules, hold these parameters in float32. Return what ends that."""
    wanted = set(map(id, parameters))
    stops = []
    for module in model.modules():
        own: list[weakref.ref[Tensor]] = [
            weakref.ref(p) for p in module.parameters(recurse=False) if id(p) in wanted
        ]
        if own:
            stops.append(on_deepcopy(module, _Widening(own)))
    return stops


class _Widening:
    """Makes the copies of some parameters float32."""

    def __init__(self, parameters: list[weakref.ref[Tensor]]) -> None:
        self._parameters = parameters

    def __call__(self, memo: dict[int, Any]) -> None:
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.dtype is torch.bfloat16:
                copied = copy.deepcopy(parameter, memo)
                copied.data = copied.detach().float()


def read_in_float32(full_value: FullValue) -> None:
    """Have every `AveragedModel` read weights by `full_value` from now on.

    That lasts as long as the process: weights stay in bfloat16, and their averages in float32, after `remove`.
    """

    def read(average: nn.Module, model: nn.Module) -> nn.Module:
        averaged, weights = list(average.parameters()), list(model.parameters())
        pairs = list(zip(averaged, weights, strict=False))
        if average not in _warned and any(_stays(mine, its, full_value) for mine, its in pairs):
            _warned.add(average)
            warnings.warn(_STAYS, PrecastWarning, stacklevel=4)
        values = [_value(mine, its, full_value) for mine, its in pairs]
        if all(value is its for value, its in zip(values, weights, strict=False)):
            return model
        return _Read([*values, *weights[len(values) :]], model)  # type: ignore[return-value]

    on_average(read)


_STAYS: Final = (
    "This AveragedModel keeps its average in bfloat16, which rounds small changes of an average away, so the average "
    "hardly moves. Average in float32: AveragedModel(copy.deepcopy(model).float(), ...)."
)


def _stays(averaged: Tensor, weight: Tensor, full_value: FullValue) -> bool:
    """Return True for an average in bfloat16 of a weight that learns by rounding."""
    return averaged.dtype is torch.bfloat16 and full_value(weight) is not None


def _value(averaged: Tensor, weight: Tensor, full_value: FullValue) -> Tensor:
    """Return what an average reads of a weight."""
    if averaged.dtype is not torch.float32 or weight.dtype is not torch.bfloat16:
        return weight
    value = full_value(weight)
    return weight.detach().float() if value is None else value


class _Read:
    """A model as an average reads it."""

    def __init__(self, parameters: list[Tensor], model: nn.Module) -> None:
        self._parameters, self._model = parameters, model

    def parameters(self) -> Iterator[Tensor]:
        """Yield what stands in the place of the model's parameters, in their order."""
        return iter(self._parameters)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the model's buffers."""
        return self._model.buffers()
