"""The part of a run that is recorded: level, steps and modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from precast.errors import ComparisonError

__all__ = ["LEVELS", "Level", "Selection"]

Level = Literal["operations", "modules"]
LEVELS = ("operations", "modules")


@dataclass(frozen=True)
class Selection:
    """The part of a run that is recorded.

    Attributes:
        level: "operations" records each operation, "modules" the results and gradients of modules only.
        every: record every N-th step.
        steps: the first step that is recorded, and the step after the last one; None for all.
        modules: a pattern for the paths of modules, in which `*` stands for any text; "" for all.
        split: the number of equal parts of a batch that are also measured one by one.

    Raises:
        ComparisonError: a value is not allowed.
    """

    level: Level = "operations"
    every: int = 1
    steps: tuple[int, int] | None = None
    modules: str = ""
    split: int = 1

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ComparisonError(
                f"record(level=...): expected {' or '.join(map(repr, LEVELS))}, got {self.level!r}"
            )
        for name in ("every", "split"):
            if getattr(self, name) < 1:
                raise ComparisonError(
                    f"record({name}=...): expected at least 1, got {getattr(self, name)}"
                )
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise ComparisonError(
                f"record(steps=...): expected (A, B) with 0 <= A < B, got {self.steps}"
            )

    def takes_step(self, step: int) -> bool:
        """Return True if a step is recorded."""
        first, end = self.steps or (0, step + 1)
        return first <= step < end and (step - first) % self.every == 0

    def takes_module(self, path: str) -> bool:
        """Return True if the operations of a module are recorded: its own path or one around it matches."""
        if not self.modules:
            return True
        pattern = ".*".join(map(re.escape, self.modules.split("*")))
        return re.fullmatch(rf"(?:{pattern})(?:\..*)?", path) is not None
