"""Finds zeros that underflow made: where a module gave zero in float16, and the same in float32 is not zero.

A zero in a float16 tensor is nothing to worry about by itself: ReLU, dropout, masks and padding make many. It is *lost*
where the operation that made it, done in float32 on the same numbers, does not give zero. That is computed anew, in
steps whose numbers are counted: forward, the gradient of the input, the gradients of the parameters. A zero that was
lost counts as a number on the way back, so what it wipes out in the modules before is lost, too.

Known are linear layers, convolutions and activations that look at each number alone. What other code does with a tensor
is not known, so of a tensor that goes elsewhere, too, at least this many zeros are lost.

Invariants: the program's tensors, graph and random numbers are not touched; nothing waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Lost", "Operation", "operation"]

_CONVOLUTIONS: Final[dict[type[nn.Module], Callable[..., Tensor]]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
_ALONE: Final = (nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU)
_ALONE_TOO: Final = (nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh)
_ACTIVATIONS: Final = frozenset({*_ALONE, *_ALONE_TOO})
_BELOW_ZERO_EDGE: Final = 2.0**-26
"""Stands for a number that was lost: what it was is not known, but that float16 makes zero of it."""


class Operation:
    """One call of a module that is known, to be done in float32."""

    def __init__(
        self, function: Callable[..., Tensor], x: Tensor, parameters: list[nn.Parameter]
    ) -> None:
        self._function = function
        self._x = x.detach()
        self.wants_input = x.requires_grad
        self._parameters = parameters

    @torch.no_grad()
    def lost(self, output: Tensor) -> Tensor:
        """How many zeros of its output are lost, shape ()."""
        with torch.autocast(output.device.type, enabled=False):
            wide = self._function(*(tensor.float() for tensor in (self._x, *self._parameters)))
        return torch.count_nonzero((output == 0) & (wide != 0))

    def gradients(
        self, gradient: Tensor
    ) -> tuple[Tensor | None, list[tuple[nn.Parameter, Tensor]]]:
        """In float32, those of the input and of each parameter that wants one."""
        wanted = [p for p in self._parameters if p.requires_grad]
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            x = self._x.float().detach().requires_grad_(self.wants_input)
            wide = [p.detach().float().requires_grad_(p.requires_grad) for p in self._parameters]
            leaves = [leaf for leaf in (x, *wide) if leaf.requires_grad]
            if not leaves:
                return None, []
            output = self._function(x * 1 if self.wants_input else x, *wide)
            found = list(torch.autograd.grad(output, leaves, gradient.to(output.dtype)))
        arriving = found.pop(0) if self.wants_input else None
        return arriving, list(zip(wanted, found, strict=True))


def operation(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Operation | None:
    """A call as one that is known; None if it is not, or gave no float16."""
    if not isinstance(output, Tensor) or output.dtype is not torch.float16:
        return None
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    kind = type(module)
    if not args[0].is_floating_point():
        return None
    if kind in _ACTIVATIONS:
        return Operation(lambda x: kind.forward(module, x.clone()), args[0], [])
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return None
    function = _function(module)
    parameters: list[Any] = [p for p in (module.weight, module.bias) if p is not None]
    if function is None or not all(type(p) is nn.Parameter for p in parameters):
        return None
    return Operation(function, args[0], parameters)


def _function(module: Any) -> Callable[..., Tensor] | None:
    if type(module).forward is nn.Linear.forward:
        return F.linear
    for kind, convolution in _CONVOLUTIONS.items():
        if type(module).forward is kind.forward and module.padding_mode == "zeros":

            def function(
                x: Tensor,
                weight: Tensor,
                bias: Tensor | None = None,
                convolution: Any = convolution,
            ) -> Tensor:
                how = module.stride, module.padding, module.dilation, module.groups
                convolved: Tensor = convolution(x, weight, bias, *how)
                return convolved

            return function
    return None


class Lost:
    """What gradients of one step would not be zero in float32."""

    def __init__(self) -> None:
        self._arriving: dict[int, Tensor] = {}
        self._parameters: dict[int, tuple[weakref.ref[nn.Parameter], Tensor]] = {}

    def back(
        self,
        place: int | None,
        known: Operation | None,
        input_place: int | None,
        gradient: Tensor,
    ) -> Tensor | None:
        """Takes a gradient through a call.

        Args:
            place: of the call's output in the record.
            known: the call.
            input_place: of its input in the record, if it is there.
            gradient: of its output.

        Returns:
            How many of the gradient's zeros are lost, shape (); None where that is not known.
        """
        arriving = None if place is None else self._arriving.pop(place, None)
        lost = None if arriving is None else (gradient == 0) & arriving
        if known is not None:
            wide = gradient.float()
            if lost is not None:
                wide = torch.where(lost, _BELOW_ZERO_EDGE, wide)
            before, parameters = known.gradients(wide)
            if before is not None and input_place is not None:
                self._merge(input_place, before != 0)
            for parameter, its in parameters:
                self._merge_parameter(parameter, its != 0)
        return None if lost is None else torch.count_nonzero(lost)

    def of_parameter(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """How many zeros of a parameter's gradient are lost, shape (); None where that is not known."""
        kept = self._parameters.pop(id(parameter), None)
        if kept is None or kept[0]() is not parameter or kept[1].shape != gradient.shape:
            return None
        return torch.count_nonzero((gradient == 0) & kept[1])

    def _merge(self, place: int, found: Tensor) -> None:
        before = self._arriving.get(place)
        self._arriving[place] = found if before is None else before | found

    def _merge_parameter(self, parameter: nn.Parameter, found: Tensor) -> None:
        kept = self._parameters.get(id(parameter))
        if kept is not None and kept[0]() is parameter:
            found = found | kept[1]
        self._parameters[id(parameter)] = weakref.ref(parameter), found
