"""The policy `lean`: each row that differs from `torch`, held against float64, and all else as `torch` and `default`.

What is compared, and why so: both policies get the same inputs, rounded to 16 bits, and the same 16-bit gradient. Where
`torch` gives float32, `lean` gives 16 bits; both results are rounded to the region's dtype before they are compared,
since `lean` is for operations whose result goes into a matmul of the region, which rounds what it takes. Gradients are
compared in the dtypes of their inputs. The error is the worse of the root mean square and the largest element. Where an
operation that takes float32 comes next, `lean` is less exact by that one rounding, which docs/policies.md says.

The rules of CUDA are tried on CPU tensors, with `mixed = "raise"`: for operations that PyTorch has no autocast kernel
for, as the norms on the CPU, `mixed = "promote"` makes of a row `promote` no more than a retry. What the CPU's kernels
do otherwise in backward is tried on CUDA alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import precast
from precast._internal import torch_versions
from precast.engine import registration
from precast.policy import toml_file
from precast.policy.policy import DEVICE_TYPES, Policy, Rule
from tests.policy.lean_cases import CASES, REFUSED, Case
from tests.policy.lean_errors import DTYPES, Outcome, outcome, ratios
from tests.support.installed import uninstall_all

LEAN, DEFAULT, TORCH = map(Policy.load, ("lean", "default", "torch"))
LIKE_CUDA = LEAN.retarget("cpu", like="cuda").replace(mixed="raise")
AT_MOST = 2
SEEDS = range(3)


def differing(device: str) -> dict[str, tuple[Rule, str]]:
    """The rows of `lean` that `default` has otherwise: their keys without `aten::`, rule and reason."""
    ours, theirs = LEAN.rules(device), DEFAULT.rules(device)
    assert ours.keys() >= theirs.keys()
    changed = {key: entry for key, entry in ours.items() if theirs.get(key) != entry}
    return {
        key.removeprefix("aten::"): (entry.rule, entry.reason) for key, entry in changed.items()
    }


ROWS = [(device, key) for device in DEVICE_TYPES for key in differing(device)]
each_row = pytest.mark.parametrize(("device", "key"), ROWS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_engine = pytest.mark.parametrize("engine_name", registration.ENGINES)


def on_cpu_tensors(device: str) -> tuple[Policy, Policy]:
    return TORCH.retarget("cpu", like=device), LEAN.retarget("cpu", like=device).replace(
        mixed="raise"
    )


# --- the table ---


def test_every_row_that_differs_is_measured_and_nothing_else() -> None:
    """For any PyTorch that precast supports: some rows are for some versions."""
    of_all_versions = set()
    for version in torch_versions.supported():
        ours, theirs = (toml_file.read(name, version).tables for name in ("lean", "default"))
        for device, table in ours.items():
            of_all_versions |= {key for key in table if table[key] != theirs[device].get(key)}
    assert {key.removeprefix("aten::") for key in of_all_versions} == CASES.keys()


@each_row
def test_a_row_differs_from_pytorchs_float32_and_says_why(device: str, key: str) -> None:
    rule, reason = differing(device)[key]
    pytorchs = TORCH.rules(device)[f"aten::{key}"]
    assert pytorchs.rule in (Rule.FP32, Rule.FP32_SET_DTYPE)
    assert rule in (Rule.KEEP, Rule.PROMOTE)
    assert reason != rule.meaning


def test_mixed_dtypes_are_as_in_default() -> None:
    assert LEAN.mixed == DEFAULT.mixed


@pytest.mark.parametrize(
    "op", ["pow.Tensor_Scalar", "exp", "log", "softplus", "sum.dim_IntList", "nll_loss", "mse_loss"]
)
def test_what_needs_the_range_stays_in_float32(op: str) -> None:
    rules = {device: LEAN.resolve(op, device).rule for device in DEVICE_TYPES}
    assert rules == {device: TORCH.resolve(op, device).rule for device in DEVICE_TYPES}
    assert rules["cuda"] in (Rule.FP32, Rule.FP32_SET_DTYPE)


def test_the_documentation_names_what_is_in_and_what_was_left_out() -> None:
    page = Path(__file__).parents[2] / "docs" / "policies.md"
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    for key in CASES:
        assert any(f"`{key.removesuffix('.default')}`" in line for line in lines), key
    left_out = [cells[:3] for line in lines if len(cells := line.split(" | ")) > 3]
    for each in REFUSED:
        assert any(
            each.device in devices and f"`{each.operation}`" in operations and each.rule in rule
            for devices, operations, rule in left_out
        ), each


# --- errors ---


def too_large(
    case: Case, dtype: torch.dtype, policies: tuple[Policy, Policy], device: str = "cpu"
) -> Iterator[str]:
    for seed in SEEDS:
        seen = ratios(case, dtype, seed, policies, device)
        if max(seen.value, seen.gradients or 0) > AT_MOST:
            yield f"{case.about}, seed {seed}: {seen}"


@each_dtype
@each_row
def test_an_error_is_at_most_twice_that_of_torch(device: str, key: str, dtype: torch.dtype) -> None:
    policies = on_cpu_tensors(device)
    assert [line for case in CASES[key] for line in too_large(case, dtype, policies)] == []


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("key", differing("cuda"))
def test_an_error_is_at_most_twice_that_of_torch_on_cuda(key: str, dtype: torch.dtype) -> None:
    lines = [too_large(case, dtype, (TORCH, LEAN), "cuda") for case in CASES[key]]
    assert list(itertools.chain.from_iterable(lines)) == []


@pytest.mark.parametrize("candidate", REFUSED, ids=lambda each: f"{each.device}-{each.operation}")
def test_what_was_left_out_would_break_the_bound(candidate) -> None:
    before = TORCH.retarget("cpu", like=candidate.device)
    after = before.replace(ops={"cpu": {candidate.operation: candidate.rule}})
    broken = (
        line
        for case, dtype in itertools.product(candidate.cases, DTYPES)
        for line in too_large(case, dtype, (before, after))
    )
    assert next(broken, None), f"{candidate.operation} has become exact enough for a row"


# --- what runs ---


@each_engine
@each_dtype
@each_row
def test_a_row_gives_16_bits_where_torch_gives_float32(
    device: str, key: str, dtype: torch.dtype, engine_name: str
) -> None:
    torchs, ours = on_cpu_tensors(device)
    for case in CASES[key]:
        with registration.use_engine(engine_name):
            assert outcome(case, dtype, 0, torchs).value.dtype is torch.float32
            result = outcome(case, dtype, 0, ours)
        assert result.value.dtype is dtype
        assert_same(result, outcome(case, dtype, 0, ours))


@each_engine
@each_row
def test_float32_and_mixed_arguments_give_what_torch_gives(
    device: str, key: str, engine_name: str
) -> None:
    torchs, ours = on_cpu_tensors(device)
    for case in CASES[key]:
        tensors = case.inputs(torch.Generator().manual_seed(1))
        for wide in all_but_none(len([t for t in tensors if t.is_floating_point()])):
            with registration.use_engine(engine_name):
                results = [run_with(case, tensors, wide, policy) for policy in (torchs, ours)]
            assert results[0].value.dtype is torch.float32
            assert_same(*results)


def all_but_none(count: int) -> Iterator[tuple[bool, ...]]:
    """Which of so many tensors are float32: at least one."""
    return (wide for wide in itertools.product((True, False), repeat=count) if any(wide))


def run_with(case: Case, tensors, wide: tuple[bool, ...], policy: Policy) -> Outcome:
    left = iter(wide)
    inputs = [
        t.to(torch.float32 if next(left) else torch.bfloat16, copy=True).requires_grad_()
        if t.is_floating_point()
        else t
        for t in tensors
    ]
    with precast.autocast("cpu", policy=policy):
        value = case.call(*inputs)
    leaves = [t for t in inputs if t.requires_grad]
    return Outcome(value.detach(), torch.autograd.grad(value.square().sum(), leaves))


def assert_same(one: Outcome, other: Outcome) -> None:
    torch.testing.assert_close(one.value, other.value, rtol=0, atol=0)
    torch.testing.assert_close(one.gradients, other.gradients, rtol=0, atol=0)


@each_engine
@pytest.mark.parametrize(
    ("of_input", "of_weight", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
    ],
)
def test_the_dtypes_of_norms_on_cuda(
    of_input, of_weight, expected, engine_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fake tensors, which pass through PyTorch's autocast keys and need no device."""
    monkeypatch.setattr("precast.autocast_mode.region.cuda_is_usable", lambda: True)
    with FakeTensorMode(), registration.use_engine(engine_name):
        x = torch.empty(3, 8, device="cuda", dtype=of_input)
        weight = torch.empty(8, device="cuda", dtype=of_weight)
        with precast.autocast("cuda", torch.bfloat16, policy=LEAN):
            assert F.layer_norm(x, (8,), weight, weight).dtype is expected
            assert torch.native_layer_norm(x, (8,), weight, weight, 1e-5)[0].dtype is expected
            if ("cuda", "rms_norm") in ROWS:  # PyTorch's own autocast has it since 2.12
                assert F.rms_norm(x, (8,), weight).dtype is expected


