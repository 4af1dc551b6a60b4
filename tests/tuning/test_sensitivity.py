"""The operations that lose too much in 16 bits are found, and nothing else is; policies then hold them back."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning.held_back import held_back, policy_holding, reason_of
from precast.tuning.recording import record
from precast.tuning.sensitivity import (
    MOST_RUNS,
    Errors,
    Meter,
    Sensitivity,
    SiteErrors,
    measure_sensitivity,
)
from precast.tuning.sites import Program, Site
from precast.tuning.training import FLOAT32, Setup, Workload, random_states_kept
from tests.tuning import planted

DEFAULT = Policy.load("default")
LOSS, GRADIENT = 0.01, 0.3


def measured(workload: Workload, low: torch.dtype, **options) -> tuple[Program, Sensitivity]:
    def step(model: nn.Module) -> torch.Tensor:
        return workload.step(model, workload.batches[0])

    program = record(workload.model, step, DEFAULT, low=low)
    with random_states_kept():
        meter = Meter(workload, steps=3)
        found = measure_sensitivity(
            meter, program, DEFAULT, loss=LOSS, gradient=GRADIENT, **options
        )
    return program, found


@pytest.mark.parametrize("name", planted.CASES)
@pytest.mark.parametrize("seed", [0, 7])
def test_what_is_planted_is_found_and_nothing_else(name: str, seed: int) -> None:
    case = planted.CASES[name]
    program, found = measured(planted.workload(case, seed), case.low)
    held = held_back(found, loss=LOSS, gradient=GRADIENT)
    assert held
    assert {str(site.module).partition(".")[0] for site in held} == {planted.PLANTED}
    assert case.needed & {site.op for site in held}
    assert found.runs <= 2 + 2 * len(held) * math.ceil(math.log2(len(program.sites)))
    assert found.complete


def test_where_nothing_is_lost_one_run_is_enough() -> None:
    case = planted.Case(planted.Block, torch.bfloat16, frozenset())
    program, found = measured(planted.workload(case, 1), case.low)
    assert found.runs == 1
    assert not held_back(found, loss=LOSS, gradient=GRADIENT)
    assert set(found.sites) == {site for site in program.sites if not site.barred}
    assert found.together is not None
    assert math.isclose(sum(e.gradient for e in found.sites.values()), found.together.gradient)


def test_reasons_have_the_figures() -> None:
    for name, said in (
        ("overflow", "float16 ends at 65504"),
        ("underflow", "makes 100% of the gradient of"),
    ):
        case = planted.CASES[name]
        _, found = measured(planted.workload(case, 2), case.low)
        held = held_back(found, loss=LOSS, gradient=GRADIENT)
        assert any(said in reason_of(found.sites[site], case.low) for site in held), name


def test_the_loss_scale_is_what_a_scaler_would_reach() -> None:
    """Small gradients that a scale brings into float16's range are no reason to hold anything back."""
    case = planted.Case(planted.Block, torch.float16, frozenset())
    tiny = planted.workload(case, 0)
    scaled = Workload(
        tiny.model, lambda m, b: tiny.step(m, b) * 1e-5, tiny.batches, tiny.optimizer, "cpu"
    )
    _, found = measured(scaled, torch.float16)
    assert found.scale >= 2**20
    assert not held_back(found, loss=LOSS, gradient=GRADIENT)


def test_without_time_a_group_shares_its_error_and_that_is_said() -> None:
    case = planted.CASES["reduction"]
    _, found = measured(planted.workload(case, 0), case.low, deadline=time.monotonic())
    assert found.runs == 1
    assert not found.complete
    each = [errors.gradient for errors in found.sites.values()]
    assert each == pytest.approx([each[0]] * len(each))


def test_a_gradient_that_is_noise_in_float32_does_not_count() -> None:
    """A bias before a norm has a gradient of zero, but for rounding, of which 16 bits make something else."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last((x - x.mean(0)) / x.std(0))

    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    workload = Workload(
        Normed(),
        lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1]),
        ((x, y),),
        lambda p: torch.optim.SGD(p, lr=0.1),
        "cpu",
    )
    found = Meter(workload, steps=0).errors(Setup("default", DEFAULT, torch.bfloat16))
    assert found.gradient < GRADIENT**2
    assert found.parameter != "first.bias"


def test_the_same_setup_has_no_error() -> None:
    case = planted.CASES["reduction"]
    meter = Meter(planted.workload(case, 0), steps=2)
    found = meter.errors(FLOAT32)
    assert (found.loss, found.gradient, found.flushed) == (0.0, 0.0, 0.0)


def test_float32_that_is_not_finite_is_an_error() -> None:
    given = planted.workload(planted.CASES["reduction"], 0)
    for steps in (0, 2):
        broken = Workload(
            given.model, lambda m, b: given.step(m, b) / 0, given.batches, given.optimizer, "cpu"
        )
        with pytest.raises(TuningError, match="in float32 the loss of batch 1 is inf"):
            Meter(broken, steps=steps)


class Chain(nn.Module):
    """Blocks that are all alike."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(planted.Block(8) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def _chain(blocks: int) -> Workload:
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    return Workload(
        Chain(blocks),
        lambda model, x: model(x).float().square().mean(),
        (batch,),
        lambda p: torch.optim.SGD(p, lr=0.1),
        "cpu",
    )


def _errors(workload: Workload, loss: float, gradient: float) -> tuple[Program, Sensitivity]:
    def step(model: nn.Module) -> torch.Tensor:
        return workload.step(model, workload.batches[0])

    program = record(workload.model, step, DEFAULT)
    with random_states_kept():
        meter = Meter(workload, steps=0, batches=1)
        return program, measure_sensitivity(meter, program, DEFAULT, loss=loss, gradient=gradient)


