"""Finds out what an operation does with mixed dtypes: tensors without numbers do not say all that it refuses.

Some say another dtype of the result, too, than tensors with numbers have.

Invariants:

- the operation runs on zeros of the arguments' sizes, dtypes and devices, and nothing else is touched. A mask selects
  as many elements as some argument has room for, since operations compare that number before dtypes;
- an error is about dtypes if there is none when all floating tensors have the widest of them;
- where a device is not there, nothing is known, and nothing is said.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from precast import _torch
from precast._internal.pytree import tensors_in
from precast._torch import OpOverload
from precast.shipping.graph_nodes import retyped

__all__ = ["as_with_numbers", "error_of", "in_dtypes_of", "is_mixed", "tried"]


@contextlib.contextmanager
def as_with_numbers() -> Iterator[None]:
    """Has operations on tensors without numbers do, in this thread, with mixed dtypes what they do on others.

    They refuse what those refuse, and their results have the dtypes of those.
    A policy with `mixed = "promote"` acts where an operation raises, and a program may ask the result for its dtype.
    """
    thread = threading.get_ident()

    def check(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread or not is_mixed((args, kwargs)):
            return None
        with _torch.without_modes():
            found = tried(overload, args, kwargs)
        if isinstance(found, RuntimeError):
            raise found
        return lambda value: in_dtypes_of(found, value)

    stop = _torch.on_fake_operation(check)
    try:
        yield
    finally:
        stop()


def is_mixed(values: Any) -> bool:
    """Whether there are tensors of several floating dtypes among values."""
    return len({t.dtype for t in tensors_in(values) if t.is_floating_point()}) > 1


def tried(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation for tensors like these, or the error that it raises on their dtypes.

    None where nothing is known: where the operation raises in one dtype, too, its error is about the zeros, or about
    how many elements a mask selects.
    """
    for count in _counts((args, kwargs)):
        result = _run(overload, (args, kwargs), count, None)
        if not isinstance(result, Exception):
            return result
        widest = _widest((args, kwargs))
        if isinstance(result, RuntimeError) and not isinstance(
            _run(overload, (args, kwargs), count, widest), Exception
        ):
            return result
    return None


def _counts(values: Any) -> list[int]:
    """Return how many elements masks may select: none, or as many as a tensor among values has in one dimension."""
    tensors = list(tensors_in(values))
    if not any(t.dtype is torch.bool for t in tensors):
        return [0]
    return sorted({0, 1, *(_number(size) for t in tensors for size in t.shape)})


def _run(overload: OpOverload, call: Any, count: int, dtype: torch.dtype | None) -> Any:
    """Run an operation on tensors with numbers; return its result or its error, None where a device is not there.

    Args:
        overload: the operation.
        call: its arguments.
        count: how many elements its masks select.
        dtype: of all floating tensors; None is that of each.
    """
    try:
        args, kwargs = _torch.tree_map(lambda leaf: _real(leaf, count, dtype), call)
    except (RuntimeError, AssertionError):
        return None
    try:
        with torch.no_grad():
            return overload(*args, **kwargs)
    except Exception as error:  # any: zeros may be values that it does not take
        return error


def _widest(values: Any) -> torch.dtype:
    return functools.reduce(
        torch.promote_types, (t.dtype for t in tensors_in(values) if t.is_floating_point())
    )


def error_of(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> RuntimeError | None:
    """The error that an operation raises on tensors like these; None where it runs."""
    found = tried(overload, args, kwargs)
    return found if isinstance(found, RuntimeError) else None


def in_dtypes_of(real: Any, value: Any) -> Any:
    """A result without numbers, in the dtypes of one with numbers; some of PyTorch's say others (2.13)."""
    return value if real is None else retyped(value, real)


def _real(leaf: Any, count: int, dtype: torch.dtype | None) -> Any:
    if isinstance(leaf, torch.SymInt):
        return _number(leaf)
    if not isinstance(leaf, Tensor):
        return leaf
    shape, stride = (tuple(map(_number, each)) for each in (leaf.shape, leaf.stride()))
    its = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
    real = torch.empty_strided(shape, stride, dtype=its, device=leaf.device).zero_()
    if its is torch.bool and count:
        real.copy_(torch.arange(real.numel(), device=leaf.device).reshape(shape) < count)
    return real


def _number(size: int | torch.SymInt) -> int:
    """A size that the program has seen, or 2 where only the data says it."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)
