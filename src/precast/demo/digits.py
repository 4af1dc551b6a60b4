"""The digits task: a small convolutional classifier on real handwritten digits.

The 1797 images of 8 x 8 pixels ship inside scikit-learn (the test set of the UCI "Optical
Recognition of Handwritten Digits" data); a fifth of them is held out and never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precast._internal.missing import missing_extra
from precast.demo.task import Batch, Mark, Panel, Task, channels_last

__all__ = ["IMAGES", "Digits"]

IMAGES = 1797
"""How many images there are."""

_HELD_OUT = IMAGES // 5
_SHOWN = 6  # digits along a side of a panel
_HIGH, _WIDE = 8 + 5, 8 + 4  # pixels of a digit with the room around it


class Digits(Task):
    """Learns to read handwritten digits.

    Args:
        size: images in a batch.
        device: where data and model live.
        seed: decides which images are held out, and the order of the others.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """

    name = "digits"

    def __init__(self, size: int, device: torch.device, seed: int) -> None:
        self.size, self.device = size, device
        self.summary = f"handwritten digits, {size} images a batch, {_HELD_OUT} images held out"
        images, labels = _load()
        self._random = torch.Generator().manual_seed(seed)
        order = torch.randperm(IMAGES, generator=self._random)
        held_out, trained = order[:_HELD_OUT], order[_HELD_OUT:]
        self.examples, self.labels = images[held_out].to(device), labels[held_out]
        self._images, self._labels = images[trained].to(device), labels[trained].to(device)
        self._order: Tensor = torch.empty(0, dtype=torch.long)

    def model(self) -> nn.Module:
        """Three 3x3 convolutions (32, 64, 128 channels) with BatchNorm and ReLU, and a linear."""
        network = nn.Sequential(
            *_block(1, 32),
            *_block(32, 64),
            nn.MaxPool2d(2),
            *_block(64, 128),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128 * 2 * 2, 10),
        )
        return channels_last(network, self.device)

    def batch(self, step: int) -> Batch:
        """The images of one step. Each epoch has every image once, in a random order of its own."""
        last = (step + 1) * self.size
        while len(self._order) < last:
            epoch = torch.randperm(len(self._labels), generator=self._random)
            self._order = torch.cat([self._order, epoch])
        chosen = self._order[last - self.size : last].to(self.device)
        return self._images[chosen], self._labels[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output, target)

    def accuracy(self, output: Tensor) -> float:
        """Share of the held-out images that are read correctly."""
        return (output.argmax(1) == self.labels).float().mean().item()

    def panels(self, outputs: Mapping[str, Tensor]) -> tuple[Panel, ...]:
        """Held-out digits with what each run reads; digits that a run reads wrongly come first."""
        readings = {label: output.argmax(1) for label, output in outputs.items()}
        wrong = sum((reading != self.labels).int() for reading in readings.values())
        shown = torch.as_tensor(wrong).argsort(descending=True, stable=True)[: _SHOWN**2]
        answers = {"target": self.labels, **readings}
        return tuple(
            Panel(title, self._mosaic(shown), self._marks(answer[shown], self.labels[shown]))
            for title, answer in answers.items()
        )

    def _mosaic(self, shown: Tensor) -> Tensor:
        tiles = F.pad(self.examples[shown].cpu(), (2, 2, 1, 4))  # below is room for the reading
        rows = tiles.reshape(_SHOWN, _SHOWN, _HIGH, _WIDE).transpose(1, 2)
        return rows.reshape(_SHOWN * _HIGH, _SHOWN * _WIDE)

    def _marks(self, answer: Tensor, truth: Tensor) -> tuple[Mark, ...]:
        return tuple(
            Mark(
                row=(place // _SHOWN + 1) * _HIGH - 2.7,
                column=(place % _SHOWN + 0.5) * _WIDE - 0.5,
                text=str(read),
                right=read == true,
            )
            for place, (read, true) in enumerate(zip(answer.tolist(), truth.tolist(), strict=True))
        )


def _block(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]


def _load() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) from 0 to 1, and their labels (1797,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_extra("the task digits", "scikit-learn", "demo") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16  # pixels are 0 to 16
    return images.contiguous(memory_format=torch.channels_last), torch.tensor(data.target)
