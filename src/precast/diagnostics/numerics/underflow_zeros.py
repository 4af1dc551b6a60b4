"""Detection of zeros caused by underflow: zero in float16 where float32 gives another value.

Zeros in a float16 tensor are normal: ReLU, dropout, masks and padding cause many. A zero is *lost* if the same
operation in float32 on the same values does not return zero. In counted steps this is computed: for outputs in forward,
and for the gradients of inputs and parameters in backward. In backward, a lost zero counts as a nonzero value, so
the zeros that it causes in earlier modules are lost too.

This covers linear layers, convolutions and elementwise activations. The use of a tensor by other code is unknown, so
more zeros may be lost than are reported.

Invariants: the program's tensors, graph and random numbers are not changed; nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["LostGradients", "OutputSource", "RepeatableCall", "repeatable_call"]

_CONVOLUTIONS: Final[dict[type[nn.Module], Callable[..., Tensor]]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
_ACTIVATIONS: Final = frozenset(
    {nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.Mish}
    | {nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh}
)
_LOST_VALUE: Final = 2.0**-26
"""Replaces a lost value, whose size is unknown: it is so small that float16 rounds it to zero."""


class RepeatableCall:
    """One call of a module that can be repeated in float32."""

    def __init__(
        self, function: Callable[..., Tensor], x: Tensor, parameters: list[nn.Parameter]
    ) -> None:
        self._function = function
        self._x = x.detach()
        self._wants_input = x.requires_grad
        self._parameters = parameters

    @torch.no_grad()
    def lost(self, output: Tensor) -> Tensor:
        """Return the number of lost zeros in its output, shape ()."""
        with torch.autocast(output.device.type, enabled=False):
            wide = self._function(*(tensor.float() for tensor in (self._x, *self._parameters)))
        return torch.count_nonzero((output == 0) & (wide != 0))

    def gradients(
        self, gradient: Tensor
    ) -> tuple[Tensor | None, list[tuple[nn.Parameter, Tensor]]]:
        """Return the gradients in float32 of the input and of each parameter, if they require one."""
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            x = self._x.float().detach().requires_grad_(self._wants_input)
            wide = [p.detach().float().requires_grad_(p.requires_grad) for p in self._parameters]
            leaves = [leaf for leaf in (x, *wide) if leaf.requires_grad]
            if not leaves:
                return None, []
            output = self._function(x * 1 if self._wants_input else x, *wide)
            gradients = list(torch.autograd.grad(output, leaves, gradient.to(output.dtype)))
        input_gradient = gradients.pop(0) if self._wants_input else None
        trained = [p for p in self._parameters if p.requires_grad]
        return input_gradient, list(zip(trained, gradients, strict=True))


def repeatable_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> RepeatableCall | None:
    """Return the call, if it can be repeated and returned float16; else None."""
    is_usual = isinstance(output, Tensor) and len(args) == 1 and not kwargs
    if not is_usual or output.dtype is not torch.float16:
        return None
    if not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return None
    kind = type(module)
    if kind in _ACTIVATIONS:
        return RepeatableCall(lambda x: kind.forward(module, x.clone()), args[0], [])
    function = _function(module)
    if function is None:
        return None
    parameters: list[Any] = [p for p in (module.weight, module.bias) if p is not None]
    if not all(type(p) is nn.Parameter for p in parameters):
        return None
    return RepeatableCall(function, args[0], parameters)


def _function(module: Any) -> Callable[..., Tensor] | None:
    """Return the function of a linear layer or a convolution, which takes input, weight and bias."""
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return F.linear
    for kind, convolution in _CONVOLUTIONS.items():
        if isinstance(module, kind) and forward is kind.forward and module.padding_mode == "zeros":
            names = ("stride", "padding", "dilation", "groups")
            return functools.partial(convolution, **{name: getattr(module, name) for name in names})
    return None


class OutputSource(NamedTuple):
    """The output that a gradient belongs to."""

    name: str
    """The module that returned it."""
    place: int | None = None
    """The place of the output in the record, if it was recorded."""
    repeatable: RepeatableCall | None = None
    """The call that returned it, in a counted step."""
    before: int | None = None
    """The place of the module's input, if that is one tensor."""


class LostGradients:
    """The zero gradients of one step that would not be zero in float32."""

    def __init__(self) -> None:
        self._arriving: dict[int, Tensor] = {}
        self._parameters = WeakTensorKeyDictionary()

    def back(self, source: OutputSource, gradient: Tensor) -> Tensor | None:
        """Propagate the gradient of an output to the inputs of its call.

        Returns the number of lost zeros in the gradient, shape (); None if that is unknown.
        """
        arriving = None if source.place is None else self._arriving.pop(source.place, None)
        lost = None if arriving is None else (gradient == 0) & arriving
        if source.repeatable is not None:
            wide = gradient.float()
            if lost is not None:
                wide = torch.where(lost, _LOST_VALUE, wide)
            input_gradient, parameters = source.repeatable.gradients(wide)
            if input_gradient is not None and source.before is not None:
                _merge(self._arriving, source.before, input_gradient)
            for parameter, of_parameter in parameters:
                _merge(self._parameters, parameter, of_parameter)
        return None if lost is None else torch.count_nonzero(lost)

    def of_parameter(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Return the number of lost zeros in a parameter's gradient, shape (); None if that is unknown."""
        nonzero = self._parameters.pop(parameter, None)
        if nonzero is None or nonzero.shape != gradient.shape:
            return None
        return torch.count_nonzero((gradient == 0) & nonzero)


def _merge(masks: MutableMapping[Any, Tensor], key: Any, gradient: Tensor) -> None:
    """Add the nonzero values of another gradient that is summed up for `key`."""
    mask = masks.get(key)
    masks[key] = gradient != 0 if mask is None else mask | (gradient != 0)
