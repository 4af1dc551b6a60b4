"""Copies of many small tensors on the CPU, with one wait for each device.

Invariant: the copies have the bits of the tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["move_to_host", "on_host"]


def move_to_host(groups: Iterable[dict[Any, Any]]) -> None:
    """Replace the tensors among the values of dictionaries by copies on the CPU. Waits once for each device."""
    places = [(group, key) for group in groups for key in group if isinstance(group[key], Tensor)]
    copies = on_host(group[key] for group, key in places)
    for (group, key), copy in zip(places, copies, strict=True):
        group[key] = copy


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU: copies of those of other devices. Waits once for each device."""
    copies = [tensor.detach() for tensor in tensors]
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for place, tensor in enumerate(copies):
        if not tensor.is_cpu:
            by_device[tensor.device].append(place)
    for places in by_device.values():
        # The largest items first, so that each tensor begins at a multiple of its item size.
        places.sort(key=lambda place: -copies[place].dtype.itemsize)
        parts = [copies[place].reshape(-1).view(torch.uint8) for place in places]
        memory = torch.cat(parts).cpu().split([part.numel() for part in parts])
        for place, part in zip(places, memory, strict=True):
            copies[place] = part.view(copies[place].dtype).reshape(copies[place].shape)
    return copies
