"""The mistakes by the code of their rule: each is written from what the catalogue says, not from how a rule looks.

Invariant: what a mutator yields is a mistake in the words of the rule's page, and none that the page calls fine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import libcst as cst

__all__ = ["MUTATORS", "Mutator", "mutates"]

Mutator = Callable[[cst.Module], Iterator[cst.Module]]
MUTATORS: dict[str, list[Mutator]] = {}


def mutates(*codes: str) -> Callable[[Mutator], Mutator]:
    """Registers a mutator with the rules that name its mistake."""

    def keep(mutator: Mutator) -> Mutator:
        for code in codes:
            MUTATORS.setdefault(code, []).append(mutator)
        return mutator

    return keep
