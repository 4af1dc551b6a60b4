"""A full trace of selected steps of a run, and counts of operations in all steps.

Invariants: the full trace is open in the selected steps only; memory does not grow with the run. Both traces see only
the thread that called `start`, so steps in other threads have no effect on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from precast.diagnostics.tracing.tracer import Trace, trace
from precast.report.saved_trace import data_of
from precast.report.schema import RuleCount, TraceData

__all__ = ["TraceWindow"]


class TraceWindow:
    """A trace of operation counts in all steps, and a full trace of the steps from `begin` to `end` - 1.

    `model` is called when the full trace begins. It returns the model from which module names are taken.
    """

    def __init__(self, begin: int, end: int, model: Callable[[], nn.Module | None]) -> None:
        self._begin, self._end = begin, end
        self._model = model
        self._counter = trace(full=False)
        self._full: Trace | None = None
        self._is_open = False
        self._last_step = 0
        self._full_steps = 0
        self._thread = 0
        self.elsewhere = 0
        """The number of steps that ended in a thread other than the traced one."""

    def start(self) -> None:
        """Start the counts, in the calling thread."""
        self._thread = threading.get_ident()
        self._counter.__enter__()

    def begins(self, step: int) -> None:
        """Handle the beginning of a step. Another step 0 discards the full trace so far."""
        if step == 0:
            self.elsewhere = 0
        if threading.get_ident() != self._thread:
            self.elsewhere += step > 0
            return
        if self._is_open and step:
            self._full_steps += 1
        if step in {0, self._end}:
            self._close()
        if step == 0:
            self._full, self._full_steps = None, 0
        if step == self._begin:
            self._full = trace(self._model())
            self._full.__enter__()
            self._is_open = True
        if self._is_open:
            self._last_step = step

    def stop(self) -> None:
        """End both traces, if called in the traced thread."""
        if threading.get_ident() == self._thread:
            self._close()
            self._counter.__exit__(None, None, None)

    @property
    def traced(self) -> list[int] | None:
        """The first step of the full trace and the step after its last one; None without such a trace."""
        return None if self._full is None else [self._begin, self._last_step + 1]

    def counts(self) -> list[RuleCount]:
        """Return the calls and casts of each operation with a rule, in all steps."""
        return self._counter.counts

    def data(self) -> TraceData | None:
        """Return the full trace. Its number of steps includes steps that the scaler skipped, unlike in other traces."""
        if self._full is None:
            return None
        data = data_of(self._full)
        return replace(data, totals=replace(data.totals, steps=self._full_steps))

    def _close(self) -> None:
        if self._full is not None and self._is_open:
            self._full.__exit__(None, None, None)
        self._is_open = False
