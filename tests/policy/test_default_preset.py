"""The policy `default`: as `torch` where PyTorch works, and an answer where PyTorch raises.

Each row that `default` adds is tried with mixed floating dtypes, beside PyTorch's own failure.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import precast
from precast.engine import registration
from precast.engine.reference_kernels import DERIVATIVE_REFUSES
from precast.policy.policy import DEVICE_TYPES, Policy, Rule, expanded_rules
from tests.support import op_samples
from tests.support.behaviour import map_tensors, torch_region
from tests.support.op_samples import Sample

DEFAULT, TORCH = Policy.load("default"), Policy.load("torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PATTERNS = list(itertools.permutations(DTYPES, 2))


def added_rows(device: str) -> set[str]:
    """What `default` names and `torch` does not, by the dispatcher's names."""
    return set(expanded_rules(DEFAULT, device)[0]) - set(expanded_rules(TORCH, device)[0])


def writes_out(name: str) -> bool:
    operation, _, overload = name.removeprefix("aten::").partition(".")
    schema = getattr(getattr(torch.ops.aten, operation), overload or "default")._schema
    return any(argument.is_out for argument in schema.arguments)


def in_dtypes(sample: Sample, pattern: tuple[torch.dtype, ...]) -> Sample:
    """The sample with its floating tensors in the dtypes of the pattern, taken in turn."""
    dtypes = itertools.cycle(pattern)
    return map_tensors(
        lambda t: t.to(next(dtypes), copy=True) if t.is_floating_point() else t.clone(), sample
    )


@functools.cache
def refused_rows(device: str) -> set[str]:
    """What `default` runs in float32 where PyTorch refuses 16 bits, without overloads."""
    entries = expanded_rules(DEFAULT, device)[0].items()
    return {name.partition(".")[0] for name, e in entries if e.rule is Rule.FP32_IF_REFUSED}


def widest(name: str, sample: Sample) -> torch.dtype:
    leaves = [x for x in tree_leaves(tuple(sample)) if isinstance(x, Tensor)]
    result = torch.bfloat16
    for dtype in {x.dtype for x in leaves if x.is_floating_point()}:
        result = torch.promote_types(result, dtype)
    is_refused = name.partition(".")[0] in refused_rows("cuda") | refused_rows("cpu")
    return torch.promote_types(result, torch.float32) if is_refused else result


def written(name: str, sample: Sample) -> list[Tensor]:
    """The tensors that the call writes into."""
    if name.partition(".")[0].endswith("_"):
        return [sample.args[0]]
    names = ("out", "values", "indices", "Q", "R") if writes_out(name) else ()
    return [sample.kwargs[key] for key in names if key in sample.kwargs]


def outcome(name: str, sample: Sample) -> tuple[list[Any], list[Tensor]] | None:
    """What a call returns and what it leaves in its destinations; None where it raises."""
    try:
        returned = op_samples.call(name, sample)
    except RuntimeError:
        return None
    return tree_leaves(returned), written(name, sample)


def by_hand(name: str, sample: Sample) -> tuple[list[Any], list[Tensor]] | None:
    """The call in the widest dtype outside a region, its results put into the real destinations."""
    wide = in_dtypes(sample, (widest(name, sample),))
    result = outcome(name, wide)
    if result is None or not result[1]:
        return result
    into = written(name, sample)
    for destination, value in zip(into, result[1], strict=True):
        destination.copy_(value)
    return into, into


def assert_same(seen: Any, expected: Any, about: str) -> None:
    assert (seen is None) == (expected is None), about
    for x, y in zip(tree_leaves(seen or []), tree_leaves(expected or []), strict=True):
        if isinstance(x, Tensor):
            # LAPACK's least squares rounds by how its memory is aligned: PyTorch does not give the same bits twice.
            bits = 1e-5 if "linalg_lstsq" in about else 0
            # Outside of their domain special functions are NaN, in the same places.
            torch.testing.assert_close(
                x, y, rtol=bits, atol=bits, equal_nan=True, msg=lambda m: f"{about}: {m}"
            )
        else:
            assert x == y, about


# What PyTorch takes in forward and refuses in backward.
TAKEN = {f"{name}{end}" for name in DERIVATIVE_REFUSES for end in ("", ".default")}

CASES = [
    (device, name)
    for device in ("cpu", "cuda")
    for name in sorted(added_rows(device))
    if name in op_samples.named() | op_samples.promoted()
    # operations on one tensor: the next test but one is theirs
    and name.partition(".")[0] not in ("aten::linalg_matrix_norm", "aten::pinverse", "aten::stft")
    and name not in TAKEN
]


