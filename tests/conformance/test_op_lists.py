"""PyTorch's own operation lists for its autocast tests, on every way to run on precast.

Each entry is called as a function and as a method, in a region; the result must be what `torch.autocast` gives, and
what a person gets by casting the arguments first. The lists for CUDA run on CUDA where there is one, and on CPU
tensors everywhere, in a policy that applies the CUDA table to the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from precast._internal.pytree import map_tensors
from precast.policy.policy import Policy
from tests.conformance.systems import TORCH, MakeRegion, System, on_all_systems, systems
from tests.support.outcomes import same_bits

LIKE_CUDA = Policy.load("torch").retarget("cpu", like="cuda")
NEEDS_CUDNN = {"cudnn_convolution", "cudnn_convolution_transpose"}
LOWER = (torch.bfloat16, torch.float16)
NN, LINALG = torch._C._nn, torch._C._linalg
Entry = tuple[Any, ...]
# The lists call these two as old programs do, and PyTorch says so once a process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim arg"),
    pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated"),
]


class Call(NamedTuple):
    """One way to call an operation of a list, and what is expected of it in a region."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run_as: torch.dtype
    """The dtype to which its arguments are cast."""
    out: torch.dtype
    lower: torch.dtype
    """The lower precision of the region."""


class Reading(NamedTuple):
    """The format of the entries of a list."""

    module: Any
    """The module of its functions; None if there are methods alone."""
    calls: Callable[[Entry], Iterator[Call]]


def _lowered(entry: Entry) -> Iterator[Call]:
    """An operation that runs in the region's lower precision."""
    for lower in LOWER:
        yield _call(entry, lower, lower)


def _in_float32(entry: Entry) -> Iterator[Call]:
    for lower in LOWER:
        yield _call(entry, torch.float32, lower)


def _call(entry: Entry, run_as: torch.dtype, lower: torch.dtype) -> Call:
    name, args, *rest = entry
    if isinstance(args, str):
        # PyTorch's entry for `einsum` is an equation of four dimensions and two matrices, and its test skips it.
        return Call(name, ("ij,jk->ik", *rest[0]), {}, run_as, run_as, lower)
    kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
    return Call(name, args, kwargs, run_as, run_as, lower)


def _promoted_on_cpu(entry: Entry) -> Iterator[Call]:
    """Arguments in bfloat16 and float32, then in float16 and float32, and the dtype of the result."""
    name, *by_lower, out = entry if isinstance(entry[-1], torch.dtype) else (*entry, torch.float32)
    for lower, args in zip(LOWER, by_lower, strict=True):
        yield Call(name, args, {}, torch.float32, out, lower)


def _promoted_on_cuda(entry: Entry) -> Iterator[Call]:
    name, args, *out = entry
    yield Call(name, args, {}, torch.float32, *(out or [torch.float32]), torch.float16)


ON_CPU = {
    "torch_expect_builtin_promote": Reading(torch, _promoted_on_cpu),
    "methods_expect_builtin_promote": Reading(None, _promoted_on_cpu),
    "torch_need_autocast_promote": Reading(torch, _promoted_on_cpu),
    "torch_16": Reading(torch, _lowered),
    "torch_fp32": Reading(torch, _in_float32),
    "nn_16": Reading(NN, _lowered),
    "nn_fp32": Reading(NN, _in_float32),
}
ON_CUDA = {
    "torch_expect_builtin_promote": Reading(torch, _promoted_on_cuda),
    "methods_expect_builtin_promote": Reading(None, _promoted_on_cuda),
    "torch_need_autocast_promote": Reading(torch, _promoted_on_cuda),
    "torch_fp16": Reading(torch, _lowered),
    "torch_fp32": Reading(torch, _in_float32),
    "nn_fp16": Reading(NN, _lowered),
    "nn_fp32": Reading(NN, _in_float32),
    "linalg_fp16": Reading(LINALG, _lowered),
    "methods_fp16": Reading(None, _lowered),
    "methods_fp32": Reading(None, _in_float32),
}


@pytest.mark.parametrize(
    ("lists", "readings"), [(AutocastCPUTestLists, ON_CPU), (AutocastTestLists, ON_CUDA)]
)
def test_every_list_is_visited(lists: Any, readings: dict[str, Reading]) -> None:
    every = {name: value for name, value in vars(lists("cpu")).items() if type(value) is list}
    assert every.keys() - {"banned"} == readings.keys()
    assert all(every.values())


@on_all_systems
@pytest.mark.parametrize("name", ON_CPU)
def test_the_lists_for_the_cpu(
    name: str, system: System, record_property: Callable[[str, object], None]
) -> None:
    entries = _fresh(AutocastCPUTestLists, "cpu", name)
    record_property("cases", _compare_with_torch(ON_CPU[name], entries, system, "cpu"))


