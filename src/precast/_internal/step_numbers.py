"""Which number a step of training has, so that one moment has one number in everything that tells of it.

Invariants: while a tracker counts the steps of the process, its numbers are everybody's; where none does, each who asks
keeps the number that it counted itself. This file imports nothing of torch at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["StepNumbers", "after_step", "trackers"]


class StepNumbers(Protocol):
    """Who counts the steps of the process."""

    @property
    def number(self) -> int:
        """The number of the step that runs."""

    def before_step(self, optimizer: Optimizer) -> int:
        """The number of the step that an optimizer is about to take or to skip."""

    def after_step(self, optimizer: Optimizer) -> int:
        """The number of the step that an optimizer has just taken or skipped."""


trackers: Final[list[StepNumbers]] = []
"""Those that count now; the first has the say."""


def after_step(optimizer: Optimizer, own: int) -> int:
    """The number of the step that `optimizer` has just taken or skipped; `own` where nobody counts."""
    return trackers[0].after_step(optimizer) if trackers else own
