"""Presets pinned to a release of PyTorch: `torch@2.11` has its rules, whichever PyTorch is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import precast
from precast import _torch
from precast._internal import torch_versions
from precast._internal.torch_versions import Version, spell
from precast.engine import registration
from precast.errors import PolicyError
from precast.policy import toml_file
from precast.policy.policy import DEVICE_TYPES, Policy, Rule, expanded_rules
from precast.policy.rows import split
from precast.policy.shortest_text import whole_file
from tests.support import op_samples
from tests.support.outcomes import assert_same, mixtures, outcome

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
RELEASES = torch_versions.supported()
INSTALLED = _torch.VERSION
ENDS = (torch_versions.OLDEST, torch_versions.NEWEST)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# What PyTorch 2.11.0 and 2.12.1 gave on CUDA, by the dtypes of the input and the weight: seen with fake tensors.
RMS_NORM: dict[Version, dict[tuple[torch.dtype, torch.dtype | None], torch.dtype]] = {
    (2, 11): {
        (F32, None): F32, (F32, F32): F32, (F32, BF16): F32,
        (BF16, None): BF16, (BF16, F32): BF16, (BF16, BF16): BF16,
        (F16, None): F16, (F16, F32): F16, (F16, BF16): F16,
    },
    (2, 12): {
        (F32, None): F32, (F32, F32): F32, (F32, BF16): F32,
        (BF16, None): F32, (BF16, F32): F32, (BF16, BF16): F32,
        (F16, None): F32, (F16, F32): F32, (F16, BF16): F32,
    },
}  # fmt: skip


def at(name: str, release: Version) -> str:
    return f"{name}@{spell(release)}"


def like_cuda(name: str) -> Policy:
    return Policy.load(name).retarget("cpu", like="cuda")


def rules(policy: Policy, device: str) -> dict[str, Rule]:
    return {name: entry.rule for name, entry in expanded_rules(policy, device)[0].items()}


# --- what they say ---


@pytest.mark.parametrize("name", Policy.presets())
def test_every_preset_has_every_release_under_its_own_name(name: str) -> None:
    for release in RELEASES:
        policy = Policy.load(at(name, release))
        assert policy.name == at(name, release)
        assert policy is Policy.load(at(name, release))
        assert policy.mixed == Policy.load(name).mixed
        assert policy.summary == Policy.load(name).summary


@pytest.mark.parametrize("name", Policy.presets())
def test_pinned_to_the_installed_release_a_preset_has_the_same_rules(name: str) -> None:
    pinned, free = Policy.load(at(name, INSTALLED)), Policy.load(name)
    assert pinned.fingerprint == free.fingerprint
    for device in DEVICE_TYPES:
        assert rules(pinned, device) == rules(free, device)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", Policy.presets())
def test_the_rules_are_those_of_the_release(name: str, release: Version) -> None:
    pinned = Policy.load(at(name, release))
    of_release = toml_file.read(name, release).tables
    of_installed = toml_file.read(name, INSTALLED).tables
    for device in DEVICE_TYPES:
        wanted = {key: entry.rule for key, entry in of_release.get(device, {}).items()}
        later = of_installed.get(device, {}).keys() - wanted.keys()
        wanted |= dict.fromkeys(later, Rule.FALLTHROUGH)
        there = {key: rule for key, rule in wanted.items() if is_installed(key)}
        assert {key: entry.rule for key, entry in pinned.rules(device).items()} == there


def is_installed(key: str) -> bool:
    return bool(_torch.operator_overloads(split(key)[0]))


def test_what_pytorch_came_to_list_later_falls_through() -> None:
    if INSTALLED < (2, 12):
        pytest.skip("PyTorch has no kernel for rms_norm before 2.12")
    for name in Policy.presets():
        found = Policy.load(f"{name}@2.11").resolve("rms_norm", "cuda")
        assert found.rule is Rule.FALLTHROUGH
        assert found.reason.startswith("PyTorch 2.11 has no rule for it: runs unchanged")
        assert f"({'torch' if name != 'lean' else 'lean'}.toml: " in found.reason


def test_a_release_that_is_not_known_is_one_error_that_lists_those_that_are() -> None:
    known = ", ".join(at("torch", release) for release in RELEASES)
    for wrong in ("2.10", "2.11.0", "", "newest", "2.13+cpu"):
        with pytest.raises(PolicyError) as error:
            Policy.load(f"torch@{wrong}")
        assert f"'torch@{wrong}': precast has no rules of PyTorch {wrong!r}" in str(error.value)
        assert f"Allowed: {known}, or torch for" in str(error.value)
    with pytest.raises(
        PolicyError, match=r"no policy .nothing@2\.11.: neither a preset nor a file"
    ):
        Policy.load("nothing@2.11")


# --- what they do ---


@pytest.mark.parametrize("engine", registration.ENGINES)
@pytest.mark.parametrize("release", RMS_NORM)
@pytest.mark.parametrize("name", ["torch", "default"])
def test_rms_norm_has_the_dtypes_that_the_release_gave(
    name: str, release: Version, engine: str
) -> None:
    policy = like_cuda(at(name, release))
    for (given, weighed), wanted in RMS_NORM[release].items():
        x = torch.ones(2, 8, dtype=given)
        weight = None if weighed is None else torch.ones(8, dtype=weighed)
        with registration.use_engine(engine), precast.autocast("cpu", policy=policy):
            assert F.rms_norm(x, (8,), weight).dtype is wanted, (given, weighed)


def test_its_gradients_have_them_too() -> None:
    x = torch.randn(2, 8, dtype=BF16, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    with precast.autocast("cpu", policy=like_cuda("torch@2.11")):
        result = F.rms_norm(x, (8,), weight)
    result.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (BF16, F32)
    plain = F.rms_norm(x.detach(), (8,), weight.detach())
    assert torch.equal(result.detach(), plain.to(BF16))


@pytest.mark.parametrize("release", ENDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_other_listed_operation_is_as_on_the_installed_pytorch(
    device: str, release: Version
) -> None:
    pinned, free = (
        Policy.load(name) if device == "cpu" else like_cuda(name)
        for name in (at("torch", release), "torch")
    )
    ours, theirs = rules(pinned, "cpu"), rules(free, "cpu")
    differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert len(differing) < 5
    listed = set(theirs) & op_samples.named() - set(op_samples.NOT_ON_CPU) - differing
    assert len(listed) > 90
    for name in sorted(listed):
        sample = op_samples.samples(name)[0]
        for dtypes in mixtures(sample):
            mine, expected = (
                outcome(precast.autocast("cpu", policy=policy), name, sample, dtypes)
                for policy in (pinned, free)
            )
            assert_same(mine, expected, f"{name} {dtypes}")


@pytest.mark.parametrize("engine", registration.ENGINES)
def test_an_operation_that_falls_through_calls_others_which_follow_their_rules(engine: str) -> None:
    x = torch.ones(2, 2)
    with registration.use_engine(engine):
        for rule, wanted in (("keep", F32), ("fallthrough", BF16)):
            policy = like_cuda("torch").replace(ops={"einsum": rule})
            with precast.autocast("cpu", policy=policy):
                assert torch.einsum("ij,jk->ik", x, x).dtype is wanted


def test_for_an_operation_that_has_no_kernel_it_is_as_no_row() -> None:
    without = Policy.load("torch")
    policy = without.replace(ops={"relu": "fallthrough"})
    assert registration.bind(policy, "cpu").matches_torch
    with precast.autocast("cpu", policy=policy):
        assert torch.relu(torch.ones(2, dtype=F16)).dtype is F16


# --- where they are named ---


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (4,))


def test_a_file_may_have_one_as_its_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "torch@2.12"\n[ops]\nlinear = "fp32"\n')
    policy = Policy.load(path)
    assert policy.name == "mine"
    assert policy.resolve("rms_norm", "cuda").rule is Rule.FP32
    assert policy.resolve("linear", "cuda").rule is Rule.FP32
    path.write_text('base = "torch@2.11"\n[ops]\nrms_norm = { rule = "fp32", since = "2.11" }\n')
    assert Policy.load(path).resolve("rms_norm", "cuda").rule is Rule.FP32
    path.write_text('base = "torch@1.0"\n')
    with pytest.raises(PolicyError, match=r"mine\.toml: base = 'torch@1\.0': .*Allowed: torch@2"):
        Policy.load(path)


@pytest.mark.parametrize("name", ["torch@2.11", "lean@2.12"])
def test_one_can_be_dumped_and_replaced_and_written_in_short(name: str, tmp_path: Path) -> None:
    policy = Policy.load(name)
    policy.save(tmp_path / "whole.toml")
    assert Policy.load(tmp_path / "whole.toml") == policy
    changed = policy.replace(ops={"linear": "fp32"})
    (tmp_path / "short.toml").write_text(whole_file(changed))
    assert Policy.load(tmp_path / "short.toml").fingerprint == changed.fingerprint


def test_regions_installations_attachments_and_conversions_take_its_name() -> None:
    x, linear = torch.ones(2, 4), nn.Linear(4, 4).eval()
    with precast.autocast("cpu", policy="torch@2.11"):
        assert linear(x).dtype is BF16
    with precast.install("torch@2.11"), torch.autocast("cpu"):
        assert linear(x).dtype is BF16
    with precast.attach(linear, "torch@2.11"), precast.autocast("cpu"):
        assert linear(x).dtype is BF16
    assert precast.convert(linear, "torch@2.11", example=x)(x).dtype is BF16
    assert precast.export(linear, (x,), policy="torch@2.11").module()(x).dtype is BF16


def test_an_exported_program_has_the_casts_of_the_release() -> None:
    x = torch.ones(2, 4, dtype=BF16)
    for release, wanted in (((2, 11), BF16), ((2, 12), F32)):
        program = precast.export(Norm(), (x,), policy=like_cuda(at("torch", release)))
        assert program.module()(x).dtype is wanted


def test_a_compiled_function_follows_it() -> None:
    torch._dynamo.reset()
    x = torch.ones(2, 4, dtype=BF16)
    compiled = torch.compile(Norm(), backend="aot_eager")
    for name, wanted in (("torch@2.11", BF16), ("torch@2.12", F32), ("torch@2.11", BF16)):
        with precast.autocast("cpu", policy=like_cuda(name)):
            assert compiled(x).dtype is wanted, name


def test_a_trace_says_so() -> None:
    if INSTALLED < (2, 12):
        pytest.skip("PyTorch has no kernel for rms_norm before 2.12")
    with precast.autocast("cpu", policy=like_cuda("torch@2.12")):
        pass  # its rule brings the CPU a kernel, as CUDA has one: a trace tells of operations that have one
    with (
        precast.trace() as trace,
        precast.autocast("cpu", policy=like_cuda("torch@2.11")),
    ):
        F.rms_norm(torch.ones(2, 4, dtype=BF16), (4,))
    assert [row.rule for row in trace.rows if row.op == "rms_norm"] == ["fallthrough"]
