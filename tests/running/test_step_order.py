"""`precast run` sees gradients that are clipped while they are scaled, and backward passes inside a region."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.running import step_order
from precast.running.run_observer import RunObserver
from precast.running.step_order import BACKWARD_IN_REGION, SCALED_CLIPPING
from tests.support.installed import uninstall_all
from tests.support.reports import document_of, summary_of

Scaler = Callable[..., torch.amp.GradScaler]
SCALERS = [torch.amp.GradScaler, precast.GradScaler]


class Program:
    """Two small models with an optimizer each, and one scaler for both."""

    def __init__(self, scaler: Scaler = torch.amp.GradScaler, **settings: Any) -> None:
        self.models = [nn.Linear(4, 4) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in self.models]
        self.scaler = scaler("cpu", **{"init_scale": 1024.0, **settings})

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.models[0].parameters())

    def loss(self, number: int = 0) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            output: Tensor = self.models[number](torch.ones(3, 4))
            return output.float().square().mean()

    def backward(self, number: int = 0) -> None:
        self.optimizers[number].zero_grad()
        self.scaler.scale(self.loss(number)).backward()


def observed(program: Callable[[], object]) -> Any:
    """Return the document of a program that is watched in this process."""
    watch = RunObserver("torch", (100, 101), health=False)
    watch.start()
    try:
        program()
    finally:
        watch.stop()
        uninstall_all()
    return document_of(watch, "torch")


def repeated(step: Callable[[Program], None], program: Program) -> None:
    for _ in range(3):
        step(program)


def kinds(document: Any) -> list[str]:
    return [finding["kind"] for finding in document["findings"]]


def clip_then_step(it: Program) -> None:
    it.backward()
    nn.utils.clip_grad_norm_(it.parameters, 1.0)
    it.scaler.step(it.optimizers[0])
    it.scaler.update()


def clip_then_unscale(it: Program) -> None:
    it.backward()
    torch.nn.utils.clip_grad.clip_grad_value_(it.models[0].parameters(), clip_value=1.0)
    it.scaler.unscale_(it.optimizers[0])
    it.scaler.step(it.optimizers[0])
    it.scaler.update()


def clip_the_second_of_two(it: Program) -> None:
    it.backward(0)
    it.scaler.unscale_(it.optimizers[0])
    nn.utils.clip_grad_norm_(it.parameters, 1.0)
    it.scaler.step(it.optimizers[0])
    it.backward(1)
    nn.utils.clip_grad_norm_(iter(it.models[1].parameters()), 1.0)
    it.scaler.step(it.optimizers[1])
    it.scaler.update()


def clip_one_parameter(it: Program) -> None:
    it.backward()
    nn.utils.clip_grad_norm_(it.models[0].weight, max_norm=1.0)
    it.scaler.step(it.optimizers[0])
    it.scaler.update()


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(
    "step", [clip_then_step, clip_then_unscale, clip_the_second_of_two, clip_one_parameter]
)
def test_clipping_of_scaled_gradients_is_a_finding_with_its_line(
    scaler: Scaler, step: Callable[[Program], None]
) -> None:
    program = Program(scaler)
    document = observed(lambda: repeated(step, program))
    [finding] = document["findings"]
    assert (finding["kind"], finding["severity"]) == (SCALED_CLIPPING, "error")
    assert finding["where"]["source"].endswith(f" in {step.__name__}")
    assert "(1024), in 3 " in finding["title"] or "(1024), in 6 " in finding["title"]
    assert "a limit of 1 acts as 0.00098" in finding["suggestion"]
    summary = summary_of(document)
    assert (summary["level"], summary["headline"]) == ("warning", finding["title"] + ".")
    assert "scaler.unscale_(optimizer)" in summary["first"]["text"]


def unscale_then_clip(it: Program) -> None:
    it.backward()
    it.scaler.unscale_(it.optimizers[0])
    nn.utils.clip_grad_norm_(it.parameters, 1.0)
    it.scaler.step(it.optimizers[0])
    it.scaler.update()


def clip_by_a_scaled_limit(it: Program) -> None:
    it.backward()
    nn.utils.clip_grad_norm_(it.parameters, 0.1 * it.scaler.get_scale())
    it.scaler.step(it.optimizers[0])
    it.scaler.update()


def measure_the_norm(it: Program) -> None:
    it.backward()
    nn.utils.clip_grad_norm_(it.parameters, math.inf)
    it.scaler.step(it.optimizers[0])
    it.scaler.update()


def clip_before_backward(it: Program) -> None:
    nn.utils.clip_grad_norm_(it.parameters, 1.0)
    it.backward()
    it.scaler.step(it.optimizers[0])
    it.scaler.update()


def clip_without_a_scaler(it: Program) -> None:
    it.optimizers[0].zero_grad()
    it.loss().backward()
    nn.utils.clip_grad_norm_(it.parameters, 1.0)
    it.optimizers[0].step()


def clip_other_gradients(it: Program) -> None:
    it.loss(1).backward()
    it.backward(0)
    nn.utils.clip_grad_norm_(it.models[1].parameters(), 1.0)
    it.scaler.step(it.optimizers[0])
    it.scaler.update()
    it.optimizers[1].step()


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(
    "step",
    [
        unscale_then_clip,
        clip_by_a_scaled_limit,
        measure_the_norm,
        clip_before_backward,
        clip_without_a_scaler,
        clip_other_gradients,
    ],
)
def test_other_clipping_is_no_finding(scaler: Scaler, step: Callable[[Program], None]) -> None:
    program = Program(scaler)
    assert kinds(observed(lambda: repeated(step, program))) == []


@pytest.mark.parametrize("settings", [{"enabled": False}, {"init_scale": 1.0}])
def test_gradients_that_no_scale_changes_may_be_clipped(settings: dict[str, Any]) -> None:
    assert kinds(observed(lambda: clip_then_step(Program(**settings)))) == []


@pytest.mark.trial("UNSCALE_BEFORE_CLIPPING")
@pytest.mark.parametrize("scaler", SCALERS)
def test_clipping_after_unscale_has_the_limit_that_was_named(scaler: Scaler) -> None:
    norms = {}
    for step in (clip_then_step, unscale_then_clip):
        torch.manual_seed(0)
        program = Program(scaler)
        with torch.no_grad():
            program.models[0].weight += 10
        before = nn.utils.parameters_to_vector(program.parameters).detach()
        document = observed(functools.partial(step, program))
        after = nn.utils.parameters_to_vector(program.parameters).detach()
        norms[step] = float((after - before).norm()) / 0.1  # the learning rate
        assert bool(document["findings"]) == (step is clip_then_step)
    assert norms[clip_then_step] == pytest.approx(1 / 1024, rel=0.01)
    assert norms[unscale_then_clip] == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("broken", ["_Iteration", "program_line", "_line_of"])
def test_an_error_of_the_watcher_does_not_reach_the_program(
    monkeypatch: pytest.MonkeyPatch, scaler: Scaler, broken: str
) -> None:
    def fail(*_: object) -> NoReturn:
        raise ValueError("broken")

    monkeypatch.setattr(step_order, broken, fail)
    program = Program(scaler)
    before = program.parameters[0].detach().clone()
    assert kinds(observed(lambda: repeated(clip_then_step, program))) == []
    assert not torch.equal(program.parameters[0], before)


def test_a_watched_program_computes_the_same() -> None:
    results = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        program = Program()
        run = functools.partial(repeated, clip_the_second_of_two, program)
        if is_watched:
            observed(run)
        else:
            run()
        results.append([p.detach() for each in program.models for p in each.parameters()])
    assert all(map(torch.equal, *results))


def test_a_generator_without_parameters_is_warned_of_as_without_precast() -> None:
    program = Program()

    def clip() -> None:
        program.backward()
        nn.utils.clip_grad_norm_((each for each in list[Tensor]()), 1.0)

    with pytest.warns(UserWarning, match="`parameters` is an empty generator"):
        observed(clip)


@pytest.mark.parametrize("region", [torch.autocast, precast.autocast])
def test_a_backward_inside_a_region_is_a_finding(region: Callable[..., Any]) -> None:
    model = nn.Linear(4, 4)

    def program() -> None:
        for _ in range(2):
            with region("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(3, 4)).float().mean()
                loss.backward()
            torch.optim.SGD(model.parameters(), 0.1).step()

    document = observed(program)
    [finding] = document["findings"]
    assert (finding["kind"], finding["severity"]) == (BACKWARD_IN_REGION, "warning")
    assert finding["where"]["source"].endswith(" in program")
    assert "in 2 steps" in finding["title"]
    assert summary_of(document)["level"] == "warning"


class Product(torch.autograd.Function):
    """A product of matrices whose forward is in float32 on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch.autocast("cpu", enabled=False):
            return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, x.T @ gradients[0]


@pytest.mark.trial("BACKWARD_OUTSIDE")
@pytest.mark.parametrize("is_inside", [True, False])
def test_backward_outside_the_region_is_in_float32(is_inside: bool) -> None:
    x = torch.full((1, 4), 1 + 2**-12)  # bfloat16 rounds it to 1
    weight = torch.zeros(4, 4, requires_grad=True)

    def program() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = Product.apply(x, weight).sum()
            if is_inside:
                loss.backward()
        if not is_inside:
            loss.backward()

    assert bool(kinds(observed(program))) == is_inside
    assert weight.grad is not None
    assert torch.equal(weight.grad, x.T.expand(4, 4)) != is_inside


def test_a_backward_where_autocast_is_off_is_no_finding() -> None:
    model = nn.Linear(4, 4)

    def program() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(3, 4)).float().mean()
            with torch.autocast("cpu", enabled=False):
                loss.backward()
        model(torch.ones(3, 4)).sum().backward()

    assert kinds(observed(program)) == []
