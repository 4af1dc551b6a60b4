"""Random programs of operations, regions, grad modes and weights give what PyTorch gives, or what it should give.

A run of the tests draws its programs from a seed that it prints: the same seed in `PRECAST_PROGRAMS_SEED` draws them
again. Other programs than these run with `python -m tools.conformance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings

import precast
from precast.engine import registration
from tests.conformance.programs.compare import (
    compare,
    difference,
    repaired,
    same,
)
from tests.conformance.programs.draw import Kind, cases, drawn
from tests.conformance.programs.operations import IN_PLACE, SIDE
from tests.conformance.programs.run import Found, State, run
from tests.conformance.programs.steps import (
    Case,
    Compute,
    Differentiate,
    GradMode,
    InPlace,
    Layer,
    Leave,
    Program,
    Region,
    Sampled,
    Write,
)
from tests.conformance.systems import SYSTEMS, System, on_all_systems, systems
from tests.conftest import PROGRAMS_SEED

quickly = settings(max_examples=50, deadline=None)
engines = pytest.mark.parametrize("engine_name", registration.ENGINES)
PLAIN = Kind()
WRITING = Kind(writes=True, torchs=0, feedback=False)
REGION = Region(torchs=False, device="cpu", dtype=torch.bfloat16, enabled=True, cache=True)
FLOAT16 = Region(torchs=False, device="cpu", dtype=torch.float16, enabled=True, cache=False)
LINEAR = Compute("linear", (8, 0, 0))
PARTS, PROGRAMS = 4, 60


@pytest.fixture(scope="module", autouse=True)
def _kernels_stay_registered() -> None:
    """Not here: PyTorch's side runs with nothing of precast on the dispatcher."""


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int, record_property: Any) -> None:
    report = compare(cases(PROGRAMS, PROGRAMS_SEED + part), SYSTEMS)
    assert not report.unexplained, f"PRECAST_PROGRAMS_SEED={PROGRAMS_SEED}\n{report}"
    record_property("cases", report.programs * len(SYSTEMS))


FOUND: dict[str, Program] = {
    "one tensor in two places of an operation": (
        FLOAT16,
        Compute("addmm", (0, 1, 0)),
        Compute("add", (0, 17, 0)),
        Compute("addbmm", (-3, -2, 0)),
        Compute("adaptive_avg_pool2d", (-1, 2, 0)),
        Differentiate(tuple(range(-12, 0)), None, True, False, True),
    ),
    "data given in inference mode, which counts no writes": (
        REGION,
        GradMode("inference_mode"),
        Write("other data, twice", 0),
        Leave(raises=False),
        LINEAR,
        Compute("matmul", (9, 0, 0)),
        Differentiate((-1, -2), None, True, False, True),
    ),
    "a weight that is frozen and thawed": (
        REGION,
        LINEAR,
        Write("requires_grad", 0),
        LINEAR,
        Write("requires_grad", 0),
        Compute("matmul", (9, 0, 0)),
        Differentiate((-1, -2, -3), None, True, False, True),
    ),
    "a view made without gradients, of a base that is written": (
        Region(torchs=False, device="cpu", dtype=torch.bfloat16, enabled=True, cache=None),
        GradMode("no_grad"),
        Compute("transposed", (5, 2, 2)),
        Compute("transposed", (5, 2, 2)),
        InPlace("index_copy_", 14, 36),
        Sampled("aten::log2", 2, 10, (None,)),
        InPlace("mul_ by a number", 16, 29),
        Compute("addmm", (-5, 11, 10)),
    ),
}
"""Programs that precast once ran otherwise."""


@on_all_systems
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_once_differed(name: str, system: System) -> None:
    report = compare([Case(FOUND[name], 0)], [system])
    assert report.equal[system.name] == 1, report


@pytest.fixture
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_four_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_write_to_its_own_operand_repeats_its_result(name: str, dtype: torch.dtype) -> None:
    numbers, outcomes = torch.randn(SIDE, SIDE, dtype=dtype), set()
    for _ in range(100):
        tensor = numbers.clone()
        try:
            IN_PLACE[name](tensor, tensor)
        except RuntimeError:
            outcomes.add("refused")
        else:
            outcomes.add(str(tensor.tolist()))
    assert len(outcomes) == 1


@on_all_systems
def test_a_write_that_is_refused_after_it_was_made_is_seen(system: System) -> None:
    program: Program = (
        GradMode("inference_mode"),
        Write("other data", 0),
        Leave(raises=False),
        REGION,
        LINEAR,
        Write("through a view", 0),
        LINEAR,
    )
    report = compare([Case(program, 0)], [system])
    assert report.explained[system.name, ("written",)] == 1, report


@engines
@quickly
@given(case=drawn(PLAIN))
@example(
    case=Case(
        (
            REGION,
            Compute("addr", (-1, 0, 0)),
            Layer("BatchNorm1d", 0),
            Differentiate((-2,), None, accumulate=False, create_graph=True, retain_graph=True),
            Compute("sigmoid", (-1, 0, 0)),
        ),
        0,
    )
)
def test_the_default_policy_gives_the_bits_of_torch_until_torch_raises(
    engine_name: str, case: Case
) -> None:
    [system] = (s for s in systems("default") if s.name == f"precast, {engine_name} engine")
    ours, theirs = repaired(case, system)
    works = next((i for i, t in enumerate(theirs.results) if isinstance(t, type)), None)
    if works is None:
        assert difference(ours, theirs) is None
    assert same(ours.results[:works], theirs.results[:works])


@quickly
@given(case=drawn(WRITING))
@example(case=Case((REGION, Compute("linear", (11, 0, 0))), 0))
def test_mixed_dtypes_give_the_same_with_and_without_the_cache_on_both_engines(case: Case) -> None:
    def uncached(device: str, dtype: torch.dtype, enabled: bool, _: bool | None) -> Any:
        return precast.autocast(device, dtype, enabled, False)

    results = []
    for name in registration.available_engines():
        with registration.use_engine(name):
            results += [
                _values(run(*case, precast.autocast)),
                _values(run(*case, uncached)),
            ]
    assert all(same(results[0], other) for other in results[1:])


@engines
@quickly
@given(case=drawn(WRITING))
@example(case=Case((REGION, LINEAR, Write("in place", 0), LINEAR), 0))
def test_values_are_those_of_casting_at_each_use_whatever_is_written_to_weights(
    engine_name: str, case: Case
) -> None:
    region = partial(precast.autocast, policy="torch")
    with registration.use_engine(engine_name):
        ours = run(*case, region)
    theirs = run(*case, _uncached)
    assert same(_values(ours), _values(theirs))
    if not any(isinstance(r, type) for r in theirs.results):  # a backward that fails stops midway
        assert all(map(_close, ours.gradients, theirs.gradients))


def _values(found: Found) -> list[Any]:
    """Return the results without the state of the cache."""
    return [value for value in found.results if not isinstance(value, State)]


def _uncached(
    device: str, dtype: torch.dtype, enabled: bool, _cache: bool | None
) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype, enabled, False)


def _close(mine: Any, other: Any) -> bool:
    """Return True if two results are as near as sums in 16 and 32 bits; if one overflows, the other is large."""
    if mine is None or other is None:
        return mine is other
    a, b = mine.copy, other.copy
    finite = a.isfinite() & b.isfinite()
    bound = 0.05 * b[finite].abs().max() + 1e-3 if finite.any() else 0.0
    overflow = a.isinf() & (b.abs() > torch.finfo(torch.float16).max / 2)
    near = (a - b).abs() <= bound
    return bool((near | overflow | (a.isnan() & b.isnan()) | (a == b)).all())
