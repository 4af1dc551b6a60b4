"""The results of the tests that a path has passed, as an integer (its facts), because many paths are compared.

Invariants: each test, identified by its source text, has two bits, the lower one for True and the upper one for False.
At most one of them is set in the facts of a path. A test without a set bit may have either result, so facts with fewer
bits describe more paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["TestResults", "merge_facts"]


class TestResults:
    """The bits of the tests in one function and in the functions that it calls."""

    def __init__(self) -> None:
        self.bits_of_self = 0  # the bits of all tests that begin with `self.`
        self._positions: dict[str, int] = {}
        self._bits_with_name: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._positions)

    def texts(self) -> list[str]:
        """Return the texts of all tests so far."""
        return list(self._positions)

    def position(self, text: str) -> int:
        """Return the position of the lower bit of a test, which is added if it is new."""
        result = self._positions.get(text)
        if result is None:
            result = self._positions[text] = 2 * len(self._positions)
            if text.startswith("self."):
                self.bits_of_self |= 3 << result
        return result

    def bits_of(self, texts: Iterable[str]) -> int:
        """Return the bits of some tests."""
        result = 0
        for text in texts:
            result |= 3 << self.position(text)
        return result

    def bits_with_name(self, name: str) -> int:
        """Return the bits of all tests in which a name occurs."""
        count, result = self._bits_with_name.get(name, (0, 0))
        if count < len(self._positions):
            word = re.compile(rf"(?<![\w.]){re.escape(name)}\b")
            for text, position in list(self._positions.items())[count:]:
                if name in text and word.search(text):
                    result |= 3 << position
            self._bits_with_name[name] = len(self._positions), result
        return result

    def bits_with_prefix(self, names: Iterable[str]) -> int:
        """Return the bits of all tests that begin with one of some names."""
        result = 0
        prefixes = tuple(name for name in names if name)
        for text, position in self._positions.items():
            if text.startswith(prefixes):
                result |= 3 << position
        return result


@lru_cache(maxsize=8192)
def merge_facts(facts: frozenset[int]) -> tuple[int, ...]:
    """Return fewer facts that describe the same paths.

    Two facts that differ only in the result of one test become one without this test. Facts that contain all bits of
    others are removed.
    """
    rest = set(facts)
    changed = True
    while changed and len(rest) > 1:
        changed = False
        for yes in _tests_with_both_results(rest):
            no = yes << 1
            for with_yes in [entry for entry in rest if entry & (yes | no) == yes]:
                with_no = with_yes ^ yes ^ no
                if with_no in rest:
                    rest -= {with_yes, with_no}
                    rest.add(with_yes ^ yes)
                    changed = True
    return tuple(sorted(n for n in rest if not any(m != n and m & n == m for m in rest)))


def _tests_with_both_results(facts: set[int]) -> list[int]:
    """Return the lower bit of each test that has both results in some facts."""
    every = 0
    for bits in facts:
        every |= bits
    both = every & every >> 1
    results = []
    while both:
        lowest = both & -both
        both ^= lowest
        if (
            lowest.bit_length() % 2
        ):  # otherwise the upper bit of one test and the lower bit of the next
            results.append(lowest)
    return results
