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
    followed,
    hides,
    loop_around,
    may_backward,
    only_here,
)

__all__ = ["RULE"]


@dataclass(frozen=True)
class _State:
    """The optimizers stepped since the last backward, and the update after them."""

    scaled: bool = False
    stepped: frozenset[str] = frozenset()
    update: Node | None = None


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each update after which gradients of the old scale are used."""
    for flow, scaler in followed(source):
        used = ("backward", scaler), ("scaler_step", scaler), ("update", scaler)
        if not flow.comes_by(*used) or not only_here(flow, scaler, "scale"):
            continue

        def on(state: _State, event: Event, say: Say, scaler: str = scaler) -> _State:
            if hides(source, event, scaler) or may_backward(source, event):
                return _State()
            return _on(state, event, say, scaler)

        for node, message in flow.run(_State(), on):
            if not _steps_one(source, flow, scaler, node):
                yield source.find(RULE, node, message)


def _steps_one(source: Source, flow: FunctionFlow, scaler: str, update: Node) -> bool:
    """Return True if a loop over optimizers leaves some of them out: maybe all but one."""
    loop = loop_around(source, update)
    names = {e.optimizer for e in flow.events() if e.kind == "scaler_step" and e.scaler == scaler}
    return (
        len(names) == 1
        and loop is not None
        and any(isinstance(node, (cst.Continue, cst.Break, cst.If)) for node in walk(loop))
    )


def _on(state: _State, event: Event, say: Say, scaler: str) -> _State:
    if event.kind == "backward":
        return _State(scaled=event.scaler == scaler)
    if event.kind == "autograd_grad" or (event.kind == "scale" and event.scaler == scaler):
        return _State()
    if event.kind == "assign":  # the name of a loop over optimizers: the next one is another
        renamed = frozenset("" if name == event.assigned else name for name in state.stepped)
        return _State(state.scaled, renamed, state.update)
    if event.scaler != scaler or not state.scaled:
        return state
    if event.kind == "scaler_step":
        if state.update is not None and event.optimizer not in state.stepped:
            say.bad(state.update)
        return _State(True, state.stepped | {event.optimizer or ""}, state.update)
    if event.kind == "update" and state.stepped:
        return _State(True, state.stepped, event.node)
    return state


RULE = LintRule(
    code="AMP212",
    name="update-between-optimizers",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="the next step divides gradients of the old scale by the new one: update once, after all steps",
    what="`scaler.update()` between the steps of two optimizers whose gradients come from before it.",
    why=(
        "`update` may change the scale. The second optimizer's gradients are then divided by another scale than they "
        "were multiplied with, and gradients that were unscaled before are unscaled again."
    ),
    fine="The second optimizer's gradients are computed after the update, in code that the rule can't see.",
    words=(
        "GradScaler .step(",
        ".scale( .step(",
    ),
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
