"""trace: the dtype and the rule of each operation, the cost of casts, and advice.

Invariant: a trace belongs to the thread that opened it; `listening.py` has the invariants of what it records.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import nn

from precast import _torch
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing.call_sites import ModuleNames
from precast.diagnostics.tracing.counting import RuleCounter, RuleCounts
from precast.diagnostics.tracing.findings import findings_of
from precast.diagnostics.tracing.lineage import chain
from precast.diagnostics.tracing.listening import listen
from precast.diagnostics.tracing.recorder import TraceRecorder
from precast.engine.operator_kinds import dtype_of
from precast.errors import PrecastError
from precast.policy.module_plan import attached_models, outwards
from precast.report.saved_trace import Explanation, SavedTrace
from precast.report.schema import TraceData, TracedModule

__all__ = ["Trace", "trace"]


@_torch.never_compiled
def trace(model: nn.Module | None = None, *, full: bool = True) -> Trace:
    """Record the operations that run inside ``with``: a row for each operation and place, with its rule and the reason.

    Args:
        model: the model whose module names the rows use. Without one, the names are those of attached models, or else
            they start with the class of the outermost module that runs.
        full: False only counts the applications of each rule and their casts. This costs a few Python calls for each
            operation that has a rule.

    Returns:
        The trace, a context manager. It can be entered several times; the results add up.

    Raises:
        PrecastError: `model` is not a module.

    Examples:
        >>> import precast
        >>> model = torch.nn.Linear(4, 2)
        >>> x = torch.ones(3, 4)
        >>> with precast.trace(model) as traced, precast.autocast("cpu"):
        ...     y = model(x)
        >>> [(row.op, row.rule, row.casts) for row in traced.rows]
        [('linear', 'lower', 3)]
    """
    if model is not None and not isinstance(model, nn.Module):
        raise PrecastError(
            f"trace(model): expected a torch.nn.Module or no argument, got {type(model).__name__}"
        )
    return Trace(model, full=full)


class Trace(SavedTrace):
    """The operations that ran while the trace was open; created by `trace`.

    Attributes:
        full: True while the trace records every operation, False while it only counts.
    """

    def __init__(self, model: nn.Module | None = None, *, full: bool = True) -> None:
        models = [] if model is None else [model]
        models += [attached for attached, _ in attached_models() if attached is not model]
        self.full = full
        self._counts = RuleCounts()
        self._failures = Failures()
        self._recorder = TraceRecorder(ModuleNames(models), self._counts, self._failures)
        self._counter = RuleCounter(self._counts, self._failures)
        self._listening = contextlib.ExitStack()
        self._depth = 0
        self._thread = 0

    @_torch.never_compiled
    def __enter__(self) -> Trace:
        if self._depth and self._thread != threading.get_ident():
            raise PrecastError(
                "this trace is open in another thread, and belongs to it. Create another one with precast.trace()."
            )
        self._depth += 1
        if self._depth == 1:
            self._thread = threading.get_ident()
            self._listening = self._listen()
        return self

    @_torch.never_compiled
    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._listening.close()

    def pause(self) -> None:
        """Only count from here on, as with ``full=False``."""
        self._set_full(False)

    def resume(self) -> None:
        """Record every operation from here on."""
        self._set_full(True)

    def explain(self, tensor: torch.Tensor) -> Explanation:
        """Explain the dtype of a tensor: the operations back to the rule, or to the tensor, that decided it.

        Args:
            tensor: any tensor that was created while the full trace was open.

        Raises:
            PrecastError: `tensor` is not a tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise PrecastError(
                f"trace.explain(tensor): expected a tensor, got {type(tensor).__name__}"
            )
        return Explanation(dtype_of(tensor), chain(self._recorder.lineage.of(tensor)))

    def _recorded(self) -> TraceData:
        recorder, tally = self._recorder, self._recorder.tally
        rows = sorted(tally.rows.values(), key=lambda row: -row.seconds)
        names = {row.module for row in rows if row.module is not None}
        names |= {outer for name in names for outer in outwards(name)}
        types = recorder.names.types
        modules = [TracedModule(name, kind) for name, kind in types.items() if name in names]
        return TraceData(
            rows,
            recorder.totals,
            list(tally.flow.values()),
            dict(recorder.saved),
            modules,
            tally.dropped,
            findings_of(rows, recorder.totals, recorder.patterns, recorder.policies),
            list(self._counts.values()),
            self._notes(),
        )

    def _notes(self) -> list[str]:
        tally = self._recorder.tally
        notes = []
        if _torch.has_compiled():
            notes.append(
                "This process has functions of torch.compile. The trace has neither the operations that they fuse nor "
                "the rules behind their casts; to see these, trace the functions uncompiled."
            )
        if any(row.device_type != "cpu" for row in tally.rows.values()):
            notes.append(
                "Times are the host's: for a device that works asynchronously, they are those of launching."
            )
        verb = "is" if self._failures.total == 1 else "are"
        because = "because the trace failed to describe them"
        notes += self._failures.notes("operation", f"{verb} counted without a row, {because}")
        if tally.dropped:
            notes.append(
                f"{tally.dropped:,} calls have no row, because there were too many kinds of rows."
            )
        return notes

    def _set_full(self, full: bool) -> None:
        if self._depth and full != self.full:
            # The new listener is registered first: without any, the record of open regions would be lost.
            previous, self.full = self._listening, full
            self._listening = self._listen()
            previous.close()
        self.full = full

    def _listen(self) -> contextlib.ExitStack:
        if self.full:
            self._recorder.start()
        listener = self._recorder if self.full else self._counter
        stack = contextlib.ExitStack()
        stack.enter_context(listen(listener, rules_only=not self.full))
        return stack
