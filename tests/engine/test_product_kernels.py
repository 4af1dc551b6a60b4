"""The rule `lower_out_fp32`: factors in 16 bits, results in float32, beside float64 and PyTorch's own overloads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import precast
from precast.engine import product_kernels, registration
from precast.engine.operation import Operation
from precast.errors import PolicyError
from precast.policy.policy import Policy, Rule
from precast.policy.rows import PRODUCT_OPERATIONS, short
from tests.support import pretended_cuda

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
RULE = Rule.LOWER_OUT_FP32
OPERATIONS = tuple(map(short, PRODUCT_OPERATIONS[RULE]))
POLICY = Policy.load("default").replace(name="wide", ops=dict.fromkeys(OPERATIONS, RULE))

CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]] = {
    "linear": (functional.linear, ((2, 3, 5), (4, 5), (4,)), 2),
    "linear without bias": (functional.linear, ((3, 5), (4, 5)), 2),
    "matmul": (torch.matmul, ((2, 3, 5), (5, 4)), 2),
    "matmul of vectors": (torch.matmul, ((5,), (5,)), 2),
    "matmul, broadcast": (torch.matmul, ((2, 1, 3, 5), (7, 5, 4)), 2),
    "mm": (torch.mm, ((3, 5), (5, 4)), 2),
    "bmm": (torch.bmm, ((2, 3, 5), (2, 5, 4)), 2),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2), ((3, 5), (5, 4), (4,)), 2),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b), ((2, 3, 5), (2, 5, 4), (2, 3, 4)), 2),
    "conv1d": (functional.conv1d, ((2, 3, 9), (4, 3, 3), (4,)), 2),
    "conv2d": (
        lambda a, b, c: functional.conv2d(a, b, c, padding="same"),
        ((2, 3, 5, 5), (4, 3, 3, 3), (4,)),
        2,
    ),
    "conv3d": (functional.conv3d, ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2)), 2),
    "conv_transpose1d": (functional.conv_transpose1d, ((2, 3, 5), (3, 4, 2), (4,)), 2),
    "conv_transpose2d": (functional.conv_transpose2d, ((2, 3, 4, 4), (3, 4, 2, 2)), 2),
    "conv_transpose3d": (functional.conv_transpose3d, ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2)), 2),
}
"""Name -> the call, the shapes of its tensors, and the number of factors, which come first."""
calls = pytest.mark.parametrize("name", CALLS)
on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


def region(
    dtype: torch.dtype = torch.bfloat16, policy: Policy = POLICY, device: str = "cpu"
) -> precast.autocast:
    return precast.autocast(device, dtype, policy=policy)


def tensors(
    name: str, make: Callable[..., Tensor] = torch.randn, device: str = "cpu"
) -> list[Tensor]:
    return [make(shape).to(device) for shape in CALLS[name][1]]


def rounded(name: str, values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The factors rounded to 16 bits, and what is added as it is, all in float64."""
    factors = CALLS[name][2]
    return [(t.to(dtype) if i < factors else t).double() for i, t in enumerate(values)]


@calls
@on_each_device
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_results_and_gradients_are_those_of_float64_on_rounded_factors(
    name: str, dtype: torch.dtype, device: str
) -> None:
    if device == "cuda" and name.startswith("conv") and pretended_cuda.is_loaded():
        pytest.skip("the pretended device has no cuDNN")
    call = CALLS[name][0]
    values = [t.requires_grad_() for t in tensors(name, device=device)]
    exact = [t.detach().requires_grad_() for t in rounded(name, values, dtype)]
    with region(dtype, device=device):
        result = call(*values)
    expected = call(*exact)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)

    gradient = torch.randn_like(result)
    result.backward(gradient)
    expected.backward(gradient.to(dtype).double())
    half_a_unit = torch.finfo(dtype).eps / 2  # a gradient of a factor is rounded once
    for number, (value, reference) in enumerate(zip(values, exact, strict=True)):
        assert value.grad is not None
        assert reference.grad is not None
        is_rounded = number < CALLS[name][2]
        tolerance = 1.01 * half_a_unit if is_rounded else 1e-5
        torch.testing.assert_close(value.grad.double(), reference.grad, rtol=tolerance, atol=1e-5)


