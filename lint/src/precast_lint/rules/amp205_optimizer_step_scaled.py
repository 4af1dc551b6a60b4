"""AMP205: an optimizer's own step with gradients of a scaled loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precast_lint.editing.lines import block_of, line_of, remove
from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import hides, judged, only_here, scales_by_hand

__all__ = ["RULE"]

_ADAMS = ("torch.optim.Adam", "torch.optim.NAdam", "torch.optim.RAdam", "torch.optim.Adamax")
_NO_EPS = 1e-12
_TWICE = "`scaler.step` has made this optimizer's step already"
_AGAIN = "`scaler.step` makes this optimizer's step again: leave it to the scaler, which skips it after an overflow"


@dataclass(frozen=True)
class _State:
    """Which backwards were seen since the last step, what was unscaled, and what was stepped.

    Attributes:
        scaled: whether there was a backward of a scaled loss.
        plain: whether there was one of another loss.
        unscaled: whether gradients were unscaled.
        stepped: the optimizers that the scaler has stepped.
        by_hand: the steps with unscaled gradients, each with its optimizer: right if the scaler does not step it too.
    """

    scaled: bool = False
    plain: bool = False
    unscaled: bool = False
    stepped: frozenset[str] = frozenset()
    by_hand: frozenset[tuple[str, Node]] = frozenset()


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `optimizer.step()` with scaled gradients, or after the scaler's own."""

    def follow(
        flow: Flow, scaler: str
    ) -> tuple[_State, Callable[[_State, Event, Say], _State]] | None:
        by_hand = scales_by_hand(flow, scaler)

        def on(state: _State, event: Event, say: Say) -> _State:
            if _only_asks(event, scaler) and not by_hand:
                return state
            if hides(source, event, scaler) or event.kind in ("backward", "zero_grad", "return"):
                for _, step in state.by_hand:  # the scaler has not stepped it too
                    say.good(step)
                state = replace(state, by_hand=frozenset())
            return _State() if hides(source, event, scaler) else _on(state, event, say, scaler)

        return (_State(), on) if only_here(flow, scaler, "unscale_") else None

    for flow, _, node, message in judged(source, follow):
        if message != _TWICE and _cancels(source, node):
            continue
        fix = _fix(source, flow, node) if message == _TWICE else None
        yield source.find(RULE, node, message, fix)


def _only_asks(event: Event, scaler: str) -> bool:
    """Whether a call asks a scaler for something, and leaves the gradients as they are."""
    call = event.node
    return (
        event.kind == "call"
        and event.receiver == scaler
        and isinstance(call, cst.Call)
        and isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("get_scale", "is_enabled", "state_dict")
    )


def _on(state: _State, event: Event, say: Say, scaler: str) -> _State:
    if event.kind == "backward":
        if event.scaler == scaler:
            return replace(state, scaled=True, unscaled=False, stepped=frozenset())
        return replace(state, plain=True, stepped=frozenset())
    if event.kind == "unscale":
        return replace(state, unscaled=True)
    if event.kind == "scaler_step":
        again = frozenset(pair for pair in state.by_hand if pair[0] == event.optimizer)
        for _, step in again:
            say.bad(step, _AGAIN)
        stepped = state.stepped | {event.optimizer or ""}
        return replace(state, stepped=stepped, by_hand=state.by_hand - again)
    if event.kind == "assign":
        return _bound_again(state, event.receiver or "", say)
    if event.kind == "optimizer_step":
        if state.unscaled and not state.plain and event.optimizer not in state.stepped:
            return _State(by_hand=state.by_hand | {(event.optimizer or "", event.node)})
        _judge(state, event, say)
        return _State()
    if event.kind == "zero_grad" or (event.kind == "call" and event.receiver == scaler):
        return _State()
    return state


def _bound_again(state: _State, name: str, say: Say) -> _State:
    """After a name is bound again, what was done with it before was done with another optimizer."""
    for optimizer, step in state.by_hand:
        if optimizer == name:
            say.good(step)
    by_hand = frozenset(pair for pair in state.by_hand if pair[0] != name)
    return replace(state, stepped=state.stepped - {name}, by_hand=by_hand)


