"""Conversion and export leave the model, the process and the mode around them as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends import mha

import precast
from precast.errors import ConversionError, PrecastError

WIDTH = 32


class Counting(nn.Module):
    """A layer that counts its calls in buffers, in the four ways that programs do."""

    def __init__(self, factor: bool) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(WIDTH, WIDTH), factor
        self.register_buffer("added", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("whole", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.added += 1
        self.assigned = self.assigned + 1
        self.whole.add_(1)
        y: Tensor = self.layer(x)
        return y * self.assigned if self.factor else y


@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("ship", ["convert", "export"])
def test_buffers_that_count_calls_are_unchanged(ship: str, factor: bool) -> None:
    model, x = Counting(factor).eval(), torch.randn(4, WIDTH)
    before = dict(model.named_buffers())
    ships: dict[str, Any] = {
        "convert": lambda: precast.convert(model, example=x),
        "export": lambda: precast.export(model, (x,)).module(),
    }
    shipped = ships[ship]()
    for name, buffer in model.named_buffers():
        assert buffer is before[name]
        assert type(buffer) is Tensor
        assert buffer == 0
    for count in (1, 2):
        shipped(x)
        assert all(buffer == count for buffer in shipped.buffers())


SCRIPTED: dict[str, Any] = {
    "scripted": lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH)),
    "traced": lambda: torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.ones(1, WIDTH)),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", SCRIPTED.values(), ids=SCRIPTED)
def test_a_module_of_torchscript_inside_keeps_its_weights(
    make: Any, frozen: bool, in_place: bool
) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), make()).eval(), torch.randn(4, WIDTH)
    model.requires_grad_(not frozen)
    with torch.no_grad(), precast.autocast("cpu"):
        expected = model(x)
    converted = precast.convert(model, example=x, in_place=in_place)
    assert torch.equal(converted(x), expected)
    assert [p.dtype for p in converted.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert not any(p.requires_grad for p in converted.parameters())


def test_a_lazy_module_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(4)).eval()
    with pytest.raises(ConversionError, match=r"1\.weight has no shape yet"):
        precast.convert(model, example=torch.ones(1, WIDTH))


def test_export_does_not_switch_fused_attention_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_value: bool) -> None:
        raise AssertionError("other threads would compute with other kernels")

    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    monkeypatch.setattr(mha, "set_fastpath_enabled", fails)
    precast.export(model, (torch.randn(2, 5, WIDTH),))
    assert mha.get_fastpath_enabled()


@pytest.mark.parametrize("made_inside", [False, True])
def test_export_in_inference_mode(made_inside: bool) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), torch.randn(4, WIDTH)
    expected = precast.export(model, (x,)).module()(x)
    with torch.inference_mode():
        program = precast.export(model, (x.clone() if made_inside else x,))
    assert torch.equal(program.module()(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_transposed_input_of_a_layer_that_trains(
    frozen: bool, bias: bool, dtype: torch.dtype
) -> None:
    """PyTorch folds the batch of a product with a weight that has a graph: other bits than for frozen weights."""
    layer = nn.Linear(64, WIDTH, bias=bias).requires_grad_(not frozen)
    x = torch.randn(2, 64, 256).transpose(1, 2)
    program = precast.export(layer, (x,), dtype=dtype)
    converted = precast.convert(layer.eval(), dtype=dtype, example=x)
    layer.requires_grad_(False)
    with torch.no_grad(), precast.autocast("cpu", dtype):
        expected = layer(x)
    assert torch.equal(program.module()(x), expected)
    assert torch.equal(converted(x), expected)


def test_a_model_that_returns_nothing_is_exported_and_one_on_meta_is_an_error() -> None:
    class Nothing(nn.Linear):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            super().forward(x)

    x = torch.ones(1, WIDTH)
    assert precast.export(Nothing(WIDTH, WIDTH), (x,)).module()(x) is None
    meta = nn.Linear(WIDTH, WIDTH, device="meta")
    for example in (x, x.to("meta")):
        with pytest.raises(PrecastError, match="meta device"):
            precast.export(meta, (example,))
