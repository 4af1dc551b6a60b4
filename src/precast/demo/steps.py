"""The two training steps that the demo compares: one in float32 and one in mixed precision.

This is the file to copy from. The second function is the first one with four changes: the forward pass and the loss run
in a region, and the scaler scales the loss, steps the optimizer, and updates its scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast.autocast_mode.region import autocast
from precast.demo.task import Batch
from precast.grad_scaler.scaler import GradScaler

__all__ = ["Loss", "float32_step", "mixed_step"]

Loss = Callable[[Tensor, Tensor], Tensor]


def float32_step(model: nn.Module, optimizer: Optimizer, loss_of: Loss, batch: Batch) -> Tensor:
    """One training step in float32; returns the loss, detached."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = loss_of(model(inputs), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mixed_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Loss,
    batch: Batch,
    *,
    dtype: torch.dtype,
    scaler: GradScaler,
) -> Tensor:
    """One training step in mixed precision; returns the loss, detached."""
    inputs, target = batch
    optimizer.zero_grad()
    with autocast(inputs.device.type, dtype=dtype):
        loss = loss_of(model(inputs), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()
