"""`tune` with float8 rules: what saves something here and fits into the tolerance runs in 8 bits, and nothing else."""

from __future__ import annotations

import functools
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import precast
from precast.engine import float8_kernels
from precast.errors import TuningError
from precast.policy.policy import Policy, Rule
from precast.tuning import products, training
from precast.tuning.costs import CallCost
from precast.tuning.options import TuningOptions, checked_candidates
from precast.tuning.products import (
    Float8Product,
    ProductChoice,
    choose_products,
    products_of,
    with_products,
)
from precast.tuning.recorder import record
from precast.tuning.setups import Setup, Workload
from precast.tuning.sites import OperationSite, TunedProgram
from precast.tuning.tasks import PrecisionErrors
from precast.tuning.training import GradientMeter, TrainingTask
from tests.support.processor import has_bfloat16

SGD = functools.partial(torch.optim.SGD, lr=0.05)
LAYERS = ("body", "mid", "head")


class Layers(nn.Module):
    """Three products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.mid = nn.Linear(32, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(torch.tanh(self.body(x)))))


class Sums(Layers):
    """Nothing but the products keeps their inputs for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(0.1 * self.mid(0.1 * self.body(0.1 * x)))


class Outliers(Layers):
    """The body's input has a number so large that with one scale in 8 bits the others become zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        far = torch.zeros_like(x[:1])
        far[0, 0] = 1e7
        return super().forward(torch.cat([far, x]))[1:]


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(256, 32, generator=generator) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True).sin() + 2) for x in inputs]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def tune(model: nn.Module, *candidates: str, step=step, **options):
    given = {"optimizer": SGD, "objective": "memory", "tolerance": 0.05, "budget": 600.0}
    both = [torch.bfloat16, *candidates]
    return precast.tune(
        model, step, batches, options=TuningOptions(candidates=both), **{**given, **options}
    )


def recorded(model: nn.Module) -> TunedProgram:
    batch = batches(1)[0]
    return record(model, lambda m: step(m, batch), Policy.load("default"))


def searched(model: nn.Module, rule: str, **options) -> tuple[Setup | None, ProductChoice]:
    base, program = Policy.load("default"), recorded(model)
    given = Workload(model, step, tuple(batches()), SGD, "cpu")
    around = Setup("default", base, torch.bfloat16)
    asked = {"objective": "time", "loss": 0.05, "gradient": 0.3, **options}
    return choose_products(GradientMeter(given, steps=0), program, around, rule, **asked)


def rules_of(setup: Setup | None) -> dict[str, str]:
    """Return the rule of each layer's product under the policy of a setup."""
    assert setup is not None
    resolved = {name: setup.policy.resolve("linear", "cpu", name).rule for name in LAYERS}
    return {name: str(rule) for name, rule in resolved.items()}


