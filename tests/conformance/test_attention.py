"""Attention: scaled_dot_product_attention, nn.MultiheadAttention and transformer layers, on their fast paths too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import precast
from tests.conformance.compare import Make, assert_same, in_both_dtypes, refused, used
from tests.conformance.systems import MakeRegion, System, on_all_systems

pytestmark = [
    # What PyTorch says once in a process about its nested tensors and about masks of two types.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
]

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
HIDDEN = torch.tensor([[False, False, False, True, True], [False, False, False, False, True]])


def attention(shape: tuple[int, ...] = (2, 5, 8), **options: Any) -> Callable[..., Make]:
    """Multihead attention of a batch with itself, called with these arguments."""
    inputs = {"num_heads": 2, "batch_first": True, **options}

    def called(**arguments: Any) -> Make:
        def make() -> Any:
            module = nn.MultiheadAttention(8, **inputs)
            x = torch.randn(shape)
            return module, lambda: module(x, x, x, **arguments)

        return make

    return called


def _cross(**arguments: Any) -> Make:
    def make() -> Any:
        module = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
        q, k, v = torch.randn(5, 2, 8), torch.randn(3, 2, 4), torch.randn(3, 2, 6)
        return module, lambda: module(q, k, v, **arguments)

    return make


def _layer(kind: type[nn.Module], masks: bool = False, **options: Any) -> Make:
    def make() -> Any:
        module = kind(8, 2, 16, **{"dropout": 0.0, "batch_first": True, **options})
        x = torch.randn(2, 5, 8)
        if kind is nn.TransformerDecoderLayer:
            inputs = {"tgt_mask": CAUSAL, "tgt_is_causal": True} if masks else {}
            return module, lambda: module(x, x, **inputs)
        return module, lambda: module(x, **({"src_key_padding_mask": HIDDEN} if masks else {}))

    return make


def _encoder(given: dict[str, Any], **options: Any) -> Make:
    def make() -> Any:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
        module = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))
        x = torch.randn(2, 5, 8)
        return module, lambda: module(x, **given)

    return make


def _decoder() -> Any:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.TransformerDecoder(layer, 2)
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    return module, lambda: module(x, memory, tgt_mask=CAUSAL, tgt_key_padding_mask=HIDDEN)


def _transformer() -> Any:
    module = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    return module, lambda: module(x, x, tgt_mask=CAUSAL)


MODULES: dict[str, Make] = {
    "attention": attention()(),
    "attention with dropout": attention(dropout=0.5)(),
    "sequence first": attention(batch_first=False)(),
    "unbatched": attention((5, 8))(),
    "no weights needed": attention()(need_weights=False),
    "weights by head": attention()(average_attn_weights=False),
    "no bias": attention(bias=False)(),
    "biased keys": attention(add_bias_kv=True, add_zero_attn=True)(),
    "causal": attention()(attn_mask=CAUSAL, is_causal=True, need_weights=False),
    "added mask": attention()(attn_mask=CAUSAL),
    "boolean mask": attention()(attn_mask=CAUSAL.isinf(), need_weights=False),
    "hidden keys": attention()(key_padding_mask=HIDDEN),
    "both masks": attention()(key_padding_mask=HIDDEN, attn_mask=CAUSAL.isinf()),
    "other keys": _cross(),
    "other keys, masked": _cross(attn_mask=torch.eye(5, 3).bool(), need_weights=False),
    "encoder layer": _layer(nn.TransformerEncoderLayer),
    "encoder layer, gelu": _layer(nn.TransformerEncoderLayer, activation="gelu", norm_first=True),
    "encoder layer, masked": _layer(nn.TransformerEncoderLayer, masks=True),
    "encoder layer, no bias": _layer(nn.TransformerEncoderLayer, bias=False),
    "encoder": _encoder({}),
    "encoder, causal": _encoder({"mask": CAUSAL, "is_causal": True}, activation="gelu"),
    "encoder, masked": _encoder({"src_key_padding_mask": HIDDEN}),
    "encoder, norm first": _encoder({"src_key_padding_mask": HIDDEN}, norm_first=True, dropout=0.5),
    "decoder layer": _layer(nn.TransformerDecoderLayer),
    "decoder layer, masked": _layer(nn.TransformerDecoderLayer, masks=True, norm_first=True),
    "decoder": _decoder,
    "transformer": _transformer,
}


@in_both_dtypes
@pytest.mark.parametrize("name", MODULES)
@on_all_systems
def test_modules(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, used, MODULES[name], dtype)


@pytest.mark.parametrize("fast", [True, False])
@on_all_systems
def test_the_fast_path_is_taken_where_pytorch_takes_it(system: System, fast: bool) -> None:
    def program(region: MakeRegion) -> Any:
        module, step = _encoder({})()
        module.eval()
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with region("cpu"), torch.no_grad(), torch.profiler.profile(acc_events=True) as profile:
                result = step()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        kernels = {event.key: event.count for event in profile.key_averages()}
        assert ("aten::_transformer_encoder_layer_fwd" in kernels) is fast
        return result, kernels["aten::addmm"]

    assert_same(system, program)


def _products(shape: tuple[int, ...], heads: int, **options: Any) -> Make:
    """Attention of what three weights are turned into, in the region's dtype, and of the weights themselves."""

    def make() -> Any:
        weights = nn.ParameterList([torch.randn(2, n, *shape) for n in (heads, 2, 2)])

        def step() -> Any:
            q, k, v = (w @ torch.eye(shape[-1]) for w in weights)
            call = F.scaled_dot_product_attention
            return call(*weights, **options), call(q, k, v, **options)

        return weights, step

    return make