@pytest.mark.parametrize(("device", "name"), CASES)
def test_what_pytorch_refuses_runs_in_the_widest_dtype(device, name):
    policy = DEFAULT.retarget("cpu", like=device)
    refused = 0
    for seed, pattern in enumerate(PATTERNS):
        for sample in op_samples.samples(name, seed):
            with torch_region("cpu") if device == "cpu" else torch.autocast("cpu", enabled=False):
                theirs = outcome(name, in_dtypes(sample, pattern))
            expected = theirs or by_hand(name, in_dtypes(sample, pattern))
            refused += theirs is None and expected is not None
            with precast.autocast("cpu", policy=policy):
                ours = outcome(name, in_dtypes(sample, pattern))
            assert_same(ours, expected, f"{name} {pattern}")
    assert refused, f"PyTorch no longer refuses {name}: take its row out of default.toml"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_added_row_but_some_with_out_is_tried(device):
    untried = {name for device_, name in CASES if device_ == device} ^ added_rows(device)
    own = {n for n in untried if n.startswith(("aten::_grouped_mm", "aten::linalg_pinv"))} | TAKEN
    own |= {n for n in untried if n.partition(".")[0] in refused_rows(device)}
    assert [name for name in sorted(untried - own) if not writes_out(name)] == []


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_default_changes_no_rule_of_pytorch_but_the_ban(device):
    ours, theirs = expanded_rules(DEFAULT, device)[0], expanded_rules(TORCH, device)[0]
    changed = {name for name, entry in theirs.items() if ours[name].rule is not entry.rule}
    assert changed == {name for name, entry in theirs.items() if entry.rule is Rule.BANNED}
    assert all(ours[name].rule is Rule.FP32 for name in changed)
    rules = {name: ours[name].rule for name in added_rows(device)}
    others = {n for n, r in rules.items() if r not in (Rule.PROMOTE, Rule.FP32_IF_REFUSED)}
    assert {name.partition(".")[0] for name in others} == {"aten::_grouped_mm", "aten::linalg_pinv"}


REFUSED = [
    (device, info)
    for device in ("cpu", "cuda")
    for info in op_db
    if f"aten::{info.aten_name}" in refused_rows(device)
    # a product of 16-bit matrices goes before it, whose inverse is badly conditioned
    and info.variant_test_name != "singular"
    and info.supports_dtype(torch.float32, "cpu")
]


@pytest.mark.parametrize(
    ("device", "info"), [pytest.param(*case, id=f"{case[0]}-{case[1].name}") for case in REFUSED]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, about complex numbers in 16 bits
def test_what_pytorch_refuses_in_16_bits_runs_in_float32(device, info, dtype):
    torch.manual_seed(0)
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 3):
        narrow = map_tensors(
            lambda t: t.detach().to(dtype) if t.is_floating_point() else t.detach(),
            ((sample.input, *sample.args), sample.kwargs),
        )
        wide = map_tensors(lambda t: t.float() if t.dtype is dtype else t, narrow)
        results = []
        for policy, (args, kwargs) in ((TORCH, narrow), (None, wide), (DEFAULT, narrow)):
            region = contextlib.nullcontext()
            if policy is not None:
                region = precast.autocast("cpu", dtype, policy=policy.retarget("cpu", like=device))
            torch.manual_seed(0)
            try:
                with region:
                    results.append(tree_leaves(info.op(*args, **kwargs)))
            except RuntimeError:
                results.append(None)
        theirs, in_float32, ours = results
        assert_same(ours, in_float32 if theirs is None else theirs, "linalg_lstsq")


def in_region(info: Any, sample: Any, pattern: tuple[torch.dtype, ...]) -> Any:
    """The gradients of a call in a region, of its tensors in the dtypes of the pattern; None if forward raises."""
    leaves = []

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        dtype = next(dtypes)
        copy = tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)
        leaves.extend([copy] * copy.requires_grad)
        return copy

    dtypes = itertools.cycle(pattern)
    args, kwargs = map_tensors(leaf, ((sample.input, *sample.args), sample.kwargs))
    torch.manual_seed(0)
    try:
        with precast.autocast("cpu"):
            results = tree_leaves(info.op(*args, **kwargs))
    except RuntimeError:
        return None
    results = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
    dense = [t.to_dense() if t.layout is not torch.strided else t for t in results]
    total = sum((t.abs() if t.is_complex() else t).float().sum() for t in dense)
    return torch.autograd.grad(total, leaves, allow_unused=True) if dense and leaves else ()


