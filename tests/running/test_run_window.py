"""What is traced of a run: the steps that were asked for, from where an optimizer has stepped; the rest is counted."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import precast
from precast.running.run_observer import RunObserver
from precast.running.step_tracker import StepTracker
from precast.running.trace_window import TraceWindow
from tests.support.installed import uninstall_all


def seen_of(begin: int, end: int, steps: int, calls_before: int = 0) -> TraceWindow:
    """Traces a program that trains for some steps, perhaps after calls that look like inference."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    window = TraceWindow(begin, end, lambda: model)
    watched = StepTracker(window.begins, lambda _: None)
    window.start()
    watched.start()
    try:
        for _ in range(calls_before):
            with torch.no_grad(), torch.autocast("cpu"):
                model(torch.randn(3, 4))
        for _ in range(steps):
            with torch.autocast("cpu"):
                loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        watched.stop()
        window.stop()
    return window


@pytest.mark.parametrize(
    ("begin", "end", "steps", "traced"),
    [(2, 5, 6, [2, 5]), (0, 1, 3, [0, 1]), (1, 9, 3, [1, 4]), (7, 9, 3, None), (2, 3, 3, [2, 3])],
)
def test_the_steps_that_were_asked_for_are_traced(
    begin: int, end: int, steps: int, traced: list[int] | None
) -> None:
    window = seen_of(begin, end, steps)
    assert window.traced == traced
    [count] = window.counts()
    assert (count.op, count.rule, count.calls) == ("linear", "lower", steps)
    found = window.data()
    if traced is None:
        assert found is None
    else:
        assert found is not None
        expected = min(end, steps) - begin
        assert found.totals.steps == expected
        linear = [row for row in found.rows if row.op == "linear" and row.rule]
        assert sum(row.calls for row in linear) == expected
        assert {row.module for row in linear} == {""}


def test_what_was_traced_before_training_is_forgotten() -> None:
    window = seen_of(2, 3, 4, calls_before=5)
    found = window.data()
    assert found is not None
    assert found.totals.steps == 1
    assert any(row.phase == "backward" for row in found.rows)
    assert window.counts()[0].calls == 9


def test_steps_of_other_threads_open_nothing_and_are_counted() -> None:
    window = TraceWindow(1, 2, lambda: None)
    window.start()
    thread = threading.Thread(target=window.begins, args=(1,))
    thread.start()
    thread.join()
    window.stop()
    assert window.traced is None
    assert window.elsewhere == 1


@pytest.mark.parametrize("named", [True, False])
def test_a_compiled_model_is_traced_under_the_names_of_what_it_wraps(named: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(3, 4))
    with precast.trace(model if named else None) as seen, precast.autocast("cpu"):
        compiled(torch.randn(3, 4))
    rows = [row for row in seen.rows if row.op == "linear"]
    assert sum(row.calls for row in rows) == 1
    torch.compiler.reset()


def test_a_module_that_torchscript_traces_is_the_same_as_ever() -> None:
    watch = RunObserver("torch", (2, 5), health=False)
    watch.start()
    try:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4)
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))
    finally:
        watch.stop()
        uninstall_all()
