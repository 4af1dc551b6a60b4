"""The native engine: what it does itself, what it hands to the reference, and many threads on one model."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.testing._internal.logging_tensor import LoggingTensor, LoggingTensorMode

import precast
from precast import Policy
from precast._torch import impl_address
from precast.engine import compile_guards, registration
from precast.engine.thread_state import thread_state
from precast.weights.native import library
from precast.weights.native.api import NativeHeldCopy, native_engine
from precast.weights.native.boundary import Eviction

BF16 = torch.bfloat16
WIDTH = 160


@pytest.fixture(autouse=True)
def _native_engine() -> Iterator[None]:
    if isinstance(missing := library.load(), library.Unavailable):
        pytest.skip(f"needs the native engine: {missing.reason}")
    with registration.use_engine("native"):
        yield


def python_calls(act: Callable[[], object]) -> list[str]:
    """Return the names of the functions of precast that Python calls while `act` runs."""
    package = str(Path(precast.__file__).parent) + os.sep
    calls: list[str] = []

    def record(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_name)

    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        act()
    finally:
        sys.setprofile(previous)
    return calls


def layer(*, attached: bool = False, grad: bool = True) -> tuple[nn.Linear, Tensor]:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(grad), torch.randn(3, WIDTH)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_where_weights_have_copies_nothing_of_python_is_called(attached: bool, mode: Any) -> None:
    model, x = layer()
    with precast.attach(model) if attached else nullcontext():
        with mode(), precast.autocast("cpu"):
            expected = model(x)
            found: list[Tensor] = []
            calls = python_calls(lambda: found.append(model(x)))
    assert calls == []
    assert torch.equal(found[0], expected)


def test_the_first_use_of_a_weight_calls_nothing_of_python_either() -> None:
    model, x = layer()
    with precast.autocast("cpu"):
        torch.mm(x, x.t())
        assert python_calls(lambda: model(x)) == []


@pytest.mark.parametrize("policy", ["torch", "default"])
def test_operations_without_weights_call_nothing_of_python(policy: str) -> None:
    x, y = torch.randn(4, 4).bfloat16(), torch.randn(4, 4)
    with precast.autocast("cpu", policy=policy):
        for act in (
            lambda: torch.matmul(x, x),
            lambda: F.mse_loss(x, y),
            lambda: torch.index_add(y, 0, torch.tensor([0]), y[:1]),
            lambda: torch.softmax(x, 0),
        ):
            assert python_calls(act) == []


@pytest.mark.parametrize("first", ["trace", "monitor", "region"])
def test_what_runs_first_changes_nothing_for_later_regions(first: str) -> None:
    """In a process of its own: the library is loaded when the first region is entered, perhaps inside a trace."""
    program = f"""if True:
        import contextlib, torch, precast
        model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        first = {first!r}
        watch = precast.trace() if first == "trace" else contextlib.nullcontext()
        if first == "monitor":
            watch = precast.monitor(model)
        with watch, precast.autocast("cpu", dtype=torch.bfloat16):
            model(x).sum().backward()
        for _ in range(2):
            with precast.autocast("cpu", dtype=torch.bfloat16):
                print(model(x).dtype, (x @ x.T).dtype)
        """
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.split() == ["torch.bfloat16"] * 4


def _fake() -> None:
    with FakeTensorMode():
        F.linear(torch.ones(2, 2), torch.ones(2, 2))


def _in_mode() -> None:
    with LoggingTensorMode():
        F.linear(torch.ones(2, 2), Parameter(torch.ones(2, 2)))


def _traced() -> None:
    with precast.trace():
        F.linear(torch.ones(2, 2), Parameter(torch.ones(2, 2)))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))]
)
def test_a_region_that_was_entered_can_be_copied(copied: Callable[[Any], Any]) -> None:
    region, x = precast.autocast("cpu", dtype=torch.float16), torch.ones(2, 2)
    for _ in range(3):
        with region:
            pass
    with copied(region):
        assert torch.mm(x, x).dtype is torch.float16


def test_a_trace_hears_of_a_region_that_is_known() -> None:
    region, x = precast.autocast("cpu"), torch.ones(2, 2)
    for _ in range(3):
        with region:
            pass
    with precast.trace() as trace, region:
        torch.mm(x, x)
    assert [row.region is not None for row in trace.rows if row.op.endswith("mm")] == [True]


def test_what_is_entered_in_one_step_may_end_out_of_order() -> None:
    first, second = precast.autocast("cpu"), precast.autocast("cpu", dtype=torch.float16)
    x = torch.ones(2, 2)
    for _ in range(3):
        with first, second:
            pass
    first.__enter__()
    second.__enter__()
    with pytest.warns(precast.errors.PrecastWarning, match="ended before a region"):
        first.__exit__(None, None, None)
    assert torch.mm(x, x).dtype is torch.float16
    second.__exit__(None, None, None)
    assert torch.mm(x, x).dtype is torch.float32


STRANGE: dict[str, Callable[[], Any]] = {
    "fake tensor": _fake,
    "subclass": lambda: F.linear(LoggingTensor(torch.ones(2, 2)), Parameter(torch.ones(2, 2))),
    "mode": _in_mode,
    "vmap": lambda: torch.vmap(lambda x: x @ torch.ones(2, 2))(torch.ones(3, 2, 2)),
    "trace": _traced,
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_common_is_handed_to_the_reference(name: str) -> None:
    with precast.autocast("cpu"):
        assert "entry" in python_calls(STRANGE[name])


def test_what_pool_threads_inherit_has_one_name() -> None:
    header = Path(library.__file__).with_name("state.h").read_text(encoding="utf-8")
    assert f'"{compile_guards._TLS_KEY}"' in header


def test_an_error_is_the_one_of_the_operation() -> None:
    x, weight = torch.ones(2, 3), Parameter(torch.ones(4, 4))
    messages = []
    for engine in registration.ENGINES:
        with registration.use_engine(engine), precast.autocast("cpu"):
            with pytest.raises(RuntimeError) as raised:
                F.linear(x, weight)
            messages.append(str(raised.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_policies_that_say_the_same_are_one_in_the_library() -> None:
    calls = native_engine.api
    assert calls is not None
    assert calls.policy(True, b"\1\2\0", 3) == calls.policy(True, b"\1\2", 2)
    assert calls.policy(True, b"\1\2", 2) != calls.policy(False, b"\1\2", 2)


def test_a_policy_bound_on_the_reference_holds_in_compiled_kernels() -> None:
    ours = Policy.load("torch").replace(ops={"mm": "fp32"})
    x = torch.randn(3, 3)
    with precast.autocast("cpu", policy="torch"):
        torch.mm(x, x)
    with registration.use_engine("reference"), precast.autocast("cpu", policy=ours):
        assert thread_state("cpu").state.bound_policy is not None
        assert torch.mm(x, x).dtype is torch.float32


def test_a_thread_that_the_library_does_not_know_runs_its_policy() -> None:
    model, x = layer()
    found: list[torch.dtype] = []

    def work() -> None:
        with torch.autocast("cpu"):
            found.append(model(x).dtype)
        with precast.autocast("cpu", policy=Policy.load("torch").replace(ops={"linear": "fp32"})):
            found.append(model(x).dtype)
        found.append(model(x).dtype)

    with precast.autocast("cpu"):
        model(x)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [BF16, torch.float32, torch.float32]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 151),
    st.lists(
        st.tuples(st.sampled_from(["keep", "evict", "evict", "clear"]), st.integers(0, 150)),
        max_size=200,
    ),
)
def test_a_thread_has_the_copies_that_were_kept_and_not_dropped(
    first: int, steps: list[tuple[str, int]]
) -> None:
    calls = native_engine.api
    assert calls is not None
    sources = [torch.zeros(1) for _ in range(151)]
    copies = [NativeHeldCopy(calls, source, BF16) for source in sources]

    def in_a_new_thread() -> None:
        expected: dict[int, Tensor] = {}
        for step, which in [("keep", which) for which in range(first)] + steps:
            source = sources[which]
            if step == "keep":
                expected[which] = cast = source.to(BF16)
                snapshot = source._version, source.data_ptr()
                addresses = impl_address(source), impl_address(cast)
                calls.keep(copies[which], *addresses, which % 2, *snapshot)
            elif step == "evict":
                expected.pop(which, None)
                calls.evict(copies[which], Eviction.ALL, 0)
            else:
                expected = {w: cast for w, cast in expected.items() if w % 2 == 0}
                calls.clear()
            assert calls.count() == len(expected)
        for which, source in enumerate(sources):
            if which % 2:
                assert calls.operations.find.default(source, BF16) is expected.get(which)
            calls.evict(copies[which], Eviction.ALL, 0)
        assert calls.count() == 0

    with ThreadPoolExecutor(1) as pool:
        pool.submit(in_a_new_thread).result()


def test_threads_that_start_together_load_one_library_and_each_runs_its_policy() -> None:
    program = """
import threading
import torch, precast
barrier, wrong = threading.Barrier(6), []
def work(rule, dtype):
    policy = precast.Policy.load("torch").replace(ops={"matmul": rule})
    a = torch.ones(2, 2)
    barrier.wait(60)
    for _ in range(50):
        with precast.autocast("cpu", policy=policy):
            wrong.extend([rule] if (a @ a).dtype is not dtype else [])
rules = [("fp32", torch.float32), ("lower", torch.bfloat16), ("keep", torch.float32)] * 2
threads = [threading.Thread(target=work, args=rule) for rule in rules]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Exception in thread" not in done.stderr


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("device", ("abacus",), "abacus"),
        ("record_torch_kernel", ("aten::no_such_thing", "", "AutocastCPU"), "no_such_thing"),
        ("register", ("aten::mm", "", "NoSuchKey", "cpu", 1, 0, 0), "NoSuchKey"),
    ],
)
def test_an_exception_of_the_library_is_an_error_in_python(
    function: str, arguments: tuple[Any, ...], message: str
) -> None:
    assert native_engine.api is not None
    with pytest.raises(precast.errors.PrecastError, match=message):
        getattr(native_engine.api, function)(*arguments)