@pytest.mark.parametrize("engine", registration.ENGINES)
@pytest.mark.parametrize(
    "dtypes", list(itertools.product((torch.float32, torch.bfloat16), repeat=2))
)
def test_an_lstm_is_trained_on_every_processor(engine: str, dtypes: Any) -> None:
    """oneDNN has no 16-bit kernel for some, where torch.autocast raises."""
    torch.manual_seed(0)
    of_layer, of_input = dtypes
    layer, x = nn.LSTM(8, 4).to(of_layer), torch.randn(3, 2, 8, dtype=of_input)
    exact = copy.deepcopy(layer).double()
    with registration.use_engine(engine), precast.autocast("cpu"):
        result = layer(x)[0]
    result.float().sum().backward()
    expected = exact(x.double())[0]
    expected.sum().backward()
    torch.testing.assert_close(result.double(), expected, rtol=0.05, atol=0.02)
    for mine, its in zip(layer.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), its.grad, rtol=0.1, atol=0.1)


NAMED = {name.partition(".")[0] for name in expanded_rules(DEFAULT, "cpu")[0]}
DIFFERENTIABLE = [
    pytest.param(info, id=f"{info.name}{info.variant_test_name and '-'}{info.variant_test_name}")
    for info in op_db
    if f"aten::{info.aten_name}" in NAMED
    and info.supports_autograd
    and info.supports_dtype(torch.float32, "cpu")
    and info.name != "native_layer_norm"  # `layer_norm` calls it, and has a derivative for these
]


