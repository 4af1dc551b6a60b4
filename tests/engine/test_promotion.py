"""Mixed dtypes that PyTorch refuses: both engines promote them, and give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import precast
from precast import Policy
from precast._internal.pytree import map_tensors
from precast.engine import registration
from precast.engine.operation import Operation
from precast.weights.native import library
from tests.support import op_samples
from tests.support.op_samples import Sample
from tests.support.outcomes import DTYPES, assert_same, mixtures, outcome, same_bits

B, H, S, D = torch.bfloat16, torch.float16, torch.float32, torch.float64
POLICIES = {
    "default": Policy.load("default"),
    "cuda": Policy.load("default").retarget("cpu", like="cuda"),
}
SAMPLED = sorted((op_samples.named() | op_samples.promoted()) - set(op_samples.NOT_ON_CPU))
UNREPEATABLE = {
    "aten::linalg_lstsq": "a LAPACK routine whose rounding depends on where its memory lies",
    "aten::mkldnn_rnn_layer": "returns a buffer that is scratch memory",
    "aten::multi_margin_loss": "returns memory that it has not written where there are no rows",
    "aten::multilabel_margin_loss": "returns memory that it has not written where there are no rows",
    "aten::multilabel_margin_loss_forward": "returns memory that it has not written where there are no rows",
}
FRAGILE = {
    "aten::embedding_bag": "ends the process where there are no offsets",
    "aten::embedding_bag.padding_idx": "ends the process where there are no offsets",
    "aten::scaled_dot_product_attention": "writes beyond its memory where values are longer than keys",
    "aten::pdist": "its backward divides by the number of rows, which ends the process where there are none",
}
"""What PyTorch itself does not survive: their tensors keep their sizes."""


@pytest.fixture(autouse=True)
def _native_engine() -> Iterator[None]:
    if isinstance(missing := library.load(), library.Unavailable):
        pytest.skip(f"needs the native engine: {missing.reason}")
    with registration.use_engine("native"):
        yield


@dataclass(frozen=True)
class Call:
    """One call in a region: its arguments, and which of its floating tensors require grad."""

    name: str
    sample: Sample
    requires_grad: tuple[bool, ...]
    records: bool
    policy: str
    lower: torch.dtype


def drawn(random: Random) -> Call:
    """A call with dtypes, sizes, strides and numbers that PyTorch may take or refuse."""
    name = random.choice([name for name in SAMPLED if name not in UNREPEATABLE])
    sample = random.choice(op_samples.samples(name, random.randrange(1000)))
    dtypes = random.sample(DTYPES, random.choice([1, 2, 2, 2, 4]))
    alike = random.choice([None, random.random(), random.random()])

    def tensor(value: Tensor) -> Tensor:
        if name not in FRAGILE:
            value = reshaped(value, random if alike is None else Random(alike)).clone()
        if value.is_floating_point():
            value = value.to(random.choice([*dtypes * 5, torch.int64]))
        return value

    def number(value: object) -> object:
        changes = isinstance(value, float) and random.random() < 0.3
        return random.choice([0.0, 1.0, 0.5, -2.0]) if changes else value

    args, kwargs = map_tensors(sample, tensor)
    grads = random.choice([(False,), (True,), (False, True), (True, False)])
    return Call(
        name,
        Sample(tuple(map(number, args)), {key: number(value) for key, value in kwargs.items()}),
        grads,
        random.random() < 0.8,
        random.choice(["default", "default", "cuda"]),
        random.choice([B, B, H]),
    )


def reshaped(value: Tensor, random: Random) -> Tensor:
    """A tensor as it is, or with no elements, or one, or more or fewer dimensions, or other strides."""
    if value.dim() == 0:
        return value
    dim = random.randrange(value.dim())
    forms: list[Callable[[], Tensor]] = [
        lambda: value.narrow(dim, 0, 0),
        lambda: value.narrow(dim, 0, min(1, value.size(dim))),
        lambda: value.select(dim, 0) if value.size(dim) else value,
        lambda: value.unsqueeze(0),
        lambda: value.flatten()[0] if value.numel() else value,
        lambda: value.movedim(0, -1).contiguous().movedim(-1, 0),
        lambda: torch.cat([value, value], dim),
    ]
    return random.choice([*[lambda: value] * 7, *forms])()


def result(call: Call) -> tuple[Any, list[Tensor]]:
    """What a call gives: an error, or shapes, strides and dtypes; and all tensors, what is written to as well."""
    sample = map_tensors(call.sample, torch.clone)
    inputs: list[Tensor] = []
    map_tensors(sample, lambda t: inputs.append(t) or t)  # type: ignore[func-returns-value]
    leaves = [t for t in inputs if t.is_floating_point()]
    for place, leaf in enumerate(leaves):
        leaf.requires_grad_(call.requires_grad[place % len(call.requires_grad)])
    torch.manual_seed(0)
    region = precast.autocast("cpu", call.lower, policy=POLICIES[call.policy])
    outputs: list[Tensor] = []
    try:
        with region, torch.set_grad_enabled(call.records):
            output = op_samples.call(call.name, sample)
        map_tensors(output, lambda t: outputs.append(t) or t)  # type: ignore[func-returns-value]
        roots = [t for t in outputs if t.requires_grad]
        if roots:
            torch.manual_seed(1)
            torch.autograd.backward(roots, [torch.randn(t.shape).to(t.dtype) for t in roots])
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return (type(error), str(error).splitlines()[0]), []
    tensors = [t.detach() for t in (*outputs, *inputs) if t.layout is torch.strided]
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    said = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (*tensors, *grads)]
    return said, [t.clone(memory_format=torch.contiguous_format) for t in (*tensors, *grads)]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_both_engines_give_the_same_for_any_call(random: Random) -> None:
    for _ in range(8):
        call = drawn(random)
        with registration.use_engine("reference"):
            expected, tensors = result(call)
        found, ours = result(call)
        assert found == expected, call
        assert all(map(same_bits, ours, tensors)), call


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", SAMPLED)
def test_both_engines_give_the_same_for_all_mixtures(name: str, policy: Policy) -> None:
    for sample in op_samples.samples(name, torch.initial_seed() % 1000):
        for dtypes in mixtures(sample):
            native = outcome(precast.autocast("cpu", B, policy=policy), name, sample, dtypes)
            with registration.use_engine("reference"):
                region = precast.autocast("cpu", B, policy=policy)
                reference = outcome(region, name, sample, dtypes)
            assert_same(native, reference, f"{name} {dtypes}")
            assert (native.error, native.message) == (reference.error, reference.message)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("region", "other"), [(B, H), (H, B)])
def test_a_16_bit_dtype_other_than_the_regions_is_widened(device: str, region, other) -> None:
    """PyTorch's rule "promote" refuses it; the widest of it and the region's dtype is float32."""
    x = torch.ones(3, device=device, dtype=other)
    for engine in ("reference", "native"):
        with registration.use_engine(engine), precast.autocast(device, region):
            for _ in range(2):
                result = torch.stack([x, x]) if device == "cpu" else torch.addcmul(x, x, x)
                assert result.dtype is S


@pytest.mark.parametrize("engine", ["reference", "native"])
def test_it_is_widened_inside_an_operation_that_has_no_mixed_dtypes_itself(engine: str) -> None:
    """`cartesian_prod` calls `stack`, which PyTorch refuses."""
    x = torch.ones(3, dtype=H)
    with registration.use_engine(engine), precast.autocast("cpu", B):
        assert torch.cartesian_prod(x, x).dtype is S
        assert torch.cartesian_prod(x, x.double()).dtype is D


def test_no_rows_one_row_and_more_are_not_alike() -> None:
    """PyTorch takes one value of another dtype, in every place that a mask selects, and refuses several."""
    x, mask = torch.zeros(2, 2), torch.tensor([True, False])
    with precast.autocast("cpu"):
        for _ in range(2):
            assert torch.index_put(x.bfloat16(), (mask,), torch.ones(2)).dtype is S
            assert torch.index_put(x.bfloat16(), (mask,), torch.ones(1)).dtype is B
            assert torch.index_put(x.bfloat16(), (mask & False,), torch.ones(2)).dtype is S


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_output_of_another_size_is_resized_as_pytorch_does() -> None:
    for rows in (1, 3, 1, 3):
        a, b = torch.randn(rows, 4).bfloat16(), torch.randn(4, 5)
        out = torch.zeros(3, 5)
        with precast.autocast("cpu"):
            torch.mm(a, b, out=out)
        assert out.shape == (rows, 5)
        assert torch.equal(out, a.float() @ b)


def test_what_pytorch_grows_in_place_grows() -> None:
    for _ in range(3):
        x = torch.ones(1, 5)
        with precast.autocast("cpu"):
            x.addbmm_(torch.ones(2, 3, 4).double(), torch.ones(2, 4, 5))
        assert torch.equal(x, torch.full((3, 5), 9.0))


def test_within_another_operation_it_is_the_outer_one_that_is_promoted() -> None:
    """The inner one was refused before, and called by the outer one it is refused again."""
    x, index, source = torch.ones(3).bfloat16(), torch.tensor([0]), torch.ones(1).half()
    for _ in range(3):
        with precast.autocast("cpu"):
            assert torch.index_put(x, (index,), source, True).dtype is S
            assert torch.put(x, index, source, True).dtype is S
            a, b = torch.ones(2, 2).double(), torch.ones(2)
            assert torch.mv(a, b).dtype is D
            assert torch.tensordot(a, b, 1).dtype is D
            assert torch.dot(b, a[0]).dtype is D
            assert torch.inner(b, a[0]).dtype is D


def test_an_operation_of_an_extension_is_asked_each_time() -> None:
    asked: list[torch.dtype] = []

    @torch.library.custom_op("precast_test_promotion::add", mutates_args=())
    def add(x: Tensor, y: Tensor) -> Tensor:
        asked.append(y.dtype)
        if len(asked) == 1 and x.dtype is not y.dtype:
            raise RuntimeError("expected the same dtype")
        return x + y

    policy = Policy.load("default").replace(ops={"precast_test_promotion::add": "promote"})
    for engine in registration.ENGINES:
        asked.clear()
        with registration.use_engine(engine), precast.autocast("cpu", policy=policy):
            for _ in range(2):
                assert add(torch.ones(2).half(), torch.ones(2).bfloat16()).dtype is S
        assert asked == [B, S, B]


COMPILED = {
    "mse_loss": (((3, 4), (3, 4)), functional.mse_loss),
    "smooth_l1_loss": (((3, 4), (3, 4)), functional.smooth_l1_loss),
    "poisson_nll_loss": (((3, 4), (3, 4)), functional.poisson_nll_loss),
    "prod": (((3, 4),), torch.prod),
}
"""Operations that PyTorch runs in float32 on a CPU: the shapes of the tensors, and the call."""


@pytest.mark.parametrize("dtypes", [(S, S), (B, B), (B, S), (S, B), (H, B), (D, S), (H, H)])
@pytest.mark.parametrize("name", COMPILED)
def test_a_policy_that_promotes_what_pytorch_runs_in_float32_needs_no_python(
    name: str, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On float32 and the lower precision; other dtypes are those of the reference."""
    shapes, call = COMPILED[name]
    policy = Policy.load("default").replace(
        name="promoting", ops=dict.fromkeys(COMPILED, "promote")
    )
    values = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    own, results = {t.dtype for t in values}, []
    for engine in registration.ENGINES:
        leaves = [t.clone().requires_grad_() for t in values]
        with registration.use_engine(engine), precast.autocast("cpu", B, policy=policy):
            call(*leaves)  # binds the policy
            if engine == "native" and own <= {S, B}:
                monkeypatch.setattr(Operation, "call", None)
            result = call(*leaves)
            monkeypatch.undo()
        result.sum().backward()
        results.append([result.detach(), *(t.grad for t in leaves if t.grad is not None)])
    assert results[0][0].dtype is (B if own == {B} else D if D in own else S)
    assert len(results[0]) == 1 + len(values)
    assert all(map(same_bits, *results))


def test_an_error_is_the_same_one_each_time() -> None:
    messages = set()
    x, source = torch.ones(2), torch.ones(1).bfloat16()
    for engine in ("reference", "native", "native"):
        with registration.use_engine(engine), precast.autocast("cpu"):
            torch.index_add(x, 0, torch.tensor([1]), source)
            with pytest.raises(IndexError) as raised:
                torch.index_add(x, 0, torch.tensor([7]), source)
            messages.add(str(raised.value))
    assert len(messages) == 1
