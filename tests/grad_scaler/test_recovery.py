"""A diagnosis is for what no lower scale and no next batch mends: runs that recover are not stopped, others are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import precast
from precast.errors import BrokenModelError, ScalerError
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import KINDS, bits, make_parameter, sgd

Tensor = torch.Tensor
RUNS, ITERATIONS, AT_THE_END = 200, 90, 10


# --- runs in float16 that recover by themselves ---


@dataclass
class Run:
    """A small model in float16, its batches, and the settings of a scaler."""

    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    bad: dict[int, float] = field(default_factory=dict)
    """What a batch is multiplied by, by its number."""
    factor: float = 1.0
    sums: bool = False
    """Whether the loss is a sum in float16, which may overflow."""
    kind: str = "sgd"

    def train(self, scaler: Any) -> list[bool]:
        """Which iterations took their step; all of them are run."""
        torch.manual_seed(self.seed)
        weights = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 2))
        optimizer = KINDS[self.kind](list(weights))
        optimizer.param_groups[0]["lr"] = 1e-7 / self.factor if "sgd" in self.kind else 1e-5
        took = []
        for number in range(ITERATIONS):
            batch = torch.randn(8, 4) * self.bad.get(number, 1.0)
            before = [w.detach().clone() for w in weights]
            optimizer.zero_grad()
            output = (batch.half() @ weights[0].half()).relu() @ weights[1].half()
            loss = output.square().sum() * 100 if self.sums else output.float().square().mean()
            scaler.scale(loss * self.factor).backward()
            scaler.step(optimizer)
            scaler.update()
            took.append(not all(map(torch.equal, before, weights)))
        return took


def drawn(draw: random.Random) -> Run:
    """Any mixture of: a scale far too high, one that falls slowly, bad batches in a row, losses of any size."""
    run = Run(seed=draw.randrange(2**31))
    run.kind = draw.choice(["sgd", "foreach adam", "fused adam"])
    run.sums = draw.random() < 0.3
    run.factor = 1.0 if run.sums else 10.0 ** draw.uniform(-6, 9)
    backoff, excess = draw.choice([(0.5, 30), (0.25, 40), (0.9, 8), (0.95, 5)])
    fits = 2.0**11 / run.factor
    run.settings = {"init_scale": min(fits * 2.0 ** draw.uniform(0, excess), 2.0**100)}
    run.settings["backoff_factor"] = backoff
    run.settings["growth_interval"] = draw.choice([1, 5, 2000])
    start = 0
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        start = draw.choice([0, draw.randrange(ITERATIONS - 40)])
        bad = draw.choice([math.nan, math.inf, 1e6])
        run.bad |= {start + place: bad for place in range(draw.randrange(1, 8))}
    if draw.random() < 0.3:
        run.ours = {"min_scale": min(fits * 2.0**-10, run.settings["init_scale"])}
    elif draw.random() < 0.3 and backoff == 0.5:
        run.ours = {"init_scale": "auto"}
    return run


@pytest.mark.filterwarnings("ignore:.*overflow:RuntimeWarning")
def test_no_run_that_recovers_by_itself_is_stopped() -> None:
    """PyTorch's scaler is the judge of that: it takes steps again at the end."""
    draw = random.Random(int(torch.randint(2**62, ())))
    compared = recovered = 0
    while recovered < RUNS:
        run = drawn(draw)
        theirs = run.train(torch.amp.GradScaler("cpu", **run.settings))
        if not any(theirs[-AT_THE_END:]):
            continue
        recovered += 1
        ours = run.train(GradScaler("cpu", **{**run.settings, **run.ours}))
        assert any(ours[-AT_THE_END:]), run
        if not run.ours:
            assert ours == theirs, run
            compared += 1
    assert compared > RUNS / 4


def iterate(scaler: Any, parameter: Tensor, optimizer: Any, gradient: float, loss: float) -> bool:
    """An iteration with this gradient before it is scaled; whether it took its step."""
    before = bits(parameter)
    optimizer.zero_grad()
    scaler.scale(torch.full((), loss))
    parameter.grad = torch.full_like(parameter, gradient * scaler.get_scale()).half().float()
    scaler.step(optimizer)
    scaler.update()
    return before != bits(parameter)


def test_three_bad_first_batches_leave_the_search_for_the_first_scale_running() -> None:
    parameter = make_parameter()
    scaler, optimizer = GradScaler("cpu", "auto"), sgd(parameter)
    for turn in range(12):
        bad = math.nan if turn < 3 else 1.0
        took = iterate(scaler, parameter, optimizer, bad, bad)
    assert took
    assert scaler.get_scale() > 2.0**10


@pytest.mark.parametrize(("backoff", "steps"), [(0.9, 247), (0.95, 191)])
def test_a_scale_that_falls_slowly_may_take_its_time(backoff: float, steps: int) -> None:
    counts = []
    for kind in (torch.amp.GradScaler, GradScaler):
        parameter = make_parameter()
        scaler, optimizer = kind("cpu", 2.0**24, backoff_factor=backoff), sgd(parameter)
        counts.append(sum(iterate(scaler, parameter, optimizer, 1.0, 1.0) for _ in range(300)))
    assert counts[0] == counts[1] == steps