@pytest.mark.parametrize("info", DIFFERENTIABLE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_runs_in_forward_runs_in_backward(info: Any) -> None:
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    for sample in itertools.islice(samples, 3):
        tensors = [t for t in tree_leaves((sample.input, sample.args)) if isinstance(t, Tensor)]
        if any(tensor.numel() < 2 for tensor in tensors):
            continue  # PyTorch checks no dtype of an empty tensor, also where it has no kernel
        for pattern in (
            (torch.bfloat16,),
            *itertools.permutations((torch.bfloat16, torch.float32)),
        ):
            in_region(info, sample, pattern)  # raises if backward does


@pytest.mark.parametrize("engine", registration.ENGINES)
@pytest.mark.parametrize("policy", ["default", "lean"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_an_adjacency_matrix_is_multiplied_forward_and_backward(engine, policy, layout) -> None:
    torch.manual_seed(0)
    dense, layer, x = torch.rand(8, 8).round(), nn.Linear(4, 4), torch.randn(8, 4)
    with registration.use_engine(engine), precast.autocast("cpu", policy=policy):
        features = layer(x)
        result = torch.sparse.mm(dense.to_sparse(layout=layout), features)
    assert (features.dtype, result.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(result, dense @ features.float())
    [gradient] = torch.autograd.grad(result.sum(), features)
    torch.testing.assert_close(gradient.float(), dense.T @ torch.ones(8, 4))


@pytest.mark.parametrize("engine", registration.ENGINES)
@pytest.mark.parametrize("policy", ["default", "lean"])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_experts_run_in_16_bits_forward_and_backward(
    engine, policy, dtypes, width, device
):
    torch.manual_seed(0)
    x = torch.randn(8, width, dtype=dtypes[0], device=device)
    w = torch.randn(2, width, 8, dtype=dtypes[1], device=device)
    ends = torch.tensor([3, 8], dtype=torch.int32, device=device)
    x.requires_grad_(), w.requires_grad_()
    with registration.use_engine(engine), precast.autocast(device, torch.bfloat16, policy=policy):
        result = torch.nn.functional.grouped_mm(x, w, offs=ends)
    result.backward(gradient := torch.randn_like(result))
    # rows of 12 numbers are no multiple of 16 bytes in 16 bits, where PyTorch has no kernel
    used = torch.bfloat16 if width == 16 else torch.float32
    assert (result.dtype, x.grad.dtype, w.grad.dtype) == (used, *dtypes)
    a, b, g = (t.detach().to(used).double() for t in (x, w, gradient))
    tolerance = 2 * torch.finfo(torch.bfloat16).eps
    for rows, expert in ((slice(0, 3), 0), (slice(3, 8), 1)):
        exact = a[rows] @ b[expert], g[rows] @ b[expert].T, a[rows].T @ g[rows]
        ours = result[rows], x.grad[rows], w.grad[expert]
        for value, reference in zip(ours, exact, strict=True):
            torch.testing.assert_close(
                value.double(), reference, rtol=tolerance, atol=10 * tolerance
            )


@pytest.mark.parametrize("engine", registration.ENGINES)
@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(2, 16)], ids=["layer", "group"])
def test_gradients_of_each_sample_go_through_norms(engine, norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), norm, nn.Linear(16, 1))
    parameters, x = dict(model.named_parameters()), torch.randn(6, 4)

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        with precast.autocast("cpu"):
            return functional_call(model, values, (row[None],)).float().square().sum()

    with registration.use_engine(engine):
        each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
        jacobian = jacrev(lambda row: loss(parameters, row))(x[0])
    assert jacobian.isfinite().all()
    for name, gradients in each.items():
        for row, gradient in zip(x, gradients, strict=True):
            exact = torch.autograd.grad(
                functional_call(model, parameters, (row[None],)).square().sum(), parameters[name]
            )
            torch.testing.assert_close(gradient, exact[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("region", [torch.autocast, precast.autocast])
def test_a_known_limit_of_vmap_is_that_of_pytorch(region: Any) -> None:
    layer = nn.Linear(4, 4)
    with region("cpu", dtype=torch.bfloat16):
        assert vmap(layer)(torch.ones(5, 4)).dtype is torch.float32
        assert vmap(nn.Linear(4, 4, bias=False))(torch.ones(5, 4)).dtype is torch.bfloat16
        result = nn.LayerNorm(4)(layer(torch.ones(8, 4))).sum(-1)
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        vmap(lambda v: torch.autograd.grad(result, layer.weight, v, retain_graph=True)[0])(
            torch.eye(8)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["Beta", "Binomial", "Chi2", "Dirichlet", "Gamma", "StudentT"])
def test_distributions_that_pytorch_refuses_in_16_bits_sample_in_float32(
    name: str, dtype: torch.dtype
) -> None:
    def sample(parameter: Tensor) -> Tensor:
        torch.manual_seed(0)
        distribution = getattr(torch.distributions, name)
        first = {"Binomial": (5,), "Beta": (parameter,), "Gamma": (parameter,)}.get(name, ())
        return distribution(*first, parameter).sample()

    parameter = torch.rand(4).clamp(0.1, 0.9).to(dtype)
    with pytest.raises(RuntimeError, match="not implemented for"):
        sample(parameter)
    with precast.autocast("cpu", dtype=dtype):
        result = sample(parameter)
    torch.testing.assert_close(result.float(), sample(parameter.float()), rtol=0.01, atol=0.01)


def test_a_gradient_of_a_sample_of_gamma_is_that_of_float32() -> None:
    def gradient(parameter: Tensor) -> Tensor:
        torch.manual_seed(0)
        parameter.requires_grad_()
        torch.distributions.Gamma(parameter, 1.0).rsample().float().sum().backward()
        assert parameter.grad is not None
        return parameter.grad

    parameter = torch.rand(4).bfloat16()
    with precast.autocast("cpu"):
        result = gradient(parameter.clone())
    assert torch.equal(result, gradient(parameter.float()).bfloat16())


def test_default_names_only_operations_that_pytorch_has():
    assert {device: expanded_rules(DEFAULT, device)[1] for device in DEVICE_TYPES} == dict.fromkeys(
        DEVICE_TYPES, ()
    )


def test_default_promotes_and_torch_does_not():
    assert (DEFAULT.mixed, TORCH.mixed) == ("promote", "raise")


@pytest.fixture
def own() -> Iterator[torch.library.Library]:
    library = torch.library.Library("precast_retried", "FRAGMENT")
    yield library
    library._destroy()


@pytest.mark.parametrize("engine_name", registration.ENGINES)
@pytest.mark.parametrize("error", ["expected equal dtypes", "the file is locked"])
@pytest.mark.parametrize("refuses", ["mixtures", "all"])
@pytest.mark.parametrize("schema", ["Tensor a, Tensor b", "Tensor(a!) a, Tensor b"])
def test_an_operation_of_an_extension_runs_again_in_the_widest_dtype(
    own: torch.library.Library, engine_name: str, error: str, refuses: str, schema: str
) -> None:
    """Unless its error is not about dtypes, or it writes an argument: it may have done so before it raised.

    An error in both dtypes is the first one.
    """
    name = f"op{secrets.token_hex(8)}"
    called: list[torch.dtype] = []

    def work(a: Tensor, b: Tensor) -> Tensor:
        called.append(a.dtype)
        if a.dtype is b.dtype and refuses == "mixtures":
            return a + b
        raise RuntimeError(f"call {len(called)}: {error}")

    own.define(f"{name}({schema}) -> Tensor")
    own.impl(name, work, "CompositeExplicitAutograd")
    policy = precast.Policy.load("default").replace(ops={f"precast_retried::{name}": "keep"})
    operation = getattr(torch.ops.precast_retried, name)
    a, b = torch.ones(2).bfloat16(), torch.ones(2)
    again = "!" not in schema and "dtypes" in error
    with registration.use_engine(engine_name), precast.autocast("cpu", policy=policy):
        if again and refuses == "mixtures":
            assert operation(a, b).dtype is torch.float32
        else:
            with pytest.raises(RuntimeError, match=f"call 1: {error}"):
                operation(a, b)
    assert called == [torch.bfloat16, *([torch.float32] if again else [])]
