"""`tune` finds a policy and proves it, hands out nothing unproven, and answers bad input with one clear error."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import re
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import precast
from precast.errors import PolicyError, TuningError
from precast.tuning import tuner
from precast.tuning.options import TuningOptions, TuningProgress
from precast.tuning.training import TrainingTask
from tests.tuning import planted

SGD = functools.partial(torch.optim.SGD, lr=0.05)


class Wide(nn.Module):
    """Its activations are much of its memory, so 16 bits save some for certain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(64, 8, generator=generator) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True).sin() + 2) for x in inputs]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def tune(model: nn.Module | None = None, step=step, batches=batches, **options):
    arguments = {"optimizer": SGD, "objective": "memory", "tolerance": 0.05, "budget": 600.0}
    arguments |= {name: options.pop(name) for name in arguments if name in options}
    return precast.tune(
        model or Wide(), step, batches, options=TuningOptions(**options), **arguments
    )


@pytest.fixture(autouse=True)
def _short_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingTask, "steps", (8, 12))


def in_16_bits() -> bool:
    return torch.is_autocast_enabled("cpu")


# --- answers ---


def test_what_is_planted_is_held_back_and_the_policy_is_proven() -> None:
    case = planted.CASES["overflow"]
    given = planted.workload(case, 1)
    found = tune(
        given.model,
        given.step,
        given.batches,
        optimizer=given.optimizer,
        candidates=[case.low],
        tolerance=0.05,
    )
    assert found.name == "tuned"
    assert found.dtype is torch.float16
    assert planted.is_held_back(found.policy, case)
    assert "default fails (the loss of step 1 is nan)" in found.because
    compared = {(c.name, c.against): c for c in found._evidence.proof.comparisons}
    assert compared["tuned", "float32"].loss == "equal"
    assert compared["default", "float32"].loss == "worse"


def test_a_reduction_that_loses_in_bfloat16_is_held_back(tmp_path) -> None:
    case = planted.CASES["reduction"]
    given = planted.workload(case, 1)
    found = tune(given.model, given.step, given.batches, optimizer=given.optimizer, tolerance=0.02)
    path = tmp_path / "tuned.toml"
    path.write_text(found._evidence.proof.figures["tuned"].policy)
    assert planted.is_held_back(precast.Policy.load(path), case)


def test_a_layer_that_is_not_trained_is_not_hidden_by_the_others() -> None:
    case = planted.CASES["underflow"]
    given = planted.workload(case, 1)
    found = tune(given.model, given.step, given.batches, candidates=[case.low], tolerance=0.1)
    assert found.name == "tuned"
    assert "under default the gradient of planted.inner.weight is zero" in found.because


def test_where_nothing_is_lost_nothing_is_held_back() -> None:
    found = tune()
    assert found.name in ("default", "tuned")
    assert found.dtype is torch.bfloat16
    assert "default keeps 0.54 of the memory of float32" in found.because
    names = list(found._evidence.proof.figures)
    assert names[:2] == ["float32", "default"]


def test_where_16_bits_are_slower_the_answer_is_float32(clock: list[float]) -> None:
    def slow(model: nn.Module, batch) -> torch.Tensor:
        clock[0] += 0.008 if in_16_bits() else 0.004
        return step(model, batch)

    found = tune(step=slow, objective="time", tolerance=0.1)
    assert (found.name, found.dtype) == ("float32", torch.float32)
    assert "default is slower than float32: it takes" in found.because
    assert not found.policy.rules("cpu")


def test_where_16_bits_are_faster_they_are_the_answer(clock: list[float]) -> None:
    def slow(model: nn.Module, batch) -> torch.Tensor:
        clock[0] += 0.004 if in_16_bits() else 0.02
        return step(model, batch)

    found = tune(step=slow, objective="time", tolerance=0.1)
    assert found.dtype is torch.bfloat16
    assert f"{found.name} takes 0." in found.because


def test_what_trains_worse_is_not_handed_out() -> None:
    def spoilt(model: nn.Module, batch) -> torch.Tensor:
        loss = step(model, batch)
        return loss + 0.2 * loss.detach() if in_16_bits() else loss

    found = tune(step=spoilt)
    assert found.name == "float32"
    assert "the loss of default is worse than that of float32 by +" in found.because


def test_each_row_of_what_costs_least_says_why() -> None:
    found = tune()
    assert found.name == "tuned"
    rows = [line for line in found.text.splitlines() if "rule = " in line]
    assert rows
    assert all("bfloat16 keeps " in row for row in rows)


def test_two_dtypes_are_both_tried() -> None:
    found = tune(candidates=(torch.bfloat16, torch.float16))
    trials = list(found._evidence.proof.figures)
    assert {"float32", "default in bfloat16", "default in float16"} <= {*trials}
    assert found.dtype in (torch.bfloat16, torch.float16)


