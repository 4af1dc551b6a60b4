"""Planted faults are found: each with its cost, and a remedy that really mends it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from precast._internal import cures
from precast.diagnostics.tracing import facts, trials
from precast.diagnostics.tracing.tracer import Trace
from precast.policy.policy import Policy
from precast.report.schema import Finding


def of_kind(trace: Trace, kind: str) -> list[Finding]:
    return [finding for finding in trace.findings if finding.kind == kind]


def pasted(file: str | None, folder: Path) -> Policy:
    """The policy of a file that a finding shows, saved as it is."""
    assert file is not None
    path = folder / "mended.toml"
    path.write_text(file)
    return Policy.load(path)


# --- whole numbers that a rule rounds ---


@pytest.mark.trial("WHOLE_NUMBERS")
@pytest.mark.parametrize(
    ("positions", "left"),
    [
        (lambda: torch.arange(8192, 8320).float(), 3),
        (lambda: torch.arange(8192, 8320, dtype=torch.float32), 3),
        (lambda: torch.arange(128).float(), None),
        (lambda: torch.rand(128).double().float(), None),
        (lambda: torch.arange(8192, 8320).float() / 8320, None),
    ],
)
def test_positions_that_a_rule_makes_equal_are_found(
    positions: Any, left: int | None, tmp_path: Path
) -> None:
    with precast.trace() as trace, precast.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            angles = torch.ones(4, 1).float() @ positions()[None]
    found = of_kind(trace, "rounded by a rule")
    assert len(found) == (left is not None)
    for finding in found:
        assert int(angles[0].unique().numel()) == left
        assert f"128 different values become {left} in bfloat16" in finding.title
        assert finding.suggestion == cures.WHOLE_NUMBERS(
            op="matmul", rule='the row matmul = "fp32"; or '
        )
        with (
            precast.trace() as mended,
            precast.autocast("cpu", policy=pasted(finding.policy, tmp_path)),
        ):
            torch.ones(4, 1).float() @ positions()[None]
        assert of_kind(mended, "rounded by a rule") == []
    with precast.trace() as mended, precast.autocast("cpu"), precast.disable():
        torch.ones(4, 1).float() @ positions()[None]
    assert of_kind(mended, "rounded by a rule") == []


class Rotary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        angles = torch.ones(4, 1).float() @ torch.arange(8192, 8320).float()[None]
        return x * angles.cos().sum()


def test_the_cure_of_rounded_positions_is_a_rule_for_their_module(tmp_path: Path) -> None:
    """A row for the operation would put the other products in float32, too."""
    model = nn.ModuleDict({"rotary": Rotary(), "head": nn.Linear(8, 8)})

    def run(policy: Policy) -> list[Finding]:
        with (
            precast.attach(model, policy),
            precast.trace(model) as trace,
            precast.autocast("cpu", policy=policy),
        ):
            assert (
                model["head"](model["rotary"](torch.ones(4, 8))) @ torch.ones(8, 8)
            ).dtype is torch.bfloat16
        return of_kind(trace, "rounded by a rule")

    [found] = run(Policy.load("default"))
    assert (
        'the rule "rotary" = { ops = { matmul = "fp32" } } in [modules], attached'
        in found.suggestion
    )
    assert run(pasted(found.policy, tmp_path)) == []


# --- limits that 16 bits round ---


@pytest.mark.trial("LIMIT_IN_FLOAT32")
@pytest.mark.parametrize(
    ("dtype", "limits", "rounded"),
    [
        (torch.bfloat16, {"min": 1e-4, "max": 1 - 1e-4}, 1),
        (torch.float16, {"max": 1 - 1e-4}, 1),
        (torch.float16, {"min": 1e-8}, 0),
        (torch.float16, {"min": -1 + 1e-5, "max": 0.5}, -1),
        (torch.float16, {"min": 1e-4, "max": 1 - 1e-3}, None),
        (torch.bfloat16, {"min": 1e-8, "max": 1.0}, None),
    ],
)
def test_a_limit_of_clamp_that_16_bits_round_is_found(
    dtype: torch.dtype, limits: dict[str, float], rounded: int | None
) -> None:
    def limited(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, **limits).clamp_(**limits)

    x = torch.tensor([0.0, 1.0, -2.0], dtype=dtype)
    with precast.trace() as trace:
        result = limited(x)
    found = of_kind(trace, "rounded limit")
    assert [f.where.op for f in found] == ([] if rounded is None else ["clamp", "clamp_"])
    assert all(f.suggestion == cures.LIMIT_IN_FLOAT32(op=f.where.op) for f in found)
    assert all(f"rounds to {rounded}: " in f.title for f in found)
    with precast.trace() as trace:
        mended = limited(x.float())
    assert of_kind(trace, "rounded limit") == []
    if rounded is not None:
        assert rounded in result
        assert rounded not in mended


def test_a_limit_that_no_result_reaches_is_not_found() -> None:
    with precast.trace() as trace:
        torch.full((3,), 0.5, dtype=torch.float16).clamp(1e-8, 1 - 1e-4)
    assert of_kind(trace, "rounded limit") == []


def test_a_teacher_in_float32_beside_its_student_is_found() -> None:
    class Teacher(nn.Sequential):
        pass

    teacher, student, x = Teacher(nn.Linear(64, 64)), nn.Linear(64, 64), torch.ones(8, 64)
    with precast.trace(student) as trace:
        with torch.no_grad():
            target = teacher(x)
        with torch.autocast("cpu"):
            F.mse_loss(student(x), target).backward()
    [found] = of_kind(trace, "float32-op")
    assert found.where.module == "Teacher.0"
    assert "ran in float32 once: not in a region" in found.title


# --- a needless float32 round trip ---


class Needless(nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.cast:
            x = x.float()
        x = torch.relu(x.reshape(-1, 8)).transpose(0, 1).contiguous().t()
        out: Tensor = self.second(x)
        return out


def test_a_needless_round_trip_is_found_with_both_ends() -> None:
    model = Needless(cast=True)
    with precast.trace(model) as trace, precast.autocast("cpu"):
        for _ in range(3):
            model(torch.ones(4, 8))
    [found] = of_kind(trace, "round-trip")
    line = Needless.forward.__code__.co_firstlineno
    assert found.where.source == f"tests/diagnostics/tracing/test_findings.py:{line + 3} in forward"
    assert (
        f"linear in second at tests/diagnostics/tracing/test_findings.py:{line + 5} in forward"
        in found.title
    )
    assert "3 times" in found.title
    assert "Take the cast to float32" in found.suggestion
    assert found.policy is None
    assert found.cost.bytes == 3 * (4 * 8) * (4 + 2)
    assert found.cost.seconds is not None
    assert found.cost.seconds > 0


@pytest.mark.trial("DROP_THE_CAST")
def test_taking_the_cast_away_mends_it_and_changes_no_bit() -> None:
    faulty, mended = Needless(cast=True), Needless(cast=False)
    mended.load_state_dict(faulty.state_dict())
    x = torch.randn(4, 8)
    with precast.trace(mended) as trace, precast.autocast("cpu"):
        assert torch.equal(mended(x), faulty(x))
    with precast.trace(mended) as trace, precast.autocast("cpu"):
        mended(x)
    assert not of_kind(trace, "round-trip")


@pytest.mark.trial("KEEP_THE_DTYPE")
def test_a_round_trip_by_a_rule_is_mended_by_its_line(tmp_path: Path) -> None:
    layer = nn.Conv1d(2, 2, 3)
    policy = Policy.load("default").replace(ops={"reflection_pad1d": "fp32"})

    def run(policy: Policy) -> list[Finding]:
        with precast.trace() as trace, precast.autocast("cpu", policy=policy):
            layer(F.pad(layer(torch.ones(1, 2, 9)), (1, 1), mode="reflect"))
        return of_kind(trace, "round-trip")

    [found] = run(policy)
    assert found.policy is not None
    assert found.where.op == "reflection_pad1d"
    assert not run(pasted(found.policy, tmp_path))


def test_a_round_trip_whose_float32_numbers_are_used_is_none() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    for use_first in (True, False):
        with precast.trace() as trace, precast.autocast("cpu"):
            x = first(torch.ones(4, 8)).float()
            if use_first:
                torch.exp(x)
            second(torch.relu(x))
            if not use_first:
                torch.exp(x)
        assert not of_kind(trace, "round-trip")


def test_a_rule_that_other_calls_need_is_left_alone() -> None:
    layer = nn.Conv1d(2, 2, 3)
    policy = Policy.load("default").replace(ops={"reflection_pad1d": "fp32"})
    with precast.trace() as trace, precast.autocast("cpu", policy=policy):
        layer(F.pad(layer(torch.ones(1, 2, 9)), (1, 1), mode="reflect"))
        F.pad(torch.ones(1, 2, 9).bfloat16(), (1, 1), mode="reflect").exp()
    [found] = of_kind(trace, "round-trip")
    assert (found.suggestion, found.policy) == ("", None)


@pytest.mark.parametrize("op", [torch.exp, lambda x: x * 3, lambda x: x + torch.ones(8)])
def test_what_needs_float32_in_between_is_no_round_trip(op: Any) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    with precast.trace() as trace, precast.autocast("cpu"):
        second(op(first(torch.ones(4, 8)).float()))
        x = first(torch.ones(4, 8)).float()
        x.mul_(3)
        second(x)
    assert not of_kind(trace, "round-trip")


# --- weights that are cast again ---


@pytest.mark.trial("HOLD_THE_WEIGHTS")
def test_a_weight_that_is_cast_ten_times_a_step_is_found() -> None:
    layer = nn.Linear(128, 128, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.ones(2, 128)

    def step() -> None:
        for _ in range(10):
            with precast.autocast("cpu"):
                loss = layer(x).float().sum()
            loss.backward()
        optimizer.step()

    with precast.trace(layer) as trace:
        step()
        step()
    [found] = of_kind(trace, "weight-cast-again")
    assert "20 casts, 18 of them of a weight that had not changed" in found.title
    assert "precast.attach(model)" in found.suggestion
    assert found.cost.bytes == 18 * 128 * 128 * 2
    with precast.attach(layer), precast.trace(layer) as mended:
        step()
        step()
    assert not of_kind(mended, "weight-cast-again")


@pytest.mark.trial("ONE_REGION")
def test_one_region_around_all_uses_casts_a_weight_once() -> None:
    weight = torch.ones(8, 8, requires_grad=True)  # a view of it is none that an attachment holds

    def run(*, one: bool) -> list[Finding]:
        around = precast.autocast("cpu") if one else contextlib.nullcontext()
        with precast.trace() as trace, around:
            for _ in range(3):
                with precast.autocast("cpu"):
                    F.linear(torch.ones(2, 8), weight)
        return of_kind(trace, "weight-cast-again")

    [found] = run(one=False)
    assert found.suggestion == cures.ONE_REGION()
    assert not run(one=True)


def test_a_weight_that_is_cast_again_in_one_region_is_not_told_to_be_in_one() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    with precast.trace() as trace, precast.autocast("cpu", cache_enabled=False):
        for _ in range(3):
            F.linear(torch.ones(2, 8), weight)
    [found] = of_kind(trace, "weight-cast-again")
    assert "region" not in found.suggestion


def test_a_weight_that_is_cast_once_a_step_is_not() -> None:
    layer = nn.Linear(8, 8)
    for fused in (True, False):  # a fused one moves no version counter
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused)
        with precast.trace() as trace:
            for _ in range(5):
                with precast.autocast("cpu"):
                    loss = layer(layer(torch.ones(2, 8))).float().sum()
                loss.backward()
                optimizer.step()
        assert not of_kind(trace, "weight-cast-again")


# --- float32 islands ---


@pytest.mark.trial("LOWER_THE_ISLAND")
def test_a_float32_island_is_found_and_its_line_mends_it(
    tmp_path: Path, faster_in_16_bits: None
) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    policy = Policy.load("default").replace(ops={"sigmoid": "fp32"})

    def run(policy: Policy) -> list[Finding]:
        with precast.trace() as trace, precast.autocast("cpu", policy=policy):
            second(torch.sigmoid(first(torch.ones(4, 8))))
        return of_kind(trace, "float32-island")

    [found] = run(policy)
    assert found.where.op == "sigmoid"
    assert found.cost.bytes == (4 * 8) * (4 + 2)
    assert found.policy is not None
    assert not run(pasted(found.policy, tmp_path))


def test_a_loss_in_float32_is_no_island() -> None:
    layer = nn.Linear(8, 8)
    with precast.trace() as trace:
        with precast.autocast("cpu"):
            loss = F.mse_loss(layer(torch.ones(4, 8)), torch.ones(4, 8))
        loss.backward()
    assert not of_kind(trace, "float32-island")


# --- float32 against expectation ---


@pytest.mark.trial("REGION_AROUND")
def test_a_layer_outside_of_the_region_is_found(faster_in_16_bits: None) -> None:
    inside, outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def run(*, around: bool) -> list[Finding]:
        with precast.trace() as trace:
            with precast.autocast("cpu"):
                x = inside(torch.ones(4, 8))
            with precast.autocast("cpu", enabled=around):
                outside(x) if around else outside(x.float())
            if not around:
                outside(x.float())
        return of_kind(trace, "float32-op")

    [found] = run(around=False)
    assert "not in a region" in found.title
    assert 'with precast.autocast("cpu")' in found.suggestion
    assert "saved 1 ms to 3 ms a call" in found.suggestion
    assert not run(around=True)


@pytest.mark.parametrize("saved", [None, trials.TrialSaving(1e-3, 2e-3, 3e-3)])
def test_advice_is_given_where_a_trial_was_faster(
    saved: trials.TrialSaving | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "measure_saving", lambda *_, **__: saved)
    layer = nn.Linear(8, 8)
    policy = Policy.load("default").replace(ops={"sigmoid": "fp32", "cpu": {"mm": None}})
    with precast.trace() as trace:
        with precast.autocast("cpu", policy=policy):
            layer(torch.sigmoid(layer(torch.ones(4, 8))))
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        layer(torch.ones(4, 8))
    found = [f for f in trace.findings if f.kind in ("float32-island", "float32-op")]
    assert len(found) == 3
    assert {bool(each.suggestion) for each in found} == {saved is not None}
    assert sum(each.policy is not None for each in found) == (2 if saved else 0)


def test_a_trial_measures_what_a_call_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are those of a clock that an operation moves: more in float32 than in 16 bits."""
    now = [0.0]
    monkeypatch.setattr(trials, "perf_counter", lambda: now[0])

    class Slow:
        def __init__(self, seconds: dict[torch.dtype, float]) -> None:
            self.seconds = seconds

        def __call__(self, x: Tensor) -> Tensor:
            now[0] += self.seconds[x.dtype]
            return x

    def saved(**seconds: float) -> trials.TrialSaving | None:
        by_dtype = {getattr(torch, name): each for name, each in seconds.items()}
        return _tried(Slow(by_dtype))

    assert saved(float32=0.02, bfloat16=0.01) == pytest.approx((0.01, 0.01, 0.01))
    assert saved(float32=0.01, bfloat16=0.0099) is None, "less than the noise"
    assert saved(float32=0.01, bfloat16=0.02) is None
    assert saved(float32=0.4, bfloat16=0.1) is None, "too slow to be tried"


