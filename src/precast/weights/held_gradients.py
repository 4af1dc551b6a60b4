"""Gradients of held weights: float32, in the parameter's layout, in reused memory.

Invariants:

- gradients are float32, unless the parameter's `grad_dtype` is the copy's dtype;
- each region adds a separate graph node, so the gradients of several regions are summed in float32, as in PyTorch;
- compiled kernels have an equivalent node with separate memory (`native/held.cpp`);
- memory is reused only if no other tensor shares it, so a gradient that the program keeps is never overwritten.
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
from precast.weights.native.api import NativeHeldCopy
from precast.weights.native.boundary import HeldRecord
from precast.weights.native.engine import native_engine

__all__ = ["GradientMemory", "free_temporaries", "set_mode_counter", "with_gradient"]


def set_mode_counter(count: Callable[[], int]) -> None:
    """Replace the function that counts dispatch modes: a mode that only observes must have no effect here."""
    global dispatch_modes  # noqa: PLW0603 -- replaced as a whole, to avoid a test at each use
    dispatch_modes = count


def with_gradient(parameter: Tensor, copy: Tensor, memory: GradientMemory) -> Tensor:
    """Return the copy as a cast of the parameter, whose gradient flows to the parameter in float32."""
    with outside_inference_mode(), without_torch_function():
        if memory.native is not None and native_engine.is_used:
            return memory.native.cast_of(parameter, copy)
        cast: Tensor = _HeldCast.apply(parameter, copy, memory)  # type: ignore[no-untyped-call]
    return cast


class _HeldCast(torch.autograd.Function):
    """The cast of a parameter, whose result already exists."""

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
    """Reusable CPU memory for the gradient of one parameter.

    Fresh memory from the system costs more (page by page) than the arithmetic of a small batch. A gradient that is
    added to an existing one needs its memory only briefly: parameters of one shape share it.

    Args:
        native: the copy as the library knows it; the library manages the memory itself.
    """

    __slots__ = ("_own", "_record", "native")

    def __init__(self, native: NativeHeldCopy | None = None) -> None:
        self._own: list[Tensor] = []
        self.native = native
        self._record = HeldRecord() if native is None else None

    @property
    def record(self) -> HeldRecord:
        """The record of the copy, which counts its gradients."""
        if self._record is not None:
            return self._record
        assert self.native is not None
        return self.native.record

    def like(self, gradient: Tensor, layout: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of this layout and dtype, with the shape of `gradient`."""
        own = _pop_or_none(self._own)
        if (
            own is None
            or own.dtype is not dtype
            or own.stride() != layout
            or own.shape != gradient.shape
        ):
            own = gradient.new_empty_strided(gradient.shape, layout, dtype=dtype)
        if not is_shared(own):
            result = own.detach()
            self._own.append(own)
            return result
        self._own.append(own)
        return _temporary(gradient, layout, dtype)


def _pop_or_none(tensors: list[Tensor]) -> Tensor | None:
    """Take a tensor out of a list in one step, so that two threads never get the same one."""
    try:
        return tensors.pop()
    except IndexError:
        return None


_MemoryKind = tuple[torch.Size, tuple[int, ...], torch.dtype]
_temporaries: Final[defaultdict[_MemoryKind, list[Tensor]]] = defaultdict(list)


def _temporary(gradient: Tensor, layout: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    spares = _temporaries[gradient.shape, layout, dtype]
    spare = _pop_or_none(spares)
    if spare is None or is_shared(spare):
        spare = gradient.new_empty_strided(gradient.shape, layout, dtype=dtype)
    result = spare.detach()
    spares[:] = [spare]
    return result


def free_temporaries() -> None:
    """Free the memory that the gradients of several parameters share."""
    _temporaries.clear()
    if native_engine.api is not None:
        native_engine.api.free_temporaries()


def _in_layout(
    gradient: Tensor, layout: tuple[int, ...], dtype: torch.dtype, memory: GradientMemory
) -> Tensor:
    is_recorded = torch.is_grad_enabled() or dispatch_modes() or is_functorch_wrapper(gradient)
    if is_recorded or gradient.layout is not torch.strided:
        return gradient.to(dtype)
    if gradient.stride() != layout and dtype is not gradient.dtype:
        # Two steps: casting and transposing 512x512 at once takes 0.66 ms, in two steps 0.37 (2.13, 2-core CPU).
        gradient = gradient.new_empty_strided(gradient.shape, layout).copy_(gradient)
    if not gradient.is_cpu:
        return gradient.to(dtype)
    return memory.like(gradient, layout, dtype).copy_(gradient)
