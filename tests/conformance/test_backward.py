"""Backward: inside a region, in another region, in another thread, re-entrant, twice; gradient penalties."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import graph

from tests.conformance.compare import assert_same
from tests.conformance.systems import MakeRegion, System, on_all_systems


class Network(nn.Module):
    """Layers that a region casts, one that it does not, a weight that is used twice, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x))
        return F.mse_loss(self.last(self.norm(self.first(y))), x)


def in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def _after(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with region("cpu"):
        loss = module(x)
    loss.backward()


def _inside(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with region("cpu"):
        module(x).backward()
        module(x * 2).backward()


def _in_another_region(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with region("cpu"):
        loss = module(x)
    with region("cpu", dtype=torch.float16):
        loss.backward()


def _in_an_island(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with region("cpu"):
        loss = module(x)
        with region("cpu", enabled=False):
            loss.backward()


def _in_another_thread(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with region("cpu"):
        loss = module(x)
        in_a_thread(loss.backward)


def _in_a_region_of_another_thread(region: MakeRegion, module: Network, x: Tensor) -> Any:
    def work() -> None:
        with region("cpu"):
            module(x).backward()

    in_a_thread(work)


def _of_two_threads(region: MakeRegion, module: Network, x: Tensor) -> Any:
    """One graph made in two threads, each in a region of its own."""
    losses: list[Tensor] = []

    def work() -> None:
        with region("cpu", dtype=torch.float16):
            losses.append(module(x))

    in_a_thread(work)
    with region("cpu"):
        losses.append(module(x))
        sum(losses).backward()  # type: ignore[union-attr]


def _three_times(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with region("cpu"):
        loss = module(x)
        loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    with region("cpu"):
        loss.backward()


def _in_steps(region: MakeRegion, module: Network, x: Tensor) -> Any:
    """By hand, from the loss to a tensor between, and on from there."""
    with region("cpu"):
        y = module.first(x)
        (between,) = torch.autograd.grad(F.mse_loss(module.last(y), x), y, retain_graph=True)
        F.mse_loss(module.last(y), x).backward(inputs=[module.last.weight])
        y.backward(between)


def _penalised(region: MakeRegion, module: Network, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    with region("cpu"):
        loss = module(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + (gradient.norm(dim=1) - 1).square().mean()
    total.backward()


def _penalised_after(region: MakeRegion, module: Network, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    with region("cpu"):
        loss = module(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with region("cpu"):
        (gradient.square().sum() * module(gradient)).backward()


def _three_times_derived(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with region("cpu"):
        value = F.tanh(module.first(x)).float().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, module.first.weight, create_graph=True)
            value = gradient.square().sum()
        value.backward()


def _watched(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        _inside(region, module, x)


def _in_one_thread(region: MakeRegion, module: Network, x: Tensor) -> Any:
    with torch.autograd.set_multithreading_enabled(False):
        _inside(region, module, x)


def _saved_elsewhere(region: MakeRegion, module: Network, x: Tensor) -> Any:
    """Saved tensors are packed in another dtype between forward and backward."""
    hooks = graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.double()), lambda packed: packed[1].to(packed[0])
    )
    with region("cpu"), hooks, graph.save_on_cpu():
        loss = module(x)
    loss.backward()


def _interrupted(region: MakeRegion, module: Network, x: Tensor) -> Any:
    """A backward that raises in the middle, and one that does not."""

    def stop(gradient: Tensor) -> None:
        raise ValueError("stop")

    with region("cpu"):
        y = module.first(x)
        handle = y.register_hook(stop)
        loss = F.mse_loss(module.last(y), x)
        with pytest.raises(ValueError, match="stop"):
            loss.backward(retain_graph=True)
        handle.remove()
        loss.backward()


BACKWARDS = (
    _after,
    _inside,
    _in_another_region,
    _in_an_island,
    _in_another_thread,
    _in_a_region_of_another_thread,
    _of_two_threads,
    _three_times,
    _in_steps,
    _penalised,
    _penalised_after,
    _three_times_derived,
    _watched,
    _in_one_thread,
    _saved_elsewhere,
    _interrupted,
)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda b: b.__name__.strip("_"))
@on_all_systems
def test_gradients(system: System, backward: Any) -> None:
    assert_same(system, _run, backward)


def _run(region: MakeRegion, backward: Any) -> Any:
    module, x = Network(), torch.randn(3, 4)
    backward(region, module, x)
    return _gradients(module)


class Again(torch.autograd.Function):
    """Runs a backward of its own in its backward, `depth` times in one another, and a product in the innermost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, depth: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.depth = depth
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            if ctx.depth == 0:
                y = F.linear(x.float(), weight)
                threads.append(threading.get_ident())
            else:
                y = Again.apply(x, weight, ctx.depth - 1)
            y.float().sum().backward()
        return x.grad * gradient, weight.grad, None


threads: list[int] = []


@pytest.mark.parametrize("depth", [1, 59, 70, 130])
@pytest.mark.parametrize("inside", [False, True])
@on_all_systems
def test_reentrant_backward(system: System, inside: bool, depth: int) -> None:
    """PyTorch continues at depth 60 in another thread, to save stack."""
    assert_same(system, _reentrant, inside, depth)


def _reentrant(region: MakeRegion, inside: bool, depth: int) -> Any:
    x, weight = torch.randn(2, 3, requires_grad=True), nn.Parameter(torch.randn(3, 3))
    threads.clear()
    with region("cpu"):
        y = Again.apply(F.linear(x, weight), weight, depth)
        if inside:
            y.float().sum().backward()
    if not inside:
        y.float().sum().backward()
    assert (threads == [threading.get_ident()]) is (depth < 60)
    return y, x.grad, weight.grad


@on_all_systems
def test_one_tensor_in_several_places(system: System) -> None:
    """Each place has a cast of its own, and the order of the casts is that in which gradients are added."""
    assert_same(system, _in_several_places, 20)


def _in_several_places(region: MakeRegion, count: int) -> Any:
    result = []
    for _ in range(count):
        x, other = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
        with region("cpu", cache_enabled=False):
            y = x * 1
            results = [
                torch.mm(y, y),
                torch.addmm(y, y, y),
                torch.baddbmm(y[None], y[None], y[None]),
            ]
            results += [F.linear(other, y, y[0]), torch.einsum("ij,kj,lk->il", y, y, y), y * 3]
        total = sum(r.float().square().sum() for r in results)
        result += [*results, *torch.autograd.grad(total, x)]  # type: ignore[arg-type]
    return result