def _tried(call: Callable[[Tensor], Tensor]) -> trials.TrialSaving | None:
    """The saving of a function in bfloat16, tried as if it were an operation."""
    described = trials.describe_call(torch.ops.aten.exp.default, (torch.ones(2).bfloat16(),), {})
    assert described is not None
    return trials.measure_saving(
        described._replace(overload=call), torch.bfloat16, returns=torch.bfloat16
    )


@pytest.mark.parametrize(
    ("interrupted", "seconds", "is_certain"),
    [((0,), 0.3, True), ((3, 4, 9, 16), 0.05, True), ((3, 4, 9, 11, 16), 0.05, False)],
)
def test_a_few_runs_that_other_programs_interrupt_hide_no_saving(
    interrupted: tuple[int, ...],
    seconds: float,
    is_certain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, runs = [0.0], itertools.count()
    monkeypatch.setattr(trials, "perf_counter", lambda: now[0])

    def call(x: Tensor) -> Tensor:
        is_low = x.dtype is torch.bfloat16
        now[0] += 0.001 if is_low else 0.002
        if is_low and next(runs) in interrupted:  # the first run is not measured
            now[0] += seconds
        return x

    expected = pytest.approx((0.001, 0.001, 0.001)) if is_certain else None
    assert _tried(call) == expected


def test_noise_alone_is_no_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    now, draw = [0.0], random.Random(0)
    monkeypatch.setattr(trials, "perf_counter", lambda: now[0])

    def call(x: Tensor) -> Tensor:
        now[0] += draw.uniform(0.001, 0.01)
        return x

    assert sum(_tried(call) is not None for _ in range(300)) <= 6


def test_what_cannot_run_again_without_side_effects_is_not_tried() -> None:
    aten, x = torch.ops.aten, torch.ones(2)
    assert trials.describe_call(aten.add_.Tensor, (x, x), {}) is None
    assert trials.describe_call(aten.bernoulli.default, (x,), {}) is None
    assert trials.describe_call(aten.index_select.default, (x, 0, torch.tensor([0])), {}) is None
    assert trials.describe_call(aten.add.Tensor, (x, x.to_sparse()), {}) is None
    state = torch.random.get_rng_state()
    call = trials.describe_call(aten.exp.default, (x.expand(3, 2).bfloat16(),), {})
    assert call is not None
    trials.measure_saving(call, torch.bfloat16, returns=torch.bfloat16)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_advice_is_against_a_policy_that_tune_chose(faster_in_16_bits: None) -> None:
    layer = nn.Linear(8, 8)
    policy = dataclasses.replace(
        Policy.load("default").replace(ops={"sigmoid": "fp32", "cpu": {"mm": None}}), name="tuned"
    )
    with precast.trace() as trace, precast.autocast("cpu", policy=policy):
        layer(torch.sigmoid(layer(torch.ones(4, 8))))
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
    assert {finding.kind for finding in trace.findings} == {"float32-island", "float32-op"}
    assert not any(finding.suggestion or finding.policy for finding in trace.findings)


def test_an_island_whose_result_is_used_in_float32_gets_no_advice(
    faster_in_16_bits: None,
) -> None:
    layer = nn.Linear(8, 8)
    policy = Policy.load("default").replace(ops={"sigmoid": "fp32"})
    with precast.trace() as trace, precast.autocast("cpu", policy=policy):
        y = torch.sigmoid(layer(torch.ones(4, 8)))
        _ = layer(y), y * 2
    [found] = of_kind(trace, "float32-island")
    assert not found.suggestion


def test_an_operation_in_a_region_is_not_told_to_run_in_one(faster_in_16_bits: None) -> None:
    layer = nn.Linear(8, 8)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight).float().sum()

    with precast.trace() as trace, precast.autocast("cpu"):
        layer(torch.ones(4, 8))
        torch.func.vmap(torch.func.grad(loss), (None, 0))(layer.weight.detach(), torch.ones(4, 8))
    for finding in of_kind(trace, "float32-op"):
        assert not finding.suggestion, finding


