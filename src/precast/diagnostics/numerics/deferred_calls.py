"""A queue of module calls and gradients, which are examined in batches.

Between two modules of a training step the caches of the processor are full of weights, so that short computations are
slow there: to examine one call by itself costs 100 µs, in a batch half of that.

Invariants:

- calls are examined in order;
- at most `_MOST` calls wait, with about `_ELEMENTS` values;
- a tensor that is written in place while it waits is not examined, and later calls of its key do not wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.tally import TensorKey

__all__ = ["DeferredCalls", "unseen_by_modes"]

P = ParamSpec("P")
R = TypeVar("R")

Examine = Callable[[Any, Sequence[Tensor], Set[int]], None]
"""Examines a call. Its arguments are the call, the call's tensors, and the ids of those written while they waited."""
_Entry = tuple[TensorKey, Sequence[Tensor], Sequence[int], Examine | None, Any]
"""The key, the tensors, their versions at arrival, the function that examines them (None if done), and the call."""

_MOST: Final = 64
_ELEMENTS: Final = 1 << 22


def unseen_by_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Hide the operations of a function from the program's dispatch modes."""

    @functools.wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _torch.dispatch_modes():
            return function(*args, **kwargs)
        with _torch.without_dispatch():
            return function(*args, **kwargs)

    return hidden


class DeferredCalls:
    """The queue of one step.

    Args:
        urgent: keys whose tensors were written while they waited, in this step or an earlier one. Keys are added here.
        failures: counts the calls that could not be examined.
        counts: examine every call at once. It still waits, to detect that one of its tensors is written meanwhile.
    """

    def __init__(self, urgent: set[TensorKey], failures: Failures, *, counts: bool) -> None:
        self._urgent = urgent
        self._failures = failures
        self._counts = counts
        self._entries: list[_Entry] = []
        self._elements = 0

    def is_latest(self, tensor: Tensor) -> bool:
        """Return True if a tensor is the latest in the queue, and was not written since."""
        if not self._entries:
            return False
        _, tensors, versions, _, _ = self._entries[-1]
        return bool(tensors) and tensors[-1] is tensor and versions[-1] == _torch.version_of(tensor)

    def add(
        self, key: TensorKey, tensors: Sequence[Tensor], examine: Examine | None, call: Any
    ) -> None:
        """Examine a call soon, or now."""
        # Every function call and attribute here is slow (see above), so there are few.
        versions = []
        elements = self._elements
        for tensor in tensors:
            if type(tensor) is not Tensor or (tensor.is_cuda and _torch.is_captured(tensor)):
                break
            try:
                versions.append(_torch.version_of(tensor))
            except RuntimeError:  # PyTorch does not count the writes of inference tensors
                break
            elements += tensor.numel()
        waits = len(versions) == len(tensors)
        if self._counts or not waits or key in self._urgent:
            self.examine_now(key, tensors, examine, call)
            examine = None
        if waits:
            self._entries.append((key, tensors, versions, examine, call))
            self._elements = elements
            if elements >= _ELEMENTS or len(self._entries) >= _MOST:
                self.examine()

    def examine_now(
        self, key: TensorKey, tensors: Sequence[Tensor], examine: Examine | None, call: Any
    ) -> None:
        """Examine a call now, after those in the queue."""
        if not self._counts:
            self.examine()
        self._examine_all([(key, tensors, (), examine, call)])

    def examine(self) -> None:
        """Examine all calls in the queue."""
        if self._entries:
            entries, self._entries, self._elements = self._entries, [], 0
            self._examine_all(entries)

    @unseen_by_modes
    @torch.no_grad()
    def _examine_all(self, entries: list[_Entry]) -> None:
        with _torch.without_torch_function():
            for entry in entries:
                self._failures.call(entry[0][1], self._examine_entry, *entry)

    def _examine_entry(
        self,
        key: TensorKey,
        tensors: Sequence[Tensor],
        versions: Sequence[int],
        examine: Examine | None,
        call: Any,
    ) -> None:
        pairs = zip(
            tensors, versions, strict=False
        )  # there are no versions if the call did not wait
        stale = {id(t) for t, version in pairs if _torch.version_of(t) != version}
        if stale:
            self._urgent.add(key)
        if examine is not None:
            examine(call, tensors, stale)
