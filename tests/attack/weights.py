"""Weights: what a region has cast is never older than what PyTorch would use, whoever writes and however."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from tests.attack.scenarios import scenario
from tests.attack.tools import equal

Writes = Callable[[nn.Linear, float], None]


def void(_: object) -> None:
    """Nothing, for what a lambda does and not for what it gives."""


def _assign(layer: nn.Linear, value: float) -> None:
    layer.weight.data = torch.full_like(layer.weight, value)


def _load(layer: nn.Linear, value: float) -> None:
    layer.load_state_dict({"weight": torch.full((2, 2), value)})


def _fused(layer: nn.Linear, value: float) -> None:
    before = layer.weight.detach().clone()
    layer.weight.grad = before - value
    torch.optim.SGD(layer.parameters(), 1.0, fused=True).step()
    layer.weight.grad = None


def _stepped(layer: nn.Linear, value: float) -> None:
    layer.weight.grad = layer.weight.detach() - value
    torch.optim.SGD(layer.parameters(), 1.0, foreach=True).step()
    layer.weight.grad = None


def _counted(layer: nn.Linear, value: float) -> None:
    with torch.no_grad():
        layer.weight.fill_(value)


def _storage(layer: nn.Linear, value: float) -> None:
    torch.empty(0).set_(layer.weight.untyped_storage()).copy_(torch.full((4,), value))


def _foreach(layer: nn.Linear, value: float) -> None:
    torch._foreach_copy_([layer.weight.data], [torch.full((2, 2), value)])


def _replaced(layer: nn.Linear, value: float) -> None:
    layer.weight = nn.Parameter(torch.full((2, 2), value), layer.weight.requires_grad)


WRITES: dict[str, Writes] = {
    "an operation in place": _counted,
    "an optimizer's step": _stepped,
    "a fused optimizer's step": _fused,
    "load_state_dict": _load,
    "another tensor as .data": _assign,
    "another parameter": _replaced,
    "a write through .data": lambda layer, value: void(layer.weight.data.fill_(value)),
    "a write through NumPy": lambda layer, value: layer.weight.detach().numpy().fill(value),
    "a write through the storage": _storage,
    "a foreach operation on .data": _foreach,
    "a write through a view of .data": lambda layer, v: void(layer.weight.data.view(-1).fill_(v)),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "with gradients": nullcontext,
    "under no_grad": torch.no_grad,
    "in inference mode": torch.inference_mode,
}


def _uses(region: Any, write: Writes, mode: Any, frozen: bool) -> list[float]:
    """Return the outputs of a layer after each write, in one region."""
    layer = nn.Linear(2, 2, bias=False).requires_grad_(not frozen)
    _assign(layer, 0.0)
    result, x = [], torch.ones(1, 2)
    with region("cpu"), mode():
        for value in range(6):
            result += [float(layer(x)[0, 0]) / 2 for _ in range(2)]
            with torch.inference_mode(False):
                write(layer, value + 1.0)
    return result


def _never_staler(write: Writes, mode: Any, frozen: bool) -> Callable[[], None]:
    def run() -> None:
        theirs, mine = (_uses(r, write, mode, frozen) for r in (torch.autocast, precast.autocast))
        for number, (their, my) in enumerate(zip(theirs, mine, strict=True)):
            fresh = float(number // 2)
            assert my in (fresh, their), f"{mine} where PyTorch gives {theirs}"

    return run


for _what, _write in WRITES.items():
    for _in, _mode in MODES.items():
        for _frozen in (False, True):
            if _frozen and (_in == "with gradients" or "step" in _what):
                continue
            _of = "a frozen weight" if _frozen else "a weight"
            scenario(
                "weights",
                f"after {_what} {_of} is used as it is, or as PyTorch would use it, {_in}, in one region",
                "plain PyTorch",
                name=f"{_what}, {_of}, {_in}",
            )(_never_staler(_write, _mode, _frozen))


@scenario("weights", "a gradient that is kept through its storage is never overwritten", "by hand")
def a_gradient_kept_by_its_storage() -> None:
    layer = nn.Linear(64, 64)
    with precast.attach(layer):
        kept = []
        for step in range(6):
            layer.zero_grad(set_to_none=True)
            with precast.autocast("cpu"):
                loss = layer(torch.full((4, 64), float(step + 1))).float().sum()
            loss.backward()
            gradient = layer.weight.grad
            kept.append((gradient.untyped_storage(), gradient.clone(), gradient.detach().numpy()))
            layer.weight.grad = None
            del gradient
        for storage, then, array in kept:
            equal(torch.empty(0).set_(storage).view(64, 64), then)
            equal(torch.from_numpy(array), then)


@scenario(
    "weights",
    "a tensor that CUDA-graph trees manage is cast at every use, as in PyTorch",
    "plain PyTorch",
)
def tensors_of_graph_trees() -> None:
    result = []
    for region in (torch.autocast, precast.autocast):
        weight = torch.full((2, 2), 2.0, requires_grad=True)
        torch._C._set_cached_tensors_enabled(True)
        torch._C._add_cached_tensor(weight)
        try:
            with region("cpu"):
                first = F.linear(torch.ones(1, 2), weight)
                weight.data.zero_()
                second = F.linear(torch.ones(1, 2), weight)
            result.append((float(first[0, 0]), float(second[0, 0])))
        finally:
            torch._C._remove_cached_tensor(weight)
            torch._C._set_cached_tensors_enabled(False)
    assert result[1] == result[0], result


@scenario("weights", "swap_tensors works after a region as before it", "plain PyTorch")
def swap_after_a_region() -> None:
    layer = nn.Linear(2, 2)
    with precast.autocast("cpu"):
        layer(torch.ones(1, 2)).float().sum().backward()
    layer.zero_grad(set_to_none=True)
    other = nn.Parameter(torch.zeros(2, 2))
    torch.utils.swap_tensors(layer.weight, other)
    equal(layer.weight.detach(), torch.zeros(2, 2))


@scenario("weights", "model.double() that swaps works after a region", "plain PyTorch")
def conversion_that_swaps() -> None:
    layer = nn.Linear(2, 2)
    with torch.no_grad(), precast.autocast("cpu"):
        layer(torch.ones(1, 2))
    torch.__future__.set_swap_module_params_on_conversion(True)
    layer.double()
    assert layer.weight.dtype is torch.float64


@scenario("weights", "a region keeps no model, no graph and no copy when it has ended", "by hand")
def regions_keep_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with precast.autocast("cpu"):
        loss = model(torch.randn(2, 4)).sum()
    reference = [weakref.ref(t) for t in (model, loss, *model.parameters())]
    del model, loss
    gc.collect()
    assert [thing() for thing in reference] == [None] * 6


@scenario(
    "weights",
    "gradients of a weight used twice in a region are added as PyTorch adds them",
    "plain PyTorch",
)
def a_weight_used_many_times() -> None:
    start = torch.randn(5, 5)
    result = []
    for region in (torch.autocast, precast.autocast):
        weight = start.clone().requires_grad_()
        with region("cpu"):
            x: Tensor = torch.ones(3, 5)
            for _ in range(4):
                x = torch.tanh(F.linear(x, weight))
        x.float().sum().backward()
        result.append(weight.grad)
    equal(result[1], result[0])


@scenario("weights", "float16 and bfloat16 regions that nest do not share a copy", "by hand")
def two_dtypes_of_one_weight() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)
    with precast.autocast("cpu", dtype=torch.bfloat16):
        outer = F.linear(x, weight)
        with precast.autocast("cpu", dtype=torch.float16):
            inner = F.linear(x, weight)
        again = F.linear(x, weight)
    equal(outer.detach(), F.linear(x.bfloat16(), weight.bfloat16()).detach())
    equal(inner.detach(), F.linear(x.half(), weight.half()).detach())
    equal(again.detach(), outer.detach())