# --- in programs ---


def decoder(x: Tensor) -> Tensor:
    """Half of an image decoder: resize, convolve, normalise over channels."""
    x = F.interpolate(x, scale_factor=2.0)
    x = F.conv2d(x, torch.ones(4, 4, 3, 3) / 36, padding=1)
    return F.layer_norm(x.movedim(1, -1), (4,))


def test_a_chain_of_operations_stays_in_16_bits() -> None:
    x = torch.randn(1, 4, 8, 8).bfloat16()
    for policy, dtype in ((LIKE_CUDA, torch.bfloat16), (DEFAULT.retarget("cpu"), torch.float32)):
        with precast.autocast("cpu", policy=policy):
            assert decoder(x).dtype is dtype


def region_around(compiled, x: Tensor) -> Tensor:
    with precast.autocast("cpu", policy=LIKE_CUDA):
        return compiled(decoder)(x)


def region_inside(compiled, x: Tensor) -> Tensor:
    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=LIKE_CUDA):
            return decoder(x)

    return compiled(forward)(x)


@pytest.mark.parametrize("program", [region_around, region_inside])
def test_compiled_equals_eager(program) -> None:
    torch.compiler.reset()
    x = torch.randn(1, 4, 8, 8).bfloat16()
    eager = program(lambda function: function, x)
    compiled = program(torch.compile(backend="aot_eager", fullgraph=True), x)
    assert eager.dtype is torch.bfloat16
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    torch.compiler.reset()


