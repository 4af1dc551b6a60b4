"""JSON for dataclasses: one definition of a type writes its values, reads them and validates them.

Invariants:

- `as_json` returns strict JSON, and `from_json` rebuilds an equal value from it;
- `from_json` ignores unknown keys, because later versions may add some. Every other mismatch is an error that names
  the path, the expected type and the value;
- supported types: dataclasses, plain values, literals, lists, tuples of one type, dictionaries, and each of these or
  None;
- a bool is not a number, a number is finite, and an integer may be written with a fraction of zero, as in "3.0".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as _hints

__all__ = [
    "MismatchError",
    "RecordKey",
    "as_json",
    "from_json",
    "keys_of",
    "may_be_missing",
    "written_as",
]

_T = TypeVar("_T")
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


class MismatchError(ValueError):
    """A value does not have the expected type. The message names the path and the value."""


def may_be_missing(
    default: Any = None,
    *,
    factory: Callable[[], Any] | None = None,
    is_left_out: bool = False,
    key: str | None = None,
) -> Any:
    """Return a dataclass field whose key may be missing, as in files of earlier versions.

    Args:
        default: value for a missing key.
        factory: creates that value, for mutable ones.
        is_left_out: omit the key when the value is the default.
        key: the key in JSON, if it differs from the field's name.
    """
    metadata: dict[str, Any] = {"may_be_missing": True, "is_left_out": is_left_out}
    if key is not None:
        metadata["key"] = key
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def written_as(key: str) -> Any:
    """Return a dataclass field that has another key in JSON, for example a reserved word."""
    return dataclasses.field(metadata={"key": key})


class RecordKey(NamedTuple):
    """One key of a dataclass."""

    name: str
    field: str
    type: Any
    may_be_missing: bool
    is_left_out: bool
    default: Any


@cache
def keys_of(kind: Any) -> tuple[RecordKey, ...]:
    """Return the keys of a dataclass in the order in which they are written."""
    hints = _hints(kind)
    return tuple(
        RecordKey(
            item.metadata.get("key", item.name),
            item.name,
            hints[item.name],
            item.metadata.get("may_be_missing", False),
            item.metadata.get("is_left_out", False),
            item.default,
        )
        for item in dataclasses.fields(kind)
    )


def as_json(value: Any) -> Any:
    """Convert dataclasses, also inside lists, tuples and dictionaries, to plain values."""
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        items = ((key, getattr(value, key.field)) for key in keys_of(kind))
        return {
            key.name: as_json(item)
            for key, item in items
            if not (key.is_left_out and item == key.default)
        }
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    return value


def from_json(expected: type[_T], value: object, path: str = "") -> _T:
    """Build a value of the type `expected` from the output of `as_json` or from a file.

    Examples:
        >>> from_json(dict[str, list[int]], {"a": [1, 2.5]})
        Traceback (most recent call last):
            ...
        precast._internal.records.MismatchError: a[1]: expected a whole number, got 2.5
    """
    return cast("_T", _read(expected, value, path))


def _read(expected: Any, value: Any, path: str) -> Any:
    kind, origin, inner = _split(expected)
    if kind is Any or (value is None and kind != expected):
        return value
    if not _fits(value, kind, origin):
        where = path or "the document"
        raise MismatchError(f"{where}: expected {_describe(expected)}, got {_shown(value)}")
    if origin is list:
        items = [_read(inner[0], each, f"{path}[{i}]") for i, each in enumerate(value)]
        return tuple(items) if get_origin(kind) is tuple else items
    if origin is dict and inner:
        return {key: _read(inner[1], each, _joined(path, key)) for key, each in value.items()}
    if origin is dict:
        return _read_dataclass(kind, value, path)
    return int(value) if kind is int else value


@cache
def _split(expected: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the type without None, the Python type of its JSON values, and its type arguments."""
    kind = expected
    if get_origin(expected) in (Union, UnionType):
        [kind] = (each for each in get_args(expected) if each is not NoneType)
    origin = dict if dataclasses.is_dataclass(kind) else get_origin(kind) or kind
    return kind, list if origin is tuple else origin, get_args(kind)


def _fits(value: Any, kind: Any, origin: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    if kind is int and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, origin)


def _read_dataclass(kind: Any, value: dict[str, Any], path: str) -> Any:
    fields = {
        key.field: _read(key.type, value[key.name], _joined(path, key.name))
        for key in keys_of(kind)
        if key.name in value
    }
    for key in keys_of(kind):
        if key.name not in value and not key.may_be_missing:
            where = _joined(path, key.name)
            raise MismatchError(f"{where}: missing, expected {_describe(key.type)}")
    return kind(**fields)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _describe(kind: Any) -> str:
    if dataclasses.is_dataclass(kind) or get_origin(kind) is dict:
        return "an object"
    if get_origin(kind) in (list, tuple):
        return "a list"
    if get_origin(kind) is Literal:
        return " or ".join(json.dumps(each) for each in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_describe(each) for each in get_args(kind))
    return _WORDS.get(kind, str(kind))


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value) if value is not None else "null"
    return text if len(text) <= 60 else text[:57] + "..."
