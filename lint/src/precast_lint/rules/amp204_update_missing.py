"""AMP204: steps of a scaler without `update`, or with `update` before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precast_lint.editing.lines import block_of, exchange, insert_after, line_of
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import (
    hides,
    is_plain,
    judged,
    leading_to,
    loop_around,
    loop_in,
    loops_around,
    only_here,
)

__all__ = ["RULE"]

_MISSING = "no `{}.update()` follows this step: the next one raises, and the scale never changes"
_FIRST = (
    "`update` belongs after `step`: before it, PyTorch raises, or the gradients are divided twice"
)


@dataclass(frozen=True)
class _State:
    """Where a path stands between a scaled backward, the step and the update.

    Attributes:
        steps: those without an update so far.
        scaled: whether a scaled backward came last, and no step since.
        early: the update between a backward and its step.
        stepped: whether there was a step in this round of the loop.
        ever: whether there was one at all, or may have been.
    """

    steps: frozenset[Node] = frozenset()
    scaled: bool = False
    early: Node | None = None
    stepped: bool = False
    ever: bool = True


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each step that no update follows, and each update before its step."""

    def follow(
        flow: Flow, scaler: str
    ) -> tuple[_State, Callable[[_State, Event, Say], _State]] | None:
        hidden = any(hides(source, event, scaler) for event in flow.events())
        owned = flow.is_seen(scaler, "update") and not hidden
        updates = [e for e in flow.events() if e.kind == "update" and e.scaler == scaler]
        updating = {
            loop
            for e in updates
            for at in leading_to(flow, e.node)
            for loop in loops_around(source, at)
        }

        def on(state: _State, event: Event, say: Say) -> _State:
            if hides(source, event, scaler):
                for step in state.steps:  # the update may be there
                    say.good(step)
                return _State()
            if event.kind == "next":  # of a loop without an update it is all one
                return replace(state, stepped=False) if event.node in updating else state
            if event.kind == "return":
                for step in state.steps if owned else ():
                    if loop_in(flow, step) is not None:
                        say.bad(step, _MISSING.format(scaler))
                return state
            return _on(flow, state, event, say, scaler)

        return _State(ever=not owned or not flow.has_all(scaler, "step")), on

    for flow, scaler, node, message in judged(source, follow):
        is_early = message == _FIRST
        if is_early and not only_here(flow, scaler, "step"):
            continue
        fix = (_swap if is_early else _insert)(source, flow, scaler, node)
        yield source.find(RULE, node, message, fix)


def _on(flow: Flow, state: _State, event: Event, say: Say, scaler: str) -> _State:
    if event.kind == "backward":
        return replace(state, scaled=event.scaler == scaler, early=None)
    if event.kind == "optimizer_step":  # in the place of the scaler's, which AMP205 says
        return replace(state, ever=True)
    if event.scaler != scaler:
        return state
    if event.kind == "scaler_step":
        if state.early is not None:
            say.bad(state.early, _FIRST)
        return _State(state.steps | {event.node}, stepped=True)
    if event.kind == "update":
        for step in state.steps:
            say.good(step)
        if state.stepped and not state.scaled:
            say.good(event.node)
        elif not state.ever and _is_unconditional(flow, event.node):
            say.bad(event.node, _FIRST)
        early = event.node if state.scaled and not state.stepped else None
        return replace(state, steps=frozenset(), early=early)
    return state


def _is_unconditional(flow: Flow, update: Node) -> bool:
    """Whether an update runs in each round of a loop, the first one too: it stands in no branch on the way there."""
    source = flow.source
    for node in leading_to(flow, update):
        line = line_of(source, node)
        if line is None:
            return False
        block = source.parents[source.parents[line]]
        while isinstance(block, cst.With):
            block = source.parents[source.parents[block]]
        loop = loop_around(source, node)
        if loop is not None or not isinstance(block, cst.FunctionDef):
            return block is loop
    return False


def _insert(source: Source, flow: Flow, scaler: str, step: Node) -> Fix | None:
    """`update` after the step, if there is only one."""
    steps = [e for e in flow.events() if e.kind == "scaler_step" and e.scaler == scaler]
    line = line_of(source, step)
    if len(steps) != 1 or line is None or not is_plain(scaler):
        return None
    return source.fix(
        "Update the scale after the step",
        insert_after(source, line, f"{scaler}.update()"),
        unsafe=True,
    )


