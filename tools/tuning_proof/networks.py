"""The networks that searches are measured with: those of the benchmarks, of the demo and of the examples.

Invariant: dropout is off, so that trainings in different precisions see the same numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import networks
from benchmarks.client_models import MODELS, SIZES
from precast.demo.example import digits_task
from precast.tuning.training import FLOAT32, MakeOptimizer, Training, Workload

__all__ = ["NETWORKS", "example_decoder"]


_FEW_BATCHES: Final = 4
_MANY_BATCHES: Final = 32
_IMAGES: Final = 16  # in a batch of the ViT
_PATCHES: Final = 16  # of an image
_BEGUN: Final = 150  # steps; a ViT's loss begins to fall after about 50


def _optimizer(parameters: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


_LOWER_RATE: Final = partial(_optimizer, lr=3e-4)
_FINE_TUNED: Final = partial(_optimizer, lr=1e-4)


def example_decoder(blocks: int, width: int = 192) -> Workload:
    """The decoder of examples/decoder.py, with so many blocks of this width."""
    path = Path(__file__).parents[2] / "examples" / "decoder.py"
    spec = importlib.util.spec_from_file_location("decoder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.Decoder(width, blocks)

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = module.loss(model(batch[0]), batch[1])
        return loss

    return Workload(model, step, tuple(module.batches()), _optimizer, "cpu")


def _of_benchmarks(
    task: str, batches: int = _FEW_BATCHES, optimizer: MakeOptimizer = _optimizer
) -> Workload:
    device = torch.device("cpu")
    with mock.patch("torch.jit.script", lambda model: model):  # the demo's is a script on a CPU
        network = (
            networks.decoder(256, 4, 64)
            if task == "decoder"
            else networks.demo(task, device, batches)
        )
        model, drawn = network.seeded(device, batches)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return network.loss(model(batch[0]), batch[1])

    return Workload(model, step, tuple(drawn), optimizer, "cpu")


def _of_clients(name: str, size: str) -> Workload:
    given, chosen = MODELS[name], SIZES[size]
    torch.manual_seed(0)
    model = given.make(
        chosen
    ).eval()  # which has no batch norm, so that dropout is all that it changes
    batches = tuple(given.batch(chosen) for _ in range(_FEW_BATCHES))
    return Workload(model, given.loss, batches, _optimizer, "cpu")


def _vit_of_digits() -> Workload:
    """The client's ViT, which has begun to learn the digits of the demo.

    From random numbers, or at its first steps, losses of a ViT differ more between two seeds than between precisions.
    """
    given, size = MODELS["ViT"], replace(SIZES["medium"], length=_PATCHES, batch=_IMAGES)
    torch.manual_seed(0)
    model = given.make(size).eval()
    side = given.batch(size)["pixel_values"].shape[-1]
    digits = digits_task(size.batch, torch.device("cpu"), seed=0)
    drawn = [digits.batch(number) for number in range(_MANY_BATCHES)]
    batches = tuple(
        {
            "pixel_values": F.interpolate(images, (side, side)).expand(-1, 3, -1, -1),
            "labels": labels,
        }
        for images, labels in drawn
    )
    begun = Training(Workload(model, given.loss, batches, _optimizer, "cpu"), FLOAT32, seed=0)
    for _ in range(_BEGUN):
        begun.step()
    begun.close()
    return Workload(begun.model, given.loss, batches, _FINE_TUNED, "cpu")


NETWORKS: Final[dict[str, Callable[[], Workload]]] = {
    "decoder": lambda: _of_benchmarks("decoder"),
    "BERT": lambda: _of_clients("BERT", "medium"),
    "ViT": _vit_of_digits,
    "UNet": lambda: _of_clients("UNet", "small"),
    "GAT": lambda: _of_clients("GAT", "medium"),
    "digits": lambda: _of_benchmarks("digits", _MANY_BATCHES, _LOWER_RATE),
    "checkerboard": lambda: _of_benchmarks("checkerboard"),
}
"""Name -> makes it. BERT, ViT, UNet and GAT need the extra `test-clients`, digits and ViT need `demo`.

Digits learns from all batches, at a rate at which its loss is not 0 after them: then it can be compared.
"""