def test_however_large_a_model_is_no_more_than_so_many_groups_are_measured() -> None:
    for blocks in (40, 80):
        program, found = _errors(_chain(blocks), 1e-9, 1e-9)  # every group is too much
        assert len(program.sites) > MOST_RUNS
        assert MOST_RUNS - 2 <= found.runs <= MOST_RUNS
        assert found.complete
        assert found.sites.keys() == {site for site in program.sites if not site.barred}
        assert found.shared > 0


def test_sites_that_are_alike_share_what_is_not_measured_alone() -> None:
    program, found = _errors(_chain(40), 1e-9, 1e-9)
    by_error: dict[float, set[str]] = {}
    for site, errors in found.sites.items():
        if errors.measured is None:
            by_error.setdefault(errors.gradient, set()).add(site.op)
    assert max(map(len, by_error.values())) == 1
    assert any(len({s for s in found.sites if found.sites[s].gradient == e}) > 1 for e in by_error)
    assert [*found.sites] == [site for site in program.sites if site in found.sites]


def test_one_bad_site_is_found_in_a_model_of_any_size() -> None:
    workload = _chain(60)
    bad = workload.model.blocks[37].down
    bad.register_forward_hook(lambda _m, _a, out: out if out.dtype is torch.float32 else 9 * out)
    program, found = _errors(workload, 0.5, 0.9)
    held = held_back(found, loss=0.5, gradient=0.9)
    assert [(site.module, site.op) for site in held] == [("blocks.37.down", "linear")]
    assert found.runs <= 2 * math.ceil(math.log2(len(program.sites))) + 8


# --- policies ---


def _found(errors: dict[Site, float]) -> Sensitivity:
    return Sensitivity({site: SiteErrors(0.0, error) for site, error in errors.items()})


def test_the_worst_are_held_back_until_the_rest_is_allowed() -> None:
    a, b, c, d = (Site("m", op) for op in ("linear", "tanh", "add", "mul"))
    found = _found({a: 0.04, b: 0.5, c: 0.03, d: 0.08})
    found.sites[c] = SiteErrors(0.0, 0.0, "raises")
    assert set(held_back(found, loss=0.01, gradient=0.4)) == {b, c}
    assert set(held_back(found, loss=0.01, gradient=0.3)) == {b, c, d}
    assert set(held_back(found, loss=0.01, gradient=0.1)) == {a, b, c, d}


def test_rules_are_for_what_is_held_back_and_for_what_would_inherit_them() -> None:
    linear = DEFAULT.resolve("linear", "cpu").rule
    sites = [
        Site("", "mul"),
        Site("a", "linear", linear),
        Site("a.b", "linear", linear),
        Site("a.b.c", "linear", linear),
        Site("a.d", "tanh"),
    ]
    program = Program(tuple(sites), modules=("", "a", "a.b", "a.b.c", "a.d"))
    held = [sites[1], sites[3]]
    found = Sensitivity({s: SiteErrors(0.0, 0.2, "", Errors(0.0, 0.2, "w")) for s in sites})
    policy = policy_holding(held, found, program, DEFAULT, "tuned")
    rules = {
        (pattern, op): str(row.rule)
        for pattern, rule in policy.modules.items()
        for op, row in rule.ops.items()
    }
    assert rules == {
        ("a", "aten::linear"): "fp32",
        ("a.b", "aten::linear"): "lower",
        ("a.b.c", "aten::linear"): "fp32",
    }
    reason = policy.modules["a"].ops["aten::linear"].reason
    assert reason == "bfloat16 changes the gradient of w by 45%, and the loss by 0%"


def test_modules_that_are_held_back_alike_share_a_pattern() -> None:
    sites = tuple(Site(f"layers.{i}.norm", "mul") for i in range(3))
    odd = Site("head", "mul")
    names = ("", "layers", *(f"layers.{i}" for i in range(3)), *(str(s.module) for s in sites))
    program = Program((*sites, odd), modules=(*names, "head"))
    found = Sensitivity(
        {
            site: SiteErrors(
                0.0, 0.01 * (i + 1) ** 2, "", Errors(0.0, 0.01 * (i + 1) ** 2, f"w{i}")
            )
            for i, site in enumerate(program.sites)
        }
    )
    policy = policy_holding(sites, found, program, DEFAULT, "tuned")
    assert list(policy.modules) == ["layers.*.norm"]
    row = policy.modules["layers.*.norm"].ops["aten::mul"]
    assert row.reason == (
        "bfloat16 changes the gradient of w2 by 30%, and the loss by 0%; the worst of 3 places"
    )
    one = policy_holding(sites[:2], found, program, DEFAULT, "tuned")
    assert list(one.modules) == ["layers.0.norm", "layers.1.norm"]


def test_what_no_module_runs_has_a_row_for_the_device() -> None:
    site = Site(None, "softmax")
    program = Program((site,))
    found = Sensitivity({site: SiteErrors(0.0, math.inf, "the loss is nan")})
    policy = policy_holding([site], found, program, DEFAULT, "tuned")
    assert policy.resolve("softmax.int", "cpu").rule == "fp32"
    assert "the loss is nan" in policy.resolve("softmax.int", "cpu").reason
    assert not policy.modules


def test_what_is_float32_already_needs_no_rule() -> None:
    site = Site("m", "mse_loss", DEFAULT.resolve("mse_loss", "cpu").rule)
    found = Sensitivity({site: SiteErrors(0.0, math.inf, "the loss is nan")})
    policy = policy_holding([site], found, Program((site,), modules=("", "m")), DEFAULT, "tuned")
    assert not policy.modules