@pytest.mark.parametrize("bad", [1, 5, 39])
def test_bad_batches_at_a_floor_that_the_user_set_are_skipped(bad: int) -> None:
    parameter = make_parameter()
    scaler, optimizer = GradScaler("cpu", 8.0, min_scale=8.0), sgd(parameter)
    for _ in range(bad):
        assert not iterate(scaler, parameter, optimizer, math.inf, 1.0)
    assert iterate(scaler, parameter, optimizer, 1.0, 1.0)
    for _ in range(39):
        iterate(scaler, parameter, optimizer, math.inf, 1.0)
    with pytest.raises(BrokenModelError, match="not fallen in 40 skipped iterations"):
        iterate(scaler, parameter, optimizer, math.inf, 1.0)


def test_a_float16_loss_that_overflows_while_its_gradient_is_finite_trains_on() -> None:
    steps = []
    for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
        weight = nn.Parameter(torch.full((4,), 100.0))
        optimizer = torch.optim.SGD([weight], lr=1e-6)
        took = 0
        for _ in range(60):
            before = bits(weight)
            optimizer.zero_grad()
            loss = (torch.full((64, 4), 10.0).half() * weight.half()).sum() * 2
            assert loss.isinf()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            took += before != bits(weight)
        steps.append(took)
    assert steps[0] == steps[1] > 30


# --- closures whose trial points overflow ---


class Backtracking(torch.optim.Optimizer):
    """Gradient descent that halves its step until the loss has fallen, trial points with gradients or without."""

    def __init__(self, parameters: Any, *, gradients: bool) -> None:
        super().__init__(parameters, {})
        self.gradients = gradients

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            first = float(closure().detach())
        (parameter,) = self.param_groups[0]["params"]
        start, gradient = parameter.detach().clone(), parameter.grad.clone()
        rate = 1024.0
        for _ in range(40):
            with torch.no_grad():
                parameter.copy_(start - rate * gradient)
            with torch.set_grad_enabled(self.gradients):
                if float(closure().detach()) <= 0.9 * first or first < 1e-3:
                    return first
            rate /= 2
        raise AssertionError("no rate was small enough")


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_line_search_whose_trial_points_overflow_converges(gradients: bool, scaled: bool) -> None:
    parameter = nn.Parameter(torch.full((3,), 4.0))
    optimizer = Backtracking([parameter], gradients=gradients)
    scaler = GradScaler("cpu", init_scale=256.0, enabled=scaled)

    def closure() -> Tensor:
        loss = parameter.half().pow(4).sum().float() if scaled else parameter.pow(4).sum()
        if loss.requires_grad:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        return loss

    for _ in range(60):
        scaler.step(optimizer, closure)
        scaler.update()
    assert parameter.abs().max() < 0.5


