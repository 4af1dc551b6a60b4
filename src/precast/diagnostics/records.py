"""Dataclasses as JSON: one definition of a type writes its values, reads them, and checks what it reads.

Invariants:

- what `as_json` returns is strict JSON, and `from_json` makes an equal value of it;
- `from_json` ignores keys that the type does not have, as later versions may add some. Everything else that is not of
  the type is an error, which says where it is, what is wanted and what is there;
- the types are dataclasses, plain values, literals, lists, dictionaries, and each of these or None;
- a bool is no number, a number is finite, and a whole number may be written with a fraction of zero, as in "3.0".
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
    "Key",
    "MismatchError",
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
    """A value is not of the type that was wanted; the message says where, and what is there instead."""


def may_be_missing(
    default: Any = None, *, factory: Callable[[], Any] | None = None, is_left_out: bool = False
) -> Any:
    """A field whose key is missing in the files of earlier versions.

    Args:
        default: the value where the key is missing.
        factory: makes that value, if each needs its own.
        is_left_out: whether None is written as no key, rather than as null.
    """
    about = {"may_be_missing": True, "is_left_out": is_left_out}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=about)
    return dataclasses.field(default=default, metadata=about)


def written_as(key: str) -> Any:
    """A field whose key in JSON is another one, as where Python does not allow the name."""
    return dataclasses.field(metadata={"key": key})


class Key(NamedTuple):
    """One key of a dataclass."""

    name: str
    field: str
    wanted: Any
    """The type of its value."""
    may_be_missing: bool
    is_left_out: bool


@cache
def keys_of(kind: Any) -> tuple[Key, ...]:
    """The keys of a dataclass, in the order in which they are written."""
    hints = _hints(kind)
    return tuple(
        Key(
            item.metadata.get("key", item.name),
            item.name,
            hints[item.name],
            item.metadata.get("may_be_missing", False),
            item.metadata.get("is_left_out", False),
        )
        for item in dataclasses.fields(kind)
    )


def as_json(value: Any) -> Any:
    """Makes objects of dataclasses, also in lists and in dictionaries; everything else stays as it is."""
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        said = ((key, getattr(value, key.field)) for key in keys_of(kind))
        return {
            key.name: as_json(inner)
            for key, inner in said
            if not (inner is None and key.is_left_out)
        }
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    return value


def from_json(wanted: type[_T], value: object, path: str = "") -> _T:
    """Makes a value of the type `wanted` from what `as_json` returned, or a file contains.

    Args:
        wanted: the type.
        value: the value from JSON; it is not changed.
        path: where the value is, for messages.

    Raises:
        MismatchError: the value is not of that type.

    Examples:
        >>> from_json(dict[str, list[int]], {"a": [1, 2.5]})
        Traceback (most recent call last):
            ...
        precast.diagnostics.records.MismatchError: a[1]: a whole number is wanted, and 2.5 is there
    """
    return cast("_T", _read(wanted, value, path))


def _read(wanted: Any, value: Any, path: str) -> Any:
    kind, origin, inner = _taken_apart(wanted)
    if kind is Any or (value is None and kind != wanted):
        return value
    if not _fits(value, kind, origin):
        what = f"{_wanted(wanted)} is wanted, and {_shown(value)} is there"
        raise MismatchError(f"{path or 'the document'}: {what}")
    if origin is list:
        return [_read(inner[0], each, f"{path}[{i}]") for i, each in enumerate(value)]
    if origin is dict and inner:
        return {key: _read(inner[1], each, _joined(path, key)) for key, each in value.items()}
    if origin is dict:
        return _record(kind, value, path)
    return int(value) if kind is int else value


@cache
def _taken_apart(wanted: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """The type without None, the Python type of its values, and what is in them; a dataclass is read from a `dict`."""
    kind = wanted
    if get_origin(wanted) in (Union, UnionType):
        [kind] = (each for each in get_args(wanted) if each is not NoneType)
    origin = dict if dataclasses.is_dataclass(kind) else get_origin(kind) or kind
    return kind, origin, get_args(kind)


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


def _record(kind: Any, value: dict[str, Any], path: str) -> Any:
    given = {
        key.field: _read(key.wanted, value[key.name], _joined(path, key.name))
        for key in keys_of(kind)
        if key.name in value
    }
    for key in keys_of(kind):
        if key.name not in value and not key.may_be_missing:
            where = _joined(path, key.name)
            raise MismatchError(f"{where}: is missing; {_wanted(key.wanted)} is wanted")
    return kind(**given)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _wanted(kind: Any) -> str:
    if dataclasses.is_dataclass(kind) or get_origin(kind) is dict:
        return "an object"
    if get_origin(kind) is list:
        return "a list"
    if get_origin(kind) is Literal:
        return " or ".join(json.dumps(each) for each in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_wanted(each) for each in get_args(kind))
    return _WORDS.get(kind, str(kind))


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value) if value is not None else "null"
    return text if len(text) <= 60 else text[:57] + "..."
