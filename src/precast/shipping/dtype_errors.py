"""The result of an operation on mixed dtypes: tensors without values do not raise all errors of real ones.

Some also have another dtype in the result than tensors with values have.

Invariants:

- the operation runs on zeros with the arguments' sizes, dtypes and devices, and nothing else is changed. A mask selects
  as many elements as some argument has, because operations compare that number before dtypes;
- an error is about dtypes if there is none when all floating tensors have the widest of them;
- without the device, no result is known, and no error is raised.
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

__all__ = ["error_of", "fake_as_real", "is_mixed", "is_refused", "result_on_zeros"]


@contextlib.contextmanager
def fake_as_real() -> Iterator[None]:
    """Make operations on fake tensors with mixed dtypes behave, in this thread, as on real tensors.

    They raise the same errors, and their results have the same dtypes. A policy with `mixed = "promote"` acts where an
    operation raises, and a program may read the dtype of a result.
    """
    thread = threading.get_ident()

    def check(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread or not is_mixed((args, kwargs)):
            return None
        with _torch.without_modes():
            result = result_on_zeros(overload, args, kwargs)
        if isinstance(result, RuntimeError):
            raise result
        return lambda value: value if result is None else retyped(value, result)

    stop = _torch.on_fake_operation(check)
    try:
        yield
    finally:
        stop()


def is_mixed(values: Any) -> bool:
    """Return True if the values contain tensors of several floating dtypes."""
    return len({t.dtype for t in tensors_in(values) if t.is_floating_point()}) > 1


def result_on_zeros(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on zeros like these tensors, or the error that it raises on their dtypes.

    Return None if neither is certain: the operation raises the same error with one dtype, because of the zeros or of
    the number of elements that a mask selects.
    """
    tensors = tensors_in((args, kwargs))
    has_mask = any(t.dtype is torch.bool for t in tensors)
    sizes = {0, 1, *(_number(size) for t in tensors for size in t.shape)} if has_mask else {0}
    for count in sorted(sizes):  # of elements that masks select
        result = _run(overload, (args, kwargs), count, None)
        if not isinstance(result, Exception):
            return result
        # At least float32: PyTorch has no 16-bit kernel for some operations.
        dtypes = (t.dtype for t in tensors if t.is_floating_point())
        widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
        wide = _run(overload, (args, kwargs), count, widest)
        # With another error the zeros are invalid, too (pivots), but the dtypes were refused first.
        has_other_error = not isinstance(wide, Exception) or str(wide) != str(result)
        if isinstance(result, RuntimeError) and has_other_error:
            return result
    return None


def _run(overload: OpOverload, call: Any, count: int, dtype: torch.dtype | None) -> Any:
    """Run an operation on real tensors; return its result or its error, and None if there is no such device.

    `count` is the number of elements that its masks select; `dtype` that of all floating tensors, if it is not None.
    """
    try:
        args, kwargs = _torch.tree_map(lambda leaf: _real(leaf, count, dtype), call)
    except (RuntimeError, AssertionError):
        return None
    try:
        with torch.no_grad():
            return overload(*args, **kwargs)
    except Exception as error:  # any: zeros may be invalid values
        return error


def error_of(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> RuntimeError | None:
    """Return the error that an operation raises on tensors like these; None if it runs."""
    result = result_on_zeros(overload, args, kwargs)
    return result if isinstance(result, RuntimeError) else None


def is_refused(overload: OpOverload, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
    """Return True if PyTorch has a kernel for an operation on tensors like these in float32, and none in `dtype`."""
    low, wide = (_run(overload, (args, kwargs), 0, d) for d in (dtype, torch.float32))
    return isinstance(low, RuntimeError) and not isinstance(wide, Exception)


def _real(leaf: Any, count: int, dtype: torch.dtype | None) -> Any:
    if isinstance(leaf, torch.SymInt):
        return _number(leaf)
    if not isinstance(leaf, Tensor):
        return leaf
    shape, stride = (tuple(map(_number, each)) for each in (leaf.shape, leaf.stride()))
    own_dtype = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
    real = torch.empty_strided(shape, stride, dtype=own_dtype, device=leaf.device).zero_()
    if own_dtype is torch.bool and count:
        real.copy_(torch.arange(real.numel(), device=leaf.device).reshape(shape) < count)
    return real


def _number(size: int | torch.SymInt) -> int:
    """Return a size: its value for the example, or 2 if it depends on data."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)
