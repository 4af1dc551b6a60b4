"""The float8 rules in a region: what runs in 8 bits, what in 16 and why, under whatever surrounds the operation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import precast
from precast.engine import float8_kernels, registration
from precast.engine.float8_kernels import RECIPES
from precast.errors import PolicyError, PrecastWarning
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES
from precast.weights.float8.linear import linear
from precast.weights.float8.support import ProductMethod, Support, override_support

BF16 = torch.bfloat16
rules = pytest.mark.parametrize("rule", FLOAT8_RULES)
engines = pytest.mark.parametrize("engine", registration.available_engines())


@pytest.fixture(autouse=True)
def _warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning that float8 is emulated comes once a process; here it has come."""
    monkeypatch.setattr(float8_kernels, "_warned", {"cpu"})


def policy(rule: str = "float8") -> Policy:
    return Policy.load("default").replace(name="in8", ops=dict.fromkeys(FLOAT8_OPERATIONS, rule))


def region(rule: str = "float8", dtype: torch.dtype = BF16) -> precast.autocast:
    return precast.autocast("cpu", dtype, policy=policy(rule))


def product(x: Tensor, w: Tensor, rule: str = "float8", dtype: torch.dtype = BF16) -> Tensor:
    """What a rule gives for matrices, by hand."""
    return linear(x.to(dtype), w, RECIPES[Rule(rule)], ProductMethod.EMULATED)


def operands(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    m, k, n = shape
    return torch.randn(m, k), torch.randn(n, k), torch.randn(n)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": functional.linear,
    "mm": lambda x, w, b: torch.mm(x, w.t()) + b.to(BF16),
    "matmul": lambda x, w, b: torch.matmul(x, w.t()) + b.to(BF16),
    "@": lambda x, w, b: x @ w.t() + b.to(BF16),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
}


@engines
@rules
@pytest.mark.parametrize("name", CALLS)
def test_a_product_in_a_region(name: str, rule: str, engine: str) -> None:
    x, w, b = operands(9, 40, 24)
    with registration.use_engine(engine), region(rule):
        got = CALLS[name](x, w, b)
    weight = w if name == "linear" else w.to(BF16)
    assert got.equal(product(x, weight, rule) + b.to(BF16))


@engines
@rules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_a_region(rule: str, dtype: torch.dtype, engine: str) -> None:
    x, w, b = (t.requires_grad_() for t in operands(9, 40, 24))
    with registration.use_engine(engine), region(rule, dtype):
        got = functional.linear(x, w, b)
    above = torch.randn_like(got)
    grads = torch.autograd.grad(got, (x, w, b), above)
    x2 = x.to(dtype)
    wanted = product(x2, w, rule, dtype) + b.to(dtype)
    assert got.equal(wanted)
    for one, other in zip(grads, torch.autograd.grad(wanted, (x, w, b), above), strict=True):
        assert one.dtype is torch.float32
        assert one.equal(other)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 4)])
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    _, w, b = operands(1, 40, 24)
    x = torch.randn(*leading, 40)
    with region("float8_rowwise"):
        got = functional.linear(x, w, b)
    flat = product(x.reshape(-1, 40), w, "float8_rowwise") + b.to(BF16)
    assert got.shape == (*leading, 24)
    assert got.equal(flat.reshape(got.shape))


def test_alpha_and_beta() -> None:
    x, w, b = operands(9, 40, 24)
    with region():
        got = torch.addmm(b, x, w.t(), beta=0.5, alpha=2)
        without = torch.addmm(b * torch.nan, x, w.t(), beta=0)
    by_hand = product(x, w.to(BF16))
    assert got.equal(by_hand * 2 + b.to(BF16) * 0.5)
    assert without.equal(by_hand)


IN_16_BITS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "vector": (lambda: torch.ones(3, 4) @ torch.ones(4), "an operand is a vector"),
    "batches": (lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 5), "for batches of matrices"),
    "no rows": (lambda: torch.ones(0, 4) @ torch.ones(4, 5), "an operand is empty"),
    "no sums": (lambda: torch.ones(3, 0) @ torch.ones(0, 5), "an operand is empty"),
    "sparse": (lambda: torch.mm(torch.eye(4).to_sparse(), torch.ones(4, 5)), "layout"),
}


@engines
@pytest.mark.parametrize("name", IN_16_BITS)
def test_what_runs_in_16_bits_and_why(name: str, engine: str) -> None:
    call, why = IN_16_BITS[name]
    with registration.use_engine(engine):
        with precast.autocast("cpu", BF16, policy="default"):
            wanted = call()
        with region(), precast.trace() as trace:
            got = call()
    assert got.dtype is wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    reasons = [row.reason for row in trace.rows if row.rule == "float8"]
    assert any("ran in 16 bits" in reason and why in reason for reason in reasons), reasons


