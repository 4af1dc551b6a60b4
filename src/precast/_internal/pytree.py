"""Traversal of nested containers: a function is applied to each tensor in them, or the tensors are listed.

Invariants:
- containers are lists, deques, tuples (named tuples, `PackedSequence` and `torch.return_types` too), mappings and
  dataclass instances (frozen ones too), with their subclasses; everything else is a leaf;
- no container is modified in place: one with changes is rebuilt, with the same type, default factory, order and
  attributes, and one without is returned itself;
- a container that contains itself is visited once; in its rebuilt version it still contains the original;
- generators, which must not be consumed, are leaves, as are strings, sets and arrays.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, TypeVar

import torch

__all__ = ["map_tensors", "tensors_in"]

T = TypeVar("T")

_COMMON_LEAVES: Final = (int, float, str, type(None))


def map_tensors(
    value: T,
    fn: Callable[[torch.Tensor], torch.Tensor],
    map_other: Callable[[Any], Any] = lambda leaf: leaf,
    _containers: tuple[Any, ...] = (),
) -> T:
    """Return `value` with each tensor `t` in it replaced by ``fn(t)``.

    Args:
        value: A tensor, a leaf, or any nesting of containers; keys of mappings are not visited.
        fn: Called once for each occurrence of a tensor.
        map_other: Called for each leaf that is not a tensor; its result replaces the leaf.

    Returns:
        A value of the same structure and types; `value` itself if nothing changes.

    >>> pair = [1, (torch.ones(2), "x")]
    >>> map_tensors(pair, lambda t: t * 2)
    [1, (tensor([2., 2.]), 'x')]
    >>> map_tensors(pair, lambda t: t) is pair
    True
    """
    if isinstance(value, torch.Tensor):
        return fn(value)  # type: ignore[return-value]
    items = _items(value)
    if items is None:
        return map_other(value)  # type: ignore[no-any-return]
    if not torch.compiler.is_dynamo_compiling():  # Dynamo cannot compare containers by identity
        if any(value is container for container in _containers):
            return value
        _containers = (*_containers, value)
    changes = {}
    for key, child in items:
        new = map_tensors(child, fn, map_other, _containers)
        if new is not child:
            changes[key] = new
    return _rebuilt(value, changes) if changes else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in a value, in order. A container that occurs twice is visited once.

    >>> inner = [torch.ones(2)]
    >>> inner.append(inner)
    >>> tensors_in({"a": inner, "b": 1})
    [tensor([1., 1.])]
    """
    tensors: list[torch.Tensor] = []
    stack, visited = [value], {}
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif not isinstance(value, _COMMON_LEAVES) and id(value) not in visited:
            visited[id(value)] = value
            stack += [child for _, child in _items(value) or ()][::-1]
    return tensors


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the children of a container with their keys; None for a leaf."""
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A field may be unset (`init=False`): it then counts as None.
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return None


def _rebuilt(value: Any, changes: dict[Any, Any]) -> Any:
    """Return a container like `value` with some children replaced."""
    if isinstance(value, tuple):
        return _new_tuple(type(value), [changes.get(i, item) for i, item in enumerate(value)])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **changes})  # type: ignore[call-arg]
    new = copy.copy(value)  # not the constructor: it may take other arguments or have side effects
    set_item = _setter(value)
    for key, item in changes.items():
        set_item(new, key, item)
    return new


def _new_tuple(cls: type[tuple[Any, ...]], items: list[Any]) -> tuple[Any, ...]:
    if hasattr(cls, "n_sequence_fields"):
        return cls(items)  # C structs such as torch.return_types.max refuse tuple.__new__
    return tuple.__new__(cls, items)  # a named tuple's own constructor takes its items one by one


def _setter(container: Any) -> Callable[[Any, Any, Any], None]:
    if isinstance(container, list | deque | MutableMapping):
        return operator.setitem
    frozen = type(container).__dataclass_params__.frozen
    return object.__setattr__ if frozen else setattr
