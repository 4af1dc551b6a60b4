"""Runs an operation forward and backward and compares what came out bit for bit, errors included."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precast._internal.pytree import map_tensors
from tests.support import op_samples
from tests.support.op_samples import Sample

__all__ = ["DTYPES", "Outcome", "assert_same", "cast", "floating", "mixtures", "outcome"]

# What PyTorch itself does not give twice: a buffer that is scratch memory, and a LAPACK routine whose
# rounding depends on how its memory is aligned (it is compared to 1e-3, its dtypes exactly).
_SCRATCH = {"aten::mkldnn_rnn_layer": 3}
_ROUNDS_BY_ALIGNMENT = {"aten::linalg_lstsq"}

_ODD_ONES = (
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Outcome:
    """The results and gradients of one call, or the type of its error."""

    tensors: tuple[Tensor | None, ...] = ()
    error: type[BaseException] | None = None
    message: str = ""


def floating(sample: Sample) -> list[Tensor]:
    """The floating-point tensors of a call, in order."""
    result: list[Tensor] = []
    map_tensors(sample, lambda t: result.append(t) or t if t.is_floating_point() else t)  # type: ignore[func-returns-value]
    return result


def mixtures(sample: Sample) -> Iterator[tuple[torch.dtype, ...]]:
    """Dtypes for the floating tensors of a call: every mixture of two; of more, each that has one odd one.

    An integer in the place of one of them, or of all, is a mixture too.
    """
    count = len(floating(sample))
    if count == 0:
        yield ()
        return
    if count <= 2:
        yield from itertools.product(DTYPES, repeat=count)
    else:
        yield from ((dtype,) * count for dtype in DTYPES)
        for one, rest in _ODD_ONES:
            yield from (tuple(one if i == j else rest for j in range(count)) for i in range(count))
    yield (torch.int64,) * count
    if count > 1:
        for rest in DTYPES[:2]:
            yield from (
                tuple(torch.int64 if i == j else rest for j in range(count)) for i in range(count)
            )


def cast(sample: Sample, dtypes: tuple[torch.dtype, ...]) -> Sample:
    """The call with its floating tensors in these dtypes, as fresh leaves."""
    queue = iter(dtypes)
    return map_tensors(
        sample, lambda t: t.to(next(queue)).clone() if t.is_floating_point() else t.clone()
    )


def outcome(
    region: AbstractContextManager[object],
    name: str,
    sample: Sample,
    dtypes: tuple[torch.dtype, ...],
    run: Callable[[str, Sample], Any] = op_samples.call,
) -> Outcome:
    """Return the results of one call in a region, then the gradients of its floating arguments."""
    fresh = cast(sample, dtypes)
    leaves = floating(fresh)
    for leaf in () if _writes(name) else leaves:
        leaf.requires_grad_()
    torch.manual_seed(0)
    try:
        with region:
            result = run(name, fresh)
        outputs = floating(Sample((result,)))
        roots = [t for t in outputs if t.requires_grad]
        if roots:
            torch.manual_seed(1)
            torch.autograd.backward(roots, [torch.randn(t.shape).to(t.dtype) for t in roots])
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return Outcome(error=type(error), message=str(error))
    if name in _SCRATCH:
        result = [t for i, t in enumerate(result) if i != _SCRATCH[name]]
    everything: list[Tensor] = []
    map_tensors(result, lambda t: everything.append(t) or t)  # type: ignore[func-returns-value]
    return Outcome((*(t.detach() for t in everything), *(leaf.grad for leaf in leaves)))


def assert_same(ours: Outcome, theirs: Outcome, what: str) -> None:
    """Same dtypes, shapes and bits, or an error in both."""
    assert (ours.error is None) == (theirs.error is None), f"{what}: {ours} against {theirs}"
    assert len(ours.tensors) == len(theirs.tensors), what
    for mine, expected in zip(ours.tensors, theirs.tensors, strict=True):
        if mine is None or expected is None:
            assert mine is expected, what
            continue
        assert mine.dtype is expected.dtype, f"{what}: {mine.dtype} against {expected.dtype}"
        assert mine.shape == expected.shape, what
        if what.split(maxsplit=1)[0] in _ROUNDS_BY_ALIGNMENT:
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
        else:
            assert same_bits(mine, expected), f"{what}: values differ"


def same_bits(mine: Tensor, expected: Tensor) -> bool:
    """Equality that also tells -0.0 from 0.0, and one NaN from another."""
    if mine.layout is not torch.strided:
        return bool(torch.equal(mine.to_dense(), expected.to_dense()))
    mine, expected = mine.resolve_conj().contiguous(), expected.resolve_conj().contiguous()
    if mine.is_complex():
        mine, expected = torch.view_as_real(mine), torch.view_as_real(expected)
    return (
        bool(torch.equal(mine.view(torch.uint8), expected.view(torch.uint8)))
        if mine.dim()
        else (
            mine.reshape(1).view(torch.uint8).tolist()
            == expected.reshape(1).view(torch.uint8).tolist()
        )
    )


@functools.cache
def _writes(name: str) -> bool:
    """Return True if an operation writes to one of its arguments."""
    operation, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, operation)
    schema: torch.FunctionSchema = getattr(packet, overload or "default")._schema
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
