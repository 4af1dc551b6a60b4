"""Regions that are entered in one call: like those entered step by step, in what they do and in what they leave."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import precast
from precast.engine import registration
from precast.engine.thread_state import any_region_open, regions, thread_state
from precast.weights.native import library

BF16 = torch.bfloat16
LEAN = precast.Policy.load("lean")
TRANSPARENT = precast.Policy.load("torch")


@pytest.fixture(autouse=True, scope="module")
def _native_engine() -> Iterator[None]:
    if isinstance(missing := library.load(), library.Unavailable):
        pytest.skip(f"needs the native engine: {missing.reason}")
    with registration.use_engine("native"):
        yield


def steps_of(act: Callable[[], object]) -> list[str]:
    """The functions of precast that Python calls meanwhile, if they are those of an entry step by step."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name in {"put_in_force", "write", "_end", "follow"}:
            called.append(frame.f_code.co_name)

    kept = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(kept)
    return called


KEPT = precast.autocast("cpu")
USES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "kept": lambda: KEPT,
    "new": lambda: precast.autocast("cpu", dtype=BF16),
    "named policy": lambda: precast.autocast("cpu", policy=LEAN),
    "disabled": lambda: precast.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("around", [None, "new"])
@pytest.mark.parametrize("inside", ["kept", "new", "disabled"])
def test_a_region_is_entered_step_by_step_once(inside: str, around: str | None) -> None:
    def use() -> None:
        with USES[around]() if around else nullcontext(), USES[inside]():
            pass

    use()
    use()
    assert steps_of(use) == []


def test_a_region_with_a_named_policy_is_entered_step_by_step_once() -> None:
    test_a_region_is_entered_step_by_step_once("named policy", None)


def _in_force() -> tuple[object, ...]:
    """All that a region changes, as operations, threads and compiled functions see it."""
    bound = thread_state("cpu").state.bound_policy
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        None if bound is None else (bound.policy.name, bound.number),
        regions.guard_id,
        regions.written_guard_id,
        torch._C._get_graph_executor_optimize(),
    )


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"enabled": False},
    {"dtype": torch.float16},
    {"policy": LEAN},
    {"policy": TRANSPARENT},
    {"cache_enabled": False},
    {"policy": "lean", "cache_enabled": True, "enabled": False},
]
OBJECTS = [precast.autocast("cpu", **arguments) for arguments in ARGUMENTS]


@given(
    nest=st.lists(st.tuples(st.integers(0, len(ARGUMENTS) - 1), st.booleans()), max_size=5),
    looks=st.sets(st.integers(0, 5)),
)
def test_any_nest_of_regions_has_in_force_what_it_has_step_by_step(
    nest: list[tuple[int, bool]], looks: set[int]
) -> None:
    """Kept objects and new ones; records are asked for at some depths, which takes them over from the library."""

    def states(asks: set[int]) -> list[tuple[object, ...]]:
        seen = [_in_force()]
        with ExitStack() as stack:
            for depth, (which, kept) in enumerate(nest):
                region = OBJECTS[which] if kept else precast.autocast("cpu", **ARGUMENTS[which])
                stack.enter_context(region)
                stack.callback(lambda: seen.append(_in_force()))
                if depth in asks:
                    records = regions.records
                    assert len(records) == depth + 1
                    assert records[-1].owner is region
                seen.append(_in_force())
        assert not regions.records
        return [*seen, _in_force()]

    learnt, known = states(looks), states(looks)
    registration._registration.number, before = -1, registration._registration.number
    registration._allow_fast_entries()
    try:
        step_by_step = states(set())
    finally:
        registration._registration.number = before
        registration._allow_fast_entries()
    assert learnt == step_by_step
    assert known == step_by_step


def test_a_region_ends_as_its_record_says_after_it_was_asked_for() -> None:
    before = _in_force()
    for _ in range(3):
        with KEPT:
            assert [record.owner for record in regions.records] == [KEPT]
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_dtype("cpu", torch.float16)
        assert _in_force() == before
    assert steps_of(KEPT.__enter__) == []
    KEPT.__exit__(None, None, None)


def test_one_object_in_itself_is_left_once_for_each_entry() -> None:
    before = _in_force()
    for _ in range(3):
        with KEPT, KEPT:
            with KEPT:
                inside = _in_force()
            assert _in_force() == inside
        assert _in_force() == before
    with pytest.raises(precast.errors.RegionError, match="was not entered in this thread"):
        KEPT.__exit__(None, None, None)


def test_regions_that_end_out_of_order_restore_what_was() -> None:
    outer, inner = precast.autocast("cpu"), precast.autocast("cpu", policy=LEAN)
    before = _in_force()
    for _ in range(3):
        outer.__enter__()
        inner.__enter__()
        with pytest.warns(precast.errors.PrecastWarning, match="ended before a region"):
            outer.__exit__(None, None, None)
        assert thread_state("cpu").state.bound_policy is registration.bind(LEAN, "cpu")
        inner.__exit__(None, None, None)
        assert _in_force() == before


def test_a_region_in_another_thread_is_seen() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        for _ in range(3):
            with KEPT:
                pass
        with KEPT:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert entered.wait(30)
        assert any_region_open()
        assert not registration.unregister()
    finally:
        leave.set()
        thread.join()
    assert not any_region_open()


def test_what_was_captured_in_a_region_of_pytorchs_has_no_policy_of_ours() -> None:
    with torch.autocast("cpu", BF16):
        here = precast.current_precision()
    kept = precast.autocast("cpu", BF16, cache_enabled=True)
    for _ in range(2):
        with kept:
            pass
    with here:
        assert thread_state("cpu").state.bound_policy is None
        assert torch.is_autocast_enabled("cpu")


def test_an_open_region_keeps_its_object_and_lets_it_go() -> None:
    region = precast.autocast("cpu", policy=LEAN)
    for _ in range(2):
        with region:
            pass
    kept = weakref.ref(region)
    leave = region.__exit__
    region.__enter__()
    del region
    assert kept() is not None
    leave(None, None, None)
    del leave
    gc.collect()
    assert kept() is None


def test_a_policy_lives_no_longer_than_the_regions_that_use_it() -> None:
    policies = [LEAN.replace(name=f"lean {n}") for n in range(200)]
    alive = [weakref.ref(registration.bind(policy, "cpu")) for policy in policies]
    for policy in policies:
        for _ in range(2):
            with precast.autocast("cpu", policy=policy), precast.autocast("cpu", enabled=False):
                with precast.autocast("cpu", policy="default"):
                    pass
    del policies, policy
    gc.collect()
    assert not any(bound() for bound in alive)


def test_threads_that_come_and_go_start_with_no_region() -> None:
    def work() -> None:
        assert thread_state("cpu").state.bound_policy is None
        assert not regions.is_open
        with precast.autocast("cpu", policy=LEAN):
            seen.append(thread_state("cpu").state.bound_policy)

    seen: list[object] = []
    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [registration.bind(LEAN, "cpu")] * 20
