"""What is traced of a run: some steps in full, the rest counted.

Invariants: the full trace is open for the steps that were asked for and no others; what both keep is bounded. They see
the thread that began to watch: steps that end in others open and close nothing.
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
        model: gives the model, whose names the rows say; asked when tracing begins.
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
        """How many steps have ended in other threads."""

    def start(self) -> None:
        """Begins to count."""
        self._thread = threading.get_ident()
        self._counter.__enter__()

    def begins(self, step: int) -> None:
        """A step begins; 0 for the second time has what was traced so far forgotten."""
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
        """Ends both, if it is in the thread that they see."""
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
        """The full trace; its steps are the run's, skipped ones too: a trace counts optimizers'."""
        if self._full is None:
            return None
        data = self._full.data
        return replace(data, totals=replace(data.totals, steps=self._steps))

    def _close(self) -> None:
        if self._full is not None and self._is_open:
            self._full.__exit__(None, None, None)
        self._is_open = False
