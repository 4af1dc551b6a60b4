"""Marks a thread with the policies in force, where the guards of `torch.compile` look.

A compiled function is compiled again when PyTorch's autocast flags differ: those of every device type, also of those
whose hardware nobody has. On or off, and the dtype while on, mean nothing there, so precast writes into them, as
digits, the number of the set of policies in force. A policy that is exactly PyTorch's needs no mark: its graphs are
PyTorch's.

Invariants:

- the same policies on the same devices have the same mark, in all threads and as long as the process lives;
- threads of PyTorch's own that work for a marked thread know its mark;
- no policy in force, no mark: the flags are what PyTorch gave them;
- past `LIMIT` sets of policies, marks repeat, and what was compiled is dropped when one of those is written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from precast import _torch
from precast._internal.locks import survives_fork

__all__ = ["LIMIT", "NO_MARK", "Mark", "lent", "write"]

Policies = frozenset[tuple[str, str]]
"""Device type and fingerprint of every policy in force that is not exactly PyTorch's."""

_LOW, _HIGH = _torch.UNUSED_DEVICE_TYPES
_DEFAULTS: Final = {device: torch.get_autocast_dtype(device) for device in (_LOW, _HIGH)}
_ALL: Final = tuple(_torch.all_dtypes())
LIMIT: Final = len(_ALL) ** 2
"""How many sets of policies have marks of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The mark of one set of policies: its digits, None where the flag is off."""

    policies: Policies
    low: torch.dtype | None
    high: torch.dtype | None
    repeats: bool = False
    _next: dict[tuple[str, str | None], Mark] = field(default_factory=dict, repr=False)

    def after(self, device_type: str, fingerprint: str | None) -> Mark:
        """The mark when this policy comes into force on a device type; None is PyTorch's own, or none."""
        known = self._next.get((device_type, fingerprint))
        if known is None:
            rest = frozenset(pair for pair in self.policies if pair[0] != device_type)
            new = rest if fingerprint is None else rest | {(device_type, fingerprint)}
            known = self._next[device_type, fingerprint] = _mark_of(new)
        return known


NO_MARK: Final = Mark(frozenset(), None, None)
_marks: Final[dict[Policies, Mark]] = {NO_MARK.policies: NO_MARK}
_lock = survives_fork(threading.Lock())


def write(mark: Mark, before: Mark | None, frames: Mapping[str, object]) -> None:
    """Puts `mark` where `before` was in this thread.

    Args:
        mark: that of the policies that are in force from now on.
        before: the one in its place; None where it is not known, as its writing was interrupted.
        frames: device type -> what is in force there, for threads of PyTorch's own that work for this one.
    """
    if before is None or mark.low is not before.low:
        _write_digit(_LOW, mark.low, None if before is None else before.low)
    if before is None or mark.high is not before.high:
        _write_digit(_HIGH, mark.high, None if before is None else before.high)
    # The frames themselves, not only the mark that names them: they stay for as long as somebody may ask for them.
    _torch.set_inherited_tls("precast frames", frames)
    if mark.repeats:
        _torch.reset_compiler()


def lent() -> Mapping[str, Any]:
    """The frames of the thread that this one, a thread of PyTorch's own, works for."""
    return _torch.inherited_tls("precast frames") or {}


def _write_digit(device_type: str, digit: torch.dtype | None, before: torch.dtype | None) -> None:
    if digit is None or before is None:
        torch.set_autocast_enabled(device_type, digit is not None)
    default = _DEFAULTS[device_type]
    if digit is None or digit is not (before or default):
        torch.set_autocast_dtype(device_type, digit or default)


def _mark_of(policies: Policies) -> Mark:
    with _lock:
        return _marks.get(policies) or _marks.setdefault(policies, _new_mark(policies))


def _new_mark(policies: Policies) -> Mark:
    number = min(len(_marks), LIMIT) - 1
    high, low = divmod(number, len(_ALL))
    digit = _digits(_HIGH)[high - 1] if high else None
    return Mark(policies, _digits(_LOW)[low], digit, repeats=len(_marks) >= LIMIT)


def _digits(device_type: str) -> tuple[torch.dtype, ...]:
    """All dtypes, from the one that PyTorch gave: most programs need one digit, and need not write it."""
    start = _ALL.index(_DEFAULTS[device_type])
    return _ALL[start:] + _ALL[:start]