@calls
@on_each_device
def test_whole_numbers_give_exact_results(name: str, device: str) -> None:
    values = tensors(name, lambda shape: torch.randint(-256, 257, shape).float(), device)
    with region(device=device), torch.no_grad():
        result = CALLS[name][0](*values)
    assert torch.equal(result.double(), CALLS[name][0](*(t.double() for t in values)))


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**31))
def test_a_product_of_any_size_is_that_of_the_rounded_factors(
    m: int, k: int, n: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k)))
    with region():
        result = functional.linear(a, b)
    expected = functional.linear(a.bfloat16().float(), b.bfloat16().float())
    assert torch.equal(result, expected)


@pytest.mark.parametrize("stored", [torch.float32, *SIXTEEN_BIT])
def test_a_rule_for_a_module_holds_whatever_its_weights_are_stored_in(stored: torch.dtype) -> None:
    policy = Policy.load("default").replace(modules={"*.head": "lower_out_fp32"})
    model = nn.Sequential()
    model.add_module("body", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 3))
    model.to(stored)
    precast.attach(model, policy)
    with region(policy=policy):
        middle = model.body(torch.ones(2, 4))
        result = model(torch.ones(2, 4))
    assert (middle.dtype, result.dtype) == (torch.bfloat16, torch.float32)
    result.sum().backward()
    assert model.get_parameter("head.weight").grad.dtype is stored  # type: ignore[union-attr]


def test_a_module_in_16_bits_ends_the_rule() -> None:
    policy = POLICY.replace(modules={"0": "bfloat16"})
    model = nn.Sequential(nn.Linear(4, 4))
    precast.attach(model, policy)
    with region(policy=policy):
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16
        assert functional.linear(torch.ones(1, 4), torch.ones(1, 4)).dtype is torch.float32


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = nn.Linear(8, 8), nn.Conv1d(4, 4, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.conv(torch.relu(self.body(x))))
        return logits, torch.bmm(logits, logits.mT)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize(
    "policy",
    [POLICY, Policy.load("default").replace(modules={"head": RULE, "conv": RULE})],
    ids=["operations", "modules"],
)
def test_converted_exported_and_compiled_models_give_the_bits_of_the_region(
    dtype: torch.dtype, policy: Policy
) -> None:
    torch.manual_seed(0)
    model, x = Head().eval(), torch.randn(3, 4, 8)
    converted = precast.convert(copy.deepcopy(model), policy, dtype, example=(x,))
    exported = precast.export(model, (x,), policy=policy, dtype=dtype).module()
    attached = copy.deepcopy(model)
    precast.attach(attached, policy)
    with torch.no_grad(), region(dtype, policy):
        expected = attached(x)
        compiled = torch.compile(attached, backend="aot_eager")(x)
    with torch.no_grad():
        results = converted(x), exported(x), compiled
    for result in results:
        assert [t.dtype for t in result] == [t.dtype for t in expected]
        assert all(map(torch.equal, result, expected))


def test_transforms_of_torch_func_and_second_derivatives_work() -> None:
    w, x = torch.randn(4, 5), torch.randn(3, 5)

    def loss(weight: Tensor) -> Tensor:
        return functional.linear(x, weight).square().sum()

    with region():
        gradient = torch.func.grad(loss)(w)
        _, tangent = torch.func.jvp(loss, (w,), (w,))
        batch = torch.func.vmap(lambda row: functional.linear(row, w))(x)
        weight = w.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weight)
    assert (gradient.dtype, tangent.dtype, batch.dtype) == (torch.float32,) * 3
    exact = x.bfloat16().double()
    expected = 2 * (exact @ w.bfloat16().double().T).T @ exact
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-2)
    curvature = (2 * exact.sum(1) @ exact).expand(4, 5)
    torch.testing.assert_close(second.double(), curvature, rtol=2e-2, atol=2e-2)


@calls
def test_both_engines_give_the_same_bits(name: str) -> None:
    values, outcomes = tensors(name), []
    for engine in registration.ENGINES:
        with registration.use_engine(engine):
            leaves = [t.clone().requires_grad_() for t in values]
            with region():
                result = CALLS[name][0](*leaves)
                again = CALLS[name][0](*leaves)
            outcome = torch.autograd.grad((result + again).square().sum(), leaves)
        outcomes.append([result, *outcome])
    assert all(map(torch.equal, *outcomes))