def test_a_metric_is_compared_instead_of_the_loss() -> None:
    found = tune(
        metric=lambda model, batch: (2.0 if in_16_bits() else 1.0) + 0 * step(model, batch)
    )
    assert found.name == "float32"
    assert found._evidence.proof.figures["float32"].finals == [1.0] * 3


def test_a_budget_that_is_too_small_to_prove_anything_is_not_spent() -> None:
    told: list[TuningProgress] = []
    with pytest.raises(
        TuningError, match=r"the budget of 0.001 s is too small: .* takes about \d+[sm]"
    ):
        tune(budget=1e-3, progress=told.append)
    assert {each.stage for each in told} == {"record"}


def test_the_budget_that_is_named_has_time_for_a_proof() -> None:
    def slow(model: nn.Module, batch) -> torch.Tensor:
        time.sleep(0.004)
        return step(model, batch)

    with pytest.raises(TuningError, match="too small") as small:
        tune(step=slow, budget=0.05)
    [least] = map(float, re.findall(r"takes about (\d+)s", str(small.value)))
    steps, setups, seeds = 8, 3, 3
    assert least >= 0.004 * steps * setups * seeds


def test_a_budget_is_refused_after_a_second_however_long_steps_take() -> None:
    taken = []

    def slow(model: nn.Module, batch) -> torch.Tensor:
        taken.append(time.sleep(0.6))
        return step(model, batch)

    with pytest.raises(TuningError, match="too small"):
        tune(step=slow, budget=20.0)
    assert len(taken) == 2


def test_a_budget_is_not_refused_for_the_time_of_loading_code(monkeypatch) -> None:
    """On a busy machine the first steps may take longer than the budget."""
    monkeypatch.setattr(tuner.SearchBudget, "elapsed", lambda _: 100.0)
    assert tune(budget=60.0).outcome == "undecided"


def test_a_result_fits_into_the_terminal(monkeypatch) -> None:
    result = tune()
    for width in (40, 60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = str(result).splitlines()
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        assert re.search(r"bfloat16: \d+ operations measured, none excluded", text)
        assert "3 seeds of 12 steps; ended: proven" in text
        for figures in result._evidence.proof.figures.values():
            assert f"{figures.mean_final:.4g}" in text


def test_where_measuring_leaves_no_time_to_compare_the_answer_is_undecided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner.SearchBudget, "steps_for", lambda *_: 0)
    found = tune()
    assert (found.name, found.outcome, found.is_decided) == ("float32", "undecided", False)
    assert "default" in found._evidence.undecided
    assert re.fullmatch(r"a budget of \d+[sm] or more", found._evidence.would_decide[0])


