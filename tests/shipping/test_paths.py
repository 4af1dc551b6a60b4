"""A path that reads a stored weight gives the bits of the float32 model in a region, or a `ConversionError`."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from precast.errors import ConversionError

WIDTH = 64


class Path(nn.Linear):
    """A layer that reads its weight in another way if its second argument is true."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.read = read

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return self.read(self.weight) + x if other else super().forward(x)


@torch.jit.script
def scripted(weight: Tensor) -> Tensor:
    return weight.norm()


@torch.jit.script
def scripted_product(weight: Tensor) -> Tensor:
    return torch.matmul(weight, torch.ones(64)).sum()


@torch.jit.script
def scripted_view(weight: Tensor) -> Tensor:
    return weight.t()


@torch.jit.script
def scripted_list(weights: list[Tensor]) -> Tensor:
    return weights[0].norm()


traced = torch.jit.trace(lambda weight: weight.norm(), torch.ones(2, 2))


def product(weight: Tensor) -> Tensor:
    return F.linear(torch.linspace(-1, 1, WIDTH), weight)


def low_ones(weight: Tensor) -> Tensor:
    return torch.ones(weight.shape, dtype=torch.get_autocast_dtype("cpu"))


READS: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda w: w.float().norm(),
    "to float32": lambda w: w.to(torch.float32).norm(),
    "to a tensor": lambda w: w.to(torch.ones(1)).norm(),
    "to a device and a dtype": lambda w: w.to("cpu", torch.float32).exp().sum(),
    "to a copy": lambda w: w.to(torch.float32, copy=True).norm(),
    "type": lambda w: w.type(torch.float32).norm(),
    "type by name": lambda w: w.type("torch.FloatTensor").norm(),
    "type_as": lambda w: w.type_as(torch.ones(1)).norm(),
    "float64": lambda w: w.double().norm(),
    "half": lambda w: w.half().float().norm(),
    "bfloat16": lambda w: w.bfloat16().float().norm(),
    "tolist": lambda w: torch.tensor(w.tolist()).norm(),
    "item": lambda w: torch.tensor(w[0, 0].item()),
    "index": lambda w: torch.tensor(float(w[0, 0])),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy().copy()).norm(),
    "asarray": lambda w: torch.from_numpy(np.asarray(w.detach()).copy()).norm(),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).norm(),
    "another dtype's view": lambda w: w.view(torch.int32).sum(),
    "a 16-bit view": lambda w: w.view(torch.int16).sum(),
    "data": lambda w: w.data.float().norm(),
    "detach": lambda w: w.detach().float().norm(),
    "a part": lambda w: w[:, 3:7].float().norm(),
    "a part, contiguous": lambda w: w[:, 3:7].contiguous().sum(),
    "an expanded row": lambda w: w[3].expand(5, WIDTH).float().norm(),
    "transposed": lambda w: w.t().float().norm(),
    "clone": lambda w: w.clone().norm(),
    "norm": lambda w: w.norm(),
    "sum of two": lambda w: torch.stack([w, w]).sum(),
    "sum in 16 bits": lambda w: (w.to(torch.get_autocast_dtype("cpu")) + low_ones(w)).sum(),
    "times": lambda w: (w * 3).sum(),
    "deepcopy": lambda w: copy.deepcopy(w).norm(),
    "iteration": lambda w: sum(row.float().norm() for row in w),
    "unbind": lambda w: w.unbind(0)[2].float().norm(),
    "numpy function": lambda w: torch.as_tensor(np.linalg.norm(w.detach())).float(),
    "scripted": lambda w: scripted(w) + 0,
    "scripted, by keyword": lambda w: scripted(weight=w),
    "scripted, of a part": lambda w: scripted(w[3:7]),
    "scripted, of a list": lambda w: scripted_list([w]),
    "scripted view": lambda w: scripted_view(w).norm(),
    "scripted product": lambda w: scripted_product(w).float(),
    "traced": lambda w: traced(w) + 0,
    "vmap": lambda w: torch.func.vmap(torch.sum)(w).sum(),
    "gradient": lambda w: torch.func.grad(torch.norm)(w).sum(),
    "jvp": lambda w: torch.func.jvp(torch.norm, (w,), (torch.ones_like(w),))[1],
    "as_subclass": lambda w: w.as_subclass(Tensor).norm(),
    "product": product,
    "product of float32": lambda w: product(w.float()),
    "product of a part of float32": lambda w: (w[:5].float() @ torch.ones(WIDTH)).sum(),
    "product of float32 and back": lambda w: product(w.float().bfloat16()),
    "product of one like it": lambda w: product(torch.ones(WIDTH, WIDTH, dtype=w.dtype)),
    "product of type_as": lambda w: product(w.type_as(torch.ones(1))),
}


