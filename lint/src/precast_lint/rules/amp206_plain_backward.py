"""AMP206: a scaler's step after a backward whose loss was not scaled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precast_lint.editing.lines import block_of, line_of, remove
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.rules.object_cases import PLAIN_INVALID
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import (
    followed,
    hides,
    is_plain,
    judged,
    only_here,
    scales_by_hand,
)

__all__ = ["RULE"]

_DROPPED = "`scale` returns the scaled loss; here nobody takes it"
_SCALED_NAME = re.compile(r"scale", re.IGNORECASE)


@dataclass(frozen=True)
class _State:
    """The plain backwards since the last step; whether anything was scaled, or may have been."""

    plain: frozenset[Node] = frozenset()
    scaled: bool = False


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `scale` without a taker, and each scaler's step of plain gradients."""
    for flow, scaler in followed(source):
        dropped = [n for n in flow.nodes if _is_dropped(source, n, scaler)]
        for call in dropped:
            yield source.find(RULE, call, _DROPPED, _take(source, flow, call))

    def follow(
        flow: Flow, scaler: str
    ) -> tuple[_State, Callable[[_State, Event, Say], _State]] | None:
        def on(state: _State, event: Event, say: Say) -> _State:
            if hides(source, event, scaler):
                return replace(state, scaled=True)
            if event.kind == "backward" and event.scaler in others:
                return state  # gradients of another optimizer
            return _on(source, state, event, say, scaler)

        others = {s for s in flow.scalers if s != scaler and not flow.leaks(s)}
        dropped = any(_is_dropped(source, node, scaler) for node in flow.nodes)
        if (
            dropped
            or scales_by_hand(flow, scaler, only_up=True)
            or not only_here(flow, scaler, "scale")
        ):
            return None
        return _State(), on

    if not any(flow.comes_by(("backward", None)) for flow, _ in followed(source)):
        return
    for flow, scaler, node, _ in judged(source, follow):
        yield source.find(RULE, node, fix=_scale(source, flow, scaler))


def _on(source: Source, state: _State, event: Event, say: Say, scaler: str) -> _State:
    if event.kind == "scale" and event.scaler == scaler and not _is_for_grad(source, event.node):
        return replace(state, scaled=True)
    if event.kind == "backward":
        by_hand = _SCALED_NAME.search(key(source, event.node) or "")
        if event.scaler is not None or by_hand:
            return replace(state, scaled=True)
        return replace(state, plain=state.plain | {event.node})
    if event.kind == "scaler_step" and event.scaler == scaler:
        if state.scaled:
            say.good(event.node)
        elif state.plain:
            say.bad(event.node)
        return _State()
    return state


def _is_for_grad(source: Source, scaled: Node) -> bool:
    """Whether a scaled loss is one of which `torch.autograd.grad` takes gradients, which no optimizer gets."""
    parent = source.parents[scaled]
    call = source.parents.get(parent) if isinstance(parent, cst.Arg) else None
    return isinstance(call, cst.Call) and source.origin(call.func) == "torch.autograd.grad"


def _is_dropped(source: Source, node: Node, scaler: str) -> bool:
    func = node.func if isinstance(node, cst.Call) else None
    return (
        isinstance(func, cst.Attribute)
        and func.attr.value == "scale"
        and key(source, func.value) == scaler
        and (isinstance(source.parents[node], cst.Expr) or _name_unread(source, node) is not None)
    )


def _name_unread(source: Source, call: Node) -> str | None:
    """The name that gets the scaled loss and that nothing asks for."""
    assign = source.parents[call]
    targets = assign.targets if isinstance(assign, cst.Assign) else ()
    target = targets[0].target if len(targets) == 1 else None
    if not isinstance(target, cst.Name) or source.function(call) is None:
        return None
    home = source.scopes.scope_of[target].home(target.value)
    if home is None or source.names.only_binding(target) is None:
        return None
    is_read = any(place is not target for place in source.scopes.references(home, target.value))
    return None if is_read else target.value


def _take(source: Source, flow: Flow, call: Node) -> Fix | None:
    """The call moves to the backward of the same loss on the next line."""
    line = line_of(source, call)
    assert isinstance(call, cst.Call)
    if line is None or len(call.args) != 1:
        return None
    loss = call.args[0].value
    block = block_of(source, line)
    place = block.index(line) + 1
    name = _name_unread(source, call)
    removed = remove(source, line) if name is None else None
    edits = [removed] if removed is not None else []
    for event in flow.events():
        if (
            event.kind != "backward"
            or event.receiver != key(source, loss)
            or (name is None and not edits)
        ):
            continue
        if line_of(source, event.node) in block[place : place + 1] and event.receiver:
            scaled = _scaled(source, event.node, name or source.code(call))
            return source.fix("Scale the loss of the backward", *edits, scaled, unsafe=True)
    return None