@pytest.fixture(autouse=True)
def _short_trainings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(TrainingTask, "steps", (8, 12))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="float8 is emulated")
        yield


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Costs of a device on which 8 bits take half of the time; the list names modules for which they take twice."""
    slow: list[str] = []

    def planted(sites: Sequence[OperationSite], *_: object) -> list[Float8Product]:
        low = CallCost(0.004)
        return [
            Float8Product(s.module, s.op, low, CallCost(0.008 if s.module in slow else 0.002))
            for s in sites
        ]

    monkeypatch.setattr(products, "measure_products", planted)
    return slow


# --- which products ---


def test_all_products_that_run_in_8_bits_are_those_that_fit(kernel: list[str]) -> None:
    setup, found = searched(Layers(), "float8_rowwise")
    assert rules_of(setup) == dict.fromkeys(LAYERS, "float8_rowwise")
    assert "3 of 3 products run in float8_rowwise, which saves 6.00 ms a step" in found.because


def test_what_loses_too_much_stays_in_16_bits(kernel: list[str]) -> None:
    """With one scale the outlier costs all other rows; with a scale a row, only its own."""
    setup, found = searched(Outliers(), "float8", gradient=0.2)
    assert rules_of(setup) == {"body": "lower", "mid": "float8", "head": "float8"}
    by_name = {product.module: product for product in found.products}
    assert (by_name["body"].gradient or 0) > 10 * (by_name["mid"].gradient or 0)
    by_row, _ = searched(Outliers(), "float8_rowwise", gradient=0.2)
    assert rules_of(by_row)["body"] == "float8_rowwise"


def test_what_saves_nothing_stays_in_16_bits(kernel: list[str]) -> None:
    kernel.append("mid")
    setup, _ = searched(Layers(), "float8")
    assert rules_of(setup) == {"body": "float8", "mid": "lower", "head": "float8"}


def test_where_each_product_loses_too_much_there_is_no_policy(kernel: list[str]) -> None:
    setup, found = searched(Layers(), "float8", loss=1e-9, gradient=1e-9)
    assert setup is None
    assert found.because == "each product in float8 loses more than is allowed"


def test_the_errors_of_what_is_chosen_are_measured_together(kernel: list[str]) -> None:
    """Here each product alone loses nothing, and two of them lose all."""

    class Together:
        scale = 1.0

        def errors(self, setup: Setup) -> PrecisionErrors:
            assert setup.policy is not None
            rules = [setup.policy.resolve("linear", "cpu", name).rule for name in LAYERS]
            wrong = 1.0 if rules.count(Rule.FLOAT8) > 1 else 0.0
            return PrecisionErrors(wrong, wrong)

        def find_scale(self, setup: Setup) -> None: ...

    around = Setup("default", Policy.load("default"), torch.bfloat16)
    asked = {"objective": "time", "loss": 0.05, "gradient": 0.3}
    setup, _ = choose_products(Together(), recorded(Layers()), around, "float8", **asked)  # type: ignore[arg-type]
    assert sorted(rules_of(setup).values()) == ["float8", "lower", "lower"]


@pytest.mark.skipif(
    not has_bfloat16(),
    reason="emulated float8 is faster than emulated bfloat16: both multiply in float32",
)
def test_an_emulation_is_declined_for_its_measured_time() -> None:
    setup, found = searched(Layers(), "float8")
    assert setup is None
    said = re.search(r"its products take (\d+\.\d\d) times the time", found.because)
    assert said is not None, found.because
    assert float(said[1]) > 1
    assert "(emulated: cpu has no kernel for 8 bits)" in found.because


def test_an_operation_whose_rule_would_reach_other_modules_stays() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weight = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.inner(x), self.weight).sum(1, keepdim=True)

    program = recorded(Around())
    assert [site.module for site in products_of(program, Policy.load("default"))] == ["inner"]


def test_a_product_whose_overloads_have_different_rules_is_one() -> None:
    class Adding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight.t()).sum(1, keepdim=True)

    program = recorded(Adding(32, 32))
    assert [site.op for site in products_of(program, Policy.load("default"))] == ["addmm"]


def test_what_a_policy_says_of_a_module_otherwise_stays() -> None:
    program = recorded(Layers())
    [mid] = [site for site in program.sites if (site.module, site.op) == ("mid", "linear")]
    rows = {"m*": {"ops": {"tanh": "fp32"}}}
    product = Float8Product("mid", mid.op, CallCost(), CallCost())
    policy = with_products(Policy.load("default").replace(modules=rows), [product], "float8")
    assert policy.resolve("tanh", "cpu", "mid").rule is Rule.FP32
    assert policy.resolve("linear", "cpu", "mid").rule is Rule.FLOAT8
    assert policy.resolve("linear", "cpu", "body").rule is Rule.LOWER


# --- whole searches ---


def test_memory_is_saved_by_8_bits_where_they_are_emulated_too(tmp_path: Path) -> None:
    """With one scale, backward keeps the 8-bit form of the input."""
    found = tune(Sums(), "float8")
    assert found.name == "tuned with float8"
    [said] = found._evidence.products
    assert all(product.is_chosen for product in said.products)
    assert all(p.in_8_bits.kept_bytes < p.in_16_bits.kept_bytes for p in said.products)
    kept = {f.name: f.kept_bytes for f in found._evidence.proof.figures.values()}
    assert kept["tuned with float8"] < min(kept["default"], kept["float32"])
    found.save(tmp_path / "tuned.toml")
    policy, model = Policy.load(tmp_path / "tuned.toml"), Sums()
    assert policy == found.policy
    with (
        precast.attach(model, policy),
        precast.autocast("cpu", dtype=found.dtype, policy=policy),
        precast.trace() as trace,
    ):
        model(batches(1)[0][0])
    assert {row.module: row.rule for row in trace.rows if row.op == "linear"} == dict.fromkeys(
        LAYERS, "float8"
    )


def test_what_others_keep_as_well_is_kept_twice_and_the_proof_says_so() -> None:
    """Each product saves memory by itself; but `tanh` keeps the 16-bit form of what it gives anyway."""
    found = tune(Layers(), "float8")
    assert all(product.is_chosen for product in found._evidence.products[0].products)
    assert "float8" not in found.name
    said = re.search(
        r"tuned with float8 (?:is worse than default: it )?keeps (\d\.\d\d) of the memory of",
        found.because,
    )
    assert said is not None, found.because
    assert float(said[1]) > 1


def test_time_is_saved_where_there_is_a_kernel(
    kernel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a planted clock: a step takes 10 ms, in 16 bits 8, and 1 less for each product in 8 bits."""
    now, uneven, plain = [0.0], random.Random(0), float8_kernels.linear

    def look(_device_type: str) -> float:
        now[0] += 1e-4 * uneven.random()
        return now[0]

    def fast(*args, **kwargs):
        now[0] -= 0.001
        return plain(*args, **kwargs)

    def timed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        now[0] += 0.008 if torch.is_autocast_enabled("cpu") else 0.010
        return step(model, batch)

    monkeypatch.setattr(training, "current_time", look)
    monkeypatch.setattr(float8_kernels, "linear", fast)
    found = tune(Layers(), "float8_rowwise", step=timed, objective="time")
    assert found.name == "tuned with float8_rowwise", found.because
    kernel += LAYERS
    declined = tune(Layers(), "float8_rowwise", step=timed, objective="time")
    assert "float8" not in declined.name
    assert "float8_rowwise saves nothing here: its products take 2.00 times" in declined.because


