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
from precast.tuning.chooser import error_text
from precast.tuning.recorder import record
from precast.tuning.sensitivity import MOST_RUNS, Sensitivity, measure_sensitivity
from precast.tuning.setups import FLOAT32, Setup, Workload, preserved_random_states
from precast.tuning.sites import OperationSite, TunedProgram
from precast.tuning.training import GradientMeter
from tests.tuning import planted

DEFAULT = Policy.load("default")
LOSS, GRADIENT = 0.01, 0.3


def held_back(found: Sensitivity, *, loss: float, gradient: float) -> list[OperationSite]:
    """Return the sites whose errors are more than their share of the allowed ones."""
    count = len(found.sites)
    return [
        site
        for site, errors in found.sites.items()
        if errors.barred or errors.loss > loss**2 / count or errors.gradient > gradient**2 / count
    ]


def measured(workload: Workload, low: torch.dtype, **options) -> tuple[TunedProgram, Sensitivity]:
    def step(model: nn.Module) -> torch.Tensor:
        return workload.step(model, workload.batches[0])

    program = record(workload.model, step, DEFAULT, low=low)
    with preserved_random_states():
        meter = GradientMeter(workload, steps=3)
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


def test_where_nothing_is_lost_one_run_is_enough() -> None:
    case = planted.Case(planted.Block, torch.bfloat16, frozenset())
    program, found = measured(planted.workload(case, 1), case.low)
    assert found.runs == 1
    assert not held_back(found, loss=LOSS, gradient=GRADIENT)
    assert set(found.sites) == {site for site in program.sites if not site.barred}
    assert found.shared == 0


def test_reasons_have_the_figures() -> None:
    for name, said in (
        ("overflow", "float16 ends at 65504"),
        ("underflow", "makes 100% of the gradient of"),
    ):
        case = planted.CASES[name]
        _, found = measured(planted.workload(case, 2), case.low)
        held = held_back(found, loss=LOSS, gradient=GRADIENT)
        assert any(said in error_text(found.sites[site]) for site in held), name


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
    assert found.shared == len(found.sites)
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
    found = GradientMeter(workload, steps=0).errors(Setup("default", DEFAULT, torch.bfloat16))
    assert found.gradient < GRADIENT**2
    assert found.parameter != "first.bias"


def test_the_same_setup_has_no_error() -> None:
    case = planted.CASES["reduction"]
    meter = GradientMeter(planted.workload(case, 0), steps=2)
    found = meter.errors(FLOAT32)
    assert (found.loss, found.gradient, found.flushed) == (0.0, 0.0, 0.0)


def test_float32_that_is_not_finite_is_an_error() -> None:
    given = planted.workload(planted.CASES["reduction"], 0)
    for steps in (0, 2):
        broken = Workload(
            given.model, lambda m, b: given.step(m, b) / 0, given.batches, given.optimizer, "cpu"
        )
        with pytest.raises(TuningError, match="in float32 the loss of batch 1 is inf"):
            GradientMeter(broken, steps=steps)


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


def _errors(workload: Workload, loss: float, gradient: float) -> tuple[TunedProgram, Sensitivity]:
    def step(model: nn.Module) -> torch.Tensor:
        return workload.step(model, workload.batches[0])

    program = record(workload.model, step, DEFAULT)
    with preserved_random_states():
        meter = GradientMeter(workload, steps=0, batches=1)
        return program, measure_sensitivity(meter, program, DEFAULT, loss=loss, gradient=gradient)


def test_a_large_model_takes_no_more_runs_and_operations_that_are_alike_share_their_errors() -> (
    None
):
    program, found = _errors(_chain(18), 1e-9, 1e-9)  # every group is too much
    assert len(program.sites) > MOST_RUNS
    assert MOST_RUNS - 2 <= found.runs <= MOST_RUNS
    assert [*found.sites] == [site for site in program.sites if not site.barred]
    assert found.shared > 0
    by_error: dict[float, list[OperationSite]] = {}
    for site, errors in found.sites.items():
        if not errors.alone:
            by_error.setdefault(errors.gradient, []).append(site)
    assert all(len({site.op for site in sites}) == 1 for sites in by_error.values())
    assert any(len(sites) > 1 for sites in by_error.values())


def test_one_bad_site_is_found_in_a_model_of_any_size() -> None:
    workload = _chain(24)
    bad = workload.model.blocks[17].down
    bad.register_forward_hook(lambda _m, _a, out: out if out.dtype is torch.float32 else 9 * out)
    program, found = _errors(workload, 0.5, 0.9)
    held = held_back(found, loss=0.5, gradient=0.9)
    assert [(site.module, site.op) for site in held] == [("blocks.17.down", "linear")]
    assert found.runs <= 2 * math.ceil(math.log2(len(program.sites))) + 8
