"""Hooks on tensors, modules, graphs, parameters and optimizers: what they see, and what they change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules import module as global_hooks

import precast
from tests.conformance.compare import assert_same, in_both_dtypes, tensors_in
from tests.conformance.systems import MakeRegion, System, on_all_systems
from tests.support.processor import runs_lstm_in_bfloat16

Seen = list[Any]
Hook = Callable[["World"], Any]


class World:
    """Two layers, what the hooks saw, and what makes regions."""

    def __init__(self, region: MakeRegion) -> None:
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.module = nn.Sequential(self.first, nn.GELU(), nn.LayerNorm(4), self.last)
        self.region = region
        self.seen: Seen = []

    def note(self, name: str) -> Callable[..., None]:
        """A hook that notes the dtypes of all that it is given, and whether autocast is on."""

        def hook(*args: Any, **kwargs: Any) -> None:
            here = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            self.seen.append((name, [t.dtype for t in tensors_in((args, kwargs))], here))

        return hook


def _forward(w: World) -> None:
    w.first.register_forward_pre_hook(w.note("before"))
    w.first.register_forward_hook(w.note("after"))
    w.last.register_forward_pre_hook(w.note("before, with keywords"), with_kwargs=True)
    w.last.register_forward_hook(w.note("after, always"), always_call=True)


def _forward_changing(w: World) -> None:
    w.first.register_forward_pre_hook(lambda m, args: (args[0].double().float() * 2,))
    w.first.register_forward_hook(lambda m, args, y: y.float() + 1)
    w.last.register_forward_hook(lambda m, args, y: F.linear(y, m.weight))


def _backward(w: World) -> None:
    w.first.register_full_backward_pre_hook(w.note("before backward"))
    w.first.register_full_backward_hook(w.note("after backward"))
    w.last.register_full_backward_hook(w.note("after backward of the last"))


def _backward_changing(w: World) -> None:
    w.last.register_full_backward_pre_hook(lambda m, given: (given[0] * 3,))
    w.last.register_full_backward_hook(lambda m, gradients, given: (gradients[0] * 2,))


def _of_parameters(w: World) -> None:
    w.first.weight.register_hook(w.note("gradient"))
    w.first.weight.register_post_accumulate_grad_hook(lambda p: w.note("added up")(p.grad))
    w.first.bias.register_hook(lambda gradient: gradient * 2)


def _of_results(w: World) -> None:
    def hook(module: nn.Module, args: Any, result: Tensor) -> None:
        result.register_hook(w.note("result"))
        if result.grad_fn is not None:
            result.grad_fn.register_prehook(w.note("node, before"))
            result.grad_fn.register_hook(w.note("node, after"))

    w.first.register_forward_hook(hook)
    w.last.register_forward_hook(hook)


def _of_several(w: World) -> None:
    parameters = list(w.module.parameters())
    graph.register_multi_grad_hook(parameters, w.note("all gradients"))
    graph.register_multi_grad_hook(parameters, w.note("any gradient"), mode="any")


def _of_all_modules(w: World) -> list[Any]:
    return [
        global_hooks.register_module_forward_pre_hook(w.note("before any")),
        global_hooks.register_module_forward_hook(w.note("after any")),
        global_hooks.register_module_full_backward_hook(w.note("after any backward")),
    ]


def _with_regions(w: World) -> None:
    """Hooks that open and close regions around their module, as some libraries do."""
    islands: list[Any] = []

    def enter(module: nn.Module, args: Any) -> Any:
        islands.append(w.region("cpu", enabled=False))
        islands[-1].__enter__()
        return tuple(a.float() for a in args)

    def leave(module: nn.Module, args: Any, result: Tensor) -> None:
        islands.pop().__exit__(None, None, None)

    w.last.register_forward_pre_hook(enter)
    w.last.register_forward_hook(leave)
    w.first.weight.register_hook(w.note("gradient"))


def _that_compute(w: World) -> None:
    """Hooks that run products and use weights: in the region, or outside of it, as the backward is."""

    def hook(gradient: Tensor) -> Tensor:
        product = gradient.detach().float() @ w.first.weight.detach()
        w.note("product")(product)
        return gradient + product.to(gradient.dtype)

    w.first.weight.register_hook(hook)
    w.last.register_full_backward_hook(
        lambda m, gradients, given: w.note("in backward")(F.linear(given[0].float(), m.weight))
    )


def _of_optimizers(w: World) -> None:
    """The optimizer steps in backward, one parameter at a time."""
    for parameter in w.module.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.register_step_pre_hook(lambda o, args, kwargs: w.note("before the step")())

        def step(parameter: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


HOOKS: dict[str, Hook] = {
    "forward": _forward,
    "forward, changing": _forward_changing,
    "backward": _backward,
    "backward, changing": _backward_changing,
    "parameters": _of_parameters,
    "results": _of_results,
    "several tensors": _of_several,
    "all modules": _of_all_modules,
    "regions": _with_regions,
    "that compute": _that_compute,
    "optimizers": _of_optimizers,
}


@in_both_dtypes
@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("name", HOOKS)
@on_all_systems
def test_hooks(system: System, name: str, inside: bool, dtype: torch.dtype) -> None:
    assert_same(system, _hooked, name, inside, dtype)


def _hooked(region: MakeRegion, name: str, inside: bool, dtype: torch.dtype) -> Any:
    world = World(region)
    handles = HOOKS[name](world)
    try:
        with region("cpu", dtype=dtype):
            y = world.module(torch.randn(3, 4, requires_grad=True))
            loss = F.mse_loss(y, torch.zeros(3, 4))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    finally:
        for handle in handles or []:
            handle.remove()
    parameters = list(world.module.parameters())
    return y, world.seen, [p.grad for p in parameters], parameters


@on_all_systems
def test_saved_tensors(system: System) -> None:
    """Return the packed and unpacked tensors, with their dtypes."""
    assert_same(system, _saved, None)


def _saved(region: MakeRegion, _: None) -> Any:
    world = World(region)
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append((tensor.dtype, tuple(tensor.shape)))
        return tensor.clone()

    with graph.saved_tensors_hooks(pack, lambda t: t), region("cpu"):
        results = [world.module(torch.randn(3, 4)) for _ in range(2)]
    torch.stack(results).float().square().sum().backward()
    return packed, results, [p.grad for p in world.module.parameters()]


LAYERS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "Linear": lambda: (nn.Linear(4, 4), 1),
    "a large Linear": lambda: (nn.Linear(256, 256), 1),
    "Conv1d": lambda: (nn.Conv1d(4, 4, 1), 1),
    "Bilinear": lambda: (nn.Bilinear(4, 4, 4), 2),
    "recurrent": lambda: ((nn.LSTM if runs_lstm_in_bfloat16() else nn.GRU)(4, 4, 2), 1),
    "MultiheadAttention": lambda: (nn.MultiheadAttention(4, 2), 3),
}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@on_all_systems
def test_hooks_of_parameters_are_called_in_pytorchs_order(
    system: System, name: str, attached: bool
) -> None:
    """Random numbers in hooks depend on the order, and so does the order of gradients sent to other processes."""
    assert_same(system, _order, name, attached)


def _order(region: MakeRegion, name: str, attached: bool) -> Any:
    module, inputs = LAYERS[name]()
    records: Seen = []
    for key, parameter in module.named_parameters():
        parameter.register_hook(lambda _, key=key: records.append(key))
        parameter.register_post_accumulate_grad_hook(
            lambda _, key=key: records.append(f"{key}.grad")
        )
    width = 256 if "large" in name else 4
    x = torch.randn(4, width) if name == "Conv1d" else torch.randn(2, width)
    with precast.attach(module) if attached else nullcontext(), region("cpu"):
        y = module(*[x] * inputs)
        (y[0] if isinstance(y, tuple) else y).float().sum().backward()
    return records, [parameter.grad for parameter in module.parameters()]
