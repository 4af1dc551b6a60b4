"""The numbers of a monitor's steps: what a run, a scaler and a monitor say of one moment has one number.

A step has the process's number where a step tracker counts, else a scaler's where there is one, else the monitor's own.

Invariant: no number is given twice, and later steps have higher ones.
"""

from __future__ import annotations

from torch.optim import Optimizer

from precast._internal import events
from precast.diagnostics.numerics.record import Record

__all__ = ["Numbering"]


class Numbering:
    """Counts the steps.

    Attributes:
        begun: how many steps have begun.
        ended: how many have ended.
    """

    def __init__(self) -> None:
        self.begun = self.ended = self._next = 0

    def new(self) -> int:
        """How many steps had begun before the one that begins now."""
        self.begun += 1
        return self.begun - 1

    def ask(self, record: Record, optimizer: Optimizer | None) -> None:
        """Gives a step the process's number, if a tracker counts; `optimizer` is about to step, None in inference."""
        for tracker in events.step_trackers[:1]:
            number = tracker.number if optimizer is None else tracker.before_step(optimizer)
            record.number_told(number)

    def fix(self, record: Record) -> None:
        """Gives a step the number that it has if it ends now."""
        record.number = self._next if record.told is None else max(record.told, self._next)

    def end(self, record: Record) -> None:
        """A step ends."""
        self.fix(record)
        self._next = record.number + 1
        self.ended += 1
