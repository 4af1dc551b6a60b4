"""Every listed operation gives the bits that PyTorch gives, on both engines, forward and backward."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import precast
from precast._internal.pytree import map_tensors
from precast.engine import registration
from precast.policy.policy import Policy, Rule, expanded_rules
from tests.support import op_samples
from tests.support.op_samples import Sample
from tests.support.outcomes import assert_same, floating, mixtures, outcome

TORCH = Policy.load("torch")
LIKE_CUDA = TORCH.retarget("cpu", like="cuda")
REGIONS = (torch.bfloat16, torch.float16)


def _listed(policy: Policy) -> list[str]:
    return sorted(
        set(expanded_rules(policy, "cpu")[0]) & op_samples.named() - set(op_samples.NOT_ON_CPU)
    )


def _seed(name: str) -> int:
    return torch.initial_seed() % 1000 + zlib.crc32(name.encode()) % 1000


def _fresh(name: str) -> list[Sample]:
    return op_samples.samples(name, _seed(name))


@pytest.mark.parametrize("lower", REGIONS)
@pytest.mark.parametrize("name", _listed(TORCH))
def test_an_operation_gives_the_bits_of_torch_autocast(name: str, lower: torch.dtype) -> None:
    for sample in _fresh(name):
        for dtypes in mixtures(sample):
            theirs = outcome(torch.autocast("cpu", lower), name, sample, dtypes)
            for engine_name in registration.ENGINES:
                with registration.use_engine(engine_name):
                    ours = outcome(
                        precast.autocast("cpu", lower, policy=TORCH), name, sample, dtypes
                    )
                    assert_same(ours, theirs, f"{name} {dtypes} in {lower}, {engine_name}")
                    default = outcome(precast.autocast("cpu", lower), name, sample, dtypes)
                if theirs.error is None:  # where torch raises, the default policy may know better
                    assert_same(
                        default, theirs, f"{name} {dtypes} in {lower}, default, {engine_name}"
                    )


@pytest.mark.parametrize("name", _listed(LIKE_CUDA))
def test_the_cuda_table_on_cpu_tensors_equals_casting_by_hand(name: str) -> None:
    rule = expanded_rules(LIKE_CUDA, "cpu")[0][name].rule
    for sample in _fresh(name):
        for dtypes in mixtures(sample):
            by_hand = outcome(nullcontext(), name, sample, dtypes, run=_by_hand(rule))
            for engine_name in registration.ENGINES:
                with registration.use_engine(engine_name):
                    region = precast.autocast("cpu", REGIONS[0], policy=LIKE_CUDA)
                    ours = outcome(region, name, sample, dtypes)
                assert_same(ours, by_hand, f"{name} ({rule}) {dtypes}, {engine_name}")


def _by_hand(rule: Rule) -> Any:
    """What a person would write without a region: casts, then the plain operation."""

    def run(name: str, sample: Sample) -> Any:
        return op_samples.call(*_BY_HAND[rule](name, sample))

    return run


def _cast_to(sample: Sample, dtype: torch.dtype) -> Sample:
    return map_tensors(sample, lambda t: t.to(dtype) if _is_eligible(t) else t)


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _promoted(name: str, sample: Sample) -> tuple[str, Sample]:
    dtypes = [t.dtype for t in floating(sample) if _is_eligible(t)]
    before_float32 = dtypes[: dtypes.index(torch.float32)] if torch.float32 in dtypes else dtypes
    if set(before_float32) - {REGIONS[0]}:
        raise RuntimeError("torch promotes the region's dtype, and anything once it saw float32")
    return name, _cast_to(sample, torch.float32 if torch.float32 in dtypes else REGIONS[0])


def _with_dtype(name: str, sample: Sample) -> tuple[str, Sample]:
    given = "dtype" in sample.kwargs or any(isinstance(a, torch.dtype) for a in sample.args)
    if given or not _is_eligible(sample.args[0]):
        return name, sample
    return name, Sample(sample.args, {**sample.kwargs, "dtype": torch.float32})


def _norm_with_dtype(name: str, sample: Sample) -> tuple[str, Sample]:
    first = sample.args[0]
    dtype = torch.float32 if _is_eligible(first) else first.dtype
    longer = {
        "aten::norm.Scalar": "aten::norm.ScalarOpt_dtype",
        "aten::norm.ScalarOpt_dim": "aten::norm.ScalarOpt_dim_dtype",
    }
    missing = ((2,) if name == "aten::norm.Scalar" else (2, (), False))[len(sample.args) - 1 :]
    return longer[name], Sample((*sample.args, *missing), {**sample.kwargs, "dtype": dtype})


def _banned(_name: str, _sample: Sample) -> tuple[str, Sample]:
    raise RuntimeError("banned")


_BY_HAND: dict[Rule, Any] = {
    Rule.LOWER: lambda name, sample: (name, _cast_to(sample, REGIONS[0])),
    Rule.FP32: lambda name, sample: (name, _cast_to(sample, torch.float32)),
    Rule.PROMOTE: _promoted,
    Rule.FP32_SET_DTYPE: _with_dtype,
    Rule.FP32_APPEND_DTYPE: _norm_with_dtype,
    Rule.BANNED: _banned,
}


@pytest.mark.parametrize("lower", REGIONS)
@pytest.mark.parametrize("width", [32, 512])
@pytest.mark.parametrize("engine_name", registration.ENGINES)
def test_a_weight_that_learns_is_cast_the_same_where_nothing_is_recorded(
    engine_name: str, width: int, lower: torch.dtype
) -> None:
    """PyTorch's products choose their kernels by `requires_grad`, also under `no_grad`."""
    layer, x = torch.nn.Linear(width, 24), torch.randn(2, width, 256).transpose(1, 2)
    with torch.no_grad():
        with torch.autocast("cpu", lower):
            expected = layer(x)
        with registration.use_engine(engine_name), precast.autocast("cpu", lower):
            assert torch.equal(layer(x), expected)
            with torch.enable_grad():
                layer(x).sum().backward()
            assert torch.equal(layer(x), expected)
    assert layer.weight.grad is not None
