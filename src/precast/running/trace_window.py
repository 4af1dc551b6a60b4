"""What is traced of a run: the steps that were asked for in full, of all steps only counts.

Invariants: the full trace is open in the steps that were asked for and in no others; what is kept does not grow with
the run. Both traces see only the thread that called `start`, so steps that end in other threads open and close nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from precast.diagnostics.schema import Count, TraceData
from precast.diagnostics.tracing.tracer import Trace, trace

__all__ = ["TraceWindow"]


class TraceWindow:
    """Counts all steps, and traces those from `begin` up to `end` in full.

    Args:
        begin: the first step that is traced.
        end: the first that no longer is.
        model: gives the model from which the rows take names; it is called when the full trace begins.
    """

    def __init__(self, begin: int, end: int, model: Callable[[], nn.Module | None]) -> None:
        self._begin, self._end = begin, end
        self._model = model
        self._counter = trace(full=False)
        self._full: Trace | None = None
        self._is_open = False
        self._last = 0
        self._steps = 0
        self._thread = 0
        self.elsewhere = 0
        """How many steps have ended in other threads than the one that is traced."""

    def start(self) -> None:
        """Begins to count."""
        self._thread = threading.get_ident()
        self._counter.__enter__()

    def begins(self, step: int) -> None:
        """Is told that a step begins; when step 0 begins once more, what was traced before is forgotten."""
        if step == 0:
            self.elsewhere = 0
        if threading.get_ident() != self._thread:
            self.elsewhere += step > 0
            return
        if self._is_open and step:
            self._steps += 1
        if step in {0, self._end}:
            self._close()
        if step == 0:
            self._full, self._steps = None, 0
        if step == self._begin:
            self._full = trace(self._model())
            self._full.__enter__()
            self._is_open = True
        if self._is_open:
            self._last = step

    def stop(self) -> None:
        """Ends both traces, if called in the thread that they see."""
        if threading.get_ident() == self._thread:
            self._close()
            self._counter.__exit__(None, None, None)

    @property
    def traced(self) -> list[int] | None:
        """The first step that was traced in full, and the first after it that was not."""
        return None if self._full is None else [self._begin, self._last + 1]

    def counts(self) -> list[Count]:
        """Calls and casts of each operation with a rule, in all steps."""
        return self._counter.data.counts

    def data(self) -> TraceData | None:
        """The full trace; its count of steps is the run's, which has skipped steps, too, unlike a trace's own."""
        if self._full is None:
            return None
        data = self._full.data
        return replace(data, totals=replace(data.totals, steps=self._steps))

    def _close(self) -> None:
        if self._full is not None and self._is_open:
            self._full.__exit__(None, None, None)
        self._is_open = False
