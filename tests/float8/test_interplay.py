"""The float8 rules beside what else a program does: nested regions, shared weights, autograd functions, odd numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import precast
from precast.engine import float8_kernels, registration
from precast.engine.float8_kernels import RECIPES
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES
from precast.weights.float8.linear import linear
from precast.weights.float8.support import ProductMethod
from tests.support.installed import uninstall_all

BF16 = torch.bfloat16
BY_TENSOR = FLOAT8_RULES[:2]
rules = pytest.mark.parametrize("rule", FLOAT8_RULES)


@pytest.fixture(params=registration.available_engines(), autouse=True)
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(float8_kernels, "_warned", {"cpu"})
    with registration.use_engine(request.param):
        yield


def policy(rule: str) -> Policy:
    return Policy.load("default").replace(name="in8", ops=dict.fromkeys(FLOAT8_OPERATIONS, rule))


def region(rule: str) -> precast.autocast:
    return precast.autocast("cpu", BF16, policy=policy(rule))


def product(x: Tensor, w: Tensor, rule: str) -> Tensor:
    """What a rule gives for matrices, by hand; outside a region."""
    return linear(x.to(BF16), w, RECIPES[Rule(rule)], ProductMethod.EMULATED)


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 40), torch.randn(24, 40)


def test_regions_within_regions_have_the_rule_of_the_innermost() -> None:
    x, w = operands()
    with region("float8"):
        before = functional.linear(x, w)
        with region("float8_rowwise"):
            by_row = functional.linear(x, w)
        with precast.autocast("cpu", BF16, policy="default"):
            in_16_bits = functional.linear(x, w)
        with precast.autocast("cpu", enabled=False):
            plain = functional.linear(x, w)
        after = functional.linear(x, w)
    assert before.equal(product(x, w, "float8"))
    assert after.equal(before)
    assert by_row.equal(product(x, w, "float8_rowwise"))
    assert in_16_bits.equal(functional.linear(x.to(BF16), w.to(BF16)))
    assert plain.equal(functional.linear(x, w))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("others", FLOAT8_RULES[1:])
@pytest.mark.parametrize("hold", [False, True])
def test_a_weight_of_two_layers_with_a_rule_each(others: str, hold: bool) -> None:
    model, (x, _) = Tied(), operands()
    weight = model.a.weight
    chosen = Policy.load("default").replace(modules={"a": others, "b": "float8"})
    with precast.attach(model, chosen, hold=hold):
        for _ in range(3):
            with precast.autocast("cpu", BF16):
                got = model(x)
            (grad,) = torch.autograd.grad(got.float().square().sum(), weight)
            wanted = product(torch.relu(product(x, weight, others)), weight, "float8")
            (its,) = torch.autograd.grad(wanted.float().square().sum(), weight)
            assert got.equal(wanted)
            assert grad.equal(its)
            with torch.no_grad():
                weight.mul_(1.1)


@rules
@pytest.mark.parametrize("hold", [False, True])
def test_views_of_a_weight(rule: str, hold: bool) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 40))

        def forward(self, x: Tensor) -> Tensor:
            upper, lower = self.weight.chunk(2)
            return functional.linear(functional.linear(x, upper), lower.t())

    model, (x, _) = Views(), operands()
    with precast.attach(model, hold=hold):
        for _ in range(2):
            with region(rule):
                got = model(x)
            (grad,) = torch.autograd.grad(got.float().sum(), model.weight)
            upper, lower = model.weight.chunk(2)
            wanted = product(product(x, upper, rule), lower.t().contiguous(), rule)
            assert got.equal(wanted)
            assert grad.equal(torch.autograd.grad(wanted.float().sum(), model.weight)[0])
            with torch.no_grad():
                model.weight.neg_().mul_(1.5)


@pytest.mark.parametrize("hold", [False, True])
def test_inference_mode_and_training_after_it(hold: bool) -> None:
    model, (x, _) = nn.Linear(40, 24, bias=False), operands()
    with precast.attach(model, hold=hold):
        for _ in range(2):
            with torch.inference_mode(), region("float8_rowwise"):
                inferred = [model(x), model(x)]
            with region("float8_rowwise"):
                trained = model(x)
            trained.float().sum().backward()
            wanted = product(x, model.weight, "float8_rowwise")
            assert trained.equal(wanted)
            assert all(each.equal(wanted) and each.is_inference() for each in inferred)
            with torch.no_grad():
                model.weight.add_(1)


def test_autograd_functions_of_a_program() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @precast.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        @precast.custom_bwd(device_type="cpu")
        def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return above @ w, above.t() @ x

    class InFloat32(torch.autograd.Function):
        @staticmethod
        @precast.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(_: Any, x: Tensor, w: Tensor) -> Tensor:
            return x @ w.t()

    x, w = (each.requires_grad_() for each in operands())
    with region("float8"):
        got = Product.apply(x, w)  # type: ignore[no-untyped-call]
        plain = InFloat32.apply(x, w)  # type: ignore[no-untyped-call]
    above = torch.randn_like(got)
    grads = torch.autograd.grad(got, (x, w), above)
    assert got.equal(product(x, w.to(BF16), "float8"))
    # Its backward runs in the region of its forward: products of 8 bits, all operands e4m3.
    low = w.detach().to(BF16)
    assert grads[0].equal(product(above, low.t(), "float8").float())
    assert grads[1].equal(product(above.t(), x.detach().to(BF16).t(), "float8").float())
    assert plain.equal(x @ w.t())


def test_the_drop_in() -> None:
    x, w = operands()
    model = nn.Linear(40, 24)
    precast.install(policy("float8_rowwise"))
    try:
        with torch.autocast("cpu", dtype=BF16):
            got = functional.linear(x, w)
            again = checkpoint(model, x, use_reentrant=False)
        again.float().sum().backward()
    finally:
        uninstall_all()
    assert got.equal(product(x, w, "float8_rowwise"))
    wanted = product(x, model.weight, "float8_rowwise")
    assert again.equal(wanted + model.bias.to(BF16))
    assert model.weight.grad is not None
    assert model.weight.grad.equal(torch.autograd.grad(wanted.float().sum(), model.weight)[0])


@rules
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_from_above_reaches_what_shares_its_scale(rule: str, bad: float) -> None:
    x, w = (each.requires_grad_() for each in operands())
    with region(rule):
        result = functional.linear(x, w)
    above = torch.randn_like(result)
    above[3, 4] = bad
    of_x, of_w = torch.autograd.grad(result, (x, w), above)
    if rule in BY_TENSOR:
        assert not of_x.isfinite().any()
        assert not of_w.isfinite().any()
    else:
        assert (~of_x.isfinite().any(1)).nonzero().flatten().tolist() == [3]
        assert (~of_w.isfinite().any(1)).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("rule", FLOAT8_RULES[2:])
def test_rows_of_any_size_beside_each_other(rule: str) -> None:
    """Rows of zeros, of denormals, and of numbers near both ends of float32; each as exact as if it were alone."""
    x, w = operands()
    sizes = [0.0, 1e-40, 1e-10, 1e-5, 1.0, 1e5, 1e10, 1e30, 1e36]
    x *= torch.tensor(sizes).unsqueeze(1)
    with region(rule):
        result = functional.linear(x, w).double()
    exact = x.to(BF16).double() @ w.double().t()
    assert not result[:2].any()  # zeros, and what lies below the smallest scale
    for row, wanted in zip(result[2:], exact[2:], strict=True):
        assert (row - wanted).norm() < 0.08 * wanted.norm()
