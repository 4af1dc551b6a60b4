"""Regions: what is in force where, and that every exit restores what its entry found."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import precast
from precast import Policy, _torch
from precast.engine.thread_state import regions
from precast.errors import PrecastWarning, RegionError, RegionTypeError

State = tuple[bool, torch.dtype, bool]


def state(device: str = "cpu") -> State:
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


def product_dtype() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_defaults_are_pytorchs() -> None:
    for device in ("cpu", "mps", "xpu"):
        with torch.autocast(device):
            theirs = state(device)
        with precast.autocast(device):
            assert state(device) == theirs


def test_operations_follow_the_innermost_region() -> None:
    with precast.autocast("cpu", dtype=torch.float16):
        assert product_dtype() is torch.float16
        with precast.autocast("cpu", enabled=False):
            assert product_dtype() is torch.float32
            with precast.autocast("cpu", dtype=torch.bfloat16):
                assert product_dtype() is torch.bfloat16
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float16
    assert product_dtype() is torch.float32


def test_dtype_none_is_the_surrounding_regions() -> None:
    with precast.autocast("cpu", dtype=torch.float16):
        with precast.autocast("cpu"):
            assert product_dtype() is torch.float16


def test_a_policy_holds_in_regions_inside_that_name_none() -> None:
    keep = Policy.load("torch").replace(ops={"mm": "fp32"})
    with precast.autocast("cpu", policy=keep):
        assert product_dtype() is torch.float32
        with precast.autocast("cpu", dtype=torch.float16):
            assert product_dtype() is torch.float32
        with precast.autocast("cpu", policy="torch"):
            assert product_dtype() is torch.bfloat16
        assert product_dtype() is torch.float32
    with precast.autocast("cpu"):
        assert product_dtype() is torch.bfloat16


def test_torch_regions_and_ours_nest_either_way() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        with precast.autocast("cpu", dtype=torch.bfloat16):
            assert product_dtype() is torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert product_dtype() is torch.float32
            with torch.autocast("cpu", dtype=torch.float16):
                assert product_dtype() is torch.float16
            assert product_dtype() is torch.bfloat16
        assert product_dtype() is torch.float16


def test_devices_are_independent() -> None:
    with precast.autocast("xpu", dtype=torch.bfloat16):
        assert product_dtype() is torch.float32
        with precast.autocast("cpu", dtype=torch.float16):
            assert product_dtype() is torch.float16
            assert torch.get_autocast_dtype("xpu") is torch.bfloat16


settings = st.fixed_dictionaries(
    {
        "device_type": st.sampled_from(["cpu", "xpu"]),
        "dtype": st.sampled_from([None, torch.bfloat16, torch.float16]),
        "enabled": st.booleans(),
        "cache_enabled": st.sampled_from([None, True, False]),
    }
)


@given(
    st.lists(st.tuples(settings, st.sampled_from([torch.autocast, precast.autocast]))),
    st.booleans(),
)
def test_any_nesting_has_pytorchs_state_at_every_level(nesting: list[Any], fail: bool) -> None:
    def descend(depth: int, ours: bool) -> list[tuple[State, State]]:
        here = [(state("cpu"), state("xpu"))]
        if depth == len(nesting):
            if fail:
                raise KeyError("deepest")
            return here
        arguments, kind = nesting[depth]
        with (kind if ours else torch.autocast)(**arguments):
            seen.append(here[0])
            inner = descend(depth + 1, ours)
        assert (state("cpu"), state("xpu")) == here[0]
        return here + inner

    traces = []
    for ours in (False, True):
        seen: list[tuple[State, State]] = []
        try:
            descend(0, ours)
        except KeyError:
            assert fail
        traces.append(seen)
    assert traces[0] == traces[1]


def test_one_object_entered_twice_restores_what_was_there() -> None:
    def leaves_on(region: Any) -> bool:
        before = torch.is_autocast_enabled("cpu")
        with region, region:
            pass
        left = torch.is_autocast_enabled("cpu") != before
        torch.set_autocast_enabled("cpu", before)
        return left

    assert leaves_on(torch.autocast("cpu")), "torch keeps what it replaced on the object, once"
    assert not leaves_on(precast.autocast("cpu"))


def test_a_recursive_decorated_function_restores_what_was_there() -> None:
    def leaves_on(autocast: Callable[..., Any]) -> bool:
        @autocast("cpu")
        def recurse(depth: int) -> None:
            if depth:
                recurse(depth - 1)

        recurse(2)
        left = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", False)
        return left

    assert leaves_on(torch.autocast)
    assert not leaves_on(precast.autocast)


def test_an_exception_leaves_nothing_behind() -> None:
    before = state()
    with pytest.raises(KeyError):
        with precast.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            raise KeyError("inside")
    assert state() == before


def test_a_region_belongs_to_its_thread() -> None:
    seen: list[torch.dtype] = []

    def elsewhere() -> None:
        seen.append(product_dtype())
        with precast.autocast("cpu", dtype=torch.float16):
            seen.append(product_dtype())
            entered.set()
            leave.wait(60)

    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=elsewhere)
    with precast.autocast("cpu"):
        thread.start()
        assert entered.wait(60)
        assert product_dtype() is torch.bfloat16
    assert product_dtype() is torch.float32
    leave.set()
    thread.join()
    assert seen == [torch.float32, torch.float16]


def test_current_takes_the_region_to_another_thread() -> None:
    keep = Policy.load("torch").replace(ops={"mv": "fp32"})
    with precast.autocast("cpu", dtype=torch.float16, policy=keep):
        here = precast.current_precision()
    seen: list[torch.dtype] = []

    def elsewhere() -> None:
        with here, here:
            seen.append(product_dtype())
            seen.append(torch.mv(torch.ones(2, 2), torch.ones(2)).dtype)
        seen.append(product_dtype())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [torch.float16, torch.float32, torch.float32]


def test_current_outside_all_regions_is_pytorchs_own() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        here = precast.current_precision("cpu")
    with precast.autocast("cpu", policy=Policy.load("torch").replace(ops={"mm": "fp32"})), here:
        assert product_dtype() is torch.float16


def test_disable_needs_no_device() -> None:
    @precast.disable()
    def product() -> torch.dtype:
        return product_dtype()

    with precast.autocast("cpu"), torch.autocast("xpu"):
        with precast.disable():
            assert product_dtype() is torch.float32
            assert not torch.is_autocast_enabled("xpu")
        assert product_dtype() is torch.bfloat16
        assert torch.is_autocast_enabled("xpu")
        assert product() is torch.float32


def test_disable_takes_no_mark_of_policies_for_a_region() -> None:
    """The mark is in autocast flags of device types that nobody has, of a second one where there were many policies."""
    torchs, seen = Policy.load("torch"), set()
    rules = ["keep", "fp32", "lower", "promote"]
    for one, two, three in itertools.product(rules, rules, rules):
        policy = torchs.replace(ops={"relu": one, "tanh": two, "sigmoid": three})
        with precast.autocast("cpu", policy=policy):
            flags = [torch.is_autocast_enabled(device) for device in _torch.UNUSED_DEVICE_TYPES]
            seen.add(tuple(flags))
            with precast.disable():
                assert product_dtype() is torch.float32
                assert {record.device_type for record in regions.records} == {"cpu"}
            with precast.current_precision():
                assert product_dtype() is torch.bfloat16
            here = [torch.is_autocast_enabled(device) for device in _torch.UNUSED_DEVICE_TYPES]
            assert here == flags
    assert (True, True) in seen


@pytest.mark.parametrize("device", ["mtia", "maia", "hpu", "xla", "ipu"])
@pytest.mark.parametrize("policy", ["torch", "default", "lean"])
def test_regions_for_devices_that_are_not_there_do_nothing_here(device: str, policy: str) -> None:
    with precast.autocast(device, dtype=torch.bfloat16, policy=policy):
        assert torch.is_autocast_enabled(device)
        assert product_dtype() is torch.float32
        with precast.autocast("cpu"):
            assert product_dtype() is torch.bfloat16
    assert not torch.is_autocast_enabled(device)


def test_a_region_left_out_of_order_is_taken_out_from_under_the_others() -> None:
    def suspended() -> Any:
        with precast.autocast("cpu", dtype=torch.float16):
            yield product_dtype()

    before = state()
    body = suspended()
    assert next(body) is torch.float16
    with precast.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(PrecastWarning, match="a generator is suspended"):
            body.close()
        assert product_dtype() is torch.bfloat16
    assert state() == before


def test_regions_entered_as_one_and_left_out_of_order_are_each_taken_out() -> None:
    def suspended() -> Any:
        with precast.disable():
            yield product_dtype()

    before = state()
    with precast.autocast("cpu", dtype=torch.bfloat16):
        here = precast.current_precision()
        body = suspended()
        assert next(body) is torch.float32
        with here:
            with pytest.warns(PrecastWarning, match="a generator is suspended"):
                body.close()
            assert product_dtype() is torch.bfloat16
        assert product_dtype() is torch.bfloat16
    assert state() == before


@pytest.mark.parametrize("make", [lambda: precast.autocast("cpu"), precast.current_precision])
def test_a_region_cannot_end_in_another_thread(make: Callable[[], Any]) -> None:
    region = make()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            region.__exit__()
        except RegionError as error:
            errors.append(error)

    with region:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "precast.current_precision()" in str(errors[0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), r'autocast\("cuda"'),
        ((True,), r'autocast\("cuda"'),
        ((torch.device("cpu"),), "'cpu'"),
        ((3,), "int"),
        (("cpu:0",), "'cpu', without an index"),
        (("gpu",), "Allowed: cpu, cuda"),
        (("cpu", "bfloat17"), "torch.bfloat16, torch.float16, their names, or None"),
        (("cpu", torch.float32), "enabled=False"),
        (("cpu", torch.int8), "Allowed: torch.bfloat16, torch.float16"),
    ],
)
def test_a_bad_argument_gets_one_error_and_changes_nothing(arguments: Any, says: str) -> None:
    before = state()
    with pytest.raises(RegionError, match=says):
        precast.autocast(*arguments)
    assert state() == before


def test_wrong_types_are_type_errors_too() -> None:
    with pytest.raises(TypeError):
        precast.autocast()
    with pytest.raises(RegionTypeError):
        precast.autocast("cpu", 16)  # type: ignore[arg-type]


def test_a_dtype_of_full_precision_is_fine_where_autocast_is_off() -> None:
    with precast.autocast("cpu", torch.float32, enabled=False):
        assert product_dtype() is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_cuda_a_cuda_region_warns_once_and_does_nothing() -> None:
    with pytest.warns(PrecastWarning, match="CUDA is not available") as caught:
        region = precast.autocast("cuda")
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with region, region:
            assert not torch.is_autocast_enabled("cuda")
            assert product_dtype() is torch.float32
        precast.autocast("cuda", enabled=False)
