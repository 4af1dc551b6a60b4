"""Steps of a program: where they end, their losses, scales and offenders, and memory that does not grow."""

from __future__ import annotations

import gc
import itertools
import math
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import precast
from precast.report.schema import StepData
from precast.running.step_log import StepLog
from precast.running.step_tracker import StepTracker


class Watched:
    """What steps a piece of code had."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.roots: list[nn.Module] = []
        self.steps = StepTracker(self.begun.append, self.roots.append)

    @property
    def kept(self) -> list[StepData]:
        return self.steps.history.steps()


@contextmanager
def watched(seen: Watched | None = None) -> Iterator[Watched]:
    seen = seen or Watched()
    backward = torch.autograd.backward
    with precast.observe(
        lambda e: seen.steps.scaled(e) if isinstance(e, precast.events.StepEvent) else 0
    ):
        seen.steps.start()
        try:
            yield seen
        finally:
            seen.steps.stop()
    assert torch.autograd.backward is backward


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(3, 4)).square().mean()
    return loss


def test_a_step_is_an_optimizers_and_its_loss_what_backward_began_at() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with watched() as seen:
        for _ in range(5):
            loss = loss_of(model)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.loss for step in seen.kept] == losses
    assert [step.step for step in seen.kept] == [0, 1, 2, 3, 4]
    assert seen.begun == [0, 1, 2, 3, 4, 5]
    assert seen.roots == [model] * 5
    assert all(s.seconds is not None and s.seconds > 0 for s in seen.kept)
    assert not any(step.skipped or step.scale for step in seen.kept)


def test_losses_of_several_backward_passes_are_added() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched() as seen:
        first, second, third = (loss_of(model) for _ in range(3))
        first.backward()
        torch.autograd.backward([second, third])
        optimizer.step()
    [step] = seen.kept
    total = first.item() + second.item() + third.item()
    assert step.loss == pytest.approx(total, rel=1e-6)


def test_a_scaled_loss_is_shown_unscaled_and_a_skipped_step_with_its_offenders() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = precast.GradScaler("cpu", init_scale=1024.0, on_diagnosis="ignore")
    losses = []
    with watched() as seen:
        for number in range(4):
            loss = loss_of(model)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            if number == 2:
                model[0].weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [step.loss for step in seen.kept] == pytest.approx(losses, rel=1e-6)
    assert [step.scale for step in seen.kept] == [1024.0, 1024.0, 1024.0, 512.0]
    assert [step.skipped for step in seen.kept] == [False, False, True, False]
    assert seen.kept[2].names == ["group 0, parameter 0"]
    assert seen.steps.history.skipped == 1
    assert seen.begun == [0, 1, 2, 3, 4]


def test_a_fused_optimizer_decides_itself_whether_it_skips() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    scaler = precast.GradScaler("cpu", init_scale=1024.0, on_diagnosis="ignore")
    with watched() as seen:
        for number in range(3):
            scaler.scale(loss_of(model)).backward()
            if number == 1:
                model[0].weight.grad.fill_(math.nan)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [step.skipped for step in seen.kept] == [False, True, False]


def test_optimizers_that_step_on_one_backward_pass_are_one_step() -> None:
    one, two = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (one, two)]
    scaler = precast.GradScaler("cpu", init_scale=2.0)
    with watched() as seen:
        for _ in range(3):
            scaler.scale(loss_of(one) + loss_of(two)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        for optimizer in optimizers:  # as those of a generator and its critic do
            loss_of(one).backward()
            optimizer.step()
    assert [step.scale for step in seen.kept] == [2.0, 2.0, 2.0, None, None]


def test_a_closure_may_run_often_and_its_first_loss_counts() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)
    x, losses = torch.randn(3, 4), []

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        losses.append(loss.item())
        loss.backward()
        return loss.item()

    with watched() as seen:
        firsts = []
        for _ in range(2):
            firsts.append(len(losses))
            optimizer.step(closure)
    assert len(losses) > 4
    assert [step.loss for step in seen.kept] == [losses[first] for first in firsts]


def test_gradients_that_no_backward_pass_made_make_steps_too() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched() as seen:
        for _ in range(3):
            gradients = torch.autograd.grad(loss_of(model), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert [(step.step, step.loss) for step in seen.kept] == [(0, None), (1, None), (2, None)]


def test_backward_passes_inside_of_backward_passes_are_no_losses() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched() as seen:
        x = torch.randn(3, 4, requires_grad=True)
        loss = checkpoint(model, x, use_reentrant=True).square().mean()
        loss.backward()
        optimizer.step()
    assert [step.loss for step in seen.kept] == [loss.item()]


def test_without_training_a_step_is_a_call_from_outside() -> None:
    model = net()
    with watched() as seen, torch.no_grad():
        for _ in range(3):
            model(torch.randn(3, 4))
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
    assert [(step.step, step.loss) for step in seen.kept] == [(i, None) for i in range(4)]
    assert seen.begun == [0, 1, 2, 3, 4]
    assert seen.roots == [model] * 4


def test_calls_that_record_gradients_are_steps_when_no_backward_pass_comes() -> None:
    model, other = net(), net()
    with watched() as seen:
        for _ in range(3):
            other(torch.randn(3, 4))
            model(torch.randn(3, 4))
    assert [step.step for step in seen.kept] == [0, 1, 2]


def test_calls_in_several_threads_are_all_steps() -> None:
    """What is told of steps is told by one thread at a time."""
    inside, together = [], []

    def boundary(number: int) -> None:
        inside.append(number)
        together.append(len(inside))
        time.sleep(0.0005)
        inside.remove(number)

    def serve() -> None:
        with torch.no_grad():
            for _ in range(20):
                model(torch.randn(3, 4))

    seen, model = Watched(), net()
    seen.steps = StepTracker(boundary, seen.roots.append)
    with watched(seen), ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(serve) for _ in range(4)]:
            done.result()
    assert seen.steps.history.count == 80
    assert set(together) == {1}


def test_a_call_that_another_threads_training_overtakes_is_no_step() -> None:
    class Trains(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(train).result()
            return x

    def train() -> None:
        loss_of(model).backward()
        optimizer.step()

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched() as seen, torch.no_grad():
        Trains()(torch.ones(1))
    assert seen.steps.history.count == 1


def test_calls_before_training_are_forgotten() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched() as seen:
        for _ in range(5):
            model(torch.randn(3, 4))
        loss_of(model).backward()
        optimizer.step()
        model(torch.randn(3, 4))
    assert len(seen.kept) == 1
    assert seen.begun == [0, 1, 2, 3, 4, 5, 0, 1]


def test_watching_is_no_operation_of_the_program() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def train() -> list[str]:
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
        scaler = precast.GradScaler("cpu")
        with Names() as mode:
            for _ in range(3):
                scaler.scale(loss_of(model)).backward()
                scaler.step(optimizer)
                scaler.update()
        return mode.names

    alone = train()
    with watched():
        assert train() == alone


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model_has_no_part_in_it(fullgraph: bool) -> None:
    model = net()
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    function = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=fullgraph)
    x = torch.randn(3, 4)
    with watched() as seen, torch.no_grad():
        for _ in range(4):
            assert torch.equal(compiled(x), model(x))
        assert torch.equal(function(x), model(x) + 1)
    assert (
        len(seen.kept) == 9
    )  # the compiled function's own call of a module is no call from outside
    torch.compiler.reset()


# --- what is kept ---


def steps_with(skipped: Any, count: int, limit: int) -> StepLog:
    history = StepLog(limit)
    for number in range(count):
        history.add(StepData(number, skipped=skipped(number)))
    return history


@pytest.mark.parametrize("count", [1, 10, 99, 100, 101, 1000, 12_345])
def test_steps_are_thinned_evenly(count: int) -> None:
    history = steps_with(lambda _: False, count, 100)
    numbers = [step.step for step in history.steps()]
    assert numbers[0] == 0
    assert numbers[-1] == count - 1
    assert min(count, 50) <= len(numbers) <= 101
    gaps = {after - before for before, after in itertools.pairwise(numbers[:-1])}
    assert len(gaps) <= 1
    assert history.count == count


def test_skipped_steps_are_kept_while_there_is_room() -> None:
    history = steps_with(lambda n: n % 500 == 7, 10_000, 100)
    assert [s.step for s in history.steps() if s.skipped] == [500 * i + 7 for i in range(20)]
    history = steps_with(lambda n: n > 5, 10_000, 100)
    skipped = [s.step for s in history.steps() if s.skipped]
    assert skipped[0] == 6
    assert 25 <= len(skipped) <= 51
    assert history.skipped == 9994


def test_a_number_that_is_not_finite_is_none_in_the_document() -> None:
    history = StepLog()
    history.add(StepData(0, loss=math.inf, scale=math.nan))
    [step] = history.steps()
    assert step.loss is None
    assert step.scale is None
    assert history.nonfinite == 1


def test_a_hundred_thousand_steps_need_no_more_memory_than_ten_thousand() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    seen = Watched()
    seen.steps = StepTracker(lambda _: None, lambda _: None)
    with watched(seen):
        begin = 0
        tracemalloc.start()
        try:
            for number in range(100_000):
                if (
                    number % 20 == 0
                ):  # the rest are steps without a loss: what is kept of them is the same
                    parameter.square().sum().backward()
                seen.steps._optimizer_begins(optimizer)
                seen.steps._optimizer_ends(optimizer)
                if number == 10_000:
                    gc.collect()
                    begin = tracemalloc.get_traced_memory()[0]
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - begin
        finally:
            tracemalloc.stop()
    assert seen.steps.history.count == 100_000
    assert len(seen.kept) <= seen.steps.history.limit + 1
    assert (
        grown < 500_000
    )  # bytes: the two thousand steps that are kept; a number a step would be 2 MB
