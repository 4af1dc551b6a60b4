"""One moment has one number: in the run's report, its trace, monitors, a scaler's events and its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import precast
from benchmarks.cuda_graphs import graph_of
from precast._internal import events
from precast.errors import BrokenModelError
from precast.running.run_observer import RunObserver
from precast.running.step_tracker import StepTracker
from tests.support.installed import uninstall_all
from tests.support.reports import document_of

ITERATIONS, MICRO_BATCHES, BAD = 6, 2, 3


class Gan:
    """Two networks, two optimizers, one scaler; gradients are accumulated, and one iteration overflows in one network.

    The critic takes the even steps of the process, and the generator the odd ones.
    """

    def __init__(self, scaler: Any, bad: str) -> None:
        self.scaler, self.bad = scaler, bad
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.events: list[Any] = []
        self.error: BrokenModelError | None = None
        self.monitors: dict[str, precast.Monitor] = {}

    def __call__(self) -> None:
        self.monitors = {
            "critic": precast.monitor(self.critic),
            "generator": precast.monitor(self.generator),
        }
        optimizers = {
            "critic": torch.optim.SGD(self.critic.parameters(), lr=0.01),
            "generator": torch.optim.SGD(self.generator.parameters(), lr=0.01),
        }
        with precast.observe(self.events.append):
            for iteration in range(ITERATIONS):
                for name, optimizer in optimizers.items():
                    optimizer.zero_grad()
                    self.accumulate(name, is_bad=iteration == BAD and name == self.bad)
                    self.scaler.step(optimizer)
                try:
                    self.scaler.update()
                except BrokenModelError as error:
                    self.error = error

    def accumulate(self, name: str, *, is_bad: bool) -> None:
        for _ in range(MICRO_BATCHES):
            size = float("inf") if is_bad else 1.0
            if name == "critic":
                loss = self.critic(torch.randn(3, 8) * size).mean()
            else:
                loss = self.generator(torch.randn(3, 4) * size).square().mean()
            self.scaler.scale(loss).backward()


def run_of(program: Callable[[], None], steps: tuple[int, int]) -> Any:
    """The document of a program that runs in this process as `precast run` would watch it."""
    watch = RunObserver("torch", steps, health=True)
    watch.start()
    try:
        program()
    finally:
        watch.stop()
        uninstall_all()
    return document_of(watch, "torch")


def precasts() -> Any:
    return precast.GradScaler("cpu", init_scale=4.0, max_consecutive_skips=1)


def pytorchs() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=4.0)


@pytest.mark.parametrize(("bad", "number"), [("critic", 2 * BAD), ("generator", 2 * BAD + 1)])
@pytest.mark.parametrize("scaler", [precasts, pytorchs])
def test_all_say_the_same_number_of_a_step(
    bad: str, number: int, scaler: Callable[[], Any]
) -> None:
    gan = Gan(scaler(), bad)
    made = run_of(gan, (number, number + 1))

    skipped = [step for step in made["steps"] if step["skipped"]]
    assert [step["step"] for step in skipped] == [number]
    assert made["run"]["steps"] == 2 * ITERATIONS
    assert skipped[0]["first"]["step"] == number

    assert made["run"]["traced"] == [number, number + 1]
    assert made["trace"]["totals"]["steps"] == 1
    first = gan.monitors[bad].first
    assert first is not None
    assert first.step == number
    assert f"In step {number}" in first.message
    [entry] = [entry for entry in gan.monitors[bad].ring if entry["skipped"]]
    assert entry["step"] == number


@pytest.mark.parametrize(("bad", "number"), [("critic", 2 * BAD), ("generator", 2 * BAD + 1)])
def test_a_broken_run_is_told_of_by_the_same_number(bad: str, number: int) -> None:
    gan = Gan(precasts(), bad)
    made = run_of(gan, (0, 1))
    assert gan.error is not None
    assert f"step {number} was skipped" in str(gan.error)
    assert f"In step {number}" in str(gan.error)
    [diagnosis] = [
        event for event in gan.events if isinstance(event, precast.events.ScalerDiagnosis)
    ]
    assert diagnosis.step == number
    assert diagnosis.first is not None
    assert diagnosis.first.step == number
    assert [diagnosis["step"] for diagnosis in made["diagnoses"]] == [number]
    steps = [event for event in gan.events if isinstance(event, precast.events.StepEvent)]
    assert [event.step for event in steps] == list(range(2 * ITERATIONS))
    assert [event.step for event in steps if event.skipped] == [number]


def test_optimizers_that_share_backward_passes_share_a_step() -> None:
    first, second = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (first, second)]
    scaler = precasts()
    events: list[Any] = []

    def program() -> None:
        with precast.observe(events.append):
            for _ in range(3):
                scaler.scale(second(first(torch.randn(3, 4))).mean()).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()

    made = run_of(program, (0, 1))
    assert made["run"]["steps"] == 3
    steps = [event.step for event in events if isinstance(event, precast.events.StepEvent)]
    assert steps == [0, 0, 1, 1, 2, 2]


def test_without_a_run_a_scaler_counts_its_iterations() -> None:
    assert not events.step_trackers
    gan = Gan(precasts(), "critic")
    gan()
    steps = [event.step for event in gan.events if isinstance(event, precast.events.StepEvent)]
    assert steps == [each for iteration in range(ITERATIONS) for each in (iteration, iteration)]
    first = gan.monitors["critic"].first
    assert first is not None
    assert first.step == BAD
    assert gan.error is not None
    assert f"iteration {BAD} was skipped" in str(gan.error)


@pytest.mark.gpu
def test_an_iteration_that_is_captured_has_no_loss() -> None:
    """It is not run, and reading a loss of it, or an event, would end the capture."""
    tracker = StepTracker(lambda _number: None, lambda _model: None)
    model, x = torch.nn.Linear(8, 8, device="cuda"), torch.ones(2, 8, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=True, capturable=True)

    def iteration() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).sum().backward()
        optimizer.step()

    tracker.start()
    graph_of(iteration).replay()
    tracker.stop()
    assert not tracker.failures.total
    assert [step.loss is None for step in tracker.history.steps()] == [False] * 3 + [True]