# --- what is asked ---


def test_float8_alone_is_tried_beside_bfloat16(kernel: list[str]) -> None:
    options = TuningOptions(candidates=["float8"])
    found = precast.tune(
        Layers(), step, batches, optimizer=SGD, objective="memory", options=options
    )
    figures = found._evidence.proof.figures.values()
    assert {each.dtype for each in figures} == {"float32", "bfloat16"}


@pytest.mark.parametrize("wrong", [["float9"], "float8", [torch.float8_e4m3fn], []])
def test_other_candidates_are_refused(wrong: object) -> None:
    with pytest.raises(TuningError, match="float8_rowwise"):
        precast.tune(Layers(), step, batches, options=TuningOptions(candidates=wrong))  # type: ignore[arg-type]


def test_float8_is_refused_for_inference() -> None:
    with pytest.raises(TuningError, match="'float8' is tried in trainings only"):
        precast.tune(
            Layers(), None, batches, options=TuningOptions(metric=step, candidates=["float8"])
        )


def test_the_command_line_takes_rules_beside_dtypes() -> None:
    read = checked_candidates(["bfloat16", " float8_rowwise", "float8"])
    assert read == [torch.bfloat16, "float8_rowwise", "float8"]
    with pytest.raises(ValueError, match="'float9' is unknown; did you mean"):
        checked_candidates(["float9"])
