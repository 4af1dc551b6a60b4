"""Recorded calls as plain values, and calls made anew from them: random tensors of the same shapes, strides and ranges.

Invariants:

- a recorded call keeps no tensor; what is no tensor is kept as it was, but lists become tuples;
- tensors made anew have the recorded strides, overlapping ones too, and numbers within the recorded range, so indices
  stay inside of what they index;
- the generator alone decides the numbers; PyTorch's own generator is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from precast.tuning.sites import Argument, Call

__all__ = ["arguments_of", "is_castable", "made", "replaced", "tensors_in_order"]

_F64: Final = torch.float64


def is_castable(dtype: torch.dtype) -> bool:
    """Whether rules act on tensors of a dtype: floating-point, other than float64."""
    return dtype.is_floating_point and dtype is not _F64


def replaced(value: Any, replace: Callable[[Any], Any], kind: type) -> Any:
    """`value` with each instance of a class in it replaced; lists become tuples, so that the result can be hashed."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, list | tuple):
        return tuple(replaced(each, replace, kind) for each in value)
    if isinstance(value, torch.Generator):
        return None
    return value


def tensors_in_order(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call in the order of its `Argument`s, also those in lists."""
    return list(_walked((*args, *kwargs.values()), Tensor))


def arguments_of(call: Call) -> list[Argument]:
    """The tensors of a recorded call, in the order of the arguments."""
    return list(_walked((*call.args, *call.kwargs.values()), Argument))


def made(
    call: Call, dtypes: Callable[[int, Argument], torch.dtype], generator: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call like the recorded one.

    Args:
        call: what was recorded.
        dtypes: the dtype of the tensor with that position among the call's tensors.
        generator: where the numbers come from.

    Returns:
        Positional and keyword arguments; tensors that had a gradient require one.
    """
    position = iter(range(len(arguments_of(call))))

    def make(argument: Argument) -> Tensor:
        return _tensor(argument, dtypes(next(position), argument), generator)

    args = tuple(replaced(value, make, Argument) for value in call.args)
    return args, {name: replaced(value, make, Argument) for name, value in call.kwargs.items()}


def _walked(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _walked(each, kind)


def _tensor(argument: Argument, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    shape, strides = argument.shape, argument.strides
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size = 0 if 0 in shape else last + 1
    numbers = _numbers(size, argument, generator).to(dtype)
    tensor = numbers.as_strided(shape, strides).detach()
    return tensor.requires_grad_(argument.needs_grad and tensor.is_floating_point())


def _numbers(size: int, argument: Argument, generator: torch.Generator) -> Tensor:
    low, high, dtype = argument.low, argument.high, argument.dtype
    device = generator.device
    if dtype is torch.bool:
        return torch.rand(size, generator=generator, device=device) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(
            int(low), int(high) + 1, (size,), generator=generator, device=device, dtype=torch.int64
        )
    numbers = torch.rand(size, generator=generator, device=device)
    return numbers * (high - low) + low
