"""The cheap look at a text: whether it mentions anything that a rule is about. Nothing is parsed, no rule loaded.

Invariant: a rule that could find something in a text has an entry whose words are all in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from precast.rewrite.registry import index

__all__ = ["interesting", "looks_at"]

_SUPPRESSIONS = (("noqa: AMP",), ("precast: noqa",))


def interesting(data: bytes, codes: Iterable[str]) -> bool:
    """Whether one of the rules has to look at a text."""
    return _mentions(data, _words(frozenset(codes)))


def looks_at(data: bytes, codes: frozenset[str]) -> Iterator[str]:
    """The rules that have to look at a text, in the order of their codes."""
    for code in index():
        if code in codes and _mentions(data, _words(frozenset({code}))):
            yield code


def _mentions(data: bytes, entries: tuple[tuple[bytes, ...], ...]) -> bool:
    return any(all(word in data for word in words) for words in entries)


@lru_cache(maxsize=256)
def _words(codes: frozenset[str]) -> tuple[tuple[bytes, ...], ...]:
    """The entries of some rules, without those that ask for all that another one asks for, and more."""
    asked = {
        tuple(entry.split()) for code in codes & index().keys() for entry in index()[code].words
    }
    asked |= set(_SUPPRESSIONS) if "AMP901" in codes else set()
    least = [words for words in asked if not any(set(less) < set(words) for less in asked)]
    return tuple(sorted(tuple(word.encode() for word in words) for words in least))
