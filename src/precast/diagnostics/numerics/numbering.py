"""The numbers of a monitor's steps, so that a moment has one number.

A number is the process's where a step tracker counts, else a scaler's where there is one, else the monitor's own count.

Invariants: no number is given twice, and later steps have higher ones.
"""

from __future__ import annotations

from torch.optim import Optimizer

from precast._internal import events
from precast.diagnostics.numerics.record import Record

__all__ = ["Numbering"]


class Numbering:
    """Counts.

    Attributes:
        begun: how many steps have begun.
        ended: how many have ended.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """What was counted so far was no training."""
        self.begun = self.ended = self._next = 0

    def new(self) -> int:
        """How many steps had begun before the one that begins now."""
        self.begun += 1
        return self.begun - 1

    def ask(self, record: Record, optimizer: Optimizer | None) -> None:
        """Gives a step the process's number, if somebody counts; `optimizer` is about to take it, None in inference."""
        for tracker in events.step_trackers[:1]:
            record.number_told(
                tracker.number if optimizer is None else tracker.before_step(optimizer)
            )

    def tell(self, record: Record, number: int) -> None:
        """Gives a step the number that its scaler says."""
        record.number_told(number)

    def fix(self, record: Record) -> None:
        """Gives a step the number that it has if it ends now."""
        record.number = self._next if record.told is None else max(record.told, self._next)

    def end(self, record: Record) -> None:
        """A step ends."""
        self.fix(record)
        self._next = record.number + 1
        self.ended += 1
