"""The checkerboard task: a network of 1x1 convolutions learns an image from its coordinates.

Each pixel is an example of its own: the input is two coordinates, the output one brightness. Sharp edges are hard to
learn from smooth coordinates, so the picture shows at a glance how far training came. The model is a
`torch.jit.ScriptModule`, as older programs have them, and it trains on precast unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precast.demo.task import Batch, Panel, Task, channels_last

__all__ = ["Checkerboard"]

_FREQUENCY = 8  # fields along a side
_WIDTH = 256


class Checkerboard(Task):
    """Learns a checkerboard of 8 x 8 fields from the coordinates of a square grid.

    Args:
        size: pixels along a side of the grid; a step trains on all of them.
        device: where data and model live.
    """

    name = "checkerboard"

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.summary = f"an 8 x 8 checkerboard from the coordinates of {size} x {size} pixels"
        self.examples = coordinates(size).to(device, memory_format=torch.channels_last)
        self.target = checkerboard(size).to(device)

    def model(self) -> nn.Module:
        """1x1 convolutions 2 -> 256 -> 256 -> 256 -> 1, BatchNorm and ReLU between, scripted."""
        layers: list[nn.Module] = []
        for before in (2, _WIDTH, _WIDTH):
            layers += [nn.Conv2d(before, _WIDTH, 1), nn.BatchNorm2d(_WIDTH), nn.ReLU()]
        network = nn.Sequential(*layers, nn.Conv2d(_WIDTH, 1, 1))
        return _script(channels_last(network, self.device))

    def batch(self, step: int) -> Batch:  # noqa: ARG002 -- all pixels, every step
        """The whole image."""
        return self.examples, self.target

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error over the pixels."""
        return F.mse_loss(output, target)

    def accuracy(self, output: Tensor) -> None:
        """None, as nothing is classified."""

    def panels(self, outputs: Mapping[str, Tensor]) -> tuple[Panel, ...]:
        """The target and the image that each run has learnt."""
        images = {"target": self.target.cpu(), **outputs}
        return tuple(Panel(title, image[0, 0].clamp(0, 1)) for title, image in images.items())


def coordinates(size: int) -> Tensor:
    """Row and column of each pixel, from -1 to 1: (1, 2, size, size)."""
    axis = torch.linspace(-1, 1, size)
    return torch.stack(torch.meshgrid(axis, axis, indexing="ij"))[None]


def checkerboard(size: int) -> Tensor:
    """An image of 8 x 8 fields that are 0 and 1 in turn: (1, 1, size, size)."""
    field = torch.arange(size) * _FREQUENCY // size
    return ((field[:, None] + field[None, :]) % 2).float()[None, None]


def _script(network: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # TorchScript is deprecated (since 2.14 by a FutureWarning); that it still trains is what this shows.
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        scripted: nn.Module = torch.jit.script(network)
    return scripted
