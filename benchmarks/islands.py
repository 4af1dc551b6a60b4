"""A model in 16 bits by hand that leaves in float32 what a policy keeps there, as one would write it without precast.

Such weights stay float32, and a layer with 16-bit weights casts its input where that is float32. So it differs from
what precast ships in nothing that the policy decides, and from `model.to(dtype)` in nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks import Network

__all__ = ["in_16_bits"]


def in_16_bits(network: Network, low: Collection[str], dtype: torch.dtype) -> nn.Module:
    """The model in evaluation mode, with these weights in `dtype`.

    Args:
        network: what makes the model.
        low: the names of the weights that are not float32.
        dtype: theirs.
    """
    model, [(inputs, _)] = network.seeded(torch.device("cpu"), 1)
    model.eval().requires_grad_(False)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in low:
            tensor.data = tensor.data.to(dtype)
    casting: list[nn.Module] = []

    def cast(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if args[0].dtype is torch.float32:
            casting.append(module)
        return (args[0].to(dtype), *args[1:])

    layers = [module for module in model.modules() if _is_low(module, dtype)]
    hooks = [layer.register_forward_pre_hook(cast) for layer in layers]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    for layer in casting:
        kind: Any = type(layer)
        layer.__class__ = _casting(kind, dtype)
    return model


def _is_low(module: nn.Module, dtype: torch.dtype) -> bool:
    weights = list(module.parameters(recurse=False))
    return bool(weights) and all(weight.dtype is dtype for weight in weights)


@cache
def _casting(base: Any, dtype: torch.dtype) -> Any:
    """The class of layers that cast their input first."""

    class Casting(base):  # type: ignore[misc]
        def forward(self, input: Tensor) -> Any:
            return super().forward(input.to(dtype))

    return Casting
