"""Models of other people's libraries with made-up weights and data: what the clients' tests and measurements train.

Nothing is downloaded: a model is its configuration, and its weights and batches come from the seed. The libraries
are those of the extra `test-clients`, and are imported when a model is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "SIZES", "Batch", "Model", "Size"]

Batch = dict[str, Tensor]
_PAD, _BEGIN, _END = 0, 1, 2


@dataclass(frozen=True)
class Size:
    """The sizes of a model and its batch."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    batch: int


SIZES = {
    "tiny": Size(width=32, layers=2, heads=4, vocabulary=64, length=12, batch=3),
    "small": Size(width=128, layers=2, heads=4, vocabulary=512, length=32, batch=4),
    "medium": Size(width=256, layers=4, heads=4, vocabulary=2048, length=64, batch=4),
    "large": Size(width=512, layers=6, heads=8, vocabulary=4096, length=128, batch=4),
}


@dataclass(frozen=True)
class Model:
    """A model that computes its own loss, its batches, and how it generates, if it does."""

    library: str
    make: Callable[[Size], nn.Module]
    batch: Callable[[Size], Batch]
    """A fresh batch from PyTorch's random state: the arguments of `forward`, labels among them."""
    loss: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: model(**batch).loss
    generate: Callable[[nn.Module, Batch], Tensor] | None = None


def _bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            max_position_embeddings=size.length,
        )
    )


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.vocabulary,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            n_positions=2 * size.length,
            bos_token_id=_BEGIN,
            eos_token_id=_END,
            pad_token_id=_PAD,
        )
    )


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=3 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            max_position_embeddings=2 * size.length,
            bos_token_id=_BEGIN,
            eos_token_id=_END,
            pad_token_id=_PAD,
        )
    )


def _vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=_side(size),
            patch_size=_PATCH,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            num_labels=_CLASSES,
        )
    )


def _t5(size: Size) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=size.vocabulary,
            d_model=size.width,
            d_kv=size.width // size.heads,
            d_ff=4 * size.width,
            num_layers=size.layers,
            num_heads=size.heads,
            pad_token_id=_PAD,
            eos_token_id=_END,
            decoder_start_token_id=_PAD,
        )
    )


def _whisper(size: Size) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=size.vocabulary,
            num_mel_bins=_MELS,
            d_model=size.width,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            encoder_attention_heads=size.heads,
            decoder_attention_heads=size.heads,
            encoder_ffn_dim=4 * size.width,
            decoder_ffn_dim=4 * size.width,
            max_source_positions=size.length,
            max_target_positions=2 * size.length,
            pad_token_id=_PAD,
            bos_token_id=_BEGIN,
            eos_token_id=_END,
            decoder_start_token_id=_BEGIN,
            suppress_tokens=[],
            begin_suppress_tokens=[],
        )
    )


def _lora(size: Size) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(_llama(size), LoraConfig(r=4, target_modules=adapted, lora_dropout=0.1))


def _x_transformer(size: Size) -> nn.Module:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    decoder = Decoder(
        dim=size.width,
        depth=size.layers,
        heads=size.heads,
        attn_dim_head=size.width // size.heads,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_glu=True,
        attn_flash=True,
    )
    return AutoregressiveWrapper(
        TransformerWrapper(
            num_tokens=size.vocabulary, max_seq_len=2 * size.length, attn_layers=decoder
        ),
        pad_value=_PAD,
    )


