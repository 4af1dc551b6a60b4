"""Watching changes nothing, and counts all: modules of torch.nn under a trace or a monitor, and alone.

The oracle of bits and dtypes is the module without anybody watching; that of casts is PyTorch's own profiler, which
shows each as a copy between two floating dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from precast._internal import pytree
from tests.support.processor import has_bfloat16, runs_lstm_in_bfloat16
from tests.support.profiled import casts_profiled

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


class Does(nn.Module):
    """A function as a module with a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def _vectors(width: int = 8) -> Tensor:
    return torch.randn(2, 3, width)


def _of(module: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Build:
    return lambda: (module(), tuple(torch.randn(*shape) for shape in shapes))


def _attention(**how: Any) -> Build:
    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        x = _vectors()
        return nn.MultiheadAttention(8, 2, **how), (x, x, x)

    return build


def _layer(**how: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, **how)


_SEQUENCE, _IMAGE, _LINE, _VOLUME = (2, 3, 8), (2, 4, 8, 8), (2, 4, 9), (2, 4, 6, 6, 6)

MODULES: dict[str, Build] = {
    "linear": _of(lambda: nn.Linear(8, 4), _SEQUENCE),
    "bilinear": _of(lambda: nn.Bilinear(4, 4, 2), (3, 4), (3, 4)),
    "conv1d": _of(lambda: nn.Conv1d(4, 4, 3), _LINE),
    "conv2d": _of(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), _IMAGE),
    "conv2d, reflected": _of(lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), _IMAGE),
    "conv3d": _of(lambda: nn.Conv3d(4, 4, 3), _VOLUME),
    "transposed convolution": _of(lambda: nn.ConvTranspose2d(4, 4, 3), _IMAGE),
    "gru": _of(lambda: nn.GRU(8, 5, 2), _SEQUENCE),
    "gru, both ways": _of(lambda: nn.GRU(8, 5, bidirectional=True, batch_first=True), _SEQUENCE),
    **({"lstm": _of(lambda: nn.LSTM(8, 5, 2), _SEQUENCE)} if runs_lstm_in_bfloat16() else {}),
    "lstm, projected": _of(lambda: nn.LSTM(8, 5, proj_size=3), _SEQUENCE),
    "rnn": _of(lambda: nn.RNN(8, 5), _SEQUENCE),
    "gru cell": _of(lambda: nn.GRUCell(8, 5), (3, 8)),
    "lstm cell": _of(lambda: nn.LSTMCell(8, 5), (3, 8)),
    "rnn cell": _of(lambda: nn.RNNCell(8, 5), (3, 8)),
    "attention": _attention(),
    "attention, batch first": _attention(batch_first=True),
    "attention with dropout": _attention(dropout=0.5),
    "encoder layer": _of(_layer, _SEQUENCE),
    "encoder layer, batch first": _of(lambda: _layer(batch_first=True), _SEQUENCE),
    "encoder layer, norm first": _of(
        lambda: _layer(batch_first=True, norm_first=True, activation="gelu"), _SEQUENCE
    ),
    "encoder": _of(lambda: nn.TransformerEncoder(_layer(batch_first=True), 2), _SEQUENCE),
    "encoder in a model": _of(
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.TransformerEncoder(_layer(batch_first=True), 2), nn.Linear(8, 2)
        ),
        _SEQUENCE,
    ),
    "decoder layer": _of(lambda: nn.TransformerDecoderLayer(8, 2, 16), _SEQUENCE, _SEQUENCE),
    "transformer": _of(
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), _SEQUENCE, _SEQUENCE
    ),
    "einsum": _of(lambda: Does(lambda x, w: torch.einsum("bij,jk->bik", x, w)), (2, 3, 4)),
    "scaled dot product": _of(
        lambda: Does(lambda x, w: F.scaled_dot_product_attention(x @ w, x, x)), (2, 3, 4)
    ),
    "mixed dtypes": _of(lambda: Does(lambda x, w: (x @ w) * x + w.sum()), (2, 3, 4)),
    "a dtype asked for": _of(lambda: Does(lambda x, w: (x @ w).softmax(-1, torch.float32)), (2, 4)),
    "a sum of another dtype": _of(
        lambda: Does(lambda x, w: (x @ w).sum(-1, dtype=torch.float64)), (2, 4)
    ),
    "in place in another dtype": _of(
        lambda: Does(lambda x, w: (x @ w).float().mul_(w.to(torch.float64))), (4, 4)
    ),
    "a complex matrix, conjugated": _of(
        lambda: Does(lambda x, w: (torch.complex(x, x).mH @ torch.complex(w, w)).abs()), (4, 4)
    ),
    "norms": _of(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Softmax(-1)),
        _SEQUENCE,
    ),
    "batch norm": _of(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), _IMAGE),
    "group norm": _of(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), _IMAGE),
    "instance norm": _of(
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.InstanceNorm1d(4, affine=True)), _LINE
    ),
    "local response norm": _of(lambda: nn.LocalResponseNorm(2), _IMAGE),
    "pools": _of(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)), _IMAGE
    ),
    "upsample": _of(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Upsample(scale_factor=2)), _IMAGE),
    "activations": _of(
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.GELU(), nn.SiLU(), nn.PReLU(), nn.Softplus(), nn.Mish(), nn.GLU()
        ),
        _SEQUENCE,
    ),
    "in place": _of(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
        _SEQUENCE,
    ),
    "dropouts": _of(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout2d(), nn.AlphaDropout()), _IMAGE
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 3)),
        (torch.tensor([1, 4, 2]),),
    ),
    "embedding bag": lambda: (
        nn.Sequential(nn.EmbeddingBag(5, 8), nn.Linear(8, 3)),
        (torch.tensor([[1, 4, 2]]),),
    ),
    "similarities": _of(nn.CosineSimilarity, _SEQUENCE, _SEQUENCE),
    "distances": _of(nn.PairwiseDistance, (3, 8), (3, 8)),
    "a loss": _of(lambda: nn.SmoothL1Loss(reduction="none"), _SEQUENCE, _SEQUENCE),
    "shuffles": _of(lambda: nn.Sequential(nn.PixelShuffle(2), nn.ChannelShuffle(1)), _IMAGE),
    "folds": _of(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Unfold(2)), _IMAGE),
}

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}

