"""The numbers of a monitor's steps: its own count, or that of a scaler or a run, so that a moment has one number.

Invariants: no number is given twice, and later steps have higher ones.
"""

from __future__ import annotations

from collections.abc import Callable

from precast.diagnostics.numerics.record import Record
from precast.diagnostics.numerics.running_step import RunningStep

__all__ = ["Numbering"]


class Numbering:
    """Counts.

    Attributes:
        count: who numbers the steps, if it is somebody else: `precast run`.
        begun: how many steps have begun.
        ended: how many have ended.
    """

    def __init__(self) -> None:
        self.count: Callable[[], int] | None = None
        self.restart()

    def restart(self) -> None:
        """What was counted so far was no training."""
        self.begun = self.ended = self._next = 0

    def new(self) -> int:
        """How many steps had begun before the one that begins now."""
        self.begun += 1
        return self.begun - 1

    def ask(self, running: RunningStep) -> None:
        """Has whoever numbers the steps number the one that runs."""
        if self.count is not None:
            running.record.number_told(self.count())

    def tell(self, record: Record, number: int) -> None:
        """A scaler's number of the iteration; a run's has precedence."""
        if self.count is None:
            record.number_told(number)

    def fix(self, record: Record) -> None:
        """Gives a step the number that it has if it ends now."""
        record.number = self._next if record.told is None else max(record.told, self._next)

    def end(self, record: Record) -> None:
        """A step ends."""
        self.fix(record)
        self._next = record.number + 1
        self.ended += 1
