"""`tune` with `lower_out_fp32`: products whose results are used in float32 alone keep them in float32."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import precast
from precast.engine import product_kernels, registration
from precast.policy.policy import Policy
from precast.tuning import training
from precast.tuning.options import TuningOptions
from precast.tuning.products import choose_results, results_in_float32
from precast.tuning.recorder import record
from precast.tuning.setups import Setup
from precast.tuning.sites import OperationSite, TunedProgram
from precast.tuning.tasks import PrecisionErrors
from precast.tuning.training import TrainingTask


class Experts(nn.Module):
    """A router, two experts, and an output head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.body = nn.Linear(32, 2), nn.Linear(32, 64)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        experts = torch.tanh(self.body(x)).unflatten(-1, (2, 32))
        return self.head((weights.unsqueeze(-1) * experts).sum(1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0))
    return [(x, x[:, :10].argmax(1)) for x in inputs]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


@pytest.fixture(scope="module")
def program() -> TunedProgram:
    batch = batches()[0]
    return record(Experts(), lambda m: step(m, batch), Policy.load("default"))


def names(sites: list[OperationSite]) -> list[str | None]:
    return [site.module for site in sites]


def test_results_that_are_used_in_16_bits_too_stay_in_16_bits(program: TunedProgram) -> None:
    """The experts' activation has no rule, so it follows their product."""
    low = [site for site in program.sites if site.op in ("linear", "tanh", "mul")]
    assert names(results_in_float32(program, program.choose(low))) == ["router", "head"]


class Meter:
    """Errors by the modules with the rule."""

    scale = 1.0

    def __init__(self, **errors: float) -> None:
        self._errors = errors

    def errors(self, setup: Setup) -> PrecisionErrors:
        assert setup.policy is not None
        resolved = {name: setup.policy.resolve("linear", "cpu", name).rule for name in self._errors}
        wrong = sum(self._errors[n] for n, rule in resolved.items() if rule == "lower_out_fp32")
        return PrecisionErrors(wrong, wrong)


@pytest.mark.parametrize(
    ("head", "router", "expected"),
    [(0.0, 0.0, {"router", "head"}), (1.0, 0.0, {"router"}), (1.0, 1.0, set())],
)
def test_products_that_lose_too_much_stay_in_float32(
    program: TunedProgram, head: float, router: float, expected: set[str]
) -> None:
    names = ("router", "body"), ("tanh", "mul")
    low = [site for site in program.sites if site.op in names[1] or site.module in names[0]]
    setup, found = choose_results(
        Meter(head=head, router=router),  # type: ignore[arg-type]
        program,
        program.choose(low),
        Policy.load("default"),
        loss=0.1,
        gradient=0.1,
    )
    assert (setup is None) == (not expected)
    if setup is not None:
        assert setup.name == "tuned with lower_out_fp32"
        assert {
            name
            for name in ("router", "body", "head")
            if setup.policy.resolve("linear", "cpu", name).rule == "lower_out_fp32"
        } == expected
    else:
        assert found.because == "lower_out_fp32 loses more than is allowed"


def test_the_rule_is_the_answer_where_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a planted clock: a step takes 10 ms, in 16 bits 8, and 1 less for each product with a float32 result."""
    now, uneven, plain = [0.0], random.Random(0), product_kernels._with_rounded_gradient

    def look(_device_type: str) -> float:
        now[0] += 1e-4 * uneven.random()
        return now[0]

    def fast(result: object, dtype: torch.dtype) -> object:
        now[0] -= 0.001
        return plain(result, dtype)

    def timed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        now[0] += 0.008 if torch.is_autocast_enabled("cpu") else 0.010
        return step(model, batch)

    monkeypatch.setattr(TrainingTask, "steps", (8, 12))
    monkeypatch.setattr(training, "current_time", look)
    monkeypatch.setattr(product_kernels, "_with_rounded_gradient", fast)
    with registration.use_engine("reference"):  # whose products call the function that is replaced
        found = precast.tune(
            Experts(),
            timed,
            batches,
            tolerance=0.05,
            budget=600.0,
            options=TuningOptions(candidates=[torch.bfloat16, "lower_out_fp32"]),
        )
    assert found.name == "tuned with lower_out_fp32", found.because
    assert found.policy.resolve("linear", "cpu", "head").rule == "lower_out_fp32"


def test_a_model_without_such_products_says_so() -> None:
    class Body(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    plain = record(Body(), lambda m: m(torch.ones(2)).sum(), Policy.load("default"))
    setup, found = choose_results(
        Meter(), plain, plain.choose(), Policy.load("default"), loss=1.0, gradient=1.0
    )  # type: ignore[arg-type]
    assert setup is None
    assert "there are none" in found.because
