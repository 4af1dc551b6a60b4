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
from precast_lint.training_step.protocol import asks_scale, followed, hides, loop_in

__all__ = ["RULE"]

_STEP = r"(lr|sched|step|update|optim|batch|iter)"
_SKIPS = re.compile(rf"found_inf|skipped|skip_?{_STEP}|{_STEP}\w*_skip|overflow", re.IGNORECASE)
_BY_RESULT = ("ReduceLROnPlateau",)
_FINITE = re.compile(r"finite|isnan|isinf|overflow", re.IGNORECASE)


@dataclass(frozen=True)
class _SchedulerState:
    """The scaler's step since the last backward, and the schedulers that stepped before it."""

    stepped: bool = False
    early: frozenset[Node] = frozenset()


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each scheduler's step beside a scaler's, if nothing in the file checks for skipped steps."""
    if _SKIPS.search(source.words):
        return
    if any(asks_scale(flow, scaler) for flow in flows(source) for scaler in flow.scalers):
        return
    for flow, scaler in followed(source):
        if not flow.comes_by("scheduler_step", ("scaler_step", scaler)):
            continue
        steps = [e for e in flow.events() if e.kind == "scaler_step" and e.scaler == scaler]

        def on(
            state: _SchedulerState, event: Event, say: Say, scaler: str = scaler
        ) -> _SchedulerState:
            if hides(source, event, scaler) or event.kind == "optimizer_step":
                return _SchedulerState()
            if event.kind == "loop" and _is_over_schedulers(source, event.node):
                return state
            return _on(state, event, say, scaler)

        for node, message in flow.run(_SchedulerState(), on):
            if _is_beside(flow, node, steps) and not _asks(source, node):
                yield source.find(RULE, node, message)


def _on(state: _SchedulerState, event: Event, say: Say, scaler: str) -> _SchedulerState:
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
    """Return True if a loop only steps its variable: `for scheduler in schedulers: scheduler.step()`."""
    if not isinstance(loop, cst.For) or not isinstance(loop.target, cst.Name):
        return False
    calls = [n for n in walk(loop.body) if isinstance(n, cst.Call)]
    owner = f"{loop.target.value}.step"
    return len(calls) == 1 and key(source, calls[0].func) == owner


def _asks(source: Source, node: Node) -> bool:
    tests = [outer.test for outer in source.around(node) if isinstance(outer, cst.If)]
    return any(_FINITE.search(key(source, test) or "") for test in tests)


def _is_beside(flow: FunctionFlow, node: object, steps: list[Event]) -> bool:
    """Return True if the scheduler steps for each batch, not for each epoch."""
    event = next(e for e in flow.events() if e.node is node)
    loop = loop_in(flow, event.node)
    if loop is not None and _is_over_schedulers(flow.source, loop):
        loop = loop_in(flow, loop)
    same = any(loop_in(flow, step.node) is loop for step in steps)
    is_step = loop is not None or isinstance(
        flow.node, cst.FunctionDef
    )  # a function that a loop calls
    return same and is_step and not (event.instance or "").endswith(_BY_RESULT)


RULE = LintRule(
    code="AMP214",
    name="scheduler-after-skipped-step",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="the scheduler steps even if the scaler has skipped the optimizer's step",
    what="`scheduler.step()` for each batch after `scaler.step(optimizer)`, without a test whether that was skipped.",
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
