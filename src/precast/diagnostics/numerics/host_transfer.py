"""Copies of many small tensors on the CPU, with one wait for each device.

Invariant: the copies have the bits of the tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["HostTransfer", "on_host"]


class HostTransfer:
    """Requests for tensors on the CPU, which `run` fulfills together."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._requests: list[tuple[int, Callable[[list[Tensor]], None]]] = []

    def add(self, tensors: Iterable[Tensor], store: Callable[[list[Tensor]], None]) -> None:
        """Request tensors. `run` calls `store` with them on the CPU, in the same order."""
        start = len(self._tensors)
        self._tensors += tensors
        self._requests.append((len(self._tensors) - start, store))

    def run(self) -> None:
        """Copy all tensors that were requested. Waits once for each device."""
        tensors = iter(on_host(self._tensors))
        for number, store in self._requests:
            store([next(tensors) for _ in range(number)])


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
