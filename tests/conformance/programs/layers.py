"""The modules of random programs: each has its weights once, however often it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from tests.conformance.programs.operations import SIDE

__all__ = ["LAYERS", "Kind"]


class Kind(NamedTuple):
    """The constructor of a module, and its call on a square."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Tensor], Any]


def _plainly(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def _as_batch(module: nn.Module, x: Tensor) -> Any:
    return module(x[None])


def _as_image(module: nn.Module, x: Tensor) -> Any:
    return module(x[None, None])


class _Tied(nn.Module):
    """One weight as an embedding and, transposed, as the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIDE, SIDE)
        self.last = nn.Linear(SIDE, SIDE, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(x + self.embed(torch.tensor([0, 3, 1, 1])))
        return result


class _Chunked(nn.Module):
    """One weight, used in parts, as attention layers keep three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * SIDE, SIDE) / 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, part) for part in self.weight.chunk(3))
        return (q @ k.t()).softmax(-1) @ v


class _LowRank(nn.Module):
    """A frozen weight and a trained correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.down = nn.Linear(SIDE, 2, bias=False)
        self.up = nn.Linear(2, SIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.up(self.down(x))
        return torch.add(low, self.base(x))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def _symmetric() -> nn.Module:
    module = nn.Linear(SIDE, SIDE)
    parametrize.register_parametrization(module, "weight", _Symmetric())
    return module


def _recurrent(kind: type[nn.Module], **settings: Any) -> Callable[[], nn.Module]:
    return lambda: kind(SIDE, 3, batch_first=True, **settings)


def _packed(module: nn.Module, x: Tensor) -> Any:
    batch = torch.stack([x, x])
    return module(pack_padded_sequence(batch, torch.tensor([4, 2]), batch_first=True))[0].data


def _attend(module: nn.Module, x: Tensor) -> Any:
    return module(x[None], x[None], x[None])


def _attend_without_weights(module: nn.Module, x: Tensor) -> Any:
    return module(x[None], x[None], x[None], need_weights=False)


def _twice(module: nn.Module, x: Tensor) -> Any:
    return module(module(x))


def _checkpointed(reentrant: bool) -> Callable[[nn.Module, Tensor], Any]:
    return lambda module, x: checkpoint(module, x, use_reentrant=reentrant)


def _functional(module: nn.Module, x: Tensor) -> Any:
    doubled = {name: weight * 2 for name, weight in module.named_parameters()}
    return torch.func.functional_call(module, doubled, (x,))


def _mapped(module: nn.Module, x: Tensor) -> Any:
    return torch.vmap(module)(x)


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(SIDE, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, SIDE, bias=False)
    )


def _encoder(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(SIDE, 2, 6, dropout=0.0, batch_first=True, **settings)


LAYERS: dict[str, Kind] = {
    "Linear": Kind(lambda: nn.Linear(SIDE, SIDE), _plainly),
    "Linear, twice": Kind(lambda: nn.Linear(SIDE, SIDE), _twice),
    "Linear of bfloat16": Kind(lambda: nn.Linear(SIDE, SIDE, dtype=torch.bfloat16), _plainly),
    "Linear, frozen": Kind(lambda: nn.Linear(SIDE, SIDE).requires_grad_(False), _plainly),
    "Bilinear": Kind(lambda: nn.Bilinear(SIDE, SIDE, 3), lambda module, x: module(x, x)),
    "perceptron": Kind(_perceptron, _plainly),
    "perceptron, checkpointed": Kind(_perceptron, _checkpointed(reentrant=False)),
    "perceptron, checkpointed reentrantly": Kind(_perceptron, _checkpointed(reentrant=True)),
    "perceptron, functional": Kind(_perceptron, _functional),
    "perceptron, mapped": Kind(_perceptron, _mapped),
    "tied": Kind(_Tied, _plainly),
    "chunked": Kind(_Chunked, _plainly),
    "low rank": Kind(_LowRank, _plainly),
    "symmetric": Kind(_symmetric, _plainly),
    "weight norm": Kind(lambda: parametrizations.weight_norm(nn.Linear(SIDE, SIDE)), _plainly),
    "Conv1d": Kind(lambda: nn.Conv1d(SIDE, 3, 2), _plainly),
    "Conv2d": Kind(lambda: nn.Conv2d(1, 2, 3, padding=1), _as_image),
    "Conv2d by groups": Kind(
        lambda: nn.Conv2d(SIDE, SIDE, 1, groups=2), lambda module, x: module(x[None, ..., None])
    ),
    "ConvTranspose2d": Kind(lambda: nn.ConvTranspose2d(1, 2, 2), _as_image),
    "BatchNorm1d": Kind(lambda: nn.BatchNorm1d(SIDE), _plainly),
    "BatchNorm1d, eval": Kind(lambda: nn.BatchNorm1d(SIDE).eval(), _plainly),
    "GroupNorm": Kind(lambda: nn.GroupNorm(2, SIDE), _plainly),
    "LayerNorm": Kind(lambda: nn.LayerNorm(SIDE), _plainly),
    "RMSNorm": Kind(lambda: nn.RMSNorm(SIDE), _plainly),
    "InstanceNorm1d": Kind(lambda: nn.InstanceNorm1d(SIDE, affine=True), _as_batch),
    "PReLU": Kind(lambda: nn.PReLU(SIDE), _plainly),
    "RNN": Kind(_recurrent(nn.RNN), _as_batch),
    "LSTM": Kind(_recurrent(nn.LSTM, num_layers=2), _as_batch),
    "LSTM, projected": Kind(_recurrent(nn.LSTM, proj_size=2), _as_batch),
    "LSTM, packed": Kind(_recurrent(nn.LSTM), _packed),
    "GRU": Kind(_recurrent(nn.GRU, bidirectional=True), _as_batch),
    "RNNCell": Kind(lambda: nn.RNNCell(SIDE, 3), _plainly),
    "LSTMCell": Kind(lambda: nn.LSTMCell(SIDE, 3), _plainly),
    "GRUCell": Kind(lambda: nn.GRUCell(SIDE, 3), _plainly),
    "MultiheadAttention": Kind(lambda: nn.MultiheadAttention(SIDE, 2, batch_first=True), _attend),
    "MultiheadAttention, eval": Kind(
        lambda: nn.MultiheadAttention(SIDE, 2, batch_first=True).eval(), _attend_without_weights
    ),
    "TransformerEncoderLayer": Kind(_encoder(), _as_batch),
    "TransformerEncoderLayer, eval": Kind(lambda: _encoder(norm_first=False)().eval(), _as_batch),
}
"""Name -> a module that takes a square."""
