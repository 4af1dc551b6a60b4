"""Dataclasses as JSON: one definition of a type writes its values, reads them, and checks what it reads.

Invariants:

- what `as_json` gives is strict JSON, and `from_json` of it equals what it was made from;
- `from_json` passes over keys that the type does not name, as later versions may say more, and refuses everything else
  that is not of the type, with the place, what is wanted and what is there;
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
    """A field whose key files may lack, as earlier versions did not write it.

    Args:
        default: the value of a file that lacks the key.
        factory: makes that value, where each needs its own.
        is_left_out: whether None is written as no key, rather than as null.
    """
    about = {"may_be_missing": True, "is_left_out": is_left_out}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=about)
    return dataclasses.field(default=default, metadata=about)


def written_as(key: str) -> Any:
    """A field whose key in JSON is no name that Python allows, or is not the field's own."""
    return dataclasses.field(metadata={"key": key})


class Key(NamedTuple):
    """One key of a type, as JSON has it."""

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
    """Dataclasses as objects, also inside of lists and of dictionaries; all else as it is."""
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
    """A value of the type `wanted` from what `as_json` gave, or a file had.

    Args:
        wanted: a dataclass, or a type made of lists, dictionaries, unions and literals of them.
        value: from JSON; it is not changed.
        path: where the value stands, for messages.

    Raises:
        MismatchError: it is not of that type.

    Examples:
        >>> from_json(dict[str, list[int]], {"a": [1, 2.5]})
        Traceback (most recent call last):
            ...
        precast.diagnostics.records.MismatchError: a[1]: a whole number is wanted, and 2.5 is there
    """
    return cast("_T", _read(wanted, value, path))


def _read(wanted: Any, value: object, path: str) -> Any:
    kind, inner = _taken_apart(wanted)
    if kind is None:
        return _scalar(wanted, value, path)
    if kind is dict and not inner:
        return _record(wanted, value, path)
    if kind is Union:
        return _union(wanted, inner, value, path)
    if kind is Literal:
        if not (isinstance(value, str) and value in inner):
            raise _wrong(path, wanted, value)
        return value
    if not isinstance(value, kind):
        raise _wrong(path, wanted, value)
    if isinstance(value, list):
        return [_read(inner[0], each, f"{path}[{i}]") for i, each in enumerate(value)]
    items = cast("dict[str, Any]", value).items()
    return {key: _read(inner[1], each, _joined(path, key)) for key, each in items}


@cache
def _taken_apart(wanted: Any) -> tuple[Any, tuple[Any, ...]]:
    """What kind of type it is, and of what; a dataclass is a `dict` of nothing, and None stands for a plain value."""
    if dataclasses.is_dataclass(wanted):
        return dict, ()
    kind = get_origin(wanted)
    return Union if kind is UnionType else kind, get_args(wanted)


def _record(wanted: Any, value: object, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(path, wanted, value)
    given = {
        key.field: _read(key.wanted, value[key.name], _joined(path, key.name))
        for key in keys_of(wanted)
        if key.name in value
    }
    for key in keys_of(wanted):
        if key.name not in value and not key.may_be_missing:
            where = _joined(path, key.name)
            raise MismatchError(f"{where}: is missing; {_wanted(key.wanted)} is wanted")
    return wanted(**given)


def _union(wanted: Any, kinds: tuple[Any, ...], value: object, path: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1 and _taken_apart(others[0])[0] is not None:
        return _read(others[0], value, path)  # the message says what is wrong inside
    for kind in others:
        try:
            return _read(kind, value, path)
        except MismatchError:
            continue
    raise _wrong(path, wanted, value)


def _scalar(wanted: Any, value: object, path: str) -> Any:
    if wanted is Any:
        return value
    if isinstance(value, bool) or wanted is bool:
        fits = isinstance(value, bool) and wanted is bool
    elif wanted is float:
        fits = isinstance(value, int | float) and math.isfinite(value)
    elif wanted is int and isinstance(value, float):
        if value.is_integer():
            return int(value)
        fits = False
    else:
        fits = isinstance(value, wanted)
    if not fits:
        raise _wrong(path, wanted, value)
    return value


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _wrong(path: str, wanted: Any, value: object) -> MismatchError:
    what = f"{_wanted(wanted)} is wanted, and {_shown(value)} is there"
    return MismatchError(f"{path or 'the document'}: {what}")


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
