"""Gradients of held weights: in float32 and in the parameter's layout, in memory that is used again.

Invariants:

- gradients are float32, but for those that `lower_gradients` has stay as they are until an optimizer's step;
- each region has a node of its own in the graph, so gradients of several regions are added in float32, as PyTorch adds
  them;
- compiled kernels have a node and a memory of their own, which do the same (`engine/native/held.cpp`);
- memory is used again only when no tensor shares it, so a gradient that a program keeps is never written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from precast._torch import (
    dispatch_modes,
    is_functorch_wrapper,
    is_shared,
    outside_inference_mode,
    without_torch_function,
)
from precast.weights.held_record import HeldRecord
from precast.weights.native_copies import NativeHeld, native

__all__ = ["GradientMemory", "free_temporaries", "see_modes", "with_gradient"]


def see_modes(count: Callable[[], int]) -> None:
    """Has this file ask `count` for dispatch modes: one that only watches must change nothing."""
    global dispatch_modes  # noqa: PLW0603 -- another function, not a question at each use
    dispatch_modes = count


def with_gradient(parameter: Tensor, copy: Tensor, memory: GradientMemory) -> Tensor:
    """The copy as a cast of the parameter: its gradient is the parameter's, in float32 and in its layout."""
    with outside_inference_mode(), without_torch_function():
        if memory.native is not None and native.is_used:
            return memory.native.cast_of(parameter, copy)
        cast: Tensor = _Cast.apply(parameter, copy, memory)  # type: ignore[no-untyped-call]
    return cast


class _Cast(torch.autograd.Function):
    """The cast of a parameter, whose result is there already."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor, memory: GradientMemory) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.memory = copy.stride(), memory
        ctx.stays_low = parameter.grad_dtype is copy.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is not None:
            ctx.memory.record.received += 1
            dtype = gradient.dtype if ctx.stays_low else torch.float32
            gradient = _in_layout(gradient, ctx.layout, dtype, ctx.memory)
        return gradient, None, None


class GradientMemory:
    """Memory of one parameter's gradient on the CPU, used again once the gradient of the last step is gone.

    What a process gets back from the system page by page costs more than the arithmetic of a small batch. A gradient
    that is added to what is there needs memory for that moment alone: parameters of one shape take it in turns.

    Args:
        native: what compiled kernels know of the copy, where there is a library: they have memory of their own.
    """

    __slots__ = ("_own", "_record", "native")

    def __init__(self, native: NativeHeld | None = None) -> None:
        self._own: list[Tensor] = []
        self.native = native
        self._record = HeldRecord() if native is None else None

    @property
    def record(self) -> HeldRecord:
        """Counts the gradients that have come."""
        if self._record is not None:
            return self._record
        assert self.native is not None
        return self.native.record

    def like(self, gradient: Tensor, layout: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of that layout and dtype, for the shape of `gradient`."""
        own = _taken(self._own)
        if (
            own is None
            or own.dtype is not dtype
            or own.stride() != layout
            or own.shape != gradient.shape
        ):
            own = gradient.new_empty_strided(gradient.shape, layout, dtype=dtype)
        if not is_shared(own):
            given = own.detach()
            self._own.append(own)
            return given
        self._own.append(own)
        return _temporary(gradient, layout, dtype)


def _taken(some: list[Tensor]) -> Tensor | None:
    """One of them, taken out, so that two threads never get the same."""
    try:
        return some.pop()
    except IndexError:
        return None


_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype]
_temporaries: Final[defaultdict[_Kind, list[Tensor]]] = defaultdict(list)


def _temporary(gradient: Tensor, layout: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    spare = _temporaries[gradient.shape, layout, dtype]
    free = _taken(spare)
    if free is None or is_shared(free):
        free = gradient.new_empty_strided(gradient.shape, layout, dtype=dtype)
    given = free.detach()
    spare[:] = [free]
    return given


def free_temporaries() -> None:
    """Gives back what parameters take in turns."""
    _temporaries.clear()
    if native.copies is not None:
        native.copies.free_temporaries()


def _in_layout(
    gradient: Tensor, layout: tuple[int, ...], dtype: torch.dtype, memory: GradientMemory
) -> Tensor:
    is_recorded = torch.is_grad_enabled() or dispatch_modes() or is_functorch_wrapper(gradient)
    if is_recorded or gradient.layout is not torch.strided:
        return gradient.to(dtype)
    if gradient.stride() != layout and dtype is not gradient.dtype:
        # Two steps: to cast and move at once takes 0.66 ms for 512x512 transposed, this 0.37 (2.13, 2-core CPU).
        gradient = gradient.new_empty_strided(gradient.shape, layout).copy_(gradient)
    if not gradient.is_cpu:
        return gradient.to(dtype)
    return memory.like(gradient, layout, dtype).copy_(gradient)
