"""The policies in force, encoded in flags that the guards of `torch.compile` compare.

A compiled function is recompiled when PyTorch's autocast flags differ. The guards compare the flags of all device
types, also of two types for which no hardware exists. For these, enabled and dtype have no effect, so precast uses them
as digits of the number of the set of policies in force. A policy equal to PyTorch's needs no number: its graphs are
those of PyTorch.

Invariants:

- equal policies on the same devices have the same guard id, in all threads, until the process ends;
- PyTorch's own threads have the guard id of the thread that they work for;
- without a policy in force there is no guard id: the flags have their original values;
- beyond `LIMIT` sets of policies guard ids repeat, and writing a repeated one drops all compiled code.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from precast import _torch
from precast._internal.locks import make_fork_safe

__all__ = ["LIMIT", "NO_GUARD_ID", "GuardId", "by_number", "inherited_policies", "write"]

Policies = frozenset[tuple[str, str]]
"""Device type and fingerprint of every policy in force that differs from PyTorch's."""

_LOW, _HIGH = _torch.UNUSED_DEVICE_TYPES
_DEFAULTS: Final = {device: torch.get_autocast_dtype(device) for device in (_LOW, _HIGH)}
_TLS_KEY: Final = "precast bound policies"  # `native/state.h` has the same name
_ALL: Final = tuple(_torch.all_dtypes())
LIMIT: Final = len(_ALL) ** 2
"""The number of sets of policies with distinct guard ids."""


@dataclass(frozen=True, slots=True, eq=False)
class GuardId:
    """The number of a set of policies as two digits; None for a flag that is off."""

    policies: Policies
    low: torch.dtype | None
    high: torch.dtype | None
    repeats: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)
    """Distinct for each object, also where the digits repeat."""
    _next: dict[tuple[str, str | None], GuardId] = field(default_factory=dict, repr=False)

    def with_policy(self, device_type: str, fingerprint: str | None) -> GuardId:
        """Return the guard id with another policy on a device type; None for PyTorch's policy, or none."""
        key = device_type, fingerprint
        guard_id = self._next.get(key)
        if guard_id is None:
            rest = frozenset(pair for pair in self.policies if pair[0] != device_type)
            policies = rest if fingerprint is None else rest | {(device_type, fingerprint)}
            guard_id = self._next[key] = _guard_id_of(policies)
        return guard_id


NO_GUARD_ID: Final = GuardId(frozenset(), None, None)
_guard_ids: Final[dict[Policies, GuardId]] = {NO_GUARD_ID.policies: NO_GUARD_ID}
by_number: Final = {NO_GUARD_ID.number: NO_GUARD_ID}
"""All guard ids: one for each set of policies that has been in force."""
_lock = make_fork_safe(threading.Lock())


def write(guard_id: GuardId, before: GuardId | None, bound_policies: Mapping[str, object]) -> None:
    """Write `guard_id` into this thread's flags in place of `before`.

    Args:
        guard_id: the guard id of the policies in force from now on.
        before: the present one; None if unknown, because writing it was interrupted.
        bound_policies: device type -> bound policy, for threads of PyTorch's own that work for this one.
    """
    if before is None or guard_id.low is not before.low:
        _write_digit(_LOW, guard_id.low, None if before is None else before.low)
    if before is None or guard_id.high is not before.high:
        _write_digit(_HIGH, guard_id.high, None if before is None else before.high)
    # The policies themselves, so that they live as long as another thread may read them.
    _torch.set_inherited_tls(_TLS_KEY, bound_policies)
    if guard_id.repeats:
        _torch.reset_compiler()


def inherited_policies() -> Mapping[str, Any] | None:
    """Return the bound policies of the thread that this one, a thread of PyTorch's own, works for; else its own."""
    policies: Mapping[str, Any] | None = _torch.inherited_tls(_TLS_KEY)
    return policies


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
    """Return all dtypes, starting with the original one: most programs need one digit, and so need not write it."""
    start = _ALL.index(_DEFAULTS[device_type])
    return _ALL[start:] + _ALL[:start]
