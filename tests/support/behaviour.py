"""The behaviour of PyTorch's own autocast for an operation, found by watching it.

An operation runs inside a region and once more outside, for each rule, with its arguments cast by
hand as that rule says. The rules under which the same kernels see the same dtypes are the answer.

Invariants:
    - A device that is not there is played by fake tensors: they carry its dispatch keys.
    - No precast region is involved; PyTorch's flags are restored.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from precast.policy.policy import Rule
from tests.support import op_samples
from tests.support.op_samples import Sample

__all__ = [
    "Outcome",
    "by_hand",
    "consistent_rules",
    "in_dtypes",
    "map_tensors",
    "observe",
    "on_device",
    "torch_region",
]

_LOW = torch.bfloat16
_PATTERNS: tuple[tuple[torch.dtype, ...], ...] = (
    (torch.float32,),
    (torch.bfloat16,),
    (torch.float16,),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float64),
)


class Outcome(NamedTuple):
    """The kernels that ran, each with its dtypes; the results' dtypes, sizes and devices; the error's first line."""

    kernels: list[tuple[object, ...]]
    results: list[object]
    error: str


def consistent_rules(name: str, device: str) -> set[Rule]:
    """The rules that explain what `torch.autocast(device)` does to an operation's samples.

    Args:
        name: the dispatcher's name of an operation with a kernel at the device's Autocast key.
        device: a device type.
    """
    rules = set(Rule) - {Rule.KEEP, Rule.FALLTHROUGH}
    for sample in op_samples.samples(name):
        for pattern in _PATTERNS:
            rules = _still_consistent(rules, name, device, in_dtypes(sample, pattern))
    return rules


@contextlib.contextmanager
def torch_region(device: str, dtype: torch.dtype = _LOW) -> Iterator[None]:
    """PyTorch's autocast by its flags alone: for devices that are not there too."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


def map_tensors(convert: Callable[[Tensor], Tensor], sample: Sample) -> Sample:
    """The sample with every tensor converted, those in lists too."""
    converted: Sample = torch.utils._pytree.tree_map_only(Tensor, convert, sample)
    return converted


def _still_consistent(rules: set[Rule], name: str, device: str, sample: Sample) -> set[Rule]:
    with _tensors_on(device) as fake, torch.no_grad():
        if fake is not None:
            sample = map_tensors(lambda t: on_device(t, device), sample)
        with torch_region(device):
            records = observe(lambda: op_samples.call(name, sample))
        return {rule for rule in rules if _explains(rule, name, sample, records)}


def _tensors_on(device: str) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if device == "cpu" else FakeTensorMode()


def _explains(rule: Rule, name: str, sample: Sample, seen: Outcome) -> bool:
    if rule is Rule.BANNED:
        return "unsafe to autocast" in seen.error
    if rule is Rule.PROMOTE and _torch_cannot_promote(sample):
        return "Unexpected floating ScalarType" in seen.error
    cast = by_hand(rule, name, sample)
    if cast is None:
        return False
    expected = observe(lambda: op_samples.call(*cast))
    casts = max(len(seen.kernels) - len(expected.kernels), 0)
    return (
        seen.error == expected.error
        and seen.kernels[casts:] == expected.kernels
        and all(kernel[0] == "aten._to_copy.default" for kernel in seen.kernels[:casts])
    )


def observe(call: Callable[[], Any]) -> Outcome:
    """Run a call and record the kernels below autograd, with the dtypes of their arguments."""
    with _Recorder() as recorder:
        try:
            results = torch.utils._pytree.tree_leaves(call())
        except Exception as error:  # fake tensors have errors of their own
            # A kernel that refuses its dtypes says so in the first line.
            first = f"{type(error).__name__}: {error}".split("\n")[0]
            return Outcome(recorder.kernels, [], first)
    return Outcome(recorder.kernels, [_metadata(value) for value in results], "")


def on_device(tensor: Tensor, device: str) -> Tensor:
    """Return a new tensor on a device with the same sizes, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _metadata(value: object) -> object:
    return (value.dtype, value.shape, value.device) if isinstance(value, Tensor) else value


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[tuple[object, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "prim":  # `prim.device` only asks where a fake tensor is
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            dtypes = [x.dtype if isinstance(x, Tensor) else x for x in leaves]
            self.kernels.append((str(func), *(x for x in dtypes if isinstance(x, torch.dtype))))
        return func(*args, **kwargs)


def by_hand(
    rule: Rule, name: str, sample: Sample, lower: torch.dtype = _LOW
) -> tuple[str, Sample] | None:
    """The operation and arguments that outside a region have the rule's effect; None where it has none."""
    if rule in (Rule.FP32_SET_DTYPE, Rule.FP32_APPEND_DTYPE):
        return _with_dtype(rule, name, sample)
    dtype = {
        Rule.LOWER: lower,
        Rule.FP32: torch.float32,
        Rule.PROMOTE: lower if set(_dtypes(sample)) <= {lower} else torch.float32,
    }.get(rule)
    if dtype is None:
        return name, sample
    return name, map_tensors(lambda t: t.to(dtype) if _eligible(t) else t, sample)


def _with_dtype(rule: Rule, name: str, sample: Sample) -> tuple[str, Sample] | None:
    operation, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, operation)
    own = getattr(packet, overload or "default")._schema.arguments
    values = dict(zip((a.name for a in own), sample.args, strict=False)) | sample.kwargs
    inputs = {a.name: values.get(a.name, a.default_value) for a in own}
    first = sample.args[0]
    if rule is Rule.FP32_SET_DTYPE and "dtype" in inputs:
        dtype = torch.float32 if _eligible(first) and inputs["dtype"] is None else inputs["dtype"]
        return name, Sample((), inputs | {"dtype": dtype})
    if rule is Rule.FP32_APPEND_DTYPE and isinstance(first, Tensor):
        inputs |= {"dtype": torch.float32 if _eligible(first) else first.dtype}
        longer = (
            other
            for other in packet.overloads()
            if [a.name for a in getattr(packet, other)._schema.arguments] == list(inputs)
        )
        return next(((f"{operation}.{other}", Sample((), inputs)) for other in longer), None)
    return None


def in_dtypes(sample: Sample, pattern: tuple[torch.dtype, ...]) -> Sample:
    """The sample with its floating tensors in the dtypes of the pattern, taken in turn."""
    dtypes = itertools.cycle(pattern)
    return map_tensors(lambda t: t.to(next(dtypes)) if t.is_floating_point() else t, sample)


def _eligible(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    )


def _dtypes(sample: Sample) -> list[torch.dtype]:
    """The dtypes of the eligible tensors, in order."""
    leaves = torch.utils._pytree.tree_leaves(tuple(sample))
    return [leaf.dtype for leaf in leaves if _eligible(leaf)]


def _torch_cannot_promote(sample: Sample) -> bool:
    """PyTorch refuses a third dtype, unless it has already met float32 (ATen/autocast_mode.h)."""
    before_float32 = itertools.takewhile(lambda dtype: dtype is not torch.float32, _dtypes(sample))
    return any(dtype is not _LOW for dtype in before_float32)
