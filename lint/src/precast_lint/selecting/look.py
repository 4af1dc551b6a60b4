"""A fast search for the words of the rules in a text, before it is parsed or a rule is loaded.

Invariant: if a rule can find something in a text, the text contains all words of one of the rule's entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from precast_lint.selecting.registry import index

__all__ = ["interesting", "looks_at"]

_SUPPRESSIONS = (("noqa: AMP",), ("precast: noqa",))


def interesting(data: bytes, codes: Iterable[str]) -> bool:
    """Return True if a text contains the words of one of some rules."""
    return _mentions(data, _words(frozenset(codes)))


def looks_at(data: bytes, codes: frozenset[str]) -> Iterator[str]:
    """Yield the rules whose words are in a text, in the order of their codes."""
    for code in index():
        if code in codes and _mentions(data, _words(frozenset({code}))):
            yield code


def _mentions(data: bytes, tree: dict[bytes, Any]) -> bool:
    return any(word in data and (not more or _mentions(data, more)) for word, more in tree.items())


@lru_cache(maxsize=256)
def _words(codes: frozenset[str]) -> dict[bytes, Any]:
    """Return the entries of some rules as a tree: a word, and the words that a text must contain besides it.

    So each word is searched for once. An entry is left out if a shorter one makes it superfluous.
    """
    requests = {tuple(e.split()) for code in codes & index().keys() for e in index()[code].words}
    requests |= set(_SUPPRESSIONS) if "AMP901" in codes else set()
    tree: dict[bytes, Any] = {}
    for words in sorted(requests):
        if any(_asks_less(less, words) for less in requests - {words}):
            continue
        branch = tree
        for word in words:
            branch = branch.setdefault(word.encode(), {})
    return tree


def _asks_less(less: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Return True if each text with the words of an entry also contains the words of a shorter one."""
    if not all(any(part in word for word in words) for part in less):
        return False
    return less < words or not all(any(word in part for part in less) for word in words)
