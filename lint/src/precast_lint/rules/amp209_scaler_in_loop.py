"""AMP209: a scaler that is created for each batch."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.callers import calls_of
from precast_lint.meaning.functions import followed_call
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow import FunctionFlow
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.protocol import (
    assigned_in,
    innermost_loop,
    loop_around,
    scaler_flows,
)

__all__ = ["RULE"]

_IN_STEP = "each call creates this scaler: create one before the loop that calls this function, and pass it"


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each scaler that is created in the loop with its backward and step."""
    for flow, scaler in scaler_flows(source):
        definitions = [
            e for e in flow.nodes if isinstance(e, cst.Assign) and _makes(source, e, scaler)
        ]
        if any(_is_under_test(source, one) for one in definitions):
            continue
        again = [one for one in definitions if loop_around(source, one) is not None]
        for one in again if len(again) == 1 else ():
            if _is_used_in(source, flow, scaler, loop_around(source, one)):
                yield source.find(RULE, one.value)
        if len(definitions) != 1 or again:
            continue
        steps = [e for e in flow.events() if e.kind == "scaler_step" and e.scaler == scaler]
        if any(_is_used_in(source, flow, scaler, innermost_loop(flow, e.node)) for e in steps):
            roots = {_root(e.optimizer) for e in steps}
            bound = source.scopes.owned[flow.node].bindings
            is_own = any(b.kind != "param" for root in roots for b in bound.get(root, ()))
            if not is_own and _runs_in_loop(source, flow.node, roots):
                yield source.find(RULE, definitions[0].value, _IN_STEP)


def _makes(source: Source, statement: cst.Assign, scaler: str) -> bool:
    definition = source.values.constructor(statement.value)
    return (
        isinstance(statement.value, cst.Call)
        and isinstance(definition, cst.Call)
        and source.origin(definition.func) in SCALERS
        and any(key(source, target.target) == scaler for target in statement.targets)
    )


def _is_under_test(source: Source, statement: Node) -> bool:
    """Return True if a test decides whether the scaler is created: `if self.scaler is None`."""
    inner = statement
    for outer in source.around(statement):
        if isinstance(outer, (cst.FunctionDef, cst.For, cst.While)) and inner is outer.body:
            return False
        if isinstance(outer, cst.If):
            return True
        inner = outer
    return False


def _is_used_in(source: Source, flow: FunctionFlow, scaler: str, loop: Node | None) -> bool:
    """Return True if a loop, not an inner one, has the backward and the step; None means the function's body."""
    events = [e for e in flow.events() if e.scaler == scaler]
    own = [e for e in events if innermost_loop(flow, e.node) is loop]
    assigned = assigned_in(source, loop) if loop is not None else set()
    steps = [e for e in own if e.kind == "scaler_step"]
    roots = {_root(e.optimizer) for e in steps}
    is_new = roots & assigned or {e.optimizer for e in steps} & assigned
    return bool(steps) and any(e.kind == "backward" for e in own) and not is_new


def _root(name: str | None) -> str:
    return (name or "").partition(".")[0].partition("[")[0]


def _runs_in_loop(source: Source, function: Node, optimizers: set[str]) -> bool:
    """Return True if all calls of a function are in loops over batches, with optimizers from before the loop."""
    assert isinstance(function, (cst.FunctionDef, cst.Module))
    calls = (
        source.values.call_arguments.calls(function)
        if isinstance(function, cst.FunctionDef)
        else []
    )
    calls = calls or _calls_of_objects(source, function)
    return bool(calls) and all(_is_in_loop(source, function, call, optimizers) for call in calls)


def _calls_of_objects(source: Source, function: Node) -> list[cst.Call]:
    """Return the calls of a method, `trainer.step(batch)`; none if the method is also used in other ways."""
    home = source.values.enclosing_class(function)
    if not isinstance(function, cst.FunctionDef) or not isinstance(home, cst.ClassDef):
        return []
    name = function.name.value
    requests = [node for node in source.all(cst.Attribute) if node.attr.value == name]
    calls = calls_of(source, function)
    return calls if all(source.parents[node] in calls for node in requests) else []


def _is_in_loop(source: Source, function: Node, call: cst.Call, optimizers: set[str]) -> bool:
    result, loop = followed_call(source, call), loop_around(source, call)
    if result is None or result[0] is not function or loop is None:
        return False
    values = {_root(key(source, result[1].get(name))) or name for name in optimizers}
    return not values & assigned_in(source, loop)


RULE = LintRule(
    code="AMP209",
    name="scaler-made-in-loop",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="this scaler is created for each batch: create one before the loop",
    what=(
        "A `GradScaler` that is created in the loop over batches in which it steps, or in a function that a loop over "
        "batches or epochs calls."
    ),
    why=(
        "A scaler finds how large the scale may be. A new one starts at 65536 each time. If that is too large, each "
        "step is skipped, and the model learns nothing."
    ),
    fine="Each iteration of the loop is a separate training.",
    words=("GradScaler scale( .step(",),
    check=check,
    example="""
 import torch

+scaler = torch.amp.GradScaler("cuda")
 for batch in batches:
-    scaler = torch.amp.GradScaler("cuda")
     scaler.scale(model(batch)).backward()
     scaler.step(optimizer)
     scaler.update()
""",
)