def _swap(source: Source, flow: Flow, scaler: str, update: Node) -> Fix | None:
    """The update after the step, if they stand one after the other."""
    line = line_of(source, update)
    block = block_of(source, line) if line is not None else []
    place = block.index(line) + 1 if line in block else len(block)
    if line is None or place >= len(block):
        return None
    steps = [e.node for e in flow.events() if e.kind == "scaler_step" and e.scaler == scaler]
    following = next((s for s in steps if line_of(source, s) is block[place]), None)
    if following is None:
        return None
    return source.fix("Step before the update", exchange(source, line, block[place]), unsafe=True)


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

        def train(batches, generator, critic, first, second):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(critic(batch)).backward()
                scaler.step(second)
                scaler.scale(generator(batch)).backward()
                scaler.step(first)
                scaler.update()
        """,
        note="One update for several optimizers.",
    ),
    Case("""
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, loss):
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)

            def after_step(self):
                self.scaler.update()
    """),
    Case("""
        import torch

        def train(batches, model, optimizer, every):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(batches):
                scaler.scale(model(batch) / every).backward()
                if (i + 1) % every == 0:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
    """),
    Case(
        """
        import torch

        def train(batches, model, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                step(scaler, optimizer)
        """,
        note="The scaler is handed to a function that is not seen.",
    ),
    Case("""
        import torch

        def test_one_step():
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
    """),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(batches):
                if i > 0:
                    scaler.update()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
        """,
        note="The step of the round before.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)

            def train(self, batches):
                self.step(next(batches))
                for batch in batches:
                    self.scaler.update()
                    self.step(batch)
                self.scaler.update()
        """,
        note="Each step has its update, if only in the next round.",
    ),
)

_HANDED = (
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)

        scaler = torch.amp.GradScaler("cuda")
        for part in parts:
            train(model, part, optimizer, scaler)
            scaler.update()
        """,
        note="Who hands the scaler over updates it.",
    ),
    Case("""
        import torch

        class Trainer(Base):
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, model, batches, optimizer):
                for batch in batches:
                    self.scaler.scale(model(batch)).backward()
                    self.scaler.step(optimizer)
    """),
    Case(
        """
        import torch
        from loop import fit

        scaler = torch.amp.GradScaler("cuda")

        def step(loss, optimizer):
            for _ in range(2):
                scaler.scale(loss).backward()
                scaler.step(optimizer)

        fit(step, scaler)
        """,
        note="Others get the scaler, and may update it.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")

        def train(model, optimizer, batches):
            for i, batch in enumerate(batches):
                with torch.autocast("cuda"):
                    loss = model(batch)
                scaler.scale(loss).backward()
                if i % 4 == 3:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")

        def train(model, optimizer, batches):
            for i, batch in enumerate(batches):
                with torch.autocast("cuda"):
                    loss = model(batch)
                scaler.scale(loss).backward()
                if i % 4 == 3:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        unsafe=True,
        note="No place of the file updates a scaler that its top level makes.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    self.step(batch)

            def step(self, batch):
                self.scaler.update()
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
        """,
        count=1,
        note="The first update comes before any step.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)

        train(model, batches, optimizer, torch.amp.GradScaler("cuda"))
        """,
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()

        train(model, batches, optimizer, torch.amp.GradScaler("cuda"))
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
        """,
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
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
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self):
                for batch in self.batches:
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.unscale_(self.optimizer)
                    self.scaler.update()  # the scale
                    self.scaler.step(self.optimizer)  # the weights
        """,
        """
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self):
                for batch in self.batches:
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.unscale_(self.optimizer)
                    self.scaler.step(self.optimizer)  # the scale
                    self.scaler.update()  # the weights
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.update()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
        """,
        count=1,
        note="In the first round there is nothing to update from.",
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
                    self.scaler.scale(self.model(batch)).backward()
                    self.after_backward()
                    self.scaler.step(self.optimizer)

            def after_backward(self):
                self.scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def backward(self, loss):
                self.scaler.scale(loss).backward()

            def step(self):
                self.scaler.step(self.optimizer)
                self.optimizer.zero_grad()

            def train(self, batches):
                for batch in batches:
                    self.backward(self.model(batch))
                    self.step()
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def backward(self, loss):
                self.scaler.scale(loss).backward()

            def step(self):
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

            def train(self, batches):
                for batch in batches:
                    self.backward(self.model(batch))
                    self.step()
        """,
        unsafe=True,
        note="Spread over methods.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    self.scaler.update()
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.step(self.optimizer)
        """,
        note="The first round has nothing to update from.",
    ),
)

RULE = Rule(
    code="AMP204",
    name="scaler-update-missing",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="`update` has to follow `step`",
    what="In a loop, `scaler.step(optimizer)` without `scaler.update()`, or `update` before `step`.",
    why=(
        "A second `step` without `update` raises a RuntimeError. `update` before `step` raises as well; after "
        "`unscale_` it forgets that the gradients are unscaled already, and `step` divides them once more."
    ),
    fine="The scale is updated in code that the rule can't see.",
    words=(
        "GradScaler .step(",
        ".scale( .step(",
    ),
    check=check,
    valid=(*VALID, *_HANDED),
    invalid=INVALID,
)