class Padded(nn.Module):
    """`lean` pads in 16 bits, and `default` does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReflectionPad1d(2), nn.Tanh())
        self.head = nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_a_preset_that_takes_least_is_the_answer(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tuner, "policy_of", lambda _choice, _program, base, **_: base)
    found = tune(Padded())
    trials = list(found._evidence.proof.figures)
    assert trials == ["float32", "default", "lean", "torch"]
    assert found.name == "lean"
    found.save(tmp_path / "tuned.toml")
    assert 'base = "lean"' in found.text
    loaded = precast.Policy.load(tmp_path / "tuned.toml")
    assert loaded.fingerprint == precast.Policy.load("lean").fingerprint


def test_what_there_is_no_time_for_is_left_out_and_said(monkeypatch) -> None:
    monkeypatch.setattr(tuner.SearchBudget, "steps_for", lambda _, setups: 8 * (setups <= 3))
    found = tune(Padded())
    assert len(found._evidence.proof.figures) == 3
    assert found._evidence.untried[-1] == "torch"
    assert "there was no time to try" in found.because


def test_the_evidence_has_the_costs_of_each_operation() -> None:
    [search] = tune()._evidence.searches
    linears = [site for site in search.sites if site.op == "linear"]
    assert linears
    for site in linears:
        assert site.costs.keys() == {"float32", "bfloat16"}
        assert all(cost.amount("time") > 0 for cost in site.costs.values())
    assert search.shared == search.skipped == 0


def test_a_search_can_be_repeated() -> None:
    first, second = tune(seed=3), tune(seed=3)
    assert first.policy == second.policy
    curves = [
        [each.curves for each in found._evidence.proof.figures.values()]
        for found in (first, second)
    ]
    assert curves[0] == curves[1]


# --- what stays as it is ---


def test_the_model_and_the_random_states_stay_as_they_are() -> None:
    model = Wide()
    step(model, batches()[0]).backward()
    weights, states = copy.deepcopy(model.state_dict()), (random.getstate(), torch.get_rng_state())
    gradient = model.body.weight.grad.clone()
    loader = torch.utils.data.DataLoader(batches(), batch_size=None, shuffle=True)
    tune(model, batches=loader)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.equal(gradient, model.body.weight.grad)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert not in_16_bits()


# --- progress and interrupts ---


def test_progress_is_plain_data_and_an_interrupt_keeps_the_best() -> None:
    told: list[TuningProgress] = []

    def interrupt(progress: TuningProgress) -> None:
        told.append(progress)
        if progress.text.startswith("round 2"):
            raise KeyboardInterrupt

    found = tune(progress=interrupt)
    assert "the search was interrupted" in found.because
    stages = list(dict.fromkeys(p.stage for p in told))
    assert stages == ["record", "errors", "costs", "prove", "done"]
    assert told[-1].seconds >= told[0].seconds >= 0
    assert found._evidence.proof.ended == "interrupted"
    assert found._evidence.proof.seeds == 1
    assert found.name == "float32"  # of one seed nothing is known


def test_an_interrupt_before_anything_is_known() -> None:
    def interrupt(progress: TuningProgress) -> None:
        if progress.stage == "errors":
            raise KeyboardInterrupt

    found = tune(progress=interrupt)
    assert found.name == "float32"
    assert found.because == "the search was interrupted before anything was proven"


# --- bad input ---


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": 5}, "model is 5; it has to be a torch.nn.Module"),
        ({"step": None, "optimizer": None}, "step is None: pass step"),
        ({"step": None}, "optimizer needs step"),
        ({"batches": []}, "batches ended before the first batch"),
        ({"batches": 7}, "batches is int"),
        ({"objective": "speed"}, 'objective is \'speed\'; it has to be "time" or "memory"'),
        ({"tolerance": 0}, "tolerance is 0"),
        ({"tolerance": "1%"}, "tolerance is '1%'"),
        ({"budget": -1}, "budget is -1"),
        ({"budget": math.inf}, "budget is inf"),
        ({"candidates": ()}, r"candidates is \(\)"),
        ({"model": nn.ReLU()}, "no parameter of the model requires a gradient"),
        ({"model": Wide().requires_grad_(False)}, "no parameter of the model requires a gradient"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS calls a closure"),
        ({"optimizer": lambda parameters: 1 / 0}, r"optimizer\(parameters\) failed: ZeroDivision"),
        ({"optimizer": lambda parameters: None}, r"optimizer\(parameters\) failed: Attribute"),
        ({"model": Wide().to("meta")}, "has no values yet"),
        ({"model": nn.LazyLinear(4)}, "the model's weight has no values yet"),
        ({"candidates": (torch.float64,)}, "candidates: torch.float64 is unknown"),
    ],
)
def test_bad_input_is_one_clear_error(wrong, said: str) -> None:
    with pytest.raises(TuningError, match=said):
        tune(**wrong)


def test_a_base_that_cannot_be_read() -> None:
    with pytest.raises(PolicyError, match="nothing"):
        tune(base="nothing")


def test_an_error_of_the_step_in_float32_is_the_programs_own() -> None:
    def fails(model: nn.Module, batch) -> torch.Tensor:
        raise LookupError("of the program")

    with pytest.raises(LookupError, match="of the program") as error:
        tune(step=fails)
    assert error.value.__notes__ == ["precast.tune: step 1 failed in float32"]


# --- results ---


def test_a_result_is_saved_and_its_policy_loads(tmp_path) -> None:
    case = planted.CASES["overflow"]
    given = planted.workload(case, 1)
    found = tune(given.model, given.step, given.batches, candidates=[case.low])
    path = tmp_path / "tuned.toml"
    found.save(path)
    loaded = precast.Policy.load(path)
    assert loaded == found.policy
    text = path.read_text()
    assert text == found.text
    assert text.startswith("# Found by precast.tune for Sequential")
    assert "float16 is excluded: the loss is nan" in text
    assert len(text.splitlines()) < 30
    assert json.loads(path.with_suffix(".json").read_text())["answer"] == "tuned"
    printed = str(found)
    assert max(map(len, printed.splitlines())) <= 80
    assert all(word in printed for word in ("float32", "default", "tuned", "equal", "planted"))
    assert repr(found) == "<TuningResult: tuned, dtype float16>"
    assert "<table>" in found._repr_html_()
    with precast.attach(given.model, loaded), precast.autocast("cpu", dtype=found.dtype):
        assert given.step(given.model, given.batches[0]).isfinite()


def test_the_policies_of_float32_and_of_the_base_load_too(tmp_path) -> None:
    def spoilt(model: nn.Module, batch) -> torch.Tensor:
        loss = step(model, batch)
        return loss + 0.2 * loss.detach() if in_16_bits() else loss

    for found in (tune(step=spoilt), tune()):
        found.save(tmp_path / f"{found.name}.toml")
        assert precast.Policy.load(tmp_path / f"{found.name}.toml") == found.policy
