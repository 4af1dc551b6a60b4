"""Results of tests on a path, stored as bits of an integer because many paths share and compare them.

Invariants: a text keeps its two bits, one for True and one for False; a number has at most one of them set. A number
with fewer bits includes more paths: those after either result of the missing test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["TestResults", "joined"]


class TestResults:
    """The tests of one function and of those that it calls, by their texts."""

    def __init__(self) -> None:
        self.of_self = 0  # the bits of texts that begin with `self.`
        self._places: dict[str, int] = {}
        self._about: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def texts(self) -> list[str]:
        """The texts of the tests so far."""
        return list(self._places)

    def place(self, text: str) -> int:
        """Return the position of a text's bits."""
        result = self._places.get(text)
        if result is None:
            result = self._places[text] = 2 * len(self._places)
            if text.startswith("self."):
                self.of_self |= 3 << result
        return result

    def bits(self, texts: Iterable[str]) -> int:
        """The bits of some texts."""
        result = 0
        for text in texts:
            result |= 3 << self.place(text)
        return result

    def about(self, name: str) -> int:
        """The bits of all texts in which a name occurs."""
        count, result = self._about.get(name, (0, 0))
        if count < len(self._places):
            word = re.compile(rf"(?<![\w.]){re.escape(name)}\b")
            for text, place in list(self._places.items())[count:]:
                if name in text and word.search(text):
                    result |= 3 << place
            self._about[name] = len(self._places), result
        return result

    def under(self, names: Iterable[str]) -> int:
        """The bits of all texts that are one of some names, or begin with one."""
        result = 0
        starts = tuple(name for name in names if name)
        for text, place in self._places.items():
            if text.startswith(starts):
                result |= 3 << place
        return result


@lru_cache(maxsize=8192)
def joined(facts: frozenset[int]) -> tuple[int, ...]:
    """Merge sets of facts.

    Two sets that differ only in the result of one test become one without it. A set that contains another one is
    dropped.
    """
    rest = set(facts)
    changed = True
    while changed and len(rest) > 1:
        changed = False
        for yes in _bits(rest):
            no = yes << 1
            for one in [one for one in rest if one & (yes | no) == yes]:
                other = one ^ yes ^ no
                if other in rest:
                    rest -= {one, other}
                    rest.add(one ^ yes)
                    changed = True
    return tuple(sorted(one for one in rest if not any(o != one and o & one == o for o in rest)))


def _bits(facts: set[int]) -> list[int]:
    """Return the lower bits of the tests with both results."""
    every = 0
    for one in facts:
        every |= one
    both = every & every >> 1
    results = []
    while both:
        lowest = both & -both
        both ^= lowest
        if lowest.bit_length() % 2:  # not the upper bit of one test and the lower one of the next
            results.append(lowest)
    return results
