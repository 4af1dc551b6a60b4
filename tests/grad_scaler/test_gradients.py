"""Gradients of every dtype and layout, closures, windows of accumulation, and the scale from the first gradients."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from precast._torch import fused_sgd_writes
from precast.errors import PrecastWarning, ScalerError
from precast.grad_scaler.next_scale import FIRST, SMALLER_ROOM, fitting
from precast.grad_scaler.optimizers import _warn_of_fused_sgd
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import bits, make_parameter, sgd, started

Tensor = torch.Tensor


# --- every dtype and layout ---


def sparse(values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse invariants are in beta
        return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,))


def compressed(values: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        crow, columns = torch.tensor([0, 1, 2]), torch.tensor([0, 2])
        return torch.sparse_csr_tensor(crow, columns, values, (2, 3))


GRADIENTS: dict[str, Any] = {
    **{
        str(dtype).removeprefix("torch."): lambda dtype=dtype: torch.tensor([2.0, -4.0]).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    },
    "complex64": lambda: torch.tensor([2 - 4j, 8j]),
    "complex128": lambda: torch.tensor([2 - 4j, 8j], dtype=torch.complex128),
    "conjugated": lambda: torch.tensor([2 - 4j, 8j]).conj(),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "sparse": lambda: sparse(torch.tensor([2.0, 4.0])),
    "sparse complex": lambda: sparse(torch.tensor([2j, 4.0])),
    "sparse CSR": lambda: compressed(torch.tensor([2.0, 4.0])),
    "empty": lambda: torch.zeros(0),
}


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def with_gradient(gradient: Tensor) -> Tensor:
    parameter = torch.zeros_like(dense(gradient).resolve_conj()).requires_grad_()
    if gradient.layout is torch.sparse_csr:
        parameter = parameter.detach().to_sparse_csr().requires_grad_()
    parameter.grad = gradient
    return parameter


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_every_kind_are_divided(kind: str) -> None:
    expected = dense(GRADIENTS[kind]()).resolve_conj() / 8
    parameter = with_gradient(GRADIENTS[kind]())
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))
    assert bits(dense(parameter.grad).resolve_conj()) == bits(expected)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("kind", [kind for kind in GRADIENTS if kind != "empty"])
def test_a_bad_number_in_any_kind_of_gradient_is_found_and_named(kind: str, bad: float) -> None:
    gradient = GRADIENTS[kind]()
    memory = gradient._values() if gradient.is_sparse else gradient
    memory = memory.values() if memory.layout is torch.sparse_csr else memory.resolve_conj()
    memory[(-1,) * memory.ndim] = complex(0, bad) if memory.is_complex() else bad
    if kind == "conjugated":
        gradient = memory.conj()
    parameters = [make_parameter(), with_gradient(gradient)]
    parameters[0].grad = torch.ones(3)
    before = [bits(dense(p)) for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.names == ("group 0, parameter 1",)
    assert [bits(dense(p)) for p in parameters] == before


@pytest.fixture
def kernel_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the kernel that unscales by one that refuses bfloat16, as CUDA's does; return the original."""
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def refusing(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
        if gradients[0].dtype is torch.bfloat16:
            raise NotImplementedError("\"..._unscale_cuda\" not implemented for 'BFloat16'")
        kernel(gradients, found_inf, inverse_scale)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refusing)
    monkeypatch.setattr("precast._torch.amp._kinds_without_kernel", set())
    return kernel


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 2.0**-40])
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_bfloat16_gradients_need_no_kernel_of_their_own(
    kernel_without_bfloat16: Any, bad: float | None, scale: float
) -> None:
    """All results have the bits of the kernel's, also where a finite gradient overflows when it is unscaled."""
    spread = torch.exp2(torch.linspace(-133, 120, 35))
    numbers = (torch.randn(7, 5) * spread.reshape(7, 5)).bfloat16()
    gradients = [numbers.clone(), numbers.t().clone().t(), numbers[0, 0].clone(), numbers[:0]]
    if bad is not None:
        gradients[1][3, 2] = bad
    inverse = torch.tensor(scale).double().reciprocal().float()
    expected = [gradient.clone() for gradient in gradients]
    kernel_without_bfloat16(expected, torch.zeros(()), inverse)
    parameters = [torch.zeros_like(gradient).requires_grad_() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scaler, optimizer = GradScaler("cpu", init_scale=scale), torch.optim.SGD(parameters, lr=0.0)
    for _ in range(2):  # the second time without asking the kernel
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        assert [bits(parameter.grad) for parameter in parameters] == list(map(bits, expected))
        scaler.step(optimizer)
        event = scaler.last_step(optimizer)
        assert event is not None
        assert event.skipped is not all(bool(gradient.isfinite().all()) for gradient in expected)
        scaler.update(scale)


@settings(max_examples=100)
@given(
    numbers=st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=20),
    scale=st.sampled_from([2.0**16, 2.0**10, 3.0, 1.0]),
)
def test_float16_gradients_are_divided_in_float32_and_rounded_once(
    numbers: list[float], scale: float
) -> None:
    """Where PyTorch refuses. What is rounded away is said in a warning."""
    parameter = torch.zeros(len(numbers), dtype=torch.float16, requires_grad=True)
    parameter.grad = torch.tensor(numbers, dtype=torch.float16)
    expected = (parameter.grad.double() / scale).float().half()
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(1))
    with pytest.raises(ValueError, match="FP16"):
        theirs.unscale_(sgd(parameter))
    ours = GradScaler("cpu", init_scale=scale)
    ours.scale(torch.ones(1))
    with pytest.warns(PrecastWarning, match="below 6e-8 become zero"):
        ours.unscale_(sgd(parameter))
    step = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    difference = (parameter.grad.float() - expected.float()).abs()
    # 1/scale is rounded to float32 before: at most one unit in float16's last place, where that ties.
    assert (difference <= torch.clamp(expected.abs().float() * 2**-10, min=step)).all()
    if math.log2(scale).is_integer():
        assert bits(parameter.grad) == bits(expected)


