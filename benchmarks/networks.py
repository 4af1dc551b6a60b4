"""The networks that `python -m benchmarks models` measures: each with its batches, its loss, and sizes to choose.

Invariants:
    - Weights and batches come from a seed alone: a network made twice has the same weights and sees the same batches.
    - No dropout, and nothing else that draws numbers while it runs.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precast.cli.demo.example import demo_task
from precast.errors import MissingExtraError

__all__ = [
    "MOST_BATCHES",
    "Batch",
    "Network",
    "checkerboard",
    "convolutional",
    "decoder",
    "digits",
    "mlp",
    "resnet50",
    "transformers_gpt2",
]

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""

MOST_BATCHES = 4
"""The most batches of a step."""

VOCABULARY = 1024
_SEED = 0
_CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network to measure.

    Attributes:
        case: its name and size, as the tables say them.
        model: makes it, in float32; from PyTorch's generator.
        batch: the batch of a step, by its number; from PyTorch's generator.
        loss: of the model's output and a batch's target.
        facts: its sizes by name, for the rows.
    """

    case: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    facts: dict[str, Any] = field(default_factory=dict)

    def seeded(self, device: torch.device, batches: int) -> tuple[nn.Module, list[Batch]]:
        """The model and the first `batches` batches of the seed; PyTorch's generators stay as they were."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), device:
            torch.manual_seed(_SEED)
            model = self.model().to(device)
            examples = [self.batch(step) for step in range(batches)]
        return model, [(inputs.to(device), target.to(device)) for inputs, target in examples]


def decoder(width: int, batch: int, length: int, *, layers: int = 4) -> Network:
    """A decoder like GPT-2: `layers` blocks of causal attention, heads of 64, and a perceptron four times as wide."""

    def drawn(_: int) -> Batch:
        tokens = torch.randint(VOCABULARY, (batch, length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return Network(
        f"decoder {width}, {batch}x{length}",
        lambda: _Decoder(width, layers, length),
        drawn,
        _cross_entropy,
        {"network": "decoder", "width": width, "batch": batch, "length": length, "layers": layers},
    )


def convolutional(width: int = 32, batch: int = 16, side: int = 32) -> Network:
    """Convolutions with batch norms, three times halved and widened, on images of `side` pixels."""

    def drawn(_: int) -> Batch:
        images = torch.randn(batch, 3, side, side).to(memory_format=torch.channels_last)
        return images, torch.randint(_CLASSES, (batch,))

    return Network(
        f"convolutional {width}, {batch}x3x{side}x{side}",
        lambda: _convolutions(width),
        drawn,
        _cross_entropy,
        {"network": "convolutional", "width": width, "batch": batch},
    )


def resnet50(batch: int = 64, side: int = 224) -> Network:
    """ResNet-50 of torchvision in channels_last.

    Raises:
        MissingExtraError: torchvision is not installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise MissingExtraError("torchvision is not installed: pip install torchvision")
    from torchvision.models import resnet50 as make

    def drawn(_: int) -> Batch:
        images = torch.randn(batch, 3, side, side).to(memory_format=torch.channels_last)
        return images, torch.randint(_CLASSES, (batch,))

    def model() -> nn.Module:
        network: nn.Module = make(num_classes=_CLASSES)
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    return Network(
        f"ResNet-50, {batch}x3x{side}x{side}",
        model,
        drawn,
        _cross_entropy,
        {"network": "ResNet-50", "batch": batch},
    )


def mlp(width: int = 16, batch: int = 8, *, layers: int = 32) -> Network:
    """Layers so small that the time goes into calls, not into arithmetic."""
    return Network(
        f"MLP {layers} x {width}, {batch}",
        lambda: nn.Sequential(*(_layer(width) for _ in range(layers))),
        lambda _: (torch.randn(batch, width), torch.randn(batch, width)),
        F.mse_loss,
        {"network": "mlp", "width": width, "batch": batch, "layers": layers},
    )


def checkerboard(device: torch.device) -> Network:
    """Return the network and the batch of `precast demo`, at the size that the demo has on this device."""
    task, _, _ = demo_task(str(device))
    return Network(
        f"checkerboard {task.size}",
        task.seeded_model,
        lambda _: task.batch,
        task.loss,
        {"network": "checkerboard", "size": task.size},
    )


def digits(device: torch.device) -> Network:
    """Return a small convolutional classifier of images of 8 x 8 pixels."""
    batch = 256 if device.type == "cuda" else 128

    def block(channels: int, width: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()

    def make() -> nn.Module:
        head = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128 * 2 * 2, 10))
        network = nn.Sequential(
            *block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), *head
        )
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    return Network(
        f"digits {batch}",
        make,
        lambda _: (torch.rand(batch, 1, 8, 8), torch.randint(10, (batch,))),
        F.cross_entropy,
        {"network": "digits", "size": batch},
    )


def transformers_gpt2(size: str = "medium") -> Network:
    """GPT-2 of the library transformers, at a size of `client_models`.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(
            "transformers is not installed; in a clone: pip install '.[test-clients]'"
        )
    from benchmarks.client_models import MODELS, SIZES

    gpt2, chosen = MODELS["GPT-2"], SIZES[size]

    def drawn(_: int) -> Batch:
        tokens = torch.randint(chosen.vocabulary, (chosen.batch, chosen.length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return Network(
        f"transformers GPT-2 {chosen.width}, {chosen.batch}x{chosen.length}",
        lambda: _Logits(gpt2.make(chosen)),
        drawn,
        _cross_entropy,
        {"network": "transformers GPT-2", "width": chosen.width, "batch": chosen.batch},
    )


class _Decoder(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self._attention(self.norm(x)))
        perceived: Tensor = x + self.perceptron(self.norm2(x))
        return perceived

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2)


class _Logits(nn.Module):
    """A language model of transformers as a function of tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def _convolutions(width: int) -> nn.Module:
    channels = [3, width, 2 * width, 4 * width]
    stages = [
        nn.Sequential(_convolution(before, after, 2), _convolution(after, after, 1))
        for before, after in itertools.pairwise(channels)
    ]
    network = nn.Sequential(
        *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], _CLASSES)
    )
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _convolution(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def _layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
