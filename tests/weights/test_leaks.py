"""Regions keep nothing: no model, no graph, no copy, no memory."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import precast
from precast.engine import registration
from precast.engine.thread_state import regions
from precast.policy.policy import Policy
from tests.support.casts import Casts


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


def test_a_model_its_graph_and_its_copies_go_when_the_region_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Casts(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with precast.autocast("cpu"):
        loss = model(x).float().sum()
        with torch.no_grad():
            model(x)
            F.linear(x, model[0].weight.t())
        loss.backward()
    gone = [weakref.ref(t) for t in (model, loss, *model.parameters())]
    del model, loss
    assert len(made) == 4
    assert made.alive() == 0
    gc.collect()
    assert [thing() for thing in gone] == [None] * 6


def test_an_error_in_a_region_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Casts(monkeypatch)
    weight = Parameter(torch.randn(4, 4))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="size mismatch"), precast.autocast("cpu"):
            F.linear(torch.randn(2, 4), weight) @ torch.randn(3)
    assert len(made) == 3
    gc.collect()
    assert made.alive() == 0


def test_an_open_region_keeps_no_frozen_model() -> None:
    x = torch.randn(2, 4)
    gone = []
    with precast.autocast("cpu"):
        for _ in range(5):
            model = nn.Linear(4, 4).requires_grad_(False)
            model(x)
            F.linear(x, model.weight.t())
            gone.append(weakref.ref(model.weight))
            del model
        gc.collect()
        assert [weight() for weight in gone] == [None] * 5
        assert len(regions.cache) == 0


def test_of_weights_that_are_gone_nothing_is_kept_in_later_regions() -> None:
    """By an attachment, whose entries outlive regions; without one none does."""
    x, cache = torch.randn(2, 256), regions.cache
    for attached in (False, True):
        for _ in range(5):
            model = nn.Linear(256, 256)
            if attached:
                precast.attach(model)
            for dtype in (torch.bfloat16, torch.float16):
                with precast.autocast("cpu", dtype=dtype):
                    model(x)
                    with torch.no_grad():
                        model(x)
        del model
        gc.collect()
        assert len(cache) == 0
        assert not cache._storages


def test_an_open_region_keeps_one_copy_of_a_weight_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Casts(monkeypatch)
    model, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with precast.autocast("cpu"):
        for _ in range(10):
            model(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(made) == 10
        assert made.alive() == 1


def test_a_thread_takes_its_copies_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Casts(monkeypatch)
    model = nn.Linear(4, 4)

    def ends_without_leaving() -> None:
        precast.autocast("cpu").__enter__()
        with torch.no_grad():
            model(torch.randn(2, 4))

    thread = threading.Thread(target=ends_without_leaving)
    thread.start()
    thread.join()  # until Python has left it: what the library keeps goes a moment later, with the thread itself
    gc.collect()
    assert len(made) == 2
    until = time.monotonic() + 10
    while made.alive() and time.monotonic() < until:
        time.sleep(0.001)
    assert made.alive() == 0


def test_thousands_of_regions_take_no_memory() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def work(count: int) -> None:
        for _ in range(count):
            with precast.autocast("cpu"), precast.autocast("cpu", enabled=False):
                with torch.autocast("cpu"), precast.current_precision(), torch.no_grad():
                    model(x)

    work(50)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work(2000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
    assert not regions.records
    assert not regions.groups


def test_a_region_makes_no_cycles_for_the_collector() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def work() -> None:
        with precast.autocast("cpu"):
            model(x).float().sum().backward()

    work()  # the first region of an engine makes kernels, and may end those of another
    while gc.collect():
        pass
    gc.disable()
    try:
        for _ in range(300):
            work()
        assert gc.collect() < 300
    finally:
        gc.enable()


def a_policy(number: int) -> Policy:
    return Policy.load("default").replace(
        name=f"tried {number}", ops={"softmax": "fp32", "matmul": "keep"}
    )


def test_a_policy_and_its_frames_go_when_nobody_uses_them() -> None:
    gone: list[weakref.ref[Any]] = []
    for number in range(5):
        policy = a_policy(number)
        with precast.autocast("cpu", policy=policy):
            F.linear(torch.ones(1, 2), torch.ones(2, 2))
        gone += [weakref.ref(policy), weakref.ref(registration.bind(policy, "cpu"))]
    del policy
    gc.collect()
    assert [thing() for thing in gone] == [None] * 10


def test_a_policy_that_rules_of_a_model_were_laid_over_goes_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    rules = Policy.load("default").replace(modules={"0": {"ops": {"linear": "fp32"}}})
    with precast.attach(model, rules):
        for number in range(3):
            policy = a_policy(number)
            with precast.autocast("cpu", policy=policy):
                model(torch.ones(1, 2))
            gone = weakref.ref(policy)
            del policy
            gc.collect()
            assert gone() is None


def test_a_region_keeps_what_it_runs_under() -> None:
    x = torch.ones(2, 2)
    region = precast.autocast("cpu", policy=Policy.load("default").replace(ops={"matmul": "fp32"}))
    with region:
        del region
        with precast.autocast("cpu", policy="torch"):
            gc.collect()
            assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float32
        here = precast.current_precision("cpu")
    gc.collect()
    with here:
        assert (x @ x).dtype is torch.float32


def test_an_installed_policy_is_kept() -> None:
    with precast.install(Policy.load("torch").replace(ops={"matmul": "fp32"})):
        gc.collect()
        with torch.autocast("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_what_was_compiled_keeps_its_policy() -> None:
    def compute(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=policy):
            return x @ x

    policy = Policy.load("default").replace(ops={"matmul": "fp32", "exp": "lower"})
    compiled = torch.compile(compute, backend="eager")
    x = torch.ones(2, 2, requires_grad=True)
    loss = compiled(x)
    assert loss.dtype is torch.float32
    fingerprint = policy.fingerprint
    policy = Policy.load("default").replace(ops={"matmul": "lower", "exp": "lower"})
    gc.collect()
    assert compiled(x).dtype is torch.bfloat16, "the variable names another policy now"
    policy = Policy.load("default").replace(ops={"matmul": "fp32", "exp": "lower"})
    assert policy.fingerprint == fingerprint
    assert compiled(x).dtype is torch.float32
    loss.sum().backward()


def test_equal_policies_share_a_frame_and_a_dropped_one_is_made_again() -> None:
    first, second = a_policy(1), a_policy(1)
    assert first is not second
    assert registration.bind(first, "cpu") is registration.bind(second, "cpu")
    gone = weakref.ref(registration.bind(first, "cpu"))
    del first
    gc.collect()
    assert gone() is registration.bind(second, "cpu")
    del second
    gc.collect()
    assert gone() is None
    with precast.autocast("cpu", policy=a_policy(1)):
        assert F.softmax(torch.ones(2).bfloat16(), 0).dtype is torch.float32


def test_a_thread_of_pytorchs_own_keeps_the_frame_that_it_works_under() -> None:
    def deep(x: Tensor) -> Tensor:
        return x @ x

    scripted = torch.jit.script(deep)
    with precast.autocast("cpu", policy=Policy.load("default").replace(ops={"matmul": "fp32"})):
        future = torch.jit.fork(scripted, torch.ones(2, 2))
    gc.collect()
    assert torch.jit.wait(future).dtype is torch.float32
