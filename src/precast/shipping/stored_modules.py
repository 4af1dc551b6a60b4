"""PyTorch's linear and convolution modules, as they are called with weights that are stored in 16 bits.

A stored weight makes sure at each use that its rounding shows in no result, which takes a few microseconds in Python.
These modules do one thing with their weights, so two questions are enough: does the region cast to the dtype that the
weight is stored in, and is the input one that it casts?

Invariant: where an answer is no, or a compiler traces, the module does what its base class does.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, is_autocast_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from precast._torch import innermost_transform, without_subclass_functions
from precast.engine.thread_state import thread_state
from precast.shipping.function_calls import lowers
from precast.shipping.stored_weights import StoredParameter

__all__ = ["use_stored_weights"]


class _Lowering(set[int]):
    """The numbers of bound policies that cast the arguments of one function to 16 bits."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def learns(self, device_type: str) -> bool:
        """Whether the policy in force is one of them; what is not known yet is noted."""
        found = lowers(self.function, device_type)
        number = thread_state(device_type).state.number.value
        if found and number:
            if len(self) >= _MOST_KNOWN:
                self.clear()
            self.add(number)
        return found


_MOST_KNOWN: Final = 4096


def _casts(weight: Any, lowering: _Lowering, value: Any) -> bool:
    """Whether the region in force casts an input, and the weights of a function to the dtype of the region.

    That the region's dtype is that of the weights the result says, which costs less than to ask for it. Each part of a
    layer's time is here, so there is no call of Python's more than it takes.
    """
    return (
        type(weight) is StoredParameter  # the program may have given it another one
        and type(value) is Tensor
        and not is_dynamo_compiling()
        and value.dtype is not torch.float64
        and (weight.thread.state.number.value in lowering or lowering.learns(weight.device_type))
        and is_autocast_enabled(weight.device_type)
        and innermost_transform() is None
    )


class Linear(nn.Linear):
    """`nn.Linear` with stored weights."""

    def forward(self, input: Tensor) -> Tensor:
        parameters: Any = self._parameters
        weight = parameters["weight"]
        if _casts(weight, _LINEAR, input):
            with without_subclass_functions():
                result = linear(input, weight, parameters["bias"])
            if result.dtype is weight.stored_dtype:
                return result
        return super().forward(input)


_LINEAR: Final = _Lowering(linear)


class _Convolution:
    """What stored convolutions have in common: the function, and its answer if the region casts to their dtype."""

    lowering: _Lowering
    _parameters: dict[str, Any]

    def forward(self, input: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        if _casts(weight, self.lowering, input):
            with without_subclass_functions():
                result: Tensor = super().forward(input)  # type: ignore[misc]
            if result.dtype is weight.stored_dtype:
                return result
        plain: Tensor = super().forward(input)  # type: ignore[misc]
        return plain


class Conv1d(_Convolution, nn.Conv1d):
    """`nn.Conv1d` with stored weights."""

    lowering = _Lowering(torch.conv1d)


class Conv2d(_Convolution, nn.Conv2d):
    """`nn.Conv2d` with stored weights."""

    lowering = _Lowering(torch.conv2d)


class Conv3d(_Convolution, nn.Conv3d):
    """`nn.Conv3d` with stored weights."""

    lowering = _Lowering(torch.conv3d)


_STORED: Final[dict[type, type[nn.Module]]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}


def use_stored_weights(model: nn.Module) -> None:
    """Exchanges the classes of the modules in a model whose weights are all stored in one 16-bit dtype."""
    for module in model.modules():
        stored = _STORED.get(type(module))
        weights: list[Any] = list(module.parameters(recurse=False))
        if (
            stored is None
            or "forward" in vars(module)
            or not all(getattr(weight, "is_dense", False) for weight in weights)
        ):
            continue
        if len({weight.stored_dtype for weight in weights}) == 1:
            module.__class__ = stored
