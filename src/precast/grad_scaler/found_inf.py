"""What checks of gradients have found: PyTorch's ``found_inf``, a number on each device that has gradients.

Invariants: adding them up waits for no device, unless numbers of a device are wanted on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from precast.errors import ScalerError
from precast.grad_scaler.memory import moved

__all__ = ["FoundInf", "found_inf_so_far", "total_found_inf"]

FoundInf = dict[torch.device, Tensor]
"""For each device with gradients a float32 tensor of shape (): nonzero if a gradient there was not finite."""


def total_found_inf(
    device: torch.device | None, each: Iterable[FoundInf], where: str = "for this optimizer."
) -> Tensor:
    """The sum of what was found for several optimizers, shape ().

    Args:
        device: Where the sum is wanted; None is the first device that something was found on.
        each: What was found for each optimizer.
        where: Ends the first sentence of the error.

    Raises:
        ScalerError: No gradients were checked.
    """
    found = [number for one in each for number in one.values()]
    if found:
        to = device or found[0].device
        return functools.reduce(torch.add, (moved(number, to) for number in found))
    raise ScalerError(
        f"No inf checks were recorded {where} "  # PyTorch's words, which programs look for
        "That is, no gradients were checked in this iteration: no parameter of the optimizer has one, or "
        "step() was not called. Call scale(loss).backward(), step(optimizer), then update(); leave "
        "an optimizer out whose parameters took no part in the loss."
    )


def found_inf_so_far(scale: Tensor, found: FoundInf) -> Tensor:
    """The sum of what was found for one optimizer, on the scale's device; zero if nothing was checked yet."""
    return total_found_inf(scale.device, [found]) if found else torch.zeros_like(scale)
