"""Finds zeros that underflow made: where a module gave zero in float16, and the same in float32 is not zero.

A zero in a float16 tensor is nothing to worry about by itself: ReLU, dropout, masks and padding make many. It is *lost*
where the operation that made it, done in float32 on the same numbers, does not give zero. That is computed again in
steps whose numbers are counted: the outputs in forward, the gradients of inputs and of parameters in backward. A zero
that was lost counts as a number on the way back, so the zeros that it causes in the modules before are lost, too.

This is done for linear layers, convolutions and activations that look at each number alone. What other code does with a
tensor is not known. So where a tensor goes elsewhere, too, more zeros may be lost than are found.

Invariants: the program's tensors, graph and random numbers are not touched; nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Lost", "Made", "Operation", "operation"]

_CONVOLUTIONS: Final[dict[type[nn.Module], Callable[..., Tensor]]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
_ACTIVATIONS: Final = frozenset(
    {nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.Mish}
    | {nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh}
)
_BELOW_ZERO_EDGE: Final = 2.0**-26
"""Stands for a number that was lost: of that is known only that float16 makes it zero."""


class Operation:
    """One call of a module that can be done again in float32."""

    def __init__(
        self, function: Callable[..., Tensor], x: Tensor, parameters: list[nn.Parameter]
    ) -> None:
        self._function = function
        self._x = x.detach()
        self._wants_input = x.requires_grad
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
        """The gradients in float32 of the input, and of each parameter, that want one."""
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            x = self._x.float().detach().requires_grad_(self._wants_input)
            wide = [p.detach().float().requires_grad_(p.requires_grad) for p in self._parameters]
            leaves = [leaf for leaf in (x, *wide) if leaf.requires_grad]
            if not leaves:
                return None, []
            output = self._function(x * 1 if self._wants_input else x, *wide)
            found = list(torch.autograd.grad(output, leaves, gradient.to(output.dtype)))
        arriving = found.pop(0) if self._wants_input else None
        wanted = [p for p in self._parameters if p.requires_grad]
        return arriving, list(zip(wanted, found, strict=True))


def operation(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Operation | None:
    """A call that can be done again; None for another one, and for one that did not give float16."""
    if not isinstance(output, Tensor) or output.dtype is not torch.float16:
        return None
    if (
        kwargs
        or len(args) != 1
        or not isinstance(args[0], Tensor)
        or not args[0].is_floating_point()
    ):
        return None
    kind = type(module)
    if kind in _ACTIVATIONS:
        return Operation(lambda x: kind.forward(module, x.clone()), args[0], [])
    function = _function(module)
    if function is None:
        return None
    parameters: list[Any] = [p for p in (module.weight, module.bias) if p is not None]
    if not all(type(p) is nn.Parameter for p in parameters):
        return None
    return Operation(function, args[0], parameters)


def _function(module: Any) -> Callable[..., Tensor] | None:
    """What a linear layer or a convolution computes from its input, its weight and its bias."""
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return F.linear
    for kind, convolution in _CONVOLUTIONS.items():
        if isinstance(module, kind) and forward is kind.forward and module.padding_mode == "zeros":
            names = ("stride", "padding", "dilation", "groups")
            return functools.partial(convolution, **{name: getattr(module, name) for name in names})
    return None


class Made(NamedTuple):
    """The output that a gradient belongs to."""

    name: str
    """The module that gave it."""
    place: int | None = None
    """Where the output is in the record, if it is there."""
    known: Operation | None = None
    """The operation that made it, in a step that is counted."""
    before: int | None = None
    """The place of what it was made from, if that is one tensor."""
    call: int = 1
    """Which call of the module in the step it was."""


class Lost:
    """Which gradients of one step would not be zero in float32."""

    def __init__(self) -> None:
        self._arriving: dict[int, Tensor] = {}
        self._parameters = WeakTensorKeyDictionary()

    def back(self, made: Made, gradient: Tensor) -> Tensor | None:
        """Takes the gradient of an output through the call that made the output.

        Returns how many of the gradient's zeros are lost, shape (); None where that is not known.
        """
        arriving = None if made.place is None else self._arriving.pop(made.place, None)
        lost = None if arriving is None else (gradient == 0) & arriving
        if made.known is not None:
            wide = gradient.float()
            if lost is not None:
                wide = torch.where(lost, _BELOW_ZERO_EDGE, wide)
            before, parameters = made.known.gradients(wide)
            if before is not None and made.before is not None:
                _merge(self._arriving, made.before, before)
            for parameter, its in parameters:
                _merge(self._parameters, parameter, its)
        return None if lost is None else torch.count_nonzero(lost)

    def of_parameter(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """How many zeros of a parameter's gradient are lost, shape (); None where that is not known."""
        kept = self._parameters.pop(parameter, None)
        if kept is None or kept.shape != gradient.shape:
            return None
        return torch.count_nonzero((gradient == 0) & kept)


def _merge(found: MutableMapping[Any, Tensor], key: Any, gradient: Tensor) -> None:
    """Notes where one more gradient that adds up to that of `key` is not zero."""
    before = found.get(key)
    found[key] = gradient != 0 if before is None else before | (gradient != 0)
