"""Finds out whether an operation refuses the dtypes of its arguments, which tensors without numbers do not say.

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

__all__ = ["as_with_numbers", "error_of"]


@contextlib.contextmanager
def as_with_numbers() -> Iterator[None]:
    """Has operations on tensors without numbers refuse, in this thread, the mixed dtypes that they refuse on others.

    A policy with `mixed = "promote"` acts where an operation raises, and a program may ask the result for its dtype.
    """
    thread = threading.get_ident()

    def check(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != thread:
            return
        if len({t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}) < 2:
            return
        with _torch.without_modes():
            error = error_of(overload, args, kwargs)
        if error is not None:
            raise error

    stop = _torch.on_fake_operation(check)
    try:
        yield
    finally:
        stop()


def error_of(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> RuntimeError | None:
    """The error that an operation raises on tensors like these; None where it runs."""
    try:
        real_args, real_kwargs = _torch.tree_map(_real, (args, kwargs))
    except (RuntimeError, AssertionError):
        return None
    try:
        with torch.no_grad():
            overload(*real_args, **real_kwargs)
    except RuntimeError as error:
        return error
    return None


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
