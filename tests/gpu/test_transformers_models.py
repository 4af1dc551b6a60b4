"""On a GPU: small models of transformers give the losses, gradients and kernels of torch.autocast, however used.

Without a GPU, `tests/clients/test_transformers.py` runs this file on the pretended device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.weights import unversioned_writes
from tests.gpu.networks import Region, equal

# Of transformers, at its import.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
WITHOUT_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES | {"num_key_value_heads": 2}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        SIZES | {"num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", SIZES | WITHOUT_DROPOUT),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        SIZES | WITHOUT_DROPOUT | {"image_size": 32, "patch_size": 8},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 128}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_ff": 128, "d_kv": 16, "d_model": 64, "num_heads": 4, "num_layers": 2}
        | {"decoder_start_token_id": 0, "dropout_rate": 0.0, "vocab_size": 128},
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        | {f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")}
        | {f"{part}_layers": 2 for part in ("encoder", "decoder")}
        | {"d_model": 64, "max_source_positions": 16, "max_target_positions": 16}
        | {"bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        | {"dropout": 0.0, "num_mel_bins": 8, "vocab_size": 128},
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"depths": [1, 1], "embedding_size": 16, "hidden_sizes": [32, 64], "layer_type": "basic"},
    ),
}
"""Name -> the classes of the configuration and the model, and the configuration."""


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of seed 0 in training, and a batch, on the GPU."""
    transformers = pytest.importorskip("transformers")
    configuration, model, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**values)
    config._attn_implementation = "eager" if name == "resnet" else "sdpa"
    config._experts_implementation = "eager"  # `grouped_mm` is in 16 bits under `default` alone
    network: nn.Module = getattr(transformers, model)(config).cuda().train()
    tokens = torch.randint(3, 100, (2, 12), device="cuda")
    if name in ("vit", "resnet"):
        images = torch.randn(2, 3, 32, 32, device="cuda")
        return network, {"pixel_values": images, "labels": torch.tensor([0, 1], device="cuda")}
    if name == "whisper":
        return network, {
            "input_features": torch.randn(2, 8, 32, device="cuda"),
            "labels": tokens,
        }
    return network, {"input_ids": tokens, "labels": tokens}


def torchs(dtype: torch.dtype) -> Region:
    return partial(torch.autocast, "cuda", dtype)


def ours(dtype: torch.dtype, policy: str | None = None) -> Region:
    return partial(precast.autocast, "cuda", dtype, policy=policy)


Use = Callable[[nn.Module], AbstractContextManager[object]]
USES: dict[str, tuple[Callable[[torch.dtype], Region], Use]] = {
    "policy torch": (partial(ours, policy="torch"), lambda _: nullcontext()),
    "policy default": (ours, lambda _: nullcontext()),
    "installed": (torchs, lambda _: precast.install()),
    "attached": (ours, precast.attach),
}


def numbers(name: str, region: Region, use: Use) -> list[Tensor]:
    """The losses of two steps, the gradients of the second, and the weights after it."""
    model, batch = made(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    with use(model):
        for _ in range(2):
            optimizer.zero_grad()
            with region():
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_autocast(
    name: str, use: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unversioned_writes, "comparison_queue", [])
    region, entered = USES[use]
    expected = numbers(name, torchs(dtype), lambda _: nullcontext())
    actual = numbers(name, region(dtype), entered)
    assert len(expected) > 5
    assert [equal(a, b) for a, b in zip(expected, actual, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_as_a_region(name: str, dtype: torch.dtype) -> None:
    model, batch = made(name)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        with precast.autocast("cuda", dtype):
            expected = model(**batch)
        precast.convert(model, dtype=dtype, example=batch, in_place=True)
        result = model(**batch)
    assert equal(result.loss, expected.loss)
    assert equal(result.logits, expected.logits)
