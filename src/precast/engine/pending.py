"""Bound policies that have rules for operations that no library has defined yet.

Invariants:

- a rule holds in every region that is entered after its operation was defined through PyTorch, or by a module that
  Python imported. After a library was loaded by other means, it may take a few entries more where many rules wait;
- an entry takes the same time, however many rules wait;
- a policy's name and an operation are warned of once.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Final

from precast import _torch
from precast.engine.thread_state import BoundPolicy
from precast.errors import PrecastWarning

__all__ = ["is_overtaken", "wait"]


@dataclass(slots=True, eq=False)
class _Waiting:
    """How far the search for the operations that a bound policy waits for has come."""

    definitions: tuple[int, ...]
    """What `_torch.definitions` gave when all of them were."""
    next: int = 0


_waiting: Final[weakref.WeakKeyDictionary[BoundPolicy, _Waiting]] = weakref.WeakKeyDictionary()
_told: Final[set[tuple[str, str]]] = set()
_SOME: Final = 16
"""How many operations are looked for at each entry of a region without a sign that any was defined."""


def wait(bound: BoundPolicy, definitions: tuple[int, ...]) -> None:
    """Warns of the operations that a new bound policy waits for; `definitions` is what was known when it was begun."""
    if bound.pending:
        _waiting[bound] = _Waiting(definitions)
        _tell(bound.policy.name, bound.pending)


def is_overtaken(bound: BoundPolicy) -> bool:
    """Whether an operation that the bound policy waits for has been defined since."""
    if not bound.pending:
        return False
    waiting, now = _waiting[bound], _torch.definitions()
    if waiting.definitions != now:
        waiting.definitions = now
        return any(map(_is_defined, bound.pending))
    start = waiting.next if waiting.next < len(bound.pending) else 0
    waiting.next = start + _SOME
    return any(map(_is_defined, bound.pending[start : start + _SOME]))


def _is_defined(key: str) -> bool:
    return bool(_torch.operator_overloads(key.partition(".")[0]))


def _tell(policy: str, pending: tuple[str, ...]) -> None:
    new = [name for name in pending if (policy, name) not in _told]
    if not new:
        return
    _told.update((policy, name) for name in new)
    named = ", ".join(new[:3]) + (f" and {len(new) - 3} others" if new[3:] else "")
    rules, such = ("rules", "operations are") if new[1:] else ("a rule", "operation is")
    warnings.warn(
        f"The policy {policy!r} has {rules} for {named}, and no such {such} registered yet. "
        "A rule holds in regions entered after that: import the library that defines the operation first.",
        PrecastWarning,
        stacklevel=2,
    )
