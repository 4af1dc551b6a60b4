"""Calls of modules and gradients that wait to be looked at, so that many are looked at in a row.

Between two modules of a training step the caches of the processor are full of weights, so whatever runs there for a
moment is slow: a call that is looked at by itself costs 100 µs, one of many in a row half of that.

Invariants:
- calls are looked at in the order in which they came;
- at most `_MOST` of them wait, with about `_ELEMENTS` numbers;
- where a tensor is written in place while it waits, no numbers of it are taken, and later calls of its key do not wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.tally import Key

__all__ = ["DeferredCalls", "unseen_by_modes"]

P = ParamSpec("P")
R = TypeVar("R")

Look = Callable[[Any, Sequence[Tensor], Set[int]], None]
"""Looks at a call, which is its first argument; the others are the call's tensors, and the ``id`` of each that was
written while it waited."""
_Entry = tuple[Key, Sequence[Tensor], Sequence[int], Look | None, Any]
"""The key, the tensors, their versions when they began to wait, what looks, if it did not look yet, and the call."""

_MOST: Final = 64
_ELEMENTS: Final = 1 << 22


def unseen_by_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Hides what a function computes from the program's dispatch modes, as it is no part of the program."""

    @functools.wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _torch.dispatch_modes():
            return function(*args, **kwargs)
        with _torch.without_dispatch():
            return function(*args, **kwargs)

    return hidden


class DeferredCalls:
    """The calls of one step that wait.

    Args:
        hurried: keys of which a tensor was written while it waited, in this step or in one before; added to.
        failures: counts the calls that could not be looked at.
        counts: whether every call is looked at as it comes. It waits nevertheless, so that it becomes known whether one
            of its tensors is written meanwhile.
    """

    def __init__(self, hurried: set[Key], failures: Failures, *, counts: bool) -> None:
        self._hurried = hurried
        self._failures = failures
        self._counts = counts
        self._entries: list[_Entry] = []
        self._elements = 0

    def is_latest(self, tensor: Tensor) -> bool:
        """Whether a tensor is the one that came last to wait, and was not written since."""
        if not self._entries:
            return False
        _, tensors, versions, _, _ = self._entries[-1]
        return bool(tensors) and tensors[-1] is tensor and versions[-1] == _torch.version_of(tensor)

    def add(self, key: Key, tensors: Sequence[Tensor], look: Look | None, what: Any) -> None:
        """Has a call looked at, soon or now."""
        # Each function that is called here, and each attribute, is slow for the same reason: there are few.
        versions = []
        elements = self._elements
        for tensor in tensors:
            if type(tensor) is not Tensor or (tensor.is_cuda and _torch.is_captured(tensor)):
                break
            try:
                versions.append(_torch.version_of(tensor))
            except RuntimeError:  # made in inference mode, where PyTorch counts no writes
                break
            elements += tensor.numel()
        waits = len(versions) == len(tensors)
        if self._counts or not waits or key in self._hurried:
            self.look_now(key, tensors, look, what)
            look = None
        if waits:
            self._entries.append((key, tensors, versions, look, what))
            self._elements = elements
            if elements >= _ELEMENTS or len(self._entries) >= _MOST:
                self.look()

    def look_now(self, key: Key, tensors: Sequence[Tensor], look: Look | None, what: Any) -> None:
        """Has a call looked at now, after all that wait."""
        if not self._counts:
            self.look()
        self._look([(key, tensors, (), look, what)])

    def look(self) -> None:
        """Looks at all that wait."""
        if self._entries:
            entries, self._entries, self._elements = self._entries, [], 0
            self._look(entries)

    @unseen_by_modes
    @torch.no_grad()
    def _look(self, entries: list[_Entry]) -> None:
        with _torch.without_torch_function():
            for entry in entries:
                self._failures.call(entry[0][1], self._look_at, *entry)

    def _look_at(
        self,
        key: Key,
        tensors: Sequence[Tensor],
        versions: Sequence[int],
        look: Look | None,
        what: Any,
    ) -> None:
        pairs = zip(tensors, versions, strict=False)  # no versions if it did not wait
        stale = {id(t) for t, version in pairs if _torch.version_of(t) != version}
        if stale:
            self._hurried.add(key)
        if look is not None:
            look(what, tensors, stale)
