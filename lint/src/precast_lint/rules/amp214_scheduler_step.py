"""AMP214: a scheduler that steps although the scaler may have skipped the optimizer's step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import FunctionFlow, Say, flows
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import (
    depends_on_scale,
    innermost_loop,
    may_use,
    scaler_flows,
)

__all__ = ["RULE"]

_STEP = r"(lr|sched|step|update|optim|batch|iter)"
_SKIP_NAME = re.compile(rf"found_inf|skipped|skip_?{_STEP}|{_STEP}\w*_skip|overflow", re.IGNORECASE)
_STEPS_BY_METRIC = ("ReduceLROnPlateau",)
_FINITE_NAME = re.compile(r"finite|isnan|isinf|overflow", re.IGNORECASE)


@dataclass(frozen=True)
class _SchedulerState:
    """True after the scaler's step, until the next backward; and the steps of schedulers before it."""

    stepped: bool = False
    early: frozenset[Node] = frozenset()


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each scheduler's step that nothing in the file skips when the scaler skips its step."""
    if _SKIP_NAME.search(source.words):
        return
    if any(depends_on_scale(flow, scaler) for flow in flows(source) for scaler in flow.scalers):
        return
    for flow, scaler in scaler_flows(source):
        if not flow.has_events("scheduler_step", ("scaler_step", scaler)):
            continue
        steps = [e for e in flow.events() if e.kind == "scaler_step" and e.scaler == scaler]

        def on(
            state: _SchedulerState, event: Event, say: Say, scaler: str = scaler
        ) -> _SchedulerState:
            if may_use(source, event, scaler) or event.kind == "optimizer_step":
                return _SchedulerState()
            if event.kind == "loop" and _is_over_schedulers(source, event.node):
                return state
            return _next_state(state, event, say, scaler)

        for node, message in flow.run(_SchedulerState(), on):
            if _is_per_batch(flow, node, steps) and not _tests_finiteness(source, node):
                yield source.find(RULE, node, message)


def _next_state(state: _SchedulerState, event: Event, say: Say, scaler: str) -> _SchedulerState:
    if event.kind == "loop":
        return _SchedulerState()
    if event.kind == "backward":
        return replace(state, stepped=False)
    if event.kind == "scheduler_step":
        if state.stepped:
            say.bad(event.node)
        return replace(state, early=state.early | {event.node})
    if event.kind == "scaler_step" and event.scaler == scaler:
        for node in state.early:
            say.bad(node)
        return _SchedulerState(stepped=True)
    return state


def _is_over_schedulers(source: Source, loop: Node) -> bool:
    """Return True for a loop over schedulers that only steps each: `for scheduler in schedulers: scheduler.step()`."""
    if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name):
        return False
    calls = [n for n in walk(loop.body) if isinstance(n, cst.Call)]
    owner = f"{loop.target.value}.step"
    return len(calls) == 1 and key(source, calls[0].func) == owner


def _tests_finiteness(source: Source, node: Node) -> bool:
    tests = [outer.test for outer in source.around(node) if isinstance(outer, cst.If)]
    return any(_FINITE_NAME.search(key(source, test) or "") for test in tests)


def _is_per_batch(flow: FunctionFlow, node: object, steps: list[Event]) -> bool:
    """Return True if the scheduler steps for each batch, not for each epoch."""
    event = next(e for e in flow.events() if e.node is node)
    loop = innermost_loop(flow, event.node)
    if loop is not None and _is_over_schedulers(flow.source, loop):
        loop = innermost_loop(flow, loop)
    with_scaler = any(innermost_loop(flow, step.node) is loop for step in steps)
    # A function without a loop is one that a loop over batches calls.
    is_in_loop = loop is not None or isinstance(flow.node, cst.FunctionDef)
    return with_scaler and is_in_loop and not (event.instance or "").endswith(_STEPS_BY_METRIC)


RULE = LintRule(
    code="AMP214",
    name="scheduler-after-skipped-step",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="the scheduler steps even if the scaler has skipped the optimizer's step",
    what="`scheduler.step()` for each batch after `scaler.step(optimizer)`, without a test for a skipped step.",
    why=(
        "The first steps are often skipped, while the scale is too large. The learning rate then runs ahead, and "
        "PyTorch warns that `lr_scheduler.step()` was called before `optimizer.step()`. After a skipped step the "
        "scale is lower than before."
    ),
    fine="A few steps more or less do not matter to the schedule.",
    words=("schedule .step( scale(",),
    check=check,
    example="""
 import torch

 scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, len(batches))
 scaler = torch.amp.GradScaler("cuda")
 for batch in batches:
     optimizer.zero_grad()
     scaler.scale(model(batch)).backward()
+    scale = scaler.get_scale()
     scaler.step(optimizer)
     scaler.update()
-    scheduler.step()
+    if scaler.get_scale() >= scale:
+        scheduler.step()
""",
)