def _scale(source: Source, flow: Flow, scaler: str) -> Fix | None:
    """`scaler.scale(...)` around the loss of the only backward."""
    found = [e for e in flow.events() if e.kind == "backward"]
    if len(found) != 1 or found[0].receiver is None or not is_plain(scaler):
        return None
    node = found[0].node
    assert isinstance(node, cst.Call)
    assert isinstance(node.func, cst.Attribute)
    text = source.code(node.func.value)
    return source.fix(
        "Scale the loss", _scaled(source, node, f"{scaler}.scale({text})"), unsafe=True
    )


def _scaled(source: Source, backward: Node, text: str) -> Edit:
    assert isinstance(backward, cst.Call)
    assert isinstance(backward.func, cst.Attribute)
    owner = backward.func.value
    start, end = source.span(owner).start, source.span(owner).end
    while source.text.data[start - 1 : start] == b"(" and source.text.data[end : end + 1] == b")":
        start, end = start - 1, end + 1
    return Edit(start, end, text)


VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=amp)
        if amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        losses = [scaler.scale(loss) for loss in losses]
        torch.autograd.backward(losses)
        scaler.step(optimizer)
        scaler.update()
    """),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def compute(self, batch):
                return self.scaler.scale(self.model(batch))

            def step(self, batch):
                self.compute(batch).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        note="A method scales the loss.",
    ),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        (loss * scaler.get_scale()).backward()
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaled_loss = outputs[0]
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=False)
        loss.backward()
        scaler.step(optimizer)
    """),
    Case("""
        def finish(model, opt, scaler):
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

        def check(loss):
            loss.backward()
    """),
    Case("""
        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                loss = model(batch)
                scaled = scaler.scale(loss)
                if scaled.isfinite():
                    scaled.backward()
                scaler.step(optimizer)
                scaler.update()
    """),
)

INVALID = (
    Case(
        """
        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                loss = model(batch)
                scaled = scaler.scale(loss)
                loss.backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                loss = model(batch)
                scaled = scaler.scale(loss)
                scaled.backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        def update(critic, opt, scaler, batch, region):
            with region:
                loss = critic(batch)
            opt.zero_grad()
            loss.backward()
            scaler.step(opt)
            scaler.update()
        """,
        """
        def update(critic, opt, scaler, batch, region):
            with region:
                loss = critic(batch)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            inverse = 1.0 / scaler.get_scale()
            with torch.autocast("cuda"):
                loss = loss + sum((g * inverse).square().sum() for g in scaled)
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            inverse = 1.0 / scaler.get_scale()
            with torch.autocast("cuda"):
                loss = loss + sum((g * inverse).square().sum() for g in scaled)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
        note="What is scaled for a penalty does not scale what backward gets.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            with torch.autocast("cuda"):
                loss = model(batch)
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            with torch.autocast("cuda"):
                loss = model(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.cuda.amp.GradScaler()
            for batch in batches:
                (model(batch) / 2).backward(retain_graph=True)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.cuda.amp.GradScaler()
            for batch in batches:
                scaler.scale(model(batch) / 2).backward(retain_graph=True)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    loss = self.model(batch)
                    loss.backward()
                    self.update()

            def update(self):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """
    ),
    Case(
        """
        def train_batch(model, batch, opt, scaler, region):
            with region:
                loss = model(batch)
            (loss / 4).backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        """,
        """
        def train_batch(model, batch, opt, scaler, region):
            with region:
                loss = model(batch)
            scaler.scale(loss / 4).backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        """,
        unsafe=True,
    ),
)

RULE = Rule(
    code="AMP206",
    name="backward-not-scaled",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="the loss was not scaled: use `scaler.scale(loss).backward()` before `scaler.step`",
    what="`scaler.step(optimizer)` after `loss.backward()`, and `scaler.scale(loss)` whose result is not used.",
    why=(
        "`step` divides the gradients by a scale with which nobody multiplied them: they are 65536 times too small. If "
        "`scale` is never called, `step` raises."
    ),
    fine="The loss is scaled in code that the rule can't see.",
    words=(
        "GradScaler backward( .step(",
        "unscale_( backward( .step(",
        "caler.update( backward( .step(",
        ".scale(",
    ),
    check=check,
    valid=VALID,
    invalid=(*INVALID, *PLAIN_INVALID),
)
