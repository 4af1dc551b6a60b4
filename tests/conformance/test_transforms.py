"""torch.func and torch.autograd.functional: vmap, grad, jacobians, products, functional calls, dual numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from tests.conformance.compare import assert_same, in_both_dtypes, refused
from tests.conformance.systems import MakeRegion, System, on_all_systems

# linearize says it of each weight that its graph closes over.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")

Context = Callable[[], AbstractContextManager[Any]]


class Network(nn.Sequential):
    """Two linear layers that run in a region of their own."""

    def __init__(self, region: Context) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            return super().forward(x)  # type: ignore[no-any-return]


class World:
    """A network, its parameters by name, and inputs for it."""

    def __init__(self, region: Context = nullcontext) -> None:
        self.module = Network(region)
        self.parameters = dict(self.module.named_parameters())
        self.detached = {name: p.detach() for name, p in self.parameters.items()}
        self.x = torch.randn(3, 4)
        self.one = self.x[0]

    def call(self, parameters: Any, x: Tensor) -> Tensor:
        return functional_call(self.module, parameters, (x,))  # type: ignore[no-any-return]

    def loss(self, parameters: Any, x: Tensor) -> Tensor:
        return self.call(parameters, x).float().square().sum()

    def of_input(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def _conv(w: World) -> Any:
    kernel = nn.Parameter(torch.randn(2, 3, 3))
    return vmap(lambda x: F.conv1d(x, kernel))(torch.randn(4, 2, 3, 8))


def _ensemble(w: World) -> Any:
    modules = [nn.Linear(4, 2) for _ in range(3)]
    parameters, buffers = stack_module_state(modules)
    results = vmap(lambda p, b, x: functional_call(modules[0], (p, b), (x,)), (0, 0, None))(
        parameters, buffers, w.x
    )
    results.float().square().sum().backward()
    return results, [parameters[name].grad for name in parameters]


def _dual(w: World) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(w.x, torch.ones_like(w.x))
        return tuple(forward_ad.unpack_dual(w.module(x)))


def _batched_gradients(w: World) -> Any:
    y = w.module(w.x).float().sum(0)
    return torch.autograd.grad(y, list(w.module.parameters()), torch.eye(2), is_grads_batched=True)


def _linearized(w: World) -> Any:
    value, pushed = linearize(w.of_input, w.x)
    return value, pushed(torch.ones_like(w.x))


def _pulled(w: World) -> Any:
    value, pull = vjp(w.call, w.parameters, w.x)
    return value, pull(torch.ones_like(value))


TRANSFORMED: dict[str, Callable[[World], Any]] = {
    "functional_call": lambda w: w.call(w.parameters, w.x),
    "functional_call, detached": lambda w: w.call(w.detached, w.x),
    "grad": lambda w: grad(w.loss)(w.parameters, w.x),
    "grad, detached": lambda w: grad(w.loss)(w.detached, w.x),
    "grad of inputs": lambda w: grad(lambda x: w.of_input(x).float().sum())(w.x),
    "grad and value": lambda w: grad_and_value(w.loss, argnums=(0, 1))(w.parameters, w.x),
    "grad of grad": lambda w: grad(lambda x: grad(lambda x: w.loss(w.parameters, x))(x).sum())(w.x),
    "per-sample gradients": lambda w: vmap(grad(w.loss), (None, 0))(w.detached, w.x),
    "per-sample gradients, in chunks": lambda w: vmap(grad(w.loss), (None, 0), chunk_size=2)(
        w.detached, w.x
    ),
    "vmap": lambda w: vmap(w.of_input)(w.x),
    "vmap of vmap": lambda w: vmap(vmap(w.of_input))(w.x.expand(2, 3, 4)),
    "vmap over weights": lambda w: vmap(F.linear, (None, 0))(w.x, torch.randn(5, 2, 4)),
    "vmap of products": lambda w: vmap(torch.mm, (0, None))(torch.randn(5, 2, 4), w.x.mT),
    "vmap of convolutions": _conv,
    "vmap with dropout": lambda w: vmap(lambda x: F.dropout(w.of_input(x)), randomness="different")(
        w.x
    ),
    "ensemble": _ensemble,
    "jacrev": lambda w: jacrev(w.of_input)(w.x),
    "jacfwd": lambda w: jacfwd(w.of_input)(w.x),
    "jacrev of weights": lambda w: jacrev(w.call)(w.detached, w.one),
    "hessian": lambda w: hessian(lambda x: w.loss(w.detached, x))(w.one),
    "vjp": _pulled,
    "jvp": lambda w: jvp(w.of_input, (w.x,), (torch.ones_like(w.x),)),
    "jvp of weights": lambda w: jvp(
        lambda p: w.call(p, w.x), (w.detached,), ({n: p * 2 for n, p in w.detached.items()},)
    ),
    "linearize": _linearized,
    "functionalize": lambda w: functionalize(w.of_input)(w.x),
    "dual numbers": _dual,
    "batched gradients": _batched_gradients,
    "autograd's jacobian": lambda w: functional.jacobian(w.of_input, w.x),
    "autograd's jacobian, at once": lambda w: functional.jacobian(w.of_input, w.x, vectorize=True),
    "autograd's hessian": lambda w: functional.hessian(lambda x: w.of_input(x).float().sum(), w.x),
    "autograd's vjp": lambda w: functional.vjp(w.of_input, w.x, torch.ones(3, 2)),
    "autograd's jvp": lambda w: functional.jvp(w.of_input, w.x, torch.ones(3, 4)),
    "autograd's vhp": lambda w: functional.vhp(lambda x: w.of_input(x).float().sum(), w.x, w.x),
}


@in_both_dtypes
@pytest.mark.parametrize("name", TRANSFORMED)
@on_all_systems
def test_in_a_region(system: System, name: str, dtype: torch.dtype) -> None:
    """Before and after its weights were used in the region; and after the region, which leaves nothing behind."""
    assert_same(system, _around, name, dtype)


def _around(region: MakeRegion, name: str, dtype: torch.dtype) -> Any:
    world, call = World(), TRANSFORMED[name]
    with region("cpu", dtype=dtype):
        first = refused(lambda: call(world))
        plain = world.module(world.x)
        again = refused(lambda: call(world))
    return first, plain, again, call(world)


@pytest.mark.parametrize("name", TRANSFORMED)
@on_all_systems
def test_with_a_region_inside(system: System, name: str) -> None:
    assert_same(system, _inside, name)


def _inside(region: MakeRegion, name: str) -> Any:
    world = World(lambda: region("cpu"))
    return refused(lambda: TRANSFORMED[name](world)), world.module(world.x)
