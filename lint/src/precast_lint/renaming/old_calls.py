"""Conversion of a deprecated name's arguments to those of its replacement.

`autocast(enabled, dtype, cache_enabled)` became `autocast(device_type, dtype, enabled, cache_enabled)`, so
positional arguments become keywords. `GradScaler` got the device in front of its parameters.
`custom_fwd` and `custom_bwd` got a keyword.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast_lint.meaning.kinds import is_text
from precast_lint.meaning.regions import regions_around
from precast_lint.model import Edit
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst

__all__ = ["call_edits", "device_edits", "has_new_arguments"]

_OLD_PARAMETERS = ("enabled", "dtype", "cache_enabled")


def call_edits(
    source: Source, call: cst.Call, args: Sequence[cst.Arg], kind: str, device: str
) -> tuple[Edit, ...] | None:
    """Return the edits of a call's arguments; None if they cannot be converted."""
    dtype = Arguments.of(call).get("dtype", _OLD_PARAMETERS.index("dtype"))
    if kind == "autocast" and dtype is None and any(regions_around(source, call)):
        return None  # the new name inherits the dtype of the region around it, the old one does not
    quoted = source.quoted(device, call)
    if kind == "same":
        return ()
    if kind == "cast":  # the device came between the value and the dtype
        plain = len(args) == 2 and not args[0].star and not args[0].keyword and not args[1].star
        return (source.after(args[0], f", {quoted}"),) if plain else None
    if not args:
        end = source.span(call).end - 1
        text = f"device_type={quoted}" if kind == "custom" else quoted
        return (Edit(end, end, text),)
    return device_edits(source, None, args, kind, device)


def has_new_arguments(source: Source, call: cst.Call, kind: str) -> bool:
    """Return True if a call of an old name passes the device, which only the new name accepts."""
    arguments = Arguments.of(call)
    if kind == "custom":
        return "device_type" in arguments.keywords
    keyword = "device_type" if kind == "autocast" else "device"
    if keyword in arguments.keywords:
        return True
    return not arguments.starred and is_text(source, arguments.get(keyword, 0))


def device_edits(
    source: Source, after: cst.Arg | None, args: Sequence[cst.Arg], kind: str, device: str
) -> tuple[Edit, ...] | None:
    """Return the edits of a list of arguments, which may follow another one (the function of a partial)."""
    if kind in ("cast", "same"):
        return () if kind == "same" else None
    last = args[-1] if args else after
    assert last is not None
    quoted = source.quoted(device, last)
    if kind == "custom":
        if any(arg.star for arg in args):
            return None
        return (source.after(last, f", device_type={quoted}"),)
    keywords = _as_keywords(source, args) if kind == "autocast" else []
    if keywords is None:
        return None
    if after is not None:
        return (source.after(after, f", {quoted}"), *keywords)
    if keywords and keywords[0].start == source.span(args[0]).start:
        first = keywords.pop(0)
        return (Edit(first.start, first.start, f"{quoted}, {first.text}"), *keywords)
    return (source.before(args[0], f"{quoted}, "), *keywords)


def _as_keywords(source: Source, args: Sequence[cst.Arg]) -> list[Edit] | None:
    """Return edits that turn positional arguments into keywords; None if there is a `*args`."""
    edits = []
    for position, arg in enumerate(args):
        if arg.star == "*" or position >= len(_OLD_PARAMETERS):
            return None
        if arg.keyword is None and not arg.star:
            edits.append(source.before(arg, f"{_OLD_PARAMETERS[position]}="))
    return edits