@pytest.mark.parametrize("is_shown", [False, True], ids=["not shown", "shown"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_path_gives_the_same_bits_or_an_error(
    read: Callable[[Tensor], Tensor], dtype: torch.dtype, is_shown: bool
) -> None:
    torch.manual_seed(0)
    model, x = Path(read).eval(), torch.randn(2, WIDTH)
    with torch.no_grad(), precast.autocast("cpu", dtype):
        expected = model.requires_grad_(False)(x, True)
    converted = precast.convert(model, dtype=dtype, example=[(x,), (x, True)] if is_shown else x)
    for _ in range(2):  # the second call knows the kinds of calls
        try:
            result = converted(x, True)
        except ConversionError:
            assert not is_shown
        else:
            assert torch.equal(result, expected)
            assert result.dtype is expected.dtype


def test_products_of_converted_weights_are_allowed_on_any_path() -> None:
    for name in ("product", "product of float32", "product of type_as"):
        model, x = Path(READS[name]).eval(), torch.randn(2, WIDTH)
        precast.convert(model, example=x)(x, True)


@pytest.mark.parametrize("weight_of", [lambda m: m[0].weight, lambda m: m], ids=["weight", "model"])
@pytest.mark.parametrize(
    "saved",
    [
        copy.deepcopy,
        lambda value: pickle.loads(pickle.dumps(value)),
        lambda value: _through_file(value, weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("region", [torch.autocast, precast.autocast])
def test_copies_and_pickles_made_in_a_region_are_those_made_outside(
    region: Any, saved: Any, weight_of: Any
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).eval()
    model.register_buffer("table", torch.ones(3))
    x = torch.randn(2, WIDTH)
    converted = precast.convert(model, example=x)
    with region("cpu"):
        inside = saved(weight_of(converted))
    outside = saved(weight_of(converted))
    assert type(inside) is type(outside)
    if isinstance(inside, nn.Module):
        assert torch.equal(inside(x), converted(x))
        inside, outside = inside[0].weight, outside[0].weight
    assert inside.dtype is torch.bfloat16
    assert torch.equal(inside, outside)


def test_a_state_dict_saved_in_a_region_has_plain_tensors() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval()
    converted = precast.convert(model, example=torch.randn(2, WIDTH))
    with precast.autocast("cpu"):
        state = _through_file(converted.state_dict(), weights_only=True)
        assert b"precast" not in pickle.dumps(converted.state_dict())
    assert {type(value) for value in state.values()} == {Tensor}
    assert {value.dtype for value in state.values()} == {torch.bfloat16}


def _through_file(value: Any, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("region", [contextlib.nullcontext, lambda: precast.autocast("cpu")])
def test_a_parameter_made_of_a_stored_weight_is_one(region: Any) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval(), torch.randn(2, WIDTH)
    converted: Any = precast.convert(model, example=x)
    expected, weight = converted(x), converted[0].weight
    with region():
        converted[0].weight = nn.Parameter(weight, requires_grad=False)
    assert isinstance(converted[0].weight, nn.Parameter)
    assert converted[0].weight is not weight
    assert converted[0].weight.data_ptr() == weight.data_ptr()
    assert torch.equal(converted(x), expected)


class MadeParameter(nn.Linear):
    """A layer that makes another parameter of its weight at each call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, nn.Parameter(self.weight), self.bias)


def test_a_model_may_make_parameters_of_its_weights() -> None:
    model, x = MadeParameter(WIDTH, WIDTH).eval(), torch.randn(2, WIDTH)
    with torch.no_grad(), precast.autocast("cpu"):
        expected = model(x)
    converted = precast.convert(model, example=x)
    assert converted.weight.dtype is torch.bfloat16
    assert torch.equal(converted(x), expected)


def test_a_bilinear_layer_can_be_converted() -> None:
    """Its operation calls others that a region casts, and PyTorch does not take it apart for observers."""
    model, x = nn.Bilinear(WIDTH, WIDTH, 3).eval(), torch.randn(2, WIDTH)
    converted = precast.convert(model, example=(x, x))
    with torch.no_grad(), precast.autocast("cpu"):
        expected = model(x, x)
    assert torch.equal(converted(x, x), expected)
