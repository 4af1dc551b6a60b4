"""Conversion of recorded calls to plain values, and of these to random tensors of the same shapes and ranges.

Invariants:
- a recorded call keeps no tensor; other values stay as they are, but lists become tuples;
- random tensors have the recorded strides, overlapping ones too, and numbers within the recorded range, so that indices
  stay inside of what they index;
- the given generator alone decides the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from precast.tuning.sites import CallRecord, TensorArgument

__all__ = ["first_floating", "is_castable", "make_arguments", "replace_all", "replace_tensors"]
__all__ += ["tensor_arguments", "tensors_in_order"]


def is_castable(dtype: torch.dtype) -> bool:
    """Return True if rules act on tensors of a dtype: floating-point, other than float64."""
    return dtype.is_floating_point and dtype is not torch.float64


def replace_all(value: Any, replace: Callable[[Any], Any], kind: type) -> Any:
    """Return `value` with each instance of a class in it replaced; lists become tuples, which can be hashed."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, list | tuple):
        return tuple(replace_all(each, replace, kind) for each in value)
    if isinstance(value, torch.Generator):
        return None
    return value


def replace_tensors(
    call: CallRecord, replace: Callable[[TensorArgument], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a recorded call with each tensor replaced."""
    args = tuple(replace_all(value, replace, TensorArgument) for value in call.args)
    return args, {n: replace_all(v, replace, TensorArgument) for n, v in call.kwargs.items()}


def tensors_in_order(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a call in the order of its arguments, also those in lists."""
    return list(_instances((*args, *kwargs.values()), Tensor))


def tensor_arguments(call: CallRecord) -> list[TensorArgument]:
    """Return the tensors of a recorded call, in the order of the arguments."""
    return list(_instances((*call.args, *call.kwargs.values()), TensorArgument))


def first_floating(result: Any) -> Tensor | None:
    """Return the first tensor of a result that rules could have cast."""
    tensors = tensors_in_order((result,), {})
    return next((tensor for tensor in tensors if is_castable(tensor.dtype)), None)


def make_arguments(
    call: CallRecord,
    dtypes: Callable[[int, TensorArgument], torch.dtype],
    generator: torch.Generator,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return random arguments for a call like the recorded one; tensors that had a gradient require one.

    Args:
        call: the recorded call.
        dtypes: returns the dtype of the tensor with this position among the call's tensors.
        generator: the source of the numbers.
    """
    position = iter(range(len(tensor_arguments(call))))
    return replace_tensors(call, lambda a: _random_tensor(a, dtypes(next(position), a), generator))


def _instances(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _instances(each, kind)


def _random_tensor(
    argument: TensorArgument, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    shape, strides = argument.shape, argument.strides
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size = 0 if 0 in shape else last + 1
    numbers = _random_numbers(size, argument, generator).to(dtype)
    tensor = numbers.as_strided(shape, strides).detach()
    return tensor.requires_grad_(argument.needs_grad and tensor.is_floating_point())


def _random_numbers(size: int, argument: TensorArgument, generator: torch.Generator) -> Tensor:
    low, high, dtype = argument.low, argument.high, argument.dtype
    device = generator.device
    if dtype is torch.bool:
        return torch.rand(size, generator=generator, device=device) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(
            int(low), int(high) + 1, (size,), generator=generator, device=device, dtype=torch.int64
        )
    return torch.rand(size, generator=generator, device=device) * (high - low) + low
