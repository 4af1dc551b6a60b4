"""monitor: what it says of a model that several threads call at the same time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import precast
from tests.diagnostics.numerics.test_monitor import entries, network, sgd, take

THREADS = 4
CALLS = 8


@pytest.fixture
def _often() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], object]) -> None:
    """Runs them in threads of their own; what one raises is raised here."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result(timeout=60)


class Meeting(nn.Module):
    """Runs `between` in its first call, with a call of the whole model half done."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__()
        self.between: Callable[[], object] | None = between

    def forward(self, x: Tensor) -> Tensor:
        between, self.between = self.between, None
        if between is not None:
            together(between)
        return x * 1.0


@torch.no_grad()
def infer(model: nn.Module) -> None:
    model(torch.randn(6, 8))


def backward(model: nn.Module) -> None:
    model(torch.randn(6, 8)).square().mean().backward()


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("every", [1, 1000])
def test_in_inference_each_call_is_a_step_of_its_own(every: int) -> None:
    model = network()

    def serve() -> None:
        for _ in range(CALLS):
            infer(model)

    with precast.monitor(model, every=every, keep=THREADS * CALLS) as monitor:
        together(*[serve] * THREADS)
    assert monitor.steps == THREADS * CALLS
    found = entries(monitor)
    assert set(found) == {("output", str(k)) for k in range(5)}
    for (_, name), entry in found.items():
        assert entry["elements"] == [6 * (4 if name == "4" else 16)] * -(-monitor.steps // every)
        assert entry["steps"] == sorted(set(entry["steps"]))
    assert [step["step"] for step in monitor.ring] == list(range(THREADS * CALLS))


@pytest.mark.usefixtures("_often")
def test_in_training_batches_of_threads_add_up() -> None:
    model = network()

    def accumulate() -> None:
        for _ in range(CALLS):
            backward(model)

    with precast.monitor(model, every=1) as monitor:
        together(*[accumulate] * THREADS)
        monitor.end_step()
    for (kind, name), entry in entries(monitor).items():
        if kind != "parameter":
            assert entry["elements"] == [THREADS * CALLS * 6 * (4 if name == "4" else 16)]
    assert monitor.ring[0]["worst"]


def test_calls_that_overlap_are_told_apart() -> None:
    model = network()
    with precast.monitor(model, every=1) as monitor:
        model.insert(2, Meeting(lambda: infer(model)))
        infer(model)
    found = entries(monitor)
    for name in "013":
        assert found["output", name]["elements"] == [96, 96]
    assert monitor.steps == 2


def test_the_first_to_overflow_is_that_of_its_own_call() -> None:
    model = network()
    model.insert(2, Meeting(lambda: infer(model)))
    with precast.monitor(model, every=1) as monitor, torch.no_grad():
        model(torch.full((6, 8), torch.inf))  # the other call, in its midst, is fine and ends first
    assert [step["first"] and step["first"]["name"] for step in monitor.ring] == [None, ""]
    assert monitor.first is not None
    assert monitor.first.step == 1


def test_a_call_whose_step_another_thread_ends_goes_on_in_the_next() -> None:
    model = network()
    optimizer = sgd(model)
    monitor = precast.monitor(model, every=1)
    take(model, optimizer)
    model.insert(2, Meeting(lambda: (take(model, optimizer), take(model, optimizer))))
    with monitor:
        backward(model)
        monitor.end_step()
    outputs = {
        name: e["elements"] for (kind, name), e in entries(monitor).items() if kind == "output"
    }
    assert [sum(outputs[name]) for name in "013"] == [4 * 96] * 3
    assert [sum(outputs[name]) for name in "4"] == [4 * 24]


def test_a_call_that_fails_at_once_takes_nothing_from_others() -> None:
    model = network()

    def fails() -> None:
        with pytest.raises(TypeError):
            model()

    model.insert(0, Meeting(fails))
    with precast.monitor(model, every=1) as monitor:
        backward(model)
        monitor.end_step()
    outputs = [e["elements"] for (kind, _), e in entries(monitor).items() if kind == "output"]
    assert sum(map(sum, outputs)) == 6 * (8 + 16 * 4 + 4)


def test_a_process_that_is_forked_off_waits_for_no_thread_of_its_parent() -> None:
    model = network()
    monitor = precast.monitor(model)
    has_turn, may_go = threading.Event(), threading.Event()

    def holds() -> None:
        with monitor._watcher.mutex.lock:
            has_turn.set()
            may_go.wait(60)

    holder = threading.Thread(target=holds)
    holder.start()
    has_turn.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork among threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        infer(model)
        os._exit(0 if monitor.steps == 1 else 1)
    may_go.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    monitor.detach()