@calls
def test_the_native_engine_needs_no_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [t.requires_grad_() for t in tensors(name)]
    with registration.use_engine("native"), region():
        CALLS[name][0](*leaves)  # binds the policy
        monkeypatch.setattr(Operation, "call", None)
        CALLS[name][0](*leaves).sum().backward()
        with torch.no_grad():
            CALLS[name][0](*leaves)


@calls
def test_a_result_can_be_written_in_place(name: str) -> None:
    leaves = [t.requires_grad_() for t in tensors(name)]
    gradients = []
    for relu in (functional.relu, functional.relu_):
        with region():
            result = relu(CALLS[name][0](*leaves))
        gradients.append(torch.autograd.grad(result.square().sum(), leaves))
    assert all(map(torch.equal, *gradients))


def test_compiled_autograd_rounds_the_gradient() -> None:
    from torch._dynamo import compiled_autograd

    x, w = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    gradient, results = torch.randn(3, 4), []
    for compiler in (
        contextlib.nullcontext(),
        compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        with region():
            result = functional.linear(x, w)
        with compiler:
            results += torch.autograd.grad(result, w, gradient)
    assert torch.equal(*results)
    exact = gradient.bfloat16().double().T @ x.bfloat16().double()
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-2, atol=1e-2)


def test_the_rule_is_for_products_alone() -> None:
    with pytest.raises(PolicyError, match=r"softmax cannot be 'lower_out_fp32': it is no product"):
        Policy.load("default").replace(ops={"softmax": RULE})


def test_float64_factors_are_not_rounded() -> None:
    a, b = torch.randn(3, 5).double(), torch.randn(4, 5).double()
    with region():
        assert torch.equal(functional.linear(a, b), functional.linear(a, b).double())


@pytest.mark.parametrize(
    "name",
    ["linear", "linear without bias", "matmul", "mm", "bmm", "addmm", "baddbmm"],
)
def test_pytorchs_kernel_with_a_float32_result_gives_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a CUDA device, with its kernels replaced by the same products on the CPU."""
    call, values = CALLS[name][0], tensors(name)
    taken = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        taken.append(a.dtype)
        return a.float() @ b.float()

    results: list[list[Tensor]] = []
    gradient = torch.randn(call(*values).shape)
    for is_kernel in (False, True):
        for module in (product_kernels, registration):
            monkeypatch.setattr(
                module, "is_product_in_float32", lambda _, answer=is_kernel: not answer
            )
        monkeypatch.setattr(product_kernels, "_can_use_kernel", lambda *_: True)
        monkeypatch.setattr(product_kernels, "_multiply", multiply)
        own = [t.clone().requires_grad_() for t in values]
        with region(policy=POLICY.replace(name=f"wide, {is_kernel}")):
            result = call(*own)
        result.backward(gradient)
        results.append([result.detach(), *(t.grad for t in own if t.grad is not None)])
    assert taken == [torch.bfloat16]
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(plain, kernel, rtol=1e-2, atol=1e-2)
    plain, kernel = results
    torch.testing.assert_close(plain[0], kernel[0], rtol=1e-5, atol=1e-5)
    added = slice(1 + CALLS[name][2], None)
    assert all(map(torch.equal, plain[added], kernel[added]))


@pytest.mark.gpu
@pytest.mark.skipif(pretended_cuda.is_loaded(), reason="it has no kernel with a float32 result")
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 7, 5)])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_a_gpu_multiplies_by_its_kernel_with_a_float32_result(
    dtype: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k, n = shape
    x, weight = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    taken = []
    multiply = product_kernels._multiply
    monkeypatch.setattr(
        product_kernels, "_multiply", lambda a, b: taken.append(a.dtype) or multiply(a, b)
    )
    with region(dtype, device="cuda"), torch.no_grad():
        result = functional.linear(x, weight)
    assert taken == [dtype]
    exact = x.to(dtype).double() @ weight.to(dtype).double().T
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
