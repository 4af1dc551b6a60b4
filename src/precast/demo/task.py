"""The interface of a demo's task: data, a model, a loss, and pictures of what was learnt.

Invariants: all randomness of a task comes from its seed, so that two runs see the same batches in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Mark", "Panel", "Task", "channels_last"]

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class Mark:
    """A word on a panel, at a place in pixels of its image."""

    row: float
    column: float
    text: str
    right: bool


@dataclass(frozen=True)
class Panel:
    """One picture of the row "target, float32, mixed".

    Attributes:
        title: what it shows.
        image: (height, width), float32 on the CPU, 0 is dark and 1 is bright.
        marks: words to write on it.
    """

    title: str
    image: Tensor
    marks: tuple[Mark, ...] = ()


class Task(ABC):
    """A training task on one device.

    Attributes:
        name: as the command line says it.
        summary: what is learnt from what, in one line.
        examples: inputs that the trained models are shown at the end.
        learning_rate: for Adam.
    """

    name: str
    summary: str
    examples: Tensor
    learning_rate = 1e-3

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model on the task's device; its weights come from PyTorch's global generator."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Inputs and targets of one step, on the task's device."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The scalar that training makes small."""

    @abstractmethod
    def accuracy(self, output: Tensor) -> float | None:
        """Share of `examples` that `output` (float32, on the CPU) gets right; None where nothing is classified."""

    @abstractmethod
    def panels(self, outputs: Mapping[str, Tensor]) -> tuple[Panel, ...]:
        """The target, then one panel for each of `outputs` (label -> output for `examples`)."""


def channels_last(network: nn.Module, device: torch.device) -> nn.Module:
    """`network` on `device`, in the memory layout that 16-bit convolutions are written for.

    Both runs get it: float32 loses nothing by it.
    """
    network.to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network
