"""AMP209: a scaler that is made anew for each batch."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow import Flow
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.protocol import assigned_in, followed, loop_around

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each scaler that is made in the loop of its backward and step."""
    for flow, scaler in followed(source):
        made = [e for e in flow.nodes if isinstance(e, cst.Assign) and _makes(source, e, scaler)]
        for statement in made:
            loop = loop_around(source, statement)
            if loop is not None and len(made) == 1 and _is_used_in(source, flow, scaler, loop):
                yield source.find(RULE, statement.value)


def _makes(source: Source, statement: cst.Assign, scaler: str) -> bool:
    call = statement.value
    return (
        isinstance(call, cst.Call)
        and source.origin(call.func) in SCALERS
        and any(key(source, target.target) == scaler for target in statement.targets)
    )


def _is_used_in(source: Source, flow: Flow, scaler: str, loop: Node) -> bool:
    """Whether the loop itself, no loop in it, trains, with an optimizer that was there before."""
    events = [e for e in flow.events() if e.scaler == scaler]
    own = [e for e in events if loop_around(source, e.node) is loop]
    assigned = assigned_in(source, loop)
    steps = [e for e in own if e.kind == "scaler_step"]
    roots = {(e.optimizer or "").partition(".")[0].partition("[")[0] for e in steps}
    is_new = roots & assigned or {e.optimizer for e in steps} & assigned
    return bool(steps) and any(e.kind == "backward" for e in own) and not is_new


VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """),
    Case(
        """
        import torch

        for fold in range(5):
            optimizer = torch.optim.SGD(models[fold].parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(models[fold](batch)).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        note="One for each training.",
    ),
    Case(
        """
        import torch

        for enabled in (False, True):
            model, optimizer = make()
            scaler = torch.amp.GradScaler("cuda", enabled=enabled)
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
        """,
        note="Each round has an optimizer of its own.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        for batch in batches:
            optimizer.zero_grad()
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda"):
                loss = model(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP209",
    name="scaler-made-in-loop",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="this scaler is made anew for each batch: make one before the loop",
    what="A `GradScaler` that is made in the loop over batches in which it steps.",
    why=(
        "A scaler learns how large the scale may be. A new one begins at 65536 each time: where that is too large, "
        "each step is skipped, and the model learns nothing."
    ),
    fine="Each round of the loop is a training of its own.",
    words=("GradScaler scale( .step(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
