"""AMP501: `.item()` at every training step."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow import flows
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.protocol import loop_around

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `.item()` that each round of a loop with a backward comes by."""
    training = {
        loop
        for flow in flows(source)
        for event in flow.events()
        if event.kind == "backward" and (loop := loop_around(source, event.node)) is not None
    }
    losses: set[tuple[str | None, Node | None]] = {
        (event.receiver, source.function(event.node))
        for flow in flows(source)
        for event in flow.events()
        if event.kind == "backward"
    }
    reads = [call for call, _, _ in source.methods("item") if not call.args]
    reads += [call for call in source.all(cst.Call) if _reads_loss(source, call, losses)]
    for call in reads:
        loop = loop_around(source, call)
        if loop in training and not _is_conditional(source, call, loop):
            yield source.find(RULE, call)


def _reads_loss(
    source: Source, call: cst.Call, losses: set[tuple[str | None, Node | None]]
) -> bool:
    """`float(loss)` of a loss whose backward runs in the same function."""
    if source.names.builtin(call.func) != "float" or len(call.args) != 1:
        return False
    loss = call.args[0].value
    if isinstance(loss, cst.Call) and isinstance(loss.func, cst.Attribute) and not loss.args:
        loss = loss.func.value  # `loss.detach()`
    return (key(source, loss), source.function(call)) in losses


def _is_conditional(source: Source, node: Node, loop: Node | None) -> bool:
    for outer in source.around(node):
        if outer is loop:
            return False
        if isinstance(outer, (cst.If, cst.IfExp, cst.Lambda, cst.CompFor)):
            return True
    return False


VALID = (
    Case("""
        import torch

        for i, batch in enumerate(batches):
            loss = model(batch)
            loss.backward()
            total += loss.detach()
            if i % 100 == 0:
                print(loss.item())
        print(total.item())
    """),
    Case("""
        import torch

        with torch.no_grad():
            for batch in batches:
                total += model(batch).item()
    """),
    Case("""
        import torch

        for batch in batches:
            loss = model(batch)
            loss.backward()
            rate = float(schedule(step))
    """),
)

INVALID = (
    Case(
        """
        import torch

        for batch in batches:
            loss = model(batch)
            loss.backward()
            total += loss.item()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        for batch in batches:
            loss = model(batch)
            loss.backward()
            total += float(loss)
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP501",
    name="item-every-step",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="`.item()` waits for the GPU at each step: keep the tensor, and ask for its value now and then",
    what="`.item()` in a training loop, at each step.",
    why=(
        "The CPU waits until the GPU has computed the value and prepares no next step meanwhile. With short steps, "
        "as mixed precision makes them, that is what a step costs."
    ),
    fine="The steps are long, or the value is needed at each of them.",
    words=("item() backward(", "item() .grad(", "float( backward("),
    check=check,
    valid=VALID,
    invalid=INVALID,
    default=False,
)