def _unet(size: Size) -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=_side(size),
        layers_per_block=1,
        block_out_channels=(size.width // 2, size.width),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _volume_unet(size: Size) -> nn.Module:
    from monai.networks.nets import UNet

    channels = (size.width // 4, size.width // 2, size.width)
    return UNet(
        3, in_channels=1, out_channels=1, channels=channels, strides=(2, 2), num_res_units=1
    )


def _graph_attention(size: Size) -> nn.Module:
    from torch_geometric.nn import GAT

    return GAT(size.width, size.width, size.layers, _CLASSES, heads=size.heads)


_PATCH, _MELS, _CLASSES = 4, 16, 10


def _side(size: Size) -> int:
    """Of a square image with about as many patches as a text has tokens."""
    return _PATCH * int(size.length**0.5 + 0.5)


def _tokens(size: Size) -> Tensor:
    return torch.randint(_END + 1, size.vocabulary, (size.batch, size.length))


def _text(size: Size) -> Batch:
    tokens, mask = _tokens(size), torch.ones(size.batch, size.length, dtype=torch.long)
    mask[0, -2:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def _masked_text(size: Size) -> Batch:
    batch = _text(size)
    hidden = torch.rand(size.batch, size.length) < 0.3
    hidden[:, 0] = True
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(hidden, _BEGIN),
        "labels": batch["labels"].masked_fill(~hidden, -100),
    }


def _images(size: Size) -> Batch:
    pixels = torch.randn(size.batch, 3, _side(size), _side(size))
    return {"pixel_values": pixels, "labels": torch.randint(_CLASSES, (size.batch,))}


def _sound(size: Size) -> Batch:
    features = torch.randn(size.batch, _MELS, 2 * size.length)
    return {"input_features": features, "labels": _tokens(size)}


def _noised(size: Size) -> Batch:
    pixels = torch.randn(size.batch, 3, _side(size), _side(size))
    return {
        "sample": pixels,
        "timestep": torch.randint(1000, (size.batch,)),
        "noise": torch.randn_like(pixels),
    }


def _volumes(size: Size) -> Batch:
    shape = (size.batch, 1, _side(size), _side(size), _side(size))
    return {"volume": torch.randn(shape), "organ": torch.randint(2, shape).float()}


def _graph(size: Size) -> Batch:
    nodes = size.batch * size.length
    return {
        "features": torch.randn(nodes, size.width),
        "edges": torch.randint(nodes, (2, 4 * nodes)),
        "labels": torch.randint(_CLASSES, (nodes,)),
    }


def _continue(model: Any, batch: Batch) -> Tensor:
    prompt = batch["input_ids"][:, : batch["input_ids"].shape[1] // 2]
    tokens: Tensor = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=True
    )
    return tokens


def _translate(model: Any, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    tokens: Tensor = model.generate(**inputs, max_new_tokens=8, num_beams=2)
    return tokens


def _continue_x(model: Any, batch: Batch) -> Tensor:
    tokens: Tensor = model.generate(batch["input_ids"][:, :4], 8, temperature=1.0)
    return tokens


def _loss_x(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch["input_ids"])
    return loss


def _loss_of_noise(model: nn.Module, batch: Batch) -> Tensor:
    prediction = model(batch["sample"], batch["timestep"]).sample
    return F.mse_loss(prediction, batch["noise"])


def _dice(model: nn.Module, batch: Batch) -> Tensor:
    from monai.losses import DiceCELoss

    loss: Tensor = DiceCELoss(sigmoid=True)(model(batch["volume"]), batch["organ"])
    return loss


def _loss_of_nodes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["features"], batch["edges"]), batch["labels"])


MODELS = {
    "BERT": Model("transformers", _bert, _masked_text),
    "GPT-2": Model("transformers", _gpt2, _text, generate=_continue),
    "Llama": Model("transformers", _llama, _text, generate=_continue),
    "ViT": Model("transformers", _vit, _images),
    "T5": Model("transformers", _t5, _text, generate=_translate),
    "Whisper": Model("transformers", _whisper, _sound, generate=_translate),
    "Llama with LoRA": Model("peft", _lora, _text, generate=_continue),
    "Decoder": Model("x-transformers", _x_transformer, _text, _loss_x, _continue_x),
    "UNet": Model("diffusers", _unet, _noised, _loss_of_noise),
    "UNet of volumes": Model("monai", _volume_unet, _volumes, _dice),
    "GAT": Model("torch-geometric", _graph_attention, _graph, _loss_of_nodes),
}
