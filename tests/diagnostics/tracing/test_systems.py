"""A trace beside compilers, checkpoints, transforms and modes: it says what it sees, and changes nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import precast
from precast import _torch
from tests.conformance.programs.compare import difference
from tests.conformance.programs.draw import cases
from tests.conformance.programs.run import run
from tests.conformance.systems import SYSTEMS, System
from tests.conftest import PROGRAMS_SEED
from tests.diagnostics.tracing.test_trace import Casts, asked_for, rows_of
from tests.support.profiled import casts_profiled


@pytest.fixture
def compiled() -> Iterator[Any]:
    """Compiles with a backend that keeps operations as they are; counts the frames that were compiled."""
    import torch._dynamo.utils as dynamo

    torch.compiler.reset()
    dynamo.counters.clear()
    yield lambda function: torch.compile(function, backend="aot_eager")
    torch.compiler.reset()


def frames() -> int:
    counters = sys.modules["torch._dynamo.utils"].counters
    return int(counters["frames"]["total"])


def test_a_trace_may_be_opened_inside_a_compiled_function(compiled: Any) -> None:
    def traced(x: torch.Tensor) -> tuple[torch.Tensor, precast.Trace]:
        with precast.trace() as trace:
            y = x + 1
        return y, trace

    y, trace = compiled(traced)(torch.ones(2))
    assert y.tolist() == [2.0, 2.0]
    assert any("torch.compile" in note for note in trace.notes)


@pytest.mark.parametrize("full", [True, False])
def test_a_compiled_function_is_neither_compiled_again_nor_run_uncompiled(
    compiled: Any, full: bool
) -> None:
    layer = nn.Linear(4, 4)
    function = compiled(lambda x: torch.relu(layer(x)))
    x = torch.ones(2, 4)
    with precast.autocast("cpu"):
        expected = function(x)
        before = frames()
        with precast.trace(full=full) as trace:
            got = function(x)
        after = function(x)
    assert frames() == before
    assert torch.equal(got, expected)
    assert torch.equal(after, expected)
    assert not rows_of(trace, "linear")  # what was compiled carries its casts out itself


def test_a_function_that_is_compiled_while_the_trace_is_open_stays_compiled(compiled: Any) -> None:
    layer = nn.Linear(4, 4)
    function = compiled(lambda x: torch.relu(layer(x)))
    x = torch.ones(2, 4)
    with precast.trace(), precast.autocast("cpu"):
        first = function(x)
        count = frames()
        assert count > 0
        function(x)
    with precast.autocast("cpu"):
        again = function(x)
    assert frames() == count
    assert torch.equal(first, again)
    assert first.dtype is torch.bfloat16


def test_a_compiled_module_is_called_as_the_module(compiled: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with precast.trace() as trace, precast.autocast("cpu"):
        compiled(model)(torch.ones(2, 4)).float().sum().backward()
    assert all("_orig_mod" not in (row.module or "") for row in trace.rows)
    assert trace.totals.casts > 0


def test_scripted_functions_are_seen_operation_by_operation() -> None:
    @torch.jit.script
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(torch.mm(x, w))

    x, w = torch.ones(2, 2), torch.ones(2, 2)
    with precast.autocast("cpu"):
        for _ in range(3):
            expected = function(x, w)
    with precast.trace() as trace, precast.autocast("cpu"):
        got = function(x, w)
    assert torch.equal(got, expected)
    [row] = rows_of(trace, "mm")
    assert (row.rule, row.output) == ("lower", ["bfloat16"])
    assert row.source is not None
    assert row.source.startswith("tests/diagnostics/tracing/test_systems.py:")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_seen_in_backward(reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)

    def step() -> None:
        with precast.autocast("cpu"):
            y = checkpoint(layer, x, use_reentrant=reentrant)
        y.float().sum().backward()

    with Casts() as independent:
        step()
    with precast.trace(layer) as trace:
        step()
    assert asked_for(trace)[0] == independent.number
    assert {row.phase for row in trace.rows if row.op == "linear"} == {"forward", "backward"}
    assert {row.module for row in trace.rows if row.op == "linear"} == {""}


def test_transforms_run_under_a_trace_and_say_why_no_rule_held() -> None:
    weight = torch.ones(3, 3)

    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight).sum()

    with precast.autocast("cpu"):
        expected = torch.func.grad(loss)(torch.ones(2, 3))
        with precast.trace() as trace:
            got = torch.func.grad(loss)(torch.ones(2, 3))
            torch.vmap(lambda x: torch.nn.functional.linear(x, weight))(torch.ones(2, 3))
    assert torch.equal(got, expected)
    assert trace.totals.calls > 0


def test_saved_tensor_hooks_of_the_program_still_hold() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), precast.trace():
        torch.sigmoid(x).sum().backward()
    assert packed


def test_a_higher_order_operation_runs_under_a_trace() -> None:
    from torch._higher_order_ops.cond import cond

    x = torch.ones(2)
    with precast.trace():
        got = cond(torch.tensor(True), torch.sin, torch.cos, (x,))
    assert torch.equal(got, torch.sin(x))


def test_pytorchs_own_threads_are_seen_in_backward() -> None:
    """A graph that is deep in Python functions goes on in a thread of PyTorch's own."""

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            with torch.enable_grad():
                y = gradient.detach().requires_grad_()
                if ctx.depth:
                    Nested.apply(y, ctx.depth - 1).sum().backward()
                else:
                    with precast.autocast("cpu"):
                        torch.mm(y[None], y[:, None]).float().sum().backward()
            return gradient, None

    def step() -> None:
        Nested.apply(torch.ones(3, requires_grad=True), 70).sum().backward()

    with Casts() as independent:
        step()
    with precast.trace() as trace:
        step()
    assert asked_for(trace)[0] == independent.number > 0


