"""AMP213: a gradient penalty of scaled gradients."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import FunctionFlow
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import followed, hides, scales_by_hand

__all__ = ["RULE"]


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each gradient of a scaled loss that is to be differentiated again."""
    for flow, scaler in followed(source):
        if scales_by_hand(flow, scaler, only_up=False):
            continue
        events = flow.events()
        if any(hides(source, event, scaler) for event in events):
            continue
        for event in events:
            is_scaled = event.kind == "autograd_grad" and event.scaler == scaler
            if is_scaled and _is_for_penalty(event) and not _leaves(source, flow, event.node):
                yield source.find(RULE, event.node)


def _is_for_penalty(event: Event) -> bool:
    result = event.arguments.get("create_graph", 4) if event.arguments else None
    return isinstance(result, cst.Name) and result.value == "True"


def _leaves(source: Source, flow: FunctionFlow, call: Node) -> bool:
    """Return True if the gradients leave the function, which may unscale them elsewhere."""
    statement = source.statement(call)
    names = {
        key(source, name)
        for node in walk(statement)
        if isinstance(node, cst.AssignTarget)
        for name in walk(node.target)
        if isinstance(name, (cst.Name, cst.Attribute))
    }
    returned = [n for n in flow.nodes if isinstance(n, (cst.Return, cst.Yield))]
    return any(
        (
            inner is call
            or (isinstance(inner, (cst.Name, cst.Attribute)) and key(source, inner) in names)
        )
        and not _is_beside_number(source, inner, node)
        for node in returned
        for inner in walk(node)
    )


def _is_beside_number(source: Source, node: Node, whole: Node) -> bool:
    """Return True if a number is added or subtracted on the way, `gradient.norm() - 1`."""
    inner = node
    for outer in source.around(node):
        if outer is whole:
            return False
        if isinstance(outer, cst.BinaryOperation) and isinstance(
            outer.operator, (cst.Add, cst.Subtract)
        ):
            other = outer.right if inner is outer.left else outer.left
            if constant(source, other):
                return True
        inner = outer
    return False


RULE = LintRule(
    code="AMP213",
    name="penalty-of-scaled-gradients",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="these gradients are scaled: divide them by `scaler.get_scale()` before they become a penalty",
    what="`torch.autograd.grad(scaler.scale(loss), ..., create_graph=True)` whose result nobody unscales.",
    why=(
        "`scaler.step` unscales what is in `.grad`, not what `torch.autograd.grad` returns. The penalty is as many "
        "times too large as the scale says, and changes with it."
    ),
    fine="The gradients are unscaled in code that the rule can't see.",
    words=("autograd scale(",),
    check=check,
    example="""
 import torch

 scaler = torch.amp.GradScaler("cuda")
 with torch.autocast("cuda"):
     score = critic(x).sum()
-gradient = torch.autograd.grad(scaler.scale(score), x, create_graph=True)[0]
+gradient = torch.autograd.grad(scaler.scale(score), x, create_graph=True)[0] / scaler.get_scale()
 loss = (gradient.norm(2, dim=1) - 1).square().mean()
 scaler.scale(loss).backward()
""",
)