class Takes(torch.optim.Optimizer):
    """Calls its closure a second time and steps on whatever is there."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-1.0)
        return loss


def test_a_step_that_took_a_trial_point_that_is_not_finite_is_undone() -> None:
    parameter = make_parameter()
    before, calls = bits(parameter), 0
    optimizer, scaler = Takes([parameter], {}), GradScaler("cpu")

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = parameter.sum() * (math.inf if calls == 2 else 1.0)
        scaler.scale(loss).backward()
        return loss

    assert scaler.step(optimizer, closure) is None
    scaler.update()
    assert bits(parameter) == before
    assert scaler.get_scale() == 2.0**15
    scaler.step(optimizer, closure)
    scaler.update()
    assert bits(parameter) != before
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_closure_that_asks_for_the_loss_alone_leaves_its_gradient_divided_once(
    by_hand: bool,
) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler, calls = Takes([parameter], {}), GradScaler("cpu"), 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        loss = parameter.sum() * 0.2
        if calls == 1 and by_hand:
            parameter.grad = torch.autograd.grad(scaler.scale(loss), parameter)[0].clone()
        elif calls == 1:
            scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert parameter.tolist() == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("zeroes", [None, "to none", "in place", "assigned"])
def test_gradients_of_a_closure_are_those_of_its_last_call(zeroes: str | None, passes: int) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = Takes([parameter], {}), GradScaler("cpu")

    def closure() -> Tensor:
        if zeroes in {"to none", "in place"}:
            optimizer.zero_grad(set_to_none=zeroes == "to none")
        elif zeroes == "assigned":
            parameter.grad = torch.zeros(2)
        for _ in range(passes):
            loss = parameter.sum() * 0.2
            scaler.scale(loss).backward()
        return loss

    if zeroes is None:
        with pytest.raises(ScalerError, match="added scaled gradients to those of its last call"):
            scaler.step(optimizer, closure)
        assert parameter.tolist() == [1.0, 1.0]
    else:
        scaler.step(optimizer, closure)
        assert parameter.tolist() == pytest.approx([1.0 - 0.2 * passes] * 2)


# --- runs that are broken ---


@pytest.mark.parametrize("init", [2.0**16, "auto", 2.0**100])
@pytest.mark.parametrize("backoff", [0.5, 0.95])
@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
def test_weights_that_are_not_finite_are_told_after_three_iterations(
    kind: str, backoff: float, init: Any
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[1].weight[0, 1] = math.nan
    optimizer = KINDS[kind](list(model.parameters()))
    scaler = GradScaler("cpu", init, backoff_factor=backoff)

    def iteration() -> None:
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 3)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(2):
        iteration()
    with pytest.raises(
        BrokenModelError, match="hold infinity or NaN: `group 0, parameter 2`"
    ) as caught:
        iteration()
    assert caught.value.diagnosis.reason == "weights"


def test_weights_that_nothing_uses_may_be_anything() -> None:
    """Where the loss is finite they are not what overflows."""
    parameter, unused = make_parameter(), nn.Parameter(torch.full((2,), math.nan))
    optimizer = torch.optim.SGD([parameter, unused], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**40)
    took = [iterate(scaler, parameter, optimizer, 1.0, 1.0) for _ in range(60)]
    assert took.count(False) == 25


@pytest.mark.parametrize(
    ("settings", "gradient", "loss", "reason", "told"),
    [
        ({}, math.nan, math.nan, "loss", 40),
        ({}, math.nan, math.inf, "loss", 40),
        ({"init_scale": "auto"}, math.nan, math.nan, "loss", 40),
        ({"min_scale": 1024.0}, math.nan, math.nan, "loss", 46),
        ({"max_nonfinite_losses": 1}, math.nan, math.nan, "loss", 2),
        ({}, math.nan, 1.0, "floor", 104),
        ({"init_scale": "auto"}, math.inf, 1.0, "floor", 45),
        ({"backoff_factor": 0.95, "init_scale": 4.0, "min_scale": 1.0}, math.nan, 1.0, "floor", 68),
        ({"max_consecutive_skips": 5}, math.inf, 1.0, "skips", 5),
    ],
)
def test_what_nothing_mends_is_told(
    settings: dict[str, Any], gradient: float, loss: float, reason: str, told: int
) -> None:
    parameter = make_parameter()
    scaler, optimizer = GradScaler("cpu", **settings), sgd(parameter)
    for _ in range(told - 1):
        iterate(scaler, parameter, optimizer, gradient, loss)
    scale = scaler.get_scale()
    with pytest.raises(BrokenModelError) as caught:
        iterate(scaler, parameter, optimizer, gradient, loss)
    assert caught.value.diagnosis.reason == reason
    assert scaler.get_scale() == scale


def test_a_scale_that_the_user_keeps_still_is_told_as_well() -> None:
    parameter = make_parameter()
    scaler, optimizer = GradScaler("cpu", 64.0), sgd(parameter)
    scaler.set_backoff_factor(1.0)
    for _ in range(39):
        iterate(scaler, parameter, optimizer, math.inf, 1.0)
    with pytest.raises(BrokenModelError, match="it is 64, and min_scale is") as caught:
        iterate(scaler, parameter, optimizer, math.inf, 1.0)
    assert caught.value.diagnosis.reason == "floor"


# --- what a diagnosis says ---


def strict() -> GradScaler:
    return GradScaler("cpu", max_nonfinite_losses=0)


def broken_by_one_of_two(scaler: GradScaler, optimizers: list[Any], parameters: list[Any]) -> str:
    """The message after an iteration in which the second of two optimizers gets NaN."""
    scaler.scale(torch.full((), math.nan))
    for parameter, gradient in zip(parameters, (1.0, math.nan), strict=True):
        parameter.grad = torch.full_like(parameter, gradient)
    for optimizer in optimizers:
        scaler.step(optimizer)
    with pytest.raises(BrokenModelError) as caught:
        scaler.update()
    return str(caught.value)


def test_a_verdict_says_that_another_optimizer_took_its_step() -> None:
    parameters = [make_parameter(), make_parameter()]
    message = broken_by_one_of_two(strict(), [sgd(p) for p in parameters], parameters)
    assert "No parameter was changed" not in message
    assert "skipped step changed no parameter; optimizer 0 of the same iteration took" in message


def test_models_with_equal_names_are_told_apart() -> None:
    models = [nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)]
    attachments = [precast.attach(model, hold=False) for model in models]
    weights = [model.weight for model in models]
    message = broken_by_one_of_two(strict(), [sgd(w) for w in weights], weights)
    assert "gradients of `optimizer 1: weight` were" in message
    both = torch.optim.SGD(weights, lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    weights[0].grad, weights[1].grad = torch.ones(1, 3), torch.full((1, 3), math.inf)
    scaler.step(both)
    event = scaler.last_step(both)
    assert event is not None
    assert event.names == ("weight (group 0, parameter 1)",)
    for attachment in attachments:
        attachment.detach()