@pytest.mark.gpu
@on_all_systems
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_lists_for_cuda(
    name: str, system: System, record_property: Callable[[str, object], None]
) -> None:
    entries = _fresh(AutocastTestLists, "cuda", name)
    record_property("cases", _compare_with_torch(ON_CUDA[name], entries, system, "cuda"))


@pytest.mark.parametrize("system", systems(LIKE_CUDA), ids=str)
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_lists_for_cuda_on_cpu_tensors(
    name: str, system: System, record_property: Callable[[str, object], None]
) -> None:
    reading, entries = ON_CUDA[name], _fresh(AutocastTestLists, "cpu", name)
    without_cudnn = [entry for entry in entries if entry[0] not in NEEDS_CUDNN]
    assert len(entries) - len(without_cudnn) == (len(NEEDS_CUDNN) if name == "torch_fp16" else 0)
    calls = [call for entry in without_cudnn for call in reading.calls(entry)]
    for call, ours in zip(calls, _results(reading.module, calls, system, "cpu"), strict=True):
        _check(ours, call, _by_hand(reading.module, call))
    record_property("cases", len(calls))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids="on {}".format
)
@pytest.mark.parametrize("which", range(4))
def test_what_is_banned_on_cuda_is_refused_by_name(which: int, device: str) -> None:
    system = systems(LIKE_CUDA if device == "cpu" else "torch")[which]
    for name, args, module in AutocastTestLists(device).banned:
        assert module is NN
        for lower in LOWER:
            with system() as region, region(device, lower):
                with pytest.raises(RuntimeError, match=f"{name}_with_logits"):
                    getattr(module, name)(*args)


def _fresh(lists: Any, device: str, name: str) -> list[Entry]:
    """The entries of a list, with new random arguments."""
    torch.manual_seed(random.getrandbits(32))
    entries: list[Entry] = getattr(lists(device), name)
    return entries


def _compare_with_torch(reading: Reading, entries: list[Entry], system: System, device: str) -> int:
    """Both give what casting by hand gives; returns the number of calls."""
    calls = [call for entry in entries for call in reading.calls(entry)]
    on_both = (_results(reading.module, calls, which, device) for which in (system, TORCH))
    for call, ours, theirs in zip(calls, *on_both, strict=True):
        by_hand = _by_hand(reading.module, call)
        _check(ours, call, by_hand)
        _check(theirs, call, by_hand)
    return len(calls)


def _check(results: list[Any], call: Call, expected: Any) -> None:
    """The function and the method both give the expected bits in the expected dtype."""
    assert results, f"{call.name} is neither a function nor a method"
    for result in results:
        assert _same(result, expected), f"{call.name} in {call.lower}"
        if isinstance(result, Tensor):
            assert result.dtype is call.out, f"{call.name} in {call.lower}"


def _results(module: Any, calls: list[Call], system: System, device: str) -> list[list[Any]]:
    """Return the results of each call in a region of the system, as a function and as a method if there is one."""
    with system() as region:
        return [_in_region(region, module, call, device) for call in calls]


def _in_region(region: MakeRegion, module: Any, call: Call, device: str) -> list[Any]:
    with region(device, call.lower):
        assert torch.is_autocast_enabled(device)
        results = [run(*call.args, **call.kwargs) for run in _callables(module, call)]
        assert torch.is_autocast_enabled(device)
    assert not torch.is_autocast_enabled(device)
    return results


def _callables(module: Any, call: Call) -> list[Callable[..., Any]]:
    owners = [owner for owner in (module, Tensor) if hasattr(owner, call.name) and owner]
    return [getattr(owner, call.name) for owner in owners]


def _by_hand(module: Any, call: Call) -> Any:
    """Return the result of the casts that a person would write without a region."""
    cast = map_tensors(
        (call.args, call.kwargs), lambda t: t.to(call.run_as) if t.is_floating_point() else t
    )
    run, *_ = _callables(module, call)
    return run(*cast[0], **cast[1])


def _same(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor):
        return mine.dtype is other.dtype and mine.shape == other.shape and same_bits(mine, other)
    if isinstance(mine, (tuple, list)):
        return len(mine) == len(other) and all(map(_same, mine, other))
    return type(mine) is type(other) and mine == other


def test_a_result_of_another_dtype_or_value_is_seen() -> None:
    ones = torch.ones(3)
    assert _same((ones, True), (ones.clone(), True))
    assert not _same(ones, ones.half())
    assert not _same(ones, -ones)
    assert not _same([ones], [ones, ones])
