"""The arguments of an operation that are no tensors, as text, and the tensors that it writes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name
from precast._internal.pytree import tensors_in

__all__ = ["UNINITIALIZED", "argument_text", "is_asynchronous", "is_random", "results_of"]

_LONGEST: Final = 80
_WITHOUT_EFFECT: Final = frozenset(
    {"device", "generator", "layout", "memory_format", "non_blocking", "pin_memory"}
)
"""Arguments that change no value of the result."""
UNINITIALIZED: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
    | {"resize_", "set_"}
)
"""Operations whose results have no values yet."""


@functools.cache
def _arguments_of(func: Any) -> tuple[tuple[str, bool], ...]:
    """Return the name of each argument of an operation, and True if the operation writes it."""
    schema = _torch.schema_of(func) if isinstance(func, _torch.OpOverload) else None
    arguments = [] if schema is None else schema.arguments
    return tuple((a.name, bool(a.alias_info and a.alias_info.is_write)) for a in arguments)


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    names = (name for name, _ in _arguments_of(func))
    return [*zip(names, args, strict=False), *kwargs.items()]


def argument_text(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the arguments that are no tensors, as "eps=1e-05; dim=[1]"."""
    pairs = _named(func, args, kwargs)
    texts = ((name, _text(value)) for name, value in pairs if name not in _WITHOUT_EFFECT)
    return "; ".join(f"{name}={text}" for name, text in texts if text)


def _text(value: Any) -> str:
    """Return an argument as text; "" for a tensor, for None and for an object."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, bool | int | float | complex | str):
        return repr(value)[:_LONGEST]
    if isinstance(value, list | tuple) and all(isinstance(v, bool | int | float) for v in value):
        return repr(list(value))[:_LONGEST]
    return ""


def results_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Tensor]:
    """Return the tensors that an operation computed: its results, or the arguments that it wrote."""
    outputs = {name for name, is_written in _arguments_of(func) if is_written}
    results = tensors_in(out)
    if not outputs or results:
        return results
    pairs = _named(func, args, kwargs)
    return tensors_in([value for name, value in pairs if name in outputs])


@functools.cache
def is_random(func: Any) -> bool:
    """Return True if an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def is_asynchronous(name: str) -> bool:
    """Return True for a communication between processes, whose results have no values yet when it returns."""
    return name.startswith(("c10d::", "_c10d_functional::")) and "wait_tensor" not in name
