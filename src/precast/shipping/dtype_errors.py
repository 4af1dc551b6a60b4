"""Finds out what an operation does with mixed dtypes: tensors without numbers do not say all that it refuses.

Some say another dtype of the result, too, than tensors with numbers have.

Invariants:

- the operation runs on zeros of the arguments' sizes, dtypes and devices, and nothing else is touched;
- where a device is not there, nothing is known, and nothing is said.
"""

from __future__ import annotations

import contextlib
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
    """What an operation gives for tensors like these, or the error that it raises; None where nothing is known."""
    try:
        real_args, real_kwargs = _torch.tree_map(_real, (args, kwargs))
    except (RuntimeError, AssertionError):
        return None
    try:
        with torch.no_grad():
            return overload(*real_args, **real_kwargs)
    except RuntimeError as error:
        return error


def error_of(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> RuntimeError | None:
    """The error that an operation raises on tensors like these; None where it runs."""
    found = tried(overload, args, kwargs)
    return found if isinstance(found, RuntimeError) else None


def in_dtypes_of(real: Any, value: Any) -> Any:
    """A result without numbers, in the dtypes of one with numbers; some of PyTorch's say others (2.13)."""
    return value if real is None else retyped(value, real)


def _real(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        shape, stride = (tuple(map(_number, each)) for each in (leaf.shape, leaf.stride()))
        return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device).zero_()
    return _number(leaf) if isinstance(leaf, torch.SymInt) else leaf


def _number(size: int | torch.SymInt) -> int:
    """A size that the program has seen, or 2 where only the data says it."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)
