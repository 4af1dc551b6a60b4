"""Conversion and export leave the model, the process and the mode around them as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn import functional as F

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
    assert [p.requires_grad for p in converted.parameters()] == [not frozen] * 4


def test_a_lazy_module_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(4)).eval()
    with pytest.raises(ConversionError, match=r"1\.weight has no shape yet"):
        precast.convert(model, example=torch.ones(1, WIDTH))


@pytest.mark.parametrize("strict", [False, True])
def test_other_threads_have_fused_attention_during_an_export(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    export, is_fused = torch.export.export, [False]

    def spied(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=lambda: is_fused.append(mha.get_fastpath_enabled()))
        thread.start()
        thread.join()
        assert not mha.get_fastpath_enabled()
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", spied)
    program = precast.export(model, (torch.randn(2, 5, WIDTH),), strict=strict)
    assert is_fused[-1]
    assert mha.get_fastpath_enabled()
    assert not any("transformer_encoder" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("made_inside", [False, True])
def test_export_in_inference_mode(made_inside: bool) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), torch.randn(4, WIDTH)
    expected = precast.export(model, (x,)).module()(x)
    with torch.inference_mode():
        program = precast.export(model, (x.clone() if made_inside else x,))
    assert torch.equal(program.module()(x), expected)


PRODUCTS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "layer": lambda layer, x: layer(x),
    "layer, four dimensions": lambda layer, x: layer(
        x.unflatten(1, (16, 16)).mT.mT.transpose(1, 2)
    ),
    "of a view": lambda layer, x: x @ layer.weight.t(),
    "of a part": lambda layer, x: F.linear(x, layer.weight[3:17]),
    "of a row": lambda layer, x: x @ layer.weight[0],
    "on the left": lambda layer, x: layer.weight @ x.mT,
    "also in float32": lambda layer, x: layer(x) + layer.weight.sum(),
}
RULED = precast.Policy.load("default").replace(ops={"linear": "fp32", "matmul": "fp32"})


class Product(nn.Linear):
    """A layer that is used as an entry of `PRODUCTS`, with a transposed input."""

    def __init__(self, product: str, bias: bool) -> None:
        super().__init__(64, WIDTH, bias)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        if self.product:
            product, self.product = self.product, ""
            try:
                return PRODUCTS[product](self, x.transpose(1, 2))
            finally:
                self.product = product
        return super().forward(x)


@pytest.mark.parametrize("policy", ["default", RULED], ids=["default", "float32"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_choose_the_kernels_of_the_model(
    product: str, trains: bool, bias: bool, policy: Any
) -> None:
    """PyTorch folds the batch of some products if the weight requires a gradient, which changes their bits."""
    model = Product(product, bias).eval().requires_grad_(trains)
    x = torch.randn(2, 64, 256)
    converted = precast.convert(model, policy, torch.float16, example=x)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode(), precast.autocast("cpu", torch.float16, policy=policy):
            expected = model(x)
        with mode():
            result = converted(x)
        assert torch.equal(result, expected)
        assert not result.requires_grad
    program = precast.export(model, (x,), policy=policy, dtype=torch.float16)
    with torch.no_grad(), precast.autocast("cpu", torch.float16, policy=policy):
        expected = model(x)
    assert torch.equal(program.module()(x), expected)
    assert not program.module()(x).requires_grad


def test_gradients_of_an_argument_pass_a_converted_model() -> None:
    model, x = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).eval(),
        torch.randn(4, WIDTH),
    )
    converted = precast.convert(model, example=x)
    gradients = []
    for run in (model, converted):
        with precast.autocast("cpu"):
            own = x.clone().requires_grad_()
            run(own)[:, :5].sum().backward()
        gradients.append(own.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


def test_attention_of_a_model_that_trains_takes_its_kernels_with_gradients() -> None:
    model, x = (
        nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True).eval(),
        torch.randn(2, 5, WIDTH),
    )
    converted = precast.convert(model, example=x)
    results = []
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), precast.autocast("cpu"):
            results.append(model(x).detach())
        with mode():
            assert torch.equal(converted(x), results[-1])
    assert not torch.equal(*results), "fused or not"


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