# --- random programs ---


class Nothing(_torch.ObservingMode):
    """PyTorch computes some operations otherwise under any dispatch mode: `bilinear`, `svdvals` and others (2.13)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def under_nothing() -> Iterator[None]:
    with Nothing():
        yield


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_random_programs_give_the_same_bits_and_counts(system: System) -> None:
    for program, seed in cases(6, PROGRAMS_SEED):

        def alone(program: Any = program, seed: int = seed) -> Any:
            with system() as region:
                return run(program, seed, region)

        def under_a_mode(program: Any = program, seed: int = seed) -> Any:
            with system() as region, under_nothing():
                return run(program, seed, region)

        plain, expected = alone(), under_a_mode()
        with system() as region, precast.trace(full=False):
            counted = run(program, seed, region)
        with system() as region, precast.trace() as trace:
            traced = run(program, seed, region)
        with system() as region, precast.trace() as beside, Casts() as independent:
            run(program, seed, region)
        assert difference(counted, plain) is None, f"seed {seed}: {program}"
        if (
            difference(expected, plain) is None
        ):  # else an operation of it has other bits under any dispatch mode
            assert difference(traced, plain) is None, f"seed {seed}: {program}"
        # Between two oracles: a mode changes what some operations cast, so it sees no more casts than a trace; the
        # profiler sees also those that a kernel makes for its own arithmetic (docs/trace.md lists them).
        assert asked_for(beside)[0] >= independent.number, f"seed {seed}: {program}"
        profiled = casts_profiled(alone)
        if casts_profiled(under_a_mode) == profiled:  # else PyTorch calls others under any mode
            at_most = casts_profiled(alone, numbers=True)
            assert trace.totals.casts <= at_most, f"seed {seed}: {program}"
        assert sum(row.casts for row in trace.rows) == trace.totals.casts


def test_traces_come_and_go_while_another_thread_computes() -> None:
    layer = nn.Linear(8, 8)
    x, stop, failed = torch.ones(4, 8), threading.Event(), []

    def compute() -> None:
        try:
            while not stop.is_set():
                with precast.autocast("cpu", policy="torch"):
                    y = layer(x)
                    assert y.dtype is torch.bfloat16
                    assert torch.nn.functional.mse_loss(y, x).dtype is torch.float32
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for full in (True, False) * 5:
            with precast.trace(full=full) as trace, precast.autocast("cpu"):
                layer(x)
            assert [count.calls for count in trace.counts] == [1]
    finally:
        stop.set()
        thread.join()
    assert not failed