Result = tuple[list[Tensor], list[Tensor]]


def _runs(
    build: Build,
    mode: str,
    trains: bool,
    watch: Callable[[nn.Module], AbstractContextManager[Any]],
    policy: str,
) -> Result:
    """Outputs, and gradients where there are some: two steps, as the second may meet what the first left."""
    torch.manual_seed(0)
    module, inputs = build()
    module.train(trains)
    for tensor in inputs:
        tensor.requires_grad_(mode == "grad" and tensor.is_floating_point())
    outputs: list[Tensor] = []
    with watch(module):
        for _ in range(2):
            with MODES[mode](), precast.autocast("cpu", policy=policy):
                found = [t for t in pytree.tensors_in(module(*inputs)) if t.is_floating_point()]
            outputs += found
            if mode == "grad":
                sum(t.double().square().sum() for t in found).backward()  # type: ignore[union-attr]
    learnt = [*module.parameters(), *(t for t in inputs if t.is_leaf)]
    return outputs, [p.grad for p in learnt if p.grad is not None]


def _differ(ours: list[Tensor], theirs: list[Tensor]) -> list[str]:
    assert len(ours) == len(theirs)
    return [
        f"{a.dtype} for {b.dtype}" if a.dtype != b.dtype else "other bits"
        for a, b in zip(ours, theirs, strict=True)
        if a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan())
        or not torch.equal(a.nan_to_num(), b.nan_to_num())
    ]  # fmt: skip