def _judge(state: _State, event: Event, say: Say) -> None:
    if event.optimizer in state.stepped:
        say.bad(event.node, _TWICE)
    elif state.scaled and not state.plain and not state.unscaled:
        say.bad(event.node)
    else:
        say.good(event.node)


def _cancels(source: Source, step: Node) -> bool:
    """Whether a factor on all gradients cancels: Adam divides by their size, if `eps` is nothing beside it.

    That holds for one factor alone: as long as no scaler of the file updates its scale.
    """
    func = step.func if isinstance(step, cst.Call) else None
    made = source.values.constructed(func.value) if isinstance(func, cst.Attribute) else None
    if not isinstance(made, cst.Call) or source.origin(made.func) not in _ADAMS:
        return False
    arguments = Arguments.of(made)
    epsilon, decay = (
        constant(source, arguments.get(n, at)) for n, at in (("eps", 3), ("weight_decay", 4))
    )
    no_decay = arguments.get("weight_decay", 4) is None or decay == 0
    updates = any(source.instance(owner) in SCALERS for _, owner, _ in source.methods("update"))
    return epsilon is not None and epsilon <= _NO_EPS and no_decay and not updates


def _fix(source: Source, flow: Flow, node: Node) -> Fix | None:
    """Without the second step, where both stand in one block."""
    line = line_of(source, node)
    if line is None:
        return None
    block = block_of(source, line)
    before = block[: block.index(line)] if line in block else []
    optimizer = next(e.optimizer for e in flow.events() if e.node is node)
    steps = [e.node for e in flow.events() if e.kind == "scaler_step" and e.optimizer == optimizer]
    if not any(line_of(source, step) in before for step in steps):
        return None
    edit = remove(source, line)
    return source.fix("Remove the second step", edit, unsafe=True) if edit else None


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

        def train(model, batches, amp, config):
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda") if amp else None
            for batch in batches:
                loss = model(batch)
                if scaler:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
                if amp:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
    """),
    Case(
        """
        import torch

        def train(model, batches, config, scheduler):
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        """,
        note="A scheduler is no optimizer.",
    ),
    Case("""
        import torch

        def train(generator, critic, batches):
            first = torch.optim.Adam(generator.parameters())
            second = torch.optim.Adam(critic.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                critic(batch).backward()
                second.step()
                scaler.scale(generator(batch)).backward()
                scaler.step(first)
                scaler.update()
    """),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        scaler.update()
        """,
        note="Unscaled and looked at by hand.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, is_finite):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                if is_finite(optimizer):
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        note="Either the one or the other makes the step.",
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.Adam(field.parameters(), lr=1e-2, eps=1e-15)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024)
        for rays in batches:
            optimizer.zero_grad()
            scaler.scale(field(rays)).backward()
            optimizer.step()
        """,
        note="Adam divides by the size of gradients, so that a fixed factor on all of them cancels.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                optimizer.step()
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
        note="Unscaled, and stepped twice.",
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            optimizer.step()
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, amp):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.step()
                optimizer.zero_grad()
        """,
        """
        import torch

        def train(model, batches, amp):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        class Trainer:
            def __init__(self, model, optimizer, scaler=None):
                self.model, self.optimizer, self.scaler = model, optimizer, scaler

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.step()
        """,
        """
        class Trainer:
            def __init__(self, model, optimizer, scaler=None):
                self.model, self.optimizer, self.scaler = model, optimizer, scaler

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        unsafe=True,
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
                    self.backward(self.model(batch))
                    self.optimizer.step()

            def backward(self, loss):
                self.scaler.scale(loss).backward()
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP205",
    name="optimizer-step-after-scaled-backward",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="the gradients here are those of a scaled loss: use `scaler.step(optimizer)`",
    what="`optimizer.step()` after `scaler.scale(loss).backward()`, in place of `scaler.step(optimizer)` or beside it.",
    why=(
        "The optimizer sees gradients 65536 times too large, inf and NaN among them, and nobody skips the step. Beside "
        "`scaler.step`, each step is made twice, and the second one is made even if the first was skipped."
    ),
    fine="The gradients are unscaled in code that the rule can't see.",
    words=("scale( .step(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