def test_installed_it_is_what_pytorchs_regions_run() -> None:
    x = torch.randn(1, 4, 8).bfloat16()
    precast.install("lean")
    try:
        with torch.autocast("cpu"):
            assert F.pad(x, (1, 1), mode="reflect").dtype is torch.bfloat16
            assert torch.cosine_embedding_loss(x[0], x[0], torch.ones(4)).dtype is torch.float32
    finally:
        uninstall_all()
    with torch.autocast("cpu"):
        assert F.pad(x, (1, 1), mode="reflect").dtype is torch.float32


MODULES = {
    "LayerNorm": (lambda: nn.LayerNorm(16), (2, 5, 16)),
    "RMSNorm": (lambda: nn.RMSNorm(16), (2, 5, 16)),
    "GroupNorm": (lambda: nn.GroupNorm(4, 16), (2, 16, 5)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0), (5, 2, 16)),
    "MultiheadAttention": (lambda: SelfAttention(16), (5, 2, 16)),
}


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[self.attention(x, x, x)[0]] * 3)


@each_engine
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_with_float32_weights_compute_as_under_torch(
    name: str, device: str, engine_name: str
) -> None:
    make, shape = MODULES[name]
    module, x = make(), torch.randn(shape, requires_grad=True)
    seen = []
    for policy in on_cpu_tensors(device):
        with registration.use_engine(engine_name), precast.autocast("cpu", policy=policy):
            result = module(x)
        leaves = [x, *module.parameters()]
        seen.append((result, *torch.autograd.grad(result.square().sum(), leaves)))
    torch.testing.assert_close(*seen, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])  # the latter has no row before 2.12
def test_norms_with_16_bit_weights_give_16_bits_as_on_cuda(name: str) -> None:
    make, shape = MODULES[name]
    module, x = make().bfloat16(), torch.randn(shape).bfloat16()
    with precast.autocast("cpu", policy=LIKE_CUDA):
        result = module(x)
    assert result.dtype is torch.bfloat16
    assert torch.equal(result, module(x))
