"""AMP208: gradients that are unscaled twice before an update."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import assigned_in, followed, hides, loop_around, only_here

__all__ = ["RULE"]

_State = frozenset[tuple[str, Node]]
_AGAIN = (
    "the next batch comes here before `update` was called: `unscale_` belongs where the step is"
)


class _Follower:
    """Follows one scaler, and remembers at which `unscale_` which optimizer was unscaled already."""

    def __init__(self, source: Source, scaler: str) -> None:
        self.source = source
        self.scaler = scaler
        self.first: set[Node] = set()
        self.second: set[Node] = set()
        self.again: set[Node] = set()

    def on(self, state: _State, event: Event, _: Say) -> _State:
        if hides(self.source, event, self.scaler):
            return frozenset()
        if event.kind == "assign":
            word = re.compile(rf"(?<![\w.]){re.escape(event.receiver or '')}\b")
            return frozenset(pair for pair in state if not word.search(pair[0]))
        if event.scaler != self.scaler or event.kind not in ("update", "unscale"):
            return state
        if event.kind == "update":
            return frozenset()
        before = dict(state).get(event.optimizer or "")
        if before is None:
            self.first.add(event.node)
            return state | {(event.optimizer or "", event.node)}
        (self.again if before is event.node else self.second).add(event.node)
        return state


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `unscale_` of an optimizer whose gradients are unscaled."""
    for flow, scaler in followed(source):
        if not only_here(flow, scaler, "update"):
            continue
        follower = _Follower(source, scaler)
        start: _State = frozenset()
        list(flow.run(start, follower.on))
        for node in follower.second - follower.first:
            yield source.find(RULE, node)
        for node in follower.again:
            if _is_each_time(source, flow, scaler, node):
                yield source.find(RULE, node, _AGAIN)


def _is_each_time(source: Source, flow: Flow, scaler: str, node: Node) -> bool:
    """Whether each round of the loop comes by, and the update is not in a loop inside it."""
    loop = loop_around(source, node)
    updates = [e.node for e in flow.events() if e.kind == "update" and e.scaler == scaler]
    if loop is None or not updates:
        return False
    if any(loop_around(source, update) is not loop for update in updates):
        return False
    assigned = assigned_in(source, loop)
    inner: Node = node
    for outer in source.around(node):
        if outer is loop:
            return True
        if isinstance(outer, (cst.If, cst.IfExp)) and inner is not outer.test:
            if any(isinstance(n, cst.Modulo) for n in walk(outer.test)):
                return False
            if any(key(source, n) in assigned for n in walk(outer.test) if _is_name(n)):
                return False
            if any(isinstance(n, cst.Call) for n in walk(outer.test)):
                return False
        if isinstance(outer, (cst.Try, cst.TryStar, cst.Match, cst.BooleanOperation)):
            return False
        inner = outer
    return False


def _is_name(node: Node) -> bool:
    return isinstance(node, (cst.Name, cst.Attribute))


VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for i, batch in enumerate(batches):
            scaler.scale(model(batch)).backward()
            if (i + 1) % 4 == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for i, batch in enumerate(batches):
            last = (i + 1) % 4 == 0
            scaler.scale(model(batch)).backward()
            if last:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        if limit is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if log and limit is None:
            scaler.unscale_(optimizer)
            report(model)
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(first + second).backward()
        scaler.unscale_(optimizers[0])
        scaler.unscale_(optimizers[1])
        scaler.step(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()
    """),
)

INVALID = (
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for i, batch in enumerate(batches):
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.unscale_(optimizer)
        print(model.weight.grad.norm())
        scaler.step(optimizer)
        scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if not norm.isfinite():
                    optimizer.zero_grad()
                    continue
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
        note="Where nothing is stepped, `update` has to be called all the same.",
    ),
)

RULE = Rule(
    code="AMP208",
    name="unscaled-twice",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this optimizer's gradients are unscaled already: `unscale_` is called once before each `update`",
    what=(
        "`scaler.unscale_(optimizer)` twice before `scaler.update()`; in a loop that accumulates gradients, `unscale_` "
        "at each batch with `update` only at some."
    ),
    why="`unscale_` raises a RuntimeError the second time.",
    fine="`update` is called in code that the rule can't see.",
    words=("unscale_(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
