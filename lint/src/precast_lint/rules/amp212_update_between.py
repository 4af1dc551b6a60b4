"""AMP212: an update between the steps of two optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import FunctionFlow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import (
    loop_around,
    may_backward,
    may_use,
    no_other_calls,
    scaler_flows,
)

__all__ = ["RULE"]


@dataclass(frozen=True)
class _UpdateState:
    """The optimizers that were stepped since the last backward, and the update after their steps."""

    scaled: bool = False
    stepped: frozenset[str] = frozenset()
    update: Node | None = None


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each update that is followed by a step with gradients of the old scale."""
    for flow, scaler in scaler_flows(source):
        used = ("backward", scaler), ("scaler_step", scaler), ("update", scaler)
        if not flow.has_events(*used) or not no_other_calls(flow, scaler, "scale"):
            continue

        def on(state: _UpdateState, event: Event, say: Say, scaler: str = scaler) -> _UpdateState:
            if may_use(source, event, scaler) or may_backward(source, event):
                return _UpdateState()
            return _next_state(state, event, say, scaler)

        for node, message in flow.run(_UpdateState(), on):
            if not _skips_optimizers(source, flow, scaler, node):
                yield source.find(RULE, node, message)


def _skips_optimizers(source: Source, flow: FunctionFlow, scaler: str, update: Node) -> bool:
    """Return True if a loop over optimizers may skip all but one of them."""
    loop = loop_around(source, update)
    names = {e.optimizer for e in flow.events() if e.kind == "scaler_step" and e.scaler == scaler}
    return (
        len(names) == 1
        and loop is not None
        and any(isinstance(node, (cst.Continue, cst.Break, cst.If)) for node in walk(loop))
    )


def _next_state(state: _UpdateState, event: Event, say: Say, scaler: str) -> _UpdateState:
    if event.kind == "backward":
        return _UpdateState(scaled=event.scaler == scaler)
    if event.kind == "autograd_grad" or (event.kind == "scale" and event.scaler == scaler):
        return _UpdateState()
    if event.kind == "assign":  # in a loop over optimizers, the variable now refers to the next one
        renamed = frozenset("" if name == event.assigned else name for name in state.stepped)
        return _UpdateState(state.scaled, renamed, state.update)
    if event.scaler != scaler or not state.scaled:
        return state
    if event.kind == "scaler_step":
        if state.update is not None and event.optimizer not in state.stepped:
            say.bad(state.update)
        return _UpdateState(True, state.stepped | {event.optimizer or ""}, state.update)
    if event.kind == "update" and state.stepped:
        return _UpdateState(True, state.stepped, event.node)
    return state


RULE = LintRule(
    code="AMP212",
    name="update-between-optimizers",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="the next step divides gradients of the old scale by the new scale: update once, after all steps",
    what="`scaler.update()` between the steps of two optimizers whose gradients were computed before it.",
    why=(
        "`update` may change the scale. The second optimizer's gradients are then divided by another scale than they "
        "were multiplied by, and gradients that are already unscaled are unscaled again."
    ),
    fine="Code in another file computes the second optimizer's gradients after the update.",
    words=("GradScaler .step(", ".scale( .step("),
    check=check,
    example="""
 import torch

 scaler = torch.amp.GradScaler("cuda")
 for batch in batches:
     scaler.scale(model(batch)).backward()
     for optimizer in optimizers:
         scaler.step(optimizer)
-        scaler.update()
+    scaler.update()
""",
)
