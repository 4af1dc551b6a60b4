"""PyTorch's linear and convolution modules with weights that are stored in 16 bits.

A stored weight checks at each use that its rounding changes no result, which takes a few microseconds in Python. These
modules use their weights in one way, so two checks are enough: the region casts to the dtype in which the weight is
stored, and it casts the input.

The checks take much of a small layer's time. So they are written inline, the cheap ones first, and the function gets
weights of PyTorch's own class.

Invariants:

- if a check fails, or a compiler traces, the module does the same as its base class;
- if the program has switched autocast off, 16-bit inputs are accepted, too; the float32 weights would raise an error.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, is_inference_mode_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from precast._torch import apply_convolution, innermost_transform, is_tracing
from precast.engine.thread_state import thread_state
from precast.shipping.function_calls import lowers
from precast.shipping.stored_weights import StoredParameter

__all__ = ["use_stored_weights"]


class _Lowering(set[int]):
    """The numbers of the bound policies that cast the arguments of one function to 16 bits."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def add_current(self, device_type: str) -> bool:
        """Return True if autocast is on and the policy in force lowers the function; remember the policy then."""
        is_lowered = lowers(self.function, device_type) and is_autocast_enabled(device_type)
        number = thread_state(device_type).state.number.value
        if is_lowered and number:
            if len(self) >= _MOST_POLICIES:
                self.clear()
            self.add(number)
        return is_lowered


_MOST_POLICIES: Final = 4096
_FLOAT64: Final = torch.float64


class _StoredModule:
    """A module with stored weights; subclasses set its function and the policies that lower it."""

    _parameters: dict[str, Any]
    lowering: _Lowering
    compute: Any
    """Returns the result of the module for an input, a weight and a bias."""

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if (
            type(weight) is StoredParameter  # the program may have replaced it
            and type(input) is Tensor
            and (bias is None or type(bias) is StoredParameter)
            and not is_dynamo_compiling()
            and input.dtype is not _FLOAT64
            and (
                weight.thread.state.number.value in self.lowering
                or self.lowering.add_current(weight.device_type)
            )
            and innermost_transform() is None
            # Of the tensors that require a gradient, a trace may contain parameters only.
            and not (weight.trains and (is_grad_enabled() or is_tracing()))
        ):
            # A region's cast requires no gradient in inference mode.
            cast = weight.plain if is_inference_mode_enabled() else weight.as_cast
            try:
                result: Tensor = self.compute(input, cast, None if bias is None else bias.plain)
            except RuntimeError:  # autocast is off here: float32 and 16 bits cannot be multiplied
                return super().forward(input)  # type: ignore[misc, no-any-return]
            # The region's dtype is then that of the weights, which costs less than to ask for it.
            if result.dtype is weight.stored_dtype:
                return result
        return super().forward(input)  # type: ignore[misc, no-any-return]


def _stored(base: type[nn.Module], function: Any, compute: Any) -> type[nn.Module]:
    """Return the class of a module of PyTorch's with stored weights; pickles name it by its place in this file."""
    values = {"lowering": _Lowering(function), "compute": compute}
    return type(base.__name__, (_StoredModule, base), values)


Linear: Final = _stored(nn.Linear, linear, staticmethod(linear))
Conv1d: Final = _stored(nn.Conv1d, torch.conv1d, apply_convolution)
Conv2d: Final = _stored(nn.Conv2d, torch.conv2d, apply_convolution)
Conv3d: Final = _stored(nn.Conv3d, torch.conv3d, apply_convolution)
_STORED: Final = {nn.Linear: Linear, nn.Conv1d: Conv1d, nn.Conv2d: Conv2d, nn.Conv3d: Conv3d}


def use_stored_weights(model: nn.Module) -> None:
    """Replace the classes of the modules in a model whose weights are all stored in one 16-bit dtype."""
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
