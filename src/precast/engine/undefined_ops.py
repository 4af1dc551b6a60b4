"""Bound policies with rules for operations that no library has defined yet.

Invariants:

- a rule applies in every region entered after its operation was defined through PyTorch, or by an imported module;
- an entry takes the same time for any number of undefined operations, unless something may have been defined since;
- each operation is warned about once per policy name.
"""

from __future__ import annotations

import warnings
from typing import Final

from precast import _torch
from precast.engine.thread_state import BoundPolicy
from precast.errors import PrecastWarning

__all__ = ["needs_rebinding", "track_undefined"]


_warned: Final[set[tuple[str, str]]] = set()


def track_undefined(bound: BoundPolicy) -> None:
    """Warn about the undefined operations of a new bound policy."""
    if bound.undefined_operations:
        _warn(bound.policy.name, bound.undefined_operations)


def needs_rebinding(bound: BoundPolicy) -> bool:
    """Return True if an undefined operation of the bound policy has been defined since."""
    if not bound.undefined_operations:
        return False
    definitions = _torch.definition_counts()
    if definitions == bound.definitions:
        return False
    bound.definitions = definitions
    return any(map(_is_defined, bound.undefined_operations))


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
