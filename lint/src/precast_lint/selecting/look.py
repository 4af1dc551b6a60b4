"""The cheap look at a text: whether it mentions anything that a rule is about. Nothing is parsed, no rule loaded.

Invariant: a rule that could find something in a text has an entry whose words are all in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from precast_lint.selecting.registry import index

__all__ = ["interesting", "looks_at"]

_CALLED = re.compile(rb"torch\.(\w+)\(")
_ALIAS = re.compile(rb"\btorch as (\w+)")
_SUPPRESSIONS = (("noqa: AMP",), ("precast: noqa",))


def interesting(data: bytes, codes: Iterable[str]) -> bool:
    """Return True if one of the rules has to look at a text."""
    return _mentions(data, _words(frozenset(codes)))


def looks_at(data: bytes, codes: frozenset[str]) -> Iterator[str]:
    """The rules that have to look at a text, in the order of their codes."""
    for code in index():
        if code in codes and _mentions(data, _words(frozenset({code}))):
            yield code


class _Words(NamedTuple):
    """Entries of words, so that each word is looked for once: a word -> what else has to be there; {} for nothing.

    Of `torch.name(` there are many: all names that are called are found together.
    """

    tree: dict[bytes, Any]
    called: frozenset[bytes]


def _mentions(data: bytes, words: _Words) -> bool:
    if _has(data, words.tree):
        return True
    return bool(words.called) and not words.called.isdisjoint(_names_called(data))


def _names_called(data: bytes) -> set[bytes]:
    """Return the names of torch that a text calls, also after `import torch as th`."""
    results = set(_CALLED.findall(data))
    for alias in set(_ALIAS.findall(data)) if b"torch as " in data else ():
        results.update(re.findall(rb"\b" + alias + rb"\.(\w+)\(", data))
    return results


def _has(data: bytes, tree: dict[bytes, Any]) -> bool:
    return any(word in data and (not more or _has(data, more)) for word, more in tree.items())


@lru_cache(maxsize=256)
def _words(codes: frozenset[str]) -> _Words:
    """The entries of some rules, without those that ask for all that another one asks for, and more."""
    requests = {tuple(e.split()) for code in codes & index().keys() for e in index()[code].words}
    requests |= set(_SUPPRESSIONS) if "AMP901" in codes else set()
    tree: dict[bytes, Any] = {}
    called = set()
    for words in sorted(requests):
        if any(_asks_less(less, words) for less in requests - {words}):
            continue
        entry = tuple(word.encode() for word in words)
        if len(entry) == 1 and (name := _CALLED.fullmatch(entry[0])):
            called.add(name[1])
            continue
        branch = tree
        for word in entry:
            branch = branch.setdefault(word, {})
    return _Words(tree, frozenset(called))


def _asks_less(less: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Return True if an entry's words are all there wherever those of another one are."""
    if not all(any(part in word for word in words) for part in less):
        return False
    return less < words or not all(any(word in part for part in less) for word in words)
