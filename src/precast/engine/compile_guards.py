"""Tells the guards of `torch.compile` which policies are in force in a thread.

A compiled function is compiled again when PyTorch's autocast flags differ. The guards compare the flags of every device
type, also of two whose hardware nobody has. There, on or off and the dtype mean nothing, so precast writes the number
of the set of policies in force into them, as digits. A policy that is exactly PyTorch's needs no number: its graphs are
PyTorch's.

Invariants:

- the same policies on the same devices have the same guard id, in all threads and as long as the process lives;
- PyTorch's own threads have the guard id of the thread that they work for;
- without a policy in force there is no guard id: the flags are what PyTorch gave them;
- past `LIMIT` sets of policies, guard ids repeat, and writing one that repeats drops what was compiled.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from precast import _torch
from precast._internal.locks import survives_fork

__all__ = ["LIMIT", "NO_GUARD_ID", "GuardId", "by_number", "inherited", "write"]

Policies = frozenset[tuple[str, str]]
"""Device type and fingerprint of every policy in force that is not exactly PyTorch's."""

_LOW, _HIGH = _torch.UNUSED_DEVICE_TYPES
_DEFAULTS: Final = {device: torch.get_autocast_dtype(device) for device in (_LOW, _HIGH)}
_LENT: Final = "precast bound policies"  # `native/state.h` has the same name
_ALL: Final = tuple(_torch.all_dtypes())
LIMIT: Final = len(_ALL) ** 2
"""How many sets of policies have guard ids of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class GuardId:
    """The number of one set of policies as two digits; None where the flag is off."""

    policies: Policies
    low: torch.dtype | None
    high: torch.dtype | None
    repeats: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)
    """What the flags cannot say: each has its own."""
    _next: dict[tuple[str, str | None], GuardId] = field(default_factory=dict, repr=False)

    def after(self, device_type: str, fingerprint: str | None) -> GuardId:
        """The guard id when this policy comes into force on a device type; None is PyTorch's own, or none."""
        known = self._next.get((device_type, fingerprint))
        if known is None:
            rest = frozenset(pair for pair in self.policies if pair[0] != device_type)
            new = rest if fingerprint is None else rest | {(device_type, fingerprint)}
            known = self._next[device_type, fingerprint] = _guard_id_of(new)
        return known


NO_GUARD_ID: Final = GuardId(frozenset(), None, None)
_guard_ids: Final[dict[Policies, GuardId]] = {NO_GUARD_ID.policies: NO_GUARD_ID}
by_number: Final = {NO_GUARD_ID.number: NO_GUARD_ID}
"""All guard ids; there is one more for each set of policies that was in force."""
_lock = survives_fork(threading.Lock())


def write(guard_id: GuardId, before: GuardId | None, bound_policies: Mapping[str, object]) -> None:
    """Puts `guard_id` where `before` was in this thread.

    Args:
        guard_id: that of the policies that are in force from now on.
        before: the one in its place; None where it is not known, as its writing was interrupted.
        bound_policies: device type -> what is in force there, for threads of PyTorch's own that work for this one.
    """
    if before is None or guard_id.low is not before.low:
        _write_digit(_LOW, guard_id.low, None if before is None else before.low)
    if before is None or guard_id.high is not before.high:
        _write_digit(_HIGH, guard_id.high, None if before is None else before.high)
    # The policies themselves, so that they live for as long as another thread may ask for them.
    _torch.set_inherited_tls(_LENT, bound_policies)
    if guard_id.repeats:
        _torch.reset_compiler()


def inherited() -> Mapping[str, Any] | None:
    """The bound policies of the thread that this one, one of PyTorch's own, works for; else what this one lends."""
    lent: Mapping[str, Any] | None = _torch.inherited_tls(_LENT)
    return lent


def _write_digit(device_type: str, digit: torch.dtype | None, before: torch.dtype | None) -> None:
    if digit is None or before is None:
        torch.set_autocast_enabled(device_type, digit is not None)
    default = _DEFAULTS[device_type]
    if digit is None or digit is not (before or default):
        torch.set_autocast_dtype(device_type, digit or default)


def _guard_id_of(policies: Policies) -> GuardId:
    with _lock:
        return _guard_ids.get(policies) or _guard_ids.setdefault(policies, _new_guard_id(policies))


def _new_guard_id(policies: Policies) -> GuardId:
    number = min(len(_guard_ids), LIMIT) - 1
    high, low = divmod(number, len(_ALL))
    digit = _digits(_HIGH)[high - 1] if high else None
    new = GuardId(policies, _digits(_LOW)[low], digit, repeats=len(_guard_ids) >= LIMIT)
    by_number[new.number] = new
    return new


def _digits(device_type: str) -> tuple[torch.dtype, ...]:
    """All dtypes, from the one that PyTorch gave: most programs need one digit, and need not write it."""
    start = _ALL.index(_DEFAULTS[device_type])
    return _ALL[start:] + _ALL[:start]