def test_a_step_without_any_gradient_leaves_the_next_one_alone() -> None:
    parameter = make_parameter()
    optimizer, scaler = sgd(parameter), GradScaler("cpu")
    scaler.scale(make_parameter().sum()).backward()
    with pytest.raises(ScalerError, match="no gradients were checked"):
        scaler.step(optimizer)
    before = parameter.detach().clone()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, before - 0.25)


def test_the_scale_is_fixed_inside_a_window_of_accumulation() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", growth_interval=1)
    for window in range(3):
        optimizer.zero_grad()
        scales = set()
        for number in range(4):
            scaler.scale(parameter.sum() * number).backward()
            scales.add(scaler.get_scale())
        assert scales == {2.0 ** (16 + window)}
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == -18.0


# --- closures ---


def rosenbrock(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 10 * (x[1] - x[0] ** 2) ** 2


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_steps_as_without_a_scaler(line_search: Any, by_name: bool) -> None:
    scaler = GradScaler("cpu", growth_interval=2)
    assert minimised(scaler, line_search, by_name) == minimised(None, line_search, by_name)
    assert scaler.get_scale() == 2.0**18


def minimised(scaler: GradScaler | None, line_search: Any, by_name: bool) -> list[Any]:
    x = torch.nn.Parameter(torch.tensor([-1.0, 1.5], dtype=torch.float64))
    optimizer = torch.optim.LBFGS([x], line_search_fn=line_search, max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = rosenbrock(x)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    losses = []
    for _ in range(4):
        step: Any = optimizer.step if scaler is None else functools.partial(scaler.step, optimizer)
        losses.append(step(closure=closure) if by_name else step(closure))
        if scaler is not None:
            scaler.update()
    return [*map(bits, losses), bits(x)]


@pytest.mark.parametrize("bad_call", [1, 2, 4])
@pytest.mark.parametrize("error", [False, True])
def test_a_closure_that_goes_bad_undoes_its_step(bad_call: int, error: bool) -> None:
    x = torch.nn.Parameter(torch.tensor([-1.0, 1.5]))
    optimizer = torch.optim.LBFGS([x], max_iter=5)
    scaler = GradScaler("cpu")
    calls = 0
    fails_at = math.inf

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = rosenbrock(x)
        if calls >= fails_at and error:
            raise KeyboardInterrupt
        scaler.scale(loss * (math.inf if calls >= fails_at else 1.0)).backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    before = [bits(x), str(optimizer.state_dict())]
    calls, fails_at = 0, bad_call
    if error:
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer, closure)
    else:
        assert scaler.step(optimizer, closure) is None
        event = scaler.last_step(optimizer)
        assert event is not None
        assert event.skipped
        scaler.update()
        assert scaler.get_scale() == 2.0**15
    assert [bits(x), str(optimizer.state_dict())] == before
    assert calls == bad_call
    fails_at = math.inf
    if error:  # a step that was broken off may be tried again
        scaler.step(optimizer, closure)
        scaler.update()
        assert scaler.counters.steps == 2
        assert bits(x) != before[0]


def test_what_an_optimizer_counts_in_its_groups_is_put_back_too() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["count"] += 1
            return super().step(closure)

    parameter = make_parameter()
    optimizer = Counting([parameter], lr=0.1)
    optimizer.param_groups[0]["count"] = 0
    scaler = GradScaler("cpu")

    def closure(factor: float) -> Tensor:
        optimizer.zero_grad()
        loss = parameter.sum()
        scaler.scale(loss * factor).backward()
        return loss

    for factor, count in ((math.inf, 0), (1.0, 1)):
        scaler.step(optimizer, functools.partial(closure, factor))
        scaler.update()
        assert optimizer.param_groups[0]["count"] == count


def test_closures_that_cannot_be_are_refused() -> None:
    scaler, parameter, optimizer = started()
    before = bits(parameter)
    with pytest.raises(ScalerError, match="the closure returned None"):
        scaler.step(optimizer, lambda: None)
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match=r"closure after unscale_\(\)"):
        scaler.step(optimizer, lambda: 1.0)
    assert bits(parameter) == before