@engines
def test_float64_is_as_under_lower(engine: str) -> None:
    with registration.use_engine(engine), region():
        got = torch.ones(3, 4, dtype=torch.float64) @ torch.ones(4, 5, dtype=torch.float64)
    assert got.dtype is torch.float64


@engines
def test_forward_mode_runs_in_16_bits(engine: str) -> None:
    x, w, _ = operands(3, 4, 5)

    def tangent() -> Tensor:
        found: Tensor = torch.func.jvp(lambda a: torch.mm(a, w.t()), (x,), (x * 2,))[1]
        return found

    with registration.use_engine(engine):
        with precast.autocast("cpu", BF16, policy="default"):
            wanted = tangent()
        with region():
            got = tangent()
    assert got.equal(wanted)


@engines
def test_transforms_take_each_product_for_one_of_forward(engine: str) -> None:
    """`torch.func.grad` hands on the products of the gradient one by one, as PyTorch's autocast gets them too."""
    x, w, _ = operands(3, 4, 5)

    def total(weight: Tensor) -> Tensor:
        return torch.mm(x, weight).square().sum()

    with registration.use_engine(engine), region():
        got = torch.func.grad(total)(w.t().contiguous())
    result = product(x, w.to(BF16))
    above = 2 * result
    assert got.equal(product(x.to(BF16).t(), above.t()).float())


def test_sizes_that_do_not_fit_are_pytorchs_error() -> None:
    with region(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional.linear(torch.ones(3, 4), torch.ones(5, 6))


@rules
def test_a_trace_says_the_formats(rule: str) -> None:
    x, w, b = operands(9, 40, 24)
    with region(rule), precast.trace() as trace:
        functional.linear(x, w, b)
        nn.functional.relu(x)
    (row,) = [row for row in trace.rows if row.op == "linear"]
    assert row.rule == rule
    scale = "a scale a row" if "row" in rule or "hp" in rule else "one scale"
    assert f"e4m3 with {scale} @ e4m3 with {scale}, emulated in float32" in row.reason


def test_a_trace_says_what_was_padded() -> None:
    x, w, b = operands(9, 40, 24)
    support = Support(ProductMethod.KERNEL, "a test")
    with region(), precast.trace() as trace, override_support(support):
        try:
            functional.linear(x, w, b)
        except RuntimeError as error:
            pytest.skip(f"no scaled_mm on this CPU: {str(error).partition('. ')[0]}")
    (row,) = [row for row in trace.rows if row.op == "linear"]
    assert "by the float8 kernel (a test)" in row.reason
    assert "padded with zeros, as 40 and 24 are not multiples of 16" in row.reason


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 50), nn.GELU(), nn.Linear(50, 24))


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad for p in net.parameters()]
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


@rules
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(rule: str, reentrant: bool) -> None:
    net, x = model(), torch.randn(9, 40, requires_grad=True)
    again = copy.deepcopy(net)
    with region(rule):
        net(x).float().square().sum().backward()
        checkpoint(again, x, use_reentrant=reentrant).float().square().sum().backward()
    for one, other in zip(gradients(net), gradients(again), strict=True):
        assert one.equal(other)


@rules
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_is_eager(rule: str, inside: bool) -> None:
    net, x = model(), torch.randn(9, 40, requires_grad=True)
    again = copy.deepcopy(net)
    chosen = policy(rule)

    def step(given: Tensor) -> Tensor:
        with precast.autocast("cpu", BF16, policy=chosen):
            return again(given)

    compiled = torch.compile(step if inside else again, backend="aot_eager", fullgraph=True)
    with region(rule):
        eager = net(x)
    if inside:
        got = compiled(x)
    else:
        with region(rule):
            got = compiled(x)
    above = torch.randn_like(got)
    (for_eager,) = torch.autograd.grad(eager, x, above, retain_graph=True)
    (for_compiled,) = torch.autograd.grad(got, x, above, retain_graph=True)
    eager.backward(above)
    got.backward(above)
    assert got.equal(eager)
    assert for_compiled.equal(for_eager)
    for one, other in zip(gradients(net), gradients(again), strict=True):
        assert one.equal(other)


def test_another_rule_compiles_again() -> None:
    net, x = model(), torch.randn(9, 40)
    compiled = torch.compile(net, backend="aot_eager")
    for rule in ("float8", "float8_rowwise", "lower", "float8"):
        with region(rule):
            assert compiled(x).equal(net(x))


def test_emulation_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_kernels, "_warned", set())
    policies = [policy("float8_rowwise").replace(name=name) for name in ("one", "other")]
    says = "float8 is emulated on cpu, as cpu has no kernel"
    with pytest.warns(PrecastWarning, match=says), precast.autocast("cpu", policy=policies[0]):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with precast.autocast("cpu", BF16, policy=policies[1]):
            pass


def test_a_device_without_float8_is_one_clear_error() -> None:
    with pytest.raises(PolicyError, match="is not supported on mps: it has neither float8"):
        float8_kernels.check_device("mps", Rule.FLOAT8)
