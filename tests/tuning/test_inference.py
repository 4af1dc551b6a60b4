"""A policy for inference: copies are run and not trained, compared by a metric, and their weights count as memory."""

from __future__ import annotations

import functools
import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import precast
from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning.checking import check
from precast.tuning.inference import InferenceRun, InferenceTask, OutputMeter
from precast.tuning.options import TuningOptions
from precast.tuning.proof import prove
from precast.tuning.setups import FLOAT32, Setup, Workload
from tests.tuning import planted

DEFAULT = Policy.load("default")
LOW = Setup("default", DEFAULT, torch.bfloat16)


class Wide(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, width)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.body(x))))


def batches(count: int = 6, width: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(32, width, generator=generator) for _ in range(count)]
    return [(x, x[:, :4].argmax(1)) for x in inputs]


def metric(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    return F.cross_entropy(model(batch[0]).float(), batch[1]).item()


def tune(model: nn.Module | None = None, metric=metric, batches=batches, **options):
    arguments = {"objective": "memory", "tolerance": 0.05, "budget": 600.0}
    arguments |= {
        name: options.pop(name)
        for name in ("objective", "tolerance", "budget", "optimizer")
        if name in options
    }
    tuning = TuningOptions(metric=metric, **options)
    return precast.tune(model or Wide().eval(), None, batches, options=tuning, **arguments)


def workload(model: nn.Module | None = None, metric=metric, count: int = 4) -> Workload:
    model = model or Wide().eval()
    return Workload(model, None, tuple(batches(count)), torch.optim.SGD, "cpu", metric)


def in_16_bits() -> bool:
    return torch.is_autocast_enabled("cpu")


# --- answers ---


def test_what_overflows_in_float16_is_held_back() -> None:
    case = planted.CASES["overflow"]
    given = planted.workload(case, 1)
    found = tune(
        given.model.eval(), batches=lambda: iter(given.batches), candidates=[torch.float16]
    )
    assert found.name.startswith("tuned")
    assert found.dtype is torch.float16
    assert planted.is_held_back(found.policy, case)
    assert "default fails (the metric of batch 1 is nan)" in found.because
    compared = {(c.name, c.against): c for c in found._evidence.proof.comparisons}
    assert compared[found.name, "float32"].loss == "equal"
    assert compared["default", "float32"].loss == "worse"


def test_a_reduction_that_loses_in_bfloat16_is_held_back() -> None:
    case = planted.CASES["reduction"]
    given = planted.workload(case, 1)
    everything_low = DEFAULT.replace(
        name="low", ops={"cpu": dict.fromkeys(("mean", "add", "sub"), "lower")}
    )
    found = tune(
        given.model.eval(),
        batches=lambda: iter(given.batches),
        base=everything_low,
        tolerance=0.02,
    )
    (search,) = found._evidence.searches
    worst = max((s for s in search.sites if not s.barred), key=lambda s: s.gradient)
    assert (worst.module, worst.op in case.needed) == (planted.PLANTED, True)
    assert found.name.startswith("tuned")
    rules = {found.policy.resolve(op, "cpu", planted.PLANTED).rule for op in case.needed}
    assert "fp32" in rules


def test_memory_is_that_of_weights_and_results() -> None:
    found = tune()
    trials = found._evidence.proof.figures
    weights = sum(p.nbytes for p in Wide().parameters())
    assert trials["float32"].kept_bytes > weights
    assert trials["default"].kept_bytes < 0.7 * trials["float32"].kept_bytes
    assert found.name != "float32"
    assert "default needs 0." in found.because
    assert found._evidence.settings.task == "inference"
    assert found.policy.measured["task"] == "inference"


def test_a_weight_that_only_a_follower_uses_is_stored_in_16_bits_where_that_pays() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5000, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x).mean(1))

    generator = torch.Generator().manual_seed(0)
    given = [
        (torch.randint(5000, (8, 5), generator=generator), torch.zeros(8, dtype=torch.long))
        for _ in range(4)
    ]
    found = tune(Words().eval(), batches=given)
    assert found.name == "tuned"
    trials = found._evidence.proof.figures
    assert trials[found.name].kept_bytes < 0.6 * trials["default"].kept_bytes
    assert "embedding" in found.text