WATCHES: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "trace": precast.trace,
    "counting trace": lambda module: precast.trace(module, full=False),
    "monitor": lambda module: precast.monitor(module, every=1),
    "monitor that counts nothing": lambda module: precast.monitor(module, every=10**6),
}


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of PyTorch's, about how such modules are best called
@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("name", MODULES)
def test_watching_changes_nothing(name: str, watch: str) -> None:
    if (name, watch) == ("bilinear", "trace"):
        pytest.skip("PyTorch computes it otherwise under any dispatch mode: docs/trace.md says so")
    for mode in MODES:
        for trains in (True, False):
            for policy in ("default", "torch"):
                alone = _runs(MODULES[name], mode, trains, lambda _: nullcontext(), policy)
                watched = _runs(MODULES[name], mode, trains, WATCHES[watch], policy)
                where = f"{mode}, {'train' if trains else 'eval'}, {policy}"
                assert not _differ(watched[0], alone[0]), where
                assert not _differ(watched[1], alone[1]), where


def test_a_layer_without_hooks_is_looked_into_where_its_modules_run() -> None:
    torch.manual_seed(0)
    for model in (
        _layer(batch_first=True),
        nn.Sequential(nn.Linear(8, 8), _layer(batch_first=True)),
    ):
        before = [set(vars(module)) for module in model.modules()]
        name = "1." if isinstance(model, nn.Sequential) else ""
        with precast.monitor(model, every=1) as monitor:
            model(_vectors()).square().mean().backward()
            monitor.end_step()
        seen = {(e["kind"], e["name"]) for e in monitor.to_dict()["modules"]}
        assert {("output", f"{name}{m}") for m in ("self_attn", "linear1", "norm2")} <= seen
        assert ("gradient", f"{name}linear2") in seen
        assert [set(vars(module)) for module in model.modules()] == before
        with precast.monitor(model.eval(), every=1) as monitor, torch.no_grad():
            model(_vectors())
        found = {e["name"] for e in monitor.to_dict()["modules"]}
        assert found == ({"0", "1"} if name else {""})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in MODULES if name != "bilinear"])
def test_casts_are_those_of_the_profiler(name: str) -> None:
    """Those inside other operations, too: where dtypes are mixed, PyTorch casts below all that a rule sees."""
    for mode in MODES:
        for trains in (True, False):
            for policy in ("default", "torch"):
                expected = casts_profiled(
                    lambda: _runs(MODULES[name], mode, trains, lambda _: nullcontext(), policy)  # noqa: B023
                )
                with precast.trace() as trace:
                    _runs(MODULES[name], mode, trains, lambda _: nullcontext(), policy)
                where = f"{mode}, {'train' if trains else 'eval'}, {policy}"
                casts = trace.totals.casts
                # Without bfloat16 instructions, kernels such as convolutions cast inside, which no trace can see.
                assert (
                    casts == expected if has_bfloat16() else 0 < casts <= expected or not expected
                ), where
                assert sum(row.casts for row in trace.rows) == casts, where
                assert sum(flow.casts for flow in trace.flow) == casts, where


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "result of another dtype": lambda x: torch.add(x.half(), 1, out=x),
    "and a double": lambda x: torch.mul(x.bfloat16(), 0.5, out=x),
    "made of others": lambda x: torch.multiply(x, 2.0),
    "made of others, in place": lambda x: x.subtract_(1.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_stands_for_a_tensor_is_taken_as_without_a_trace(name: str) -> None:
    given = torch.randn(3, 4)
    for mode in MODES.values():
        with mode():
            expected = NUMBERS[name](given.clone())
            with precast.trace():
                assert torch.equal(NUMBERS[name](given.clone()), expected)


IN_FLOAT32: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "renorm": lambda x, i: x.renorm(2, 0, 0.5),
    "renorm_": lambda x, i: x.clone().renorm_(2, 0, 0.5),
    "scatter, sums": lambda x, i: torch.scatter(x, 0, i, x, reduce="add"),
    "scatter_reduce": lambda x, i: torch.scatter_reduce(x, 0, i, x, "sum"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", IN_FLOAT32)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts_of_kernels_that_compute_in_float32_count(name: str, dtype: torch.dtype) -> None:
    x, index = torch.randn(4, 4).to(dtype), torch.randint(0, 4, (4, 4))
    expected = casts_profiled(lambda: IN_FLOAT32[name](x, index))
    with precast.trace() as trace:
        IN_FLOAT32[name](x, index)
    assert trace.totals.casts == expected > 0