# --- init_scale="auto" ---


@settings(max_examples=100)
@given(peak=st.floats(1e-30, 1e4))
def test_the_fitting_scale_is_the_largest(peak: float) -> None:
    scale = fitting(peak)
    assert scale * peak <= 65504 < 2 * scale * peak
    assert math.log2(scale).is_integer()


@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0, 1e5])
def test_the_scale_is_found_from_the_first_gradients(kind: str, size: float) -> None:
    """Gradients are made in float16, so that they overflow there."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = {"sgd": torch.optim.SGD, "fused adam": torch.optim.Adam}[kind](
        [parameter], lr=1e-3, **({"fused": True} if kind == "fused adam" else {})
    )
    scaler = GradScaler("cpu", init_scale="auto")
    assert scaler.get_scale() == FIRST
    skipped = 0
    for _ in range(6):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((3,), size * scaler.get_scale()).half().float()
        scaler.step(optimizer)
        scaler.update()
        event = scaler.last_step(optimizer)
        skipped += bool(event and event.skipped)
    assert scaler.get_scale() == fitting(float(torch.tensor(size)) * SMALLER_ROOM)
    assert skipped == (size * FIRST > 65504)
    assert not scaler._search.is_searching


@pytest.mark.parametrize(
    ("limits", "first"),
    [
        ({}, 2.0**10),
        ({"min_scale": 2.0**20}, 2.0**20),
        ({"max_scale": 16.0}, 16.0),
        ({"min_scale": 1.0, "max_scale": 2.0**20}, 2.0**10),
    ],
)
def test_a_search_begins_inside_the_limits(limits: dict[str, float], first: float) -> None:
    assert GradScaler("cpu", "auto", **limits).get_scale() == first  # type: ignore[arg-type]


def test_gradients_that_vanished_are_found() -> None:
    """Of 1e-12 float16 keeps nothing at the first scale."""
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = GradScaler("cpu", init_scale="auto")
    seen = []
    for _ in range(4):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full_like(parameter, 1e-12 * scaler.get_scale()).half().float()
        scaler.step(optimizer)
        scaler.update()
        seen.append(bool(parameter.grad.any()))
    assert seen == [False, True, True, True]
    assert scaler.get_scale() >= fitting(1e-12) / 4


def test_a_search_goes_on_where_the_gradients_say_nothing_and_in_a_copy() -> None:
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = GradScaler("cpu", init_scale="auto", max_scale=2.0**30)
    scales = []
    for gradient in (0.0, 0.0, 0.0):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full_like(parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**22, 2.0**30, 2.0**30]
    twin = copy.deepcopy(scaler)
    loaded = GradScaler("cpu", max_scale=2.0**30)
    loaded.load_state_dict(scaler.state_dict())
    for each in (scaler, twin, loaded):
        each.scale(torch.ones(()))
        parameter.grad = torch.full_like(parameter, 1e-30)
        each.step(optimizer)
        each.update()
        assert each.get_scale() == 2.0**30
        assert each.state_dict()["_growth_tracker"] == 0


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_shrink_raise_the_scale_at_the_iterations_that_measure(clip: bool) -> None:
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = GradScaler("cpu", init_scale="auto")
    scales = []
    for number in range(12):
        scaler.scale(torch.ones(()))
        size = 2.0**-number
        parameter.grad = torch.full_like(parameter, size * scaler.get_scale())
        if clip:
            scaler.clip_grad_norm_(optimizer, 2.0**-20)
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
    half, fits = 2.0**14, 2.0**15
    assert scales == [
        FIRST,
        half,
        fits * 2,
        *[fits * 2**2] * 2,
        *[fits * 2**4] * 4,
        *[fits * 2**8] * 3,
    ]


def test_gradients_that_grow_leave_the_scale_to_the_verdicts() -> None:
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = GradScaler("cpu", init_scale="auto")
    for number in range(12):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full_like(parameter, 2.0**number * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**14


def test_only_measuring_waits() -> None:
    from tests.grad_scaler.test_observers import Calls

    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale="auto")
    waits = []
    for _ in range(10):
        optimizer.zero_grad()
        with Calls() as calls:
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        waits.append(calls.waits > 0)
    assert [number for number, waited in enumerate(waits) if waited] == [0, 1, 2, 4, 8]


def test_the_room_that_overflows_show_is_left() -> None:
    """What overflows here is not the gradient that is measured, but something eight times as large."""
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = GradScaler("cpu", init_scale="auto")
    skipped = []
    for _ in range(40):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full_like(parameter, scaler.get_scale())
        if scaler.get_scale() * 8 > 65504:
            parameter.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        event = scaler.last_step(optimizer)
        skipped.append(bool(event and event.skipped))
    assert scaler.get_scale() == 2.0**12
    assert [number for number, was in enumerate(skipped) if was] == [1, 2]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_finite_gradients_in_16_bits_does_not_overflow(
    dtype: torch.dtype, order: float
) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(100, dtype=dtype)) for _ in range(3)]
    parameters.append(torch.nn.Parameter(torch.zeros(3)))
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).uniform_(2e4, 6e4)
    exact = torch.cat([p.grad.double() for p in parameters if p.grad is not None])
    scaler = GradScaler("cpu", enabled=False)
    norm = scaler.clip_grad_norm_(torch.optim.SGD(parameters, lr=1.0), 4096.0, order)
    expected = torch.linalg.vector_norm(exact, order)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    clipped = torch.cat([p.grad.double() for p in parameters if p.grad is not None])
    torch.testing.assert_close(
        clipped, exact * (4096 / expected), rtol=3 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW, Adagrad])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (lambda t: t.mT.contiguous().mT, (40, 64)),
        (lambda t: t.contiguous(memory_format=torch.channels_last), (8, 4, 5, 6)),
        (lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], (40, 64)),
    ],
    ids=["transposed", "channels last", "part"],
)
def test_a_fused_step_takes_gradients_in_another_layout(
    optimizer: Any, layout: Any, shape: tuple[int, ...]
) -> None:
    """PyTorch's fused kernels on the CPU ignore the layout, and read memory of others (2.13)."""
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(shape))
        scaler = GradScaler("cpu", init_scale=1024.0)
        scaler.scale(parameter.sum()).backward()
        parameter.grad = layout(torch.randn(shape) * 1024)
        scaler.step(optimizer([parameter], lr=0.1, fused=fused))
        scaler.update()
        results.append(parameter.detach())
    assert torch.allclose(*results, atol=1e-6)  # the kernels round differently


def test_a_fused_sgd_step_of_16_bit_parameters_warns_once() -> None:
    """PyTorch's kernel on the CPU leaves most of them unchanged (2.13)."""
    _warn_of_fused_sgd.cache_clear()
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = SGD([parameter], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    for warns in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.scale(parameter.float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        says_so = any("with fused=False" in str(each.message) for each in caught)
        assert says_so is (warns and not fused_sgd_writes(torch.bfloat16))
