"""Small networks on a GPU, how they are trained, and what has to be equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NETWORKS", "OPTIMIZERS", "Region", "Training", "equal"]
__all__ += ["loss_of", "network", "scaled_step", "train"]

Region = Callable[[], AbstractContextManager[object]]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


def _decoder() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 128), _Block(128), _Block(128), nn.LayerNorm(128), nn.Linear(128, 256)
    )


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.GroupNorm(8, 64),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))


Networks = dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]]
NETWORKS: Networks = {
    "perceptron": (_perceptron, lambda: torch.randn(16, 256)),
    "decoder": (_decoder, lambda: torch.randint(256, (4, 16))),
    "convolutional": (_convolutional, lambda: torch.randn(4, 3, 32, 32)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, 1e-3, capturable=True),
}


def network(name: str, networks: Networks = NETWORKS) -> tuple[nn.Module, Tensor]:
    """A network and a batch on the GPU, the same on each call."""
    torch.manual_seed(0)
    make, batch = networks[name]
    return make().cuda(), batch().cuda()


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


@dataclass
class Training:
    """The losses and the weights of a training run, and the scale at its end."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    scale: float | None = None

    def assert_equal(self, other: Training) -> None:
        """Every loss, weight and scale to the bit; a loss that is NaN equals none."""
        assert self.losses == other.losses
        assert self.scale == other.scale
        assert all(equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))


def train(
    name: str,
    region: Region,
    optimizer: str,
    *,
    scaler: Any = None,
    clip: float | None = None,
    prepare: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda _m, _o: None,
    steps: int = 4,
) -> Training:
    """Trains one of the networks; `prepare` gets it and its optimizer before the first step."""
    model, x = network(name)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    prepare(model, chosen)
    result = Training()
    for _ in range(steps):
        chosen.zero_grad()
        with region():
            loss = loss_of(model(x))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(chosen)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            chosen.step()
        else:
            scaler.step(chosen)
            scaler.update()
        result.losses.append(loss.item())
    result.weights = [p.detach() for p in model.parameters()]
    result.scale = None if scaler is None else scaler.get_scale()
    return result


def scaled_step(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, scaler: Any, region: Region
) -> Callable[[], Tensor]:
    """A training step under a scaler as a function that returns its loss."""

    def step() -> Tensor:
        optimizer.zero_grad()
        with region():
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are the same."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.strided and not tensor.data_ptr():  # zeros, as some gradients are
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    whole = tensor.detach().to_dense().resolve_conj().resolve_neg()
    # Not `contiguous`, which leaves the strides of a single element as they are.
    return whole.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
