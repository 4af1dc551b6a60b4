"""Bound policies with rules for operations that no library has defined yet.

Invariants:

- a rule applies in every region entered after its operation was defined through PyTorch, or by an imported module. If a
  library was loaded in another way, it may take a few more entries, depending on the number of undefined operations;
- an entry takes the same time for any number of undefined operations;
- each operation is warned about once per policy name.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Final

from precast import _torch
from precast.engine.thread_state import BoundPolicy
from precast.errors import PrecastWarning

__all__ = ["needs_rebinding", "track_undefined"]


@dataclass(slots=True, eq=False)
class _LookupProgress:
    """The state of the search for the undefined operations of one bound policy."""

    definitions: tuple[int, ...]
    """The result of `_torch.definition_counts` at the last full search."""
    next: int = 0


_waiting: Final[weakref.WeakKeyDictionary[BoundPolicy, _LookupProgress]] = (
    weakref.WeakKeyDictionary()
)
_warned: Final[set[tuple[str, str]]] = set()
_OPERATIONS_PER_ENTRY: Final = 16
"""Operations to look for at each region entry while the definition counts are unchanged."""


def track_undefined(bound: BoundPolicy, definitions: tuple[int, ...]) -> None:
    """Warn about the undefined operations of a new bound policy; `definitions` are the counts before it was bound."""
    if bound.undefined_operations:
        _waiting[bound] = _LookupProgress(definitions)
        _warn(bound.policy.name, bound.undefined_operations)


def needs_rebinding(bound: BoundPolicy) -> bool:
    """Return True if an undefined operation of the bound policy has been defined since."""
    if not bound.undefined_operations:
        return False
    progress, definitions = _waiting[bound], _torch.definition_counts()
    if progress.definitions != definitions:
        progress.definitions = definitions
        return any(map(_is_defined, bound.undefined_operations))
    start = progress.next if progress.next < len(bound.undefined_operations) else 0
    progress.next = start + _OPERATIONS_PER_ENTRY
    return any(map(_is_defined, bound.undefined_operations[start : progress.next]))


def _is_defined(key: str) -> bool:
    return bool(_torch.operator_overloads(key.partition(".")[0]))


def _warn(policy: str, operations: tuple[str, ...]) -> None:
    new = [name for name in operations if (policy, name) not in _warned]
    if not new:
        return
    _warned.update((policy, name) for name in new)
    names = ", ".join(new[:3]) + (f" and {len(new) - 3} others" if new[3:] else "")
    rules, operations_are = ("rules", "operations are") if new[1:] else ("a rule", "operation is")
    warnings.warn(
        f"The policy {policy!r} has {rules} for {names}, and no such {operations_are} registered yet. "
        "A rule holds in regions entered after that: import the library that defines the operation first.",
        PrecastWarning,
        stacklevel=2,
    )
