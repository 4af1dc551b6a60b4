"""Random programs of operations, regions, grad modes and weights give what PyTorch gives, or what it should give."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import precast
from precast import engine
from precast.frames import regions
from tests.programs import Compute, Found, MakeRegion, Program, Region, Write, programs, run

SEEDS = st.integers(0, 1000)
LOWER = st.sampled_from([torch.bfloat16, torch.float16])
CACHES = st.sampled_from([None, True, False])
# One dtype a program: PyTorch's cache hands a float16 region the bfloat16 copy of the region around it.
OF_ONE_DTYPE = LOWER.flatmap(lambda dtype: programs(dtypes=st.just(dtype), caches=CACHES))
UNCACHED = programs(dtypes=LOWER, caches=st.just(False))
WRITING = programs(dtypes=LOWER, caches=CACHES, writes=True)
_REGION = Region(torchs=False, dtype=torch.bfloat16, enabled=True, cache=True)
quickly = settings(max_examples=100, deadline=None)
engines = pytest.mark.parametrize("engine_name", engine.ENGINES)


@engines
@quickly
@given(program=OF_ONE_DTYPE | UNCACHED, seed=SEEDS)
def test_the_torch_policy_gives_the_bits_of_torch(
    engine_name: str, program: Program, seed: int
) -> None:
    ours, theirs = _ours(engine_name, program, seed, "torch"), _theirs(program, seed)
    assert _same(ours.results, theirs.results)
    assert _same(ours.gradients, theirs.gradients)


@engines
@quickly
@given(program=OF_ONE_DTYPE | UNCACHED, seed=SEEDS)
def test_the_default_policy_gives_the_bits_of_torch_until_torch_raises(
    engine_name: str, program: Program, seed: int
) -> None:
    ours, theirs = _ours(engine_name, program, seed, "default"), _theirs(program, seed)
    works = next((i for i, t in enumerate(theirs.results) if isinstance(t, type)), None)
    assert _same(ours.results[:works], theirs.results[:works])
    if works is None:
        assert _same(ours.gradients, theirs.gradients)


@quickly
@given(program=WRITING, seed=SEEDS)
@example(program=(_REGION, Compute("linear", (9, 0, 0))), seed=0)
def test_mixed_dtypes_give_the_same_with_and_without_the_cache_on_both_engines(
    program: Program, seed: int
) -> None:
    def uncached(device: str, dtype: torch.dtype, enabled: bool, _: bool | None) -> Any:
        return precast.autocast(device, dtype, enabled, False)

    results = []
    for name in engine.ENGINES:
        with engine.use_engine(name):
            results += [
                run(program, seed, precast.autocast, precast.autocast).results,
                run(program, seed, uncached, uncached).results,
            ]
    assert all(_same(results[0], other) for other in results[1:])


@engines
@quickly
@given(program=WRITING, seed=SEEDS)
@example(
    program=(
        _REGION,
        Compute("linear", (8, 0, 0)),
        Write("in place", 0),
        Compute("linear", (8, 0, 0)),
    ),
    seed=0,
)
def test_values_are_those_of_casting_at_each_use_whatever_is_written_to_weights(
    engine_name: str, program: Program, seed: int
) -> None:
    ours = _ours(engine_name, program, seed, "torch", _torchs)
    theirs = run(program, seed, _uncached, _uncached)
    assert _same(ours.results, theirs.results)
    assert len(ours.gradients) == len(theirs.gradients)
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert _close(mine, other)


def _ours(
    engine_name: str,
    program: Program,
    seed: int,
    policy: str,
    torchs: MakeRegion = torch.autocast,
) -> Found:
    def region(*args: Any) -> precast.autocast:
        return precast.autocast(*args, policy=policy)

    with engine.use_engine(engine_name):
        return run(program, seed, region, torchs)


def _theirs(program: Program, seed: int) -> Found:
    return run(program, seed, torch.autocast, torch.autocast)


def _torchs(*args: Any) -> AbstractContextManager[Any]:
    """PyTorch's region inside one of ours; where there is none its cache is its own, and stale when weights change."""
    return torch.autocast(*args) if regions.records else _uncached(*args)


def _uncached(
    device: str, dtype: torch.dtype, enabled: bool, _cache: bool | None
) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype, enabled, False)


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


@torch.no_grad()  # an operation of an inference tensor, given a weight as its data, says it requires grad
def _equal(mine: Any, other: Any) -> bool:
    """Equal to the bit: NaN where the other has it, and nowhere else."""
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return mine is other
    return (
        mine.dtype is other.dtype
        and mine.requires_grad == other.requires_grad
        and torch.equal(mine.isnan(), other.isnan())
        and torch.equal(mine.nan_to_num(0.0), other.nan_to_num(0.0))
    )


def _close(mine: Any, other: Any) -> bool:
    """As near as a sum in 16 bits is to one in 32; where that overflows, both can be infinite or not."""
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
        return mine is other
    bound = 0.05 * other.abs().max() + 1e-3
    return not other.isfinite().all() or bool((mine - other).abs().max() <= bound)