def test_costs_have_their_spread_over_the_steps() -> None:
    model = Needless(cast=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with precast.trace(model) as trace:
        for _ in range(3):
            with precast.autocast("cpu"):
                loss = model(torch.ones(4, 8)).float().sum()
            loss.backward()
            optimizer.step()
    [found] = of_kind(trace, "round-trip")
    cost = found.cost
    assert cost.low is not None
    assert cost.high is not None
    assert cost.share is not None
    assert 0 < cost.low <= cost.share <= cost.high <= 1


class Block(nn.Module):
    """A needless round trip, a sum of two dtypes and a layer outside of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with precast.autocast("cpu"):
            y = self.inside(x).float().bfloat16()
            y = self.inside(torch.softmax(y, -1)) + x
        return self.outside(y)


def test_alike_blocks_share_their_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "measure_saving", lambda *_, **__: None)
    model = nn.Sequential(*(Block() for _ in range(3)))
    model(torch.ones(4, 8))
    with precast.trace(model) as one_block:
        model[0](torch.ones(4, 8))
    with precast.trace(model) as trace:
        model(torch.ones(4, 8))
    kinds = sorted(finding.kind for finding in trace.findings)
    assert kinds == sorted(finding.kind for finding in one_block.findings)
    assert {"float32-op", "float32-spread", "round-trip"} <= set(kinds)
    [alone], [several] = of_kind(one_block, "float32-op"), of_kind(trace, "float32-op")
    assert f"{alone.where.op} in 0.outside at" in alone.title
    assert f"{alone.where.op} in *.outside (3 modules) at" in several.title
    assert "3 times" in several.title
    rows = [row for row in trace.rows if row.op == alone.where.op and row.region is None]
    assert several.cost.seconds == pytest.approx(sum(row.seconds for row in rows))
    assert several.where.module in {f"{k}.outside" for k in range(3)}


@pytest.mark.trial("RULE_FOR_IT")
def test_an_operation_without_a_rule_that_should_have_one(
    tmp_path: Path, faster_in_16_bits: None
) -> None:
    policy = Policy.load("default").replace(ops={"cpu": {"mm": None}})

    def run(policy: Policy) -> list[Finding]:
        with precast.trace() as trace, precast.autocast("cpu", policy=policy):
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            torch.bmm(torch.ones(1, 4, 4), torch.ones(1, 4, 4))
        return of_kind(trace, "float32-op")

    [found] = run(policy)
    assert found.policy == 'base = "default"\n\n[ops.cpu]\nmm = "lower"\n'
    assert not run(pasted(found.policy, tmp_path))


def test_what_is_switched_off_on_purpose_is_not_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = Policy.load("default").replace(modules={"1": "fp32"})
    with precast.attach(model, policy), precast.trace() as trace, precast.autocast("cpu"):
        model(torch.ones(2, 4))
        with precast.disable():
            model[0](torch.ones(2, 4))
    assert not of_kind(trace, "float32-op")


def test_a_sum_of_two_dtypes_is_an_observation() -> None:
    layer = nn.Linear(8, 8)
    with precast.trace() as trace, precast.autocast("cpu"):
        _ = layer(torch.ones(4, 8)) + torch.ones(8)
    [found] = of_kind(trace, "float32-spread")
    assert "mixes bfloat16 and float32, and returns float32: once." in found.title
    assert (found.suggestion, found.policy) == ("", None)


def test_findings_say_their_share_and_are_sorted() -> None:
    model = Needless(cast=True)
    with precast.trace(model) as trace, precast.autocast("cpu"):
        model(torch.ones(4, 8))
        _ = model(torch.ones(4, 8)) + torch.ones(8)
    costs = [(f.suggestion == "", -(f.cost.seconds or 0.0)) for f in trace.findings]
    assert len(costs) >= 2
    assert costs == sorted(costs), "advice before observations"
    assert all(f.cost.share is not None and 0 <= f.cost.share <= 1 for f in trace.findings)


# --- a dtype mismatch ---


def _note(error: BaseException) -> str:
    [note] = getattr(error, "__notes__", [])
    return str(note)


@pytest.mark.trial("PROMOTE_ROW")
def test_a_dtype_mismatch_says_what_led_there_and_what_mends_it(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    places = torch.tensor([0, 2])

    def run(policy: Policy | str) -> Tensor:
        with precast.autocast("cpu", policy=policy):
            y = layer(torch.ones(3, 4))
            y.index_add_(0, places, torch.ones(2, 4))
        return y

    with precast.trace(layer), pytest.raises(RuntimeError) as caught:
        run("torch")
    note = _note(caught.value)
    assert "index_add_ has no rule" in note
    assert "bfloat16, float32" in note
    assert "bfloat16 came from linear" in note
    assert "rule lower, policy 'torch'" in note
    file = note.partition("save this as a policy file")[2].partition(":\n")[2]
    mended = run(pasted(textwrap.dedent(file), tmp_path))
    assert mended.dtype is torch.bfloat16


@pytest.mark.trial("CALL_IN_REGION")
def test_a_mismatch_outside_of_regions_says_to_open_one() -> None:
    layer = nn.Linear(4, 4)
    with precast.trace(), pytest.raises(RuntimeError) as caught:
        layer(torch.ones(2, 4).bfloat16())
    assert _note(caught.value).endswith(cures.CALL_IN_REGION(device="cpu"))
    with precast.autocast("cpu"):
        layer(torch.ones(2, 4).bfloat16())


@pytest.mark.trial("CAST_BEFORE")
@pytest.mark.parametrize("policy", ["torch", "default"])
def test_a_row_that_raises_another_error_is_not_advised(policy: str) -> None:
    def run(*, cast: bool) -> None:
        low = torch.ones(2, 2).bfloat16()
        with precast.autocast("cpu", policy=policy):
            torch.ones(2, 2).addmm_(low.float() if cast else low, torch.ones(2, 2))

    changed = Policy.load(policy).replace(ops={"cpu": {"addmm_": "promote"}})
    try:
        run(cast=False)
    except RuntimeError:
        with precast.trace(), pytest.raises(RuntimeError) as caught:
            run(cast=False)
        if "save this as a policy file" in _note(caught.value):
            policy = changed  # type: ignore[assignment]
            run(cast=False)
        else:
            assert _note(caught.value).endswith(cures.CAST_BEFORE(dtype="float32"))
            run(cast=True)


def test_a_call_in_a_switched_off_region_is_not_told_to_run_in_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = Policy.load("torch").replace(modules={"1": "fp32"})

    class Dots(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.dot(x[0].bfloat16(), x[0].float())

    model[1] = Dots()
    with precast.attach(model, policy), precast.trace(), precast.autocast("cpu"):
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, 4))
    assert "run it in a region" not in _note(caught.value)


def test_a_mismatch_where_a_rule_holds() -> None:
    policy = Policy.load("torch").replace(ops={"mm": "keep"})
    low = torch.ones(2, 2).bfloat16()
    with precast.trace(), precast.autocast("cpu", policy=policy):
        with pytest.raises(RuntimeError) as caught:
            torch.mm(low, torch.ones(2, 2))
    assert "mm has the rule 'keep'" in _note(caught.value)


def test_other_errors_are_left_alone() -> None:
    with precast.trace(), precast.autocast("cpu"):
        with pytest.raises(RuntimeError) as caught:
            torch.mm(torch.ones(2, 3).bfloat16(), torch.ones(2, 3))
        with pytest.raises(RuntimeError) as other:
            torch.ones(2, 3) @ torch.ones(2, 3)
    assert not hasattr(caught.value, "__notes__")
    assert not hasattr(other.value, "__notes__")


@pytest.mark.parametrize("is_on", [True, False], ids=["region", "no region"])
def test_what_a_rule_would_run_in_float32_is_found_in_place_and_in_a_disabled_region(
    is_on: bool,
) -> None:
    policy = Policy.load("default").retarget("cpu", like="cuda")
    model = nn.Linear(4, 4).bfloat16()
    with precast.trace(model) as trace, precast.autocast("cpu", policy=policy, enabled=is_on):
        y = model(torch.ones(2, 4).bfloat16())
        y.detach().clone().pow_(2.0)
        y.pow(2.0)
        with precast.autocast("cpu", enabled=False):
            F.mse_loss(y, torch.zeros_like(y))
    found = {f.where.op: f.title for f in trace.findings if f.kind == "16-bit-op"}
    assert set(found) == ({"pow_.Scalar", "mse_loss"} if is_on else set())
    if is_on:
        assert "as it writes in place: the policy computes pow in float32" in found["pow_.Scalar"]
        assert "the policy computes mse_loss in float32" in found["mse_loss"]
