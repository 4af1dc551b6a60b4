"""Float32 averages of weights that are stored in bfloat16 alone: bfloat16 would round their increments away.

Invariants:

- a deep copy of a module has equal float32 values for the parameters that `bfloat16_weights` converted; pickles and
  state dicts have the stored values. None of the three contains objects of precast;
- `torch.optim.swa_utils.AveragedModel` reads float32 values, including the rounding error, if its average is float32
  and the weight bfloat16: PyTorch's functions for lists of tensors (`lerp`) need one dtype;
- an average in bfloat16 of a weight that learns by rounding gives a warning, once for each average.
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
"""Returns the float32 value of a weight that learns by rounding, and None for other weights."""

_warned: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()


def copy_in_float32(model: nn.Module, parameters: Iterable[Tensor]) -> list[Callable[[], None]]:
    """Make deep copies of a model, and of its modules, hold these parameters in float32. Return functions to end it."""
    ids = set(map(id, parameters))
    stops = []
    for module in model.modules():
        own: list[weakref.ref[Tensor]] = [
            weakref.ref(p) for p in module.parameters(recurse=False) if id(p) in ids
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

    This lasts as long as the process: weights stay in bfloat16, and their averages in float32, after `remove`.
    """

    def read(average: nn.Module, model: nn.Module) -> nn.Module:
        averaged, weights = list(average.parameters()), list(model.parameters())
        pairs = list(zip(averaged, weights, strict=False))
        if average not in _warned and any(_is_lost(mine, its, full_value) for mine, its in pairs):
            _warned.add(average)
            warnings.warn(_LOST, PrecastWarning, stacklevel=4)
        values = [_value(mine, its, full_value) for mine, its in pairs]
        if all(value is its for value, its in zip(values, weights, strict=False)):
            return model
        return _Float32View([*values, *weights[len(values) :]], model)  # type: ignore[return-value]

    on_average(read)


_LOST: Final = (
    "This AveragedModel stores its average in bfloat16, which rounds small changes away, so the average hardly moves. "
    "Average in float32: AveragedModel(copy.deepcopy(model).float(), ...)."
)


def _is_lost(averaged: Tensor, weight: Tensor, full_value: FullValue) -> bool:
    """Return True for an average in bfloat16 of a weight that learns by rounding."""
    return averaged.dtype is torch.bfloat16 and full_value(weight) is not None


def _value(averaged: Tensor, weight: Tensor, full_value: FullValue) -> Tensor:
    """Return the value of a weight that an average reads."""
    if averaged.dtype is not torch.float32 or weight.dtype is not torch.bfloat16:
        return weight
    value = full_value(weight)
    return weight.detach().float() if value is None else value


class _Float32View:
    """A model with float32 values in place of its parameters, for an average."""

    def __init__(self, parameters: list[Tensor], model: nn.Module) -> None:
        self._parameters, self._model = parameters, model

    def parameters(self) -> Iterator[Tensor]:
        """Yield the values in place of the model's parameters, in their order."""
        return iter(self._parameters)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the model's buffers."""
        return self._model.buffers()