@pytest.mark.parametrize(("is_slow_in_16_bits", "answers"), [(True, "float32"), (False, "default")])
def test_the_time_of_calls_of_the_model_counts(
    is_slow_in_16_bits: bool, answers: str, clock: list[float]
) -> None:
    class Slow(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock[0] += 0.008 if in_16_bits() is is_slow_in_16_bits else 0.004
            return super().forward(x)

    def with_pause(model: nn.Module, batch) -> float:
        clock[0] += 0.01  # of which no dtype is slower
        return metric(model, batch)

    found = tune(Slow().eval(), with_pause, objective="time", tolerance=0.1)
    assert (found.name == "float32") is (answers == "float32")
    proof = found._evidence.proof
    assert proof.seeds == 6


def test_a_worse_metric_is_not_handed_out() -> None:
    class Spoilt(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.2 if in_16_bits() else 1.0)

    found = tune(Spoilt().eval(), lambda m, batch: m(batch[0]).float().square().mean())
    assert found.name == "float32"
    assert "the metric of default is worse than that of float32 by +4" in found.because
    assert "run without a region" in found.text


def test_a_model_stays_in_its_mode_and_as_it_is() -> None:
    model = Wide().eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, modes = torch.get_rng_state(), set()

    def looks(model: nn.Module, batch) -> float:
        modes.add((model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return metric(model, batch)

    with torch.no_grad():
        tune(model, looks)
    with torch.inference_mode():
        tune(model, looks)
    assert modes == {(False, False, False)}
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_numbers_drawn_at_random_are_the_same_in_each_setup() -> None:
    found = tune(Wide())  # in training mode, with dropout, which cannot be converted
    compared = {(c.name, c.against): c for c in found._evidence.proof.comparisons}
    assert abs(compared["default", "float32"].difference.middle) < 0.02


# --- runs ---


def test_a_copy_is_converted_or_else_attached() -> None:
    serving = InferenceRun(workload(), LOW)
    assert serving.is_converted
    assert {p.dtype for p in serving.model.parameters()} == {torch.bfloat16}
    serving.close()

    def around(model: nn.Module, batch) -> float:
        return F.cross_entropy(model.head(torch.tanh(model.body(batch[0]))), batch[1]).item()

    serving = InferenceRun(workload(metric=around), LOW)
    assert not serving.is_converted
    alone = serving.weight_bytes()
    serving.run(0)
    assert math.isfinite(serving.values()[0])
    assert serving.weight_bytes() > alone  # the held copies count
    assert not serving.failure
    serving.close()


def test_results_count_as_long_as_they_live() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = x * self.weight  # one is made while the one before lives
            return x

    given = (torch.ones(1000), None)
    chain = Workload(
        Chain(), None, (given,) * 3, torch.optim.SGD, "cpu", lambda m, b: float(m(b[0])[0])
    )
    assert InferenceTask(chain).needed_bytes(FLOAT32) == 4 + 2 * 4000


def test_outputs_that_are_not_finite_are_an_error_although_the_metric_is() -> None:
    class Loud(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1e6

    def accuracy(model: nn.Module, batch) -> float:
        return 1 - (model(batch[0]).argmax(1) == batch[1]).float().mean().item() + 0.5

    meter = OutputMeter(workload(Loud().eval(), accuracy))
    low = Setup("low", DEFAULT.replace(ops={"cpu": {"mul": "lower"}}), torch.float16)
    errors = meter.errors(low)
    assert math.isinf(errors.gradient)
    assert errors.barred == "an output overflows"
    assert meter.errors(FLOAT32) == type(errors)(0.0, 0.0)


def test_a_metric_that_is_0_for_most_batches_is_compared_with_its_mean() -> None:
    def wrong(model: nn.Module, batch) -> float:
        rounded = model(batch[0]).dtype is not torch.float32
        return float(batch[1][0] == 0) + (1e-3 if rounded else 0.0)

    proof = prove(InferenceTask(workload(metric=wrong, count=32)), [LOW], steps=1, tolerance=0.05)
    compared = proof.comparison("default", "float32")
    assert 0 < compared.difference.low <= compared.difference.high < 0.05
    assert compared.loss == "equal"


def test_runs_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = prove(
        InferenceTask(workload()), [LOW], steps=1, tolerance=0.05, deadline=time.monotonic()
    )
    assert (proof.ended, proof.seeds) == ("time", 0)
    assert proof.comparison("default", "float32").loss == "cannot tell"
    monkeypatch.setattr(InferenceTask, "looks", (1, 2))
    proof = prove(InferenceTask(workload()), [LOW], steps=1, tolerance=1e-9, timed=True)
    assert proof.ended in ("seeds", "proven")
    assert (proof.steps <= 2, proof.seeds) == (True, 4)
    assert len(proof.figures["default"].finals) == 4
    assert len(proof.figures["default"].seconds) == 4 * proof.steps


# --- interrupts, results, checks ---


def test_a_result_speaks_of_runs_and_metrics(tmp_path) -> None:
    found = tune()
    printed = str(found)
    assert "6 batches, run 1 time; ended: proven" in printed
    assert max(map(len, printed.splitlines())) <= 80
    heads = [line.split()[:3] for line in printed.splitlines() if line.startswith("setup ")]
    assert heads == [["setup", "run", "metric"]]
    found.save(tmp_path / "tuned.toml", page=True)
    assert precast.Policy.load(tmp_path / "tuned.toml") == found.policy
    assert "Objective memory of inference" in found.text
    assert "precast.convert(model, policy, torch.bfloat16, example=...)" in found.text
    page = (tmp_path / "tuned.html").read_text()
    for words in ("Metric against float32", "Weights and results", "6 batches, run 1 time"):
        assert words in page
    assert "gradients" not in page.partition("<script")[0]
    assert found._evidence.traced


def test_the_policy_converts_the_model_as_it_was_measured() -> None:
    found = tune()
    model = Wide().eval()
    x = batches()[0][0]
    converted = precast.convert(model, found.policy, found.dtype, example=x)
    with precast.attach(model, found.policy), torch.no_grad():
        with precast.autocast("cpu", dtype=found.dtype):
            assert torch.equal(converted(x), model(x))


@pytest.mark.parametrize(("objective", "outcome"), [("memory", "holds"), ("time", None)])
def test_a_policy_is_checked_again(objective, outcome) -> None:
    asked = {"objective": objective, "tolerance": 0.05, "budget": 20.0}
    found = check(workload(), DEFAULT, base=DEFAULT, dtype=torch.bfloat16, **asked)
    assert outcome in (None, found.outcome)
    assert found.because[0].startswith("the metric of default differs from that of float32 by ")
    assert found.proof.seeds == 4


# --- bad input ---


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metric": None}, "step is None: pass step"),
        ({"metric": 5}, "metric is 5; it has to be a function"),
        ({"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}, "optimizer needs step"),
        ({"batches": batches(2)}, "batches has 2: for inference, the metrics of at least 3"),
        ({"batches": None}, "batches is NoneType"),
        ({"metric": lambda m, b: m(b[0])}, r"returned a tensor of shape \(32, 4\)"),
        ({"metric": lambda m, b: "good"}, "it has to return one number"),
        ({"metric": lambda m, b: math.nan}, "in float32 the metric of batch 1 is nan"),
    ],
)
def test_bad_input_is_one_clear_error(wrong, said: str) -> None:
    with pytest.raises(TuningError, match=said):
        tune(**wrong)


def test_an_error_of_the_metric_in_float32_is_the_programs_own() -> None:
    def fails(model: nn.Module, batch) -> float:
        raise LookupError("of the program")

    with pytest.raises(LookupError, match="of the program"):
        tune(metric=fails)
