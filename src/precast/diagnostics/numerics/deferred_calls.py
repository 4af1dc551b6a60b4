"""Calls of modules and gradients that wait to be looked at, many in a row.

Between two modules of a training step the caches of the processor are full of weights, so whatever runs there for a
moment is slow: a call that is looked at by itself costs 100 µs, one of many in a row half of that.

Invariants:
- they are looked at in the order in which they came;
- what waits is bounded: `_MOST` of them, and about `_ELEMENTS` numbers;
- of what is written in place while it waits, no numbers are taken, and its like waits no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.numerics.model_hooks import unseen

__all__ = ["DeferredCalls", "Key"]

Key = tuple[str, str]
"""Kind and name of what waits."""
Look = Callable[[Any, Sequence[Tensor], Set[int]], None]
"""Looks at something: it, its tensors, and the ``id`` of those that were written while it waited."""
_Entry = tuple[Key, Sequence[Tensor], Sequence[int], Look, Any]
"""A name, the tensors, their versions when they began to wait, what looks, and at what."""

_MOST: Final = 64
_ELEMENTS: Final = 1 << 22
_NONE: Final[frozenset[int]] = frozenset()


class DeferredCalls:
    """What waits in one step.

    Args:
        hurried: what was written while it waited, in this step or in one before; added to.
        counts: whether all is looked at as it comes; then it waits only so that it is known whether it could.
    """

    def __init__(self, hurried: set[Key], *, counts: bool) -> None:
        self._hurried = hurried
        self._counts = counts
        self._entries: list[_Entry] = []
        self._elements = 0

    def is_latest(self, tensor: Tensor) -> bool:
        """Whether a tensor is the one that came last to wait, and was not written since."""
        if not self._entries:
            return False
        _, tensors, versions, _, _ = self._entries[-1]
        return bool(tensors) and tensors[-1] is tensor and versions[-1] == _torch.version_of(tensor)

    def add(self, key: Key, tensors: Sequence[Tensor], look: Look, what: Any) -> None:
        """Has something looked at, soon or now."""
        # Each function that is called here, and each attribute, is slow for the same reason: there are few.
        versions = []
        elements = self._elements
        for tensor in tensors:
            if type(tensor) is not Tensor or (tensor.is_cuda and _torch.is_captured(tensor)):
                break
            try:
                versions.append(_torch.version_of(tensor))
            except RuntimeError:  # made in inference mode: nobody counts what is written
                break
            elements += tensor.numel()
        waits = len(versions) == len(tensors)
        if self._counts or not waits or key in self._hurried:
            self.look_now(key, tensors, look, what)
            look = _not_again
        if waits:
            self._entries.append((key, tensors, versions, look, what))
            self._elements = elements
            if elements >= _ELEMENTS or len(self._entries) >= _MOST:
                self.look()

    def look_now(self, key: Key, tensors: Sequence[Tensor], look: Look, what: Any) -> None:
        """Has it looked at, after all that waits."""
        if not self._counts:
            self.look()
        unseen(self._look, [(key, tensors, (), look, what)])

    def look(self) -> None:
        """Looks at all that waits."""
        if self._entries:
            entries, self._entries, self._elements = self._entries, [], 0
            unseen(self._look, entries)

    @torch.no_grad()
    def _look(self, entries: list[_Entry]) -> None:
        for key, tensors, versions, look, what in entries:
            stale = _NONE
            for tensor, version in zip(tensors, versions, strict=False):  # none if it did not wait
                if _torch.version_of(tensor) != version:
                    stale |= {id(tensor)}
            if stale:
                self._hurried.add(key)
            look(what, tensors, stale)


def _not_again(_what: Any, _tensors: Sequence[Tensor], _stale: Set[int]) -> None:
    """Does nothing: it was looked at."""