PRODUCTS: dict[str, Make] = {
    "plain": _products((5, 8), 2),
    "causal": _products((5, 8), 2, is_causal=True),
    "added mask": _products((5, 8), 2, attn_mask=CAUSAL),
    "boolean mask": _products((5, 8), 2, attn_mask=CAUSAL == 0),
    "scale": _products((5, 8), 2, scale=0.3),
    "grouped queries": _products((5, 8), 4, enable_gqa=True),
    "long": _products((70, 8), 2, is_causal=True),
}


@in_both_dtypes
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("name", PRODUCTS)
@on_all_systems
def test_products(system: System, name: str, backend: SDPBackend, dtype: torch.dtype) -> None:
    assert_same(system, _with_backend, backend, name, dtype)


def _with_backend(region: MakeRegion, backend: SDPBackend, name: str, dtype: torch.dtype) -> Any:
    with sdpa_kernel(backend):
        return used(region, PRODUCTS[name], dtype)


@on_all_systems
def test_a_mask_of_the_region_and_one_that_learns(system: System) -> None:
    def make() -> Any:
        weights = nn.ParameterList([torch.randn(2, 5, 8), torch.randn(5, 5)])
        q, mask = weights

        def step() -> Any:
            lower = mask @ torch.eye(5)
            call = F.scaled_dot_product_attention
            pairs = [(q, mask), (q, lower), (q @ torch.eye(8), mask), (q @ torch.eye(8), lower)]
            return [refused(lambda p=p: call(p[0], p[0], p[0], attn_mask=p[1])) for p in pairs]

        return weights, step

    assert_same(system, used, make, torch.bfloat16)


@on_all_systems
def test_dropout_draws_the_same(system: System) -> None:
    def program(region: MakeRegion) -> Tensor:
        q = torch.randn(2, 5, 8)
        with region("cpu"):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    assert_same(system, program)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@on_all_systems
def test_flex_attention_without_a_compiler(system: System) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def program(region: MakeRegion) -> Tensor:
        q, k, v = torch.randn(3, 1, 2, 16, 16).unbind()
        with region("cpu"), torch.no_grad():
            return flex_attention(q @ torch.eye(16), k @ torch.eye(16), v @ torch.eye(16))  # type: ignore[return-value]

    assert_same(system, program)


def test_an_encoder_that_skips_padding() -> None:
    """In evaluation it is given a nested tensor, and PyTorch's own kernel for it mixes dtypes in a region."""
    torch.manual_seed(0)
    module, step = _encoder({"src_key_padding_mask": HIDDEN})()
    module.eval()
    with torch.no_grad():
        with torch.autocast("cpu"), pytest.raises(RuntimeError, match="Float but found BFloat16"):
            step()
        with precast.autocast("cpu"):  # whose policy promotes
            ours = step()
        torch.testing.assert_close(ours, step(), rtol=2e-2, atol=2e-2)
