"""Training in 16 bits as an expert writes it by hand: 16-bit parameters, float32 masters that the optimizer steps.

The masters' gradients live in float32 buffers that are made once. A step casts the gradients there, steps the masters,
and copies them back into the parameters: two copies of lists, nothing for each parameter in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Update", "masters", "plain", "scaled", "summing_masters"]


@dataclass(frozen=True)
class Update:
    """The parts of a training step: `clear` first, `backward` for each batch, `apply` at the end."""

    clear: Callable[[], object]
    backward: Callable[[Tensor], object]
    apply: Callable[[], object]


def plain(optimizer: Optimizer) -> Update:
    """Return the update in the optimizer's documentation."""
    return Update(optimizer.zero_grad, Tensor.backward, optimizer.step)


def scaled(optimizer: Optimizer, scaler: Any) -> Update:
    """With a gradient scaler, PyTorch's or precast's."""

    def apply() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Update(optimizer.zero_grad, lambda loss: scaler.scale(loss).backward(), apply)


def masters(
    model: nn.Module,
    dtype: torch.dtype,
    make: Callable[[list[Tensor]], Optimizer],
    wrap: Callable[[Optimizer], Update] = plain,
) -> Update:
    """Turns the model's parameters to `dtype`; gradients of several batches are summed in it."""
    params, copies, inner = _split(model, dtype, make, wrap)
    grads: Any = [copy.grad for copy in copies]

    def clear() -> None:
        for param in params:
            param.grad = None

    def apply() -> None:
        gradients: Any = [param.grad for param in params]
        torch._foreach_copy_(grads, gradients)
        _apply(params, copies, inner)

    return Update(clear, inner.backward, apply)


def summing_masters(
    model: nn.Module,
    dtype: torch.dtype,
    make: Callable[[list[Tensor]], Optimizer],
    wrap: Callable[[Optimizer], Update] = plain,
) -> Update:
    """Like `masters`, but gradients of several batches are summed in float32, which costs a pass for each batch."""
    params, copies, inner = _split(model, dtype, make, wrap)
    sums: Any = [copy.grad for copy in copies]

    def backward(loss: Tensor) -> None:
        inner.backward(loss)
        grads: Any = [param.grad for param in params]
        torch._foreach_add_(sums, grads)
        for param in params:
            param.grad = None

    return Update(
        lambda: torch._foreach_zero_(sums), backward, lambda: _apply(params, copies, inner)
    )


def _split(
    model: nn.Module,
    dtype: torch.dtype,
    make: Callable[[list[Tensor]], Optimizer],
    wrap: Callable[[Optimizer], Update],
) -> tuple[list[Tensor], list[Tensor], Update]:
    """The parameters, now of `dtype`; their float32 masters, with room for gradients; how these are updated."""
    copies = [param.detach().clone() for param in model.parameters()]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    model.to(dtype)
    return list(model.parameters()), copies, wrap(make(copies))


@torch.no_grad()
def _apply(params: list[Tensor], copies: list[Tensor], inner: Update) -> None:
    inner.apply()
    torch._foreach_copy_(params, copies)
