"""PyTorch's linear and convolution modules, as they are called with weights that are stored in 16 bits.

A stored weight makes sure at each use that its rounding shows in no result, which takes a few microseconds in Python.
These modules do one thing with their weights, so two questions are enough: does the region cast to the dtype that the
weight is stored in, and is the input one that it casts?

Invariant: where an answer is no, or a compiler traces, the module does what its base class does.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precast import _torch
from precast.shipping.function_calls import lowers
from precast.shipping.stored_weights import StoredParameter

__all__ = ["use_stored_weights"]


def _casts(weight: Any, function: Any, value: Any) -> bool:
    """Whether the region in force casts an input, and the weights of a function to the dtype that they have."""
    # The program may have given it another weight.
    if type(weight) is not StoredParameter or torch.compiler.is_dynamo_compiling():
        return False
    device = weight.device_type
    return (
        type(value) is Tensor
        and torch.get_autocast_dtype(device) is weight.stored_dtype
        and torch.is_autocast_enabled(device)
        and value.dtype is not torch.float64
        and lowers(function, device)
    )


class Linear(nn.Linear):
    """`nn.Linear` with stored weights."""

    def forward(self, input: Tensor) -> Tensor:
        if not _casts(self._parameters["weight"], F.linear, input):
            return super().forward(input)
        parameters: Any = self._parameters
        with _torch.without_subclass_functions():
            return F.linear(input, parameters["weight"], parameters["bias"])


class Conv1d(nn.Conv1d):
    """`nn.Conv1d` with stored weights."""

    def forward(self, input: Tensor) -> Tensor:
        if not _casts(self._parameters["weight"], torch.conv1d, input):
            return super().forward(input)
        with _torch.without_subclass_functions():
            return super().forward(input)


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` with stored weights."""

    def forward(self, input: Tensor) -> Tensor:
        if not _casts(self._parameters["weight"], torch.conv2d, input):
            return super().forward(input)
        with _torch.without_subclass_functions():
            return super().forward(input)


class Conv3d(nn.Conv3d):
    """`nn.Conv3d` with stored weights."""

    def forward(self, input: Tensor) -> Tensor:
        if not _casts(self._parameters["weight"], torch.conv3d, input):
            return super().forward(input)
        with _torch.without_subclass_functions():
            return super().forward(input)


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
