"""Whether a JSON value is as a typed dictionary says; the first place where it is not, in words.

Invariants: keys that the type does not name are passed over; a bool is no number, and a number is finite.
"""

from __future__ import annotations

import json
import math
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

__all__ = ["mismatch"]

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def mismatch(value: object, wanted: Any, path: str = "") -> str | None:
    """None where `value` fits the type `wanted`, else where it does not, what was asked and what is there.

    >>> mismatch({"a": [1, 2.5]}, dict[str, list[int]])
    'a[1]: a whole number is wanted, and 2.5 is there'
    >>> mismatch([1, None], list[int | None])
    """
    kind, inner = _taken_apart(wanted)
    if kind is dict and not inner:
        return _keys(value, wanted, path)
    if kind is Union:
        return _union(value, inner, path)
    if kind is Literal:
        return None if value in inner and isinstance(value, str) else _says(path, wanted, value)
    if kind is list:
        if not isinstance(value, list):
            return _says(path, wanted, value)
        return _first((each, inner[0], f"{path}[{i}]") for i, each in enumerate(value))
    if kind is dict:
        if not isinstance(value, dict):
            return _says(path, wanted, value)
        return _first((each, inner[1], _joined(path, key)) for key, each in value.items())
    return None if _is(value, wanted) else _says(path, wanted, value)


@cache
def _taken_apart(wanted: Any) -> tuple[Any, tuple[Any, ...]]:
    """What kind of type it is, and of what; a typed dictionary is a `dict` of nothing."""
    if is_typeddict(wanted):
        return dict, ()
    kind = get_origin(wanted)
    return Union if kind is UnionType else kind, get_args(wanted)


def _keys(value: object, wanted: Any, path: str) -> str | None:
    if not isinstance(value, dict):
        return _says(path, wanted, value)
    for key, (kind, required) in _fields(wanted).items():
        if key not in value:
            if required:
                return f"{_joined(path, key)}: is missing; {_wanted(kind)} is wanted"
            continue
        found = mismatch(value[key], kind, _joined(path, key))
        if found:
            return found
    return None


@cache
def _fields(wanted: Any) -> dict[str, tuple[Any, bool]]:
    """Each key of a typed dictionary with its type, and whether it has to be there."""
    hints = get_type_hints(wanted, include_extras=True)
    return {
        key: (get_args(hint)[0], False) if get_origin(hint) is NotRequired else (hint, True)
        for key, hint in hints.items()
    }


def _union(value: object, kinds: tuple[Any, ...], path: str) -> str | None:
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1 and _taken_apart(others[0])[0] is not None:
        return mismatch(value, others[0], path)  # says what is wrong inside
    if any(mismatch(value, kind, path) is None for kind in others):
        return None
    return _says(path, Union[kinds], value)  # noqa: UP007 - from a tuple of types


def _first(parts: Any) -> str | None:
    return next((found for each in parts if (found := mismatch(*each))), None)


def _is(value: object, wanted: Any) -> bool:
    if wanted is Any:
        return True
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    if wanted is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, wanted)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _says(path: str, wanted: Any, value: object) -> str:
    return f"{path or 'the document'}: {_wanted(wanted)} is wanted, and {_shown(value)} is there"


def _wanted(kind: Any) -> str:
    if is_typeddict(kind) or get_origin(kind) is dict:
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
