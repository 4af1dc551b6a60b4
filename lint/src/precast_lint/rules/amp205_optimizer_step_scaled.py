"""AMP205: an optimizer's own step with gradients of a scaled loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precast_lint.editing.lines import block_of, line_of, remove
from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, Fix, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow import FunctionFlow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import (
    hides,
    is_plain,
    judged,
    leading_to,
    only_here,
    scales_by_hand,
)

__all__ = ["RULE"]

_ADAMS = ("torch.optim.Adam", "torch.optim.NAdam", "torch.optim.RAdam", "torch.optim.Adamax")
_NO_EPS = 1e-12
_STATEMENTS = (cst.BaseCompoundStatement, cst.SimpleStatementLine)
_UNSKIPPED = "nothing skips this step where the unscaled gradients are inf or NaN: use `scaler.step(optimizer)`"
_LOOKS = re.compile(
    r"isnan|isinf|finite|(^|_)(nan|inf|valid|check|skip|overflow)(_|s?$)|_states$",
    re.IGNORECASE,
)
_TWICE = "`scaler.step` has made this optimizer's step already"
_AGAIN = "`scaler.step` makes this optimizer's step again: leave it to the scaler, which skips it after an overflow"


@dataclass(frozen=True)
class _StepState:
    """The backwards since the last step, the unscaled optimizers, and the stepped optimizers.

    Attributes:
        scaled: whether there was a backward of a scaled loss.
        plain: whether there was one of another loss.
        unscaled: whether gradients were unscaled.
        stepped: the optimizers that the scaler has stepped.
        by_hand: the steps with unscaled gradients, each with its optimizer: right if the scaler does not step it too.
        hidden: whether something ran that is not seen, which may have made the gradients.
    """

    scaled: bool = False
    plain: bool = False
    unscaled: bool = False
    stepped: frozenset[str] = frozenset()
    by_hand: frozenset[tuple[str, Node]] = frozenset()
    hidden: bool = False


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each `optimizer.step()` with scaled gradients, or after the scaler's own."""

    def follow(
        flow: FunctionFlow, scaler: str
    ) -> tuple[_StepState, Callable[[_StepState, Event, Say], _StepState]] | None:
        if not flow.comes_by("optimizer_step"):
            return None
        by_hand = scales_by_hand(flow, scaler)
        never = not any(e.kind in ("scaler_step", "unscale") for e in flow.events())
        never = never and only_here(flow, scaler, "step")
        unskipped: dict[Node, bool] = {}

        def judge(step: Node, say: Say) -> None:
            """Judges a step with gradients that were unscaled before: right if something may look at them."""
            if step not in unskipped:
                unskipped[step] = _is_unskipped(source, flow, scaler, step)
            if unskipped[step]:
                say.bad(step, _UNSKIPPED)
            else:
                say.good(step)

        def on(state: _StepState, event: Event, say: Say) -> _StepState:
            if _only_asks(event, scaler) and not by_hand:
                return state
            if hides(source, event, scaler) or event.kind in ("backward", "zero_grad", "return"):
                for _, step in state.by_hand:  # the scaler has not stepped it too
                    judge(step, say)
                state = replace(state, by_hand=frozenset())
            if event.kind == "optimizer_step" and _has_own_gradients(source, event.node):
                return _StepState()
            if never and event.kind == "optimizer_step" and not state.scaled:
                return (
                    _StepState()
                )  # right where the loss is not scaled: that excuses no step where it is
            if event.kind == "assign":
                return _bound_again(state, event.receiver or "", lambda step: judge(step, say))
            if hides(source, event, scaler):
                return _StepState(hidden=True)
            return _on(state, event, say, scaler)

        return (_StepState(), on) if only_here(flow, scaler, "unscale_") else None

    for flow, scaler, node, message in judged(source, follow):
        if message != _TWICE and _cancels(source, node):
            continue
        fix = (
            _fix(source, flow, node)
            if message == _TWICE
            else _by_scaler(source, flow, scaler, node)
        )
        yield source.find(RULE, node, message, fix)


def _has_own_gradients(source: Source, step: Node) -> bool:
    """Return True if a step is given a closure, which computes gradients, and scales no loss as far as it is seen."""
    if not isinstance(step, cst.Call) or not step.args:
        return False
    closure = step.args[0].value
    functions: list[Node] = [closure]
    if isinstance(closure, cst.Name):
        functions += [f for f in source.all(cst.FunctionDef) if f.name.value == closure.value]
    return not any(
        isinstance(inner, cst.Attribute) and inner.attr.value == "scale"
        for function in functions
        for inner in walk(function)
    )


def _only_asks(event: Event, scaler: str) -> bool:
    """Return True if a call asks a scaler for something, and leaves the gradients as they are."""
    call = event.node
    return (
        event.kind == "call"
        and event.receiver == scaler
        and isinstance(call, cst.Call)
        and isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("get_scale", "is_enabled", "state_dict")
    )


def _on(state: _StepState, event: Event, say: Say, scaler: str) -> _StepState:
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
    if event.kind == "optimizer_step":
        if state.unscaled and not state.plain and event.optimizer not in state.stepped:
            return _StepState(by_hand=state.by_hand | {(event.optimizer or "", event.node)})
        _judge(state, event, say)
        return _StepState()
    if event.kind == "zero_grad" or (event.kind == "call" and event.receiver == scaler):
        return _StepState()
    return state


def _is_unskipped(source: Source, flow: FunctionFlow, scaler: str, step: Node) -> bool:
    """Return True if a step follows `unscale_` in the same block."""
    call = step if isinstance(step, cst.Call) else None
    unscaled = [e.node for e in flow.events() if e.kind == "unscale" and e.scaler == scaler]
    between = _since(flow, step, unscaled)
    if call is None or call.args or not between:
        return False
    leaves = (cst.Raise, cst.Return, cst.Continue, cst.Break, cst.Assert, cst.Try)
    if any(isinstance(inner, leaves) for part in between for inner in walk(part)):
        return False
    everywhere = [*flow.nodes, *(node for _, nodes in flow.called for node in nodes)]
    names = [n.value for n in everywhere if isinstance(n, cst.Name)]
    names += [n.attr.value for n in everywhere if isinstance(n, cst.Attribute)]
    updates = {e.node for e in flow.events() if e.kind == "update" and e.scaler == scaler}
    if "get_scale" in names and updates & {inner for part in between for inner in walk(part)}:
        return False  # a scale that the update has made smaller says that gradients were not finite
    return not any(map(_LOOKS.search, names)) and all(
        _is_of_torch(source, inner) for part in between for inner in walk(part)
    )


def _since(flow: FunctionFlow, step: Node, unscaled: list[Node]) -> list[Node]:
    """The statements between `unscale_` and a step, in the innermost block that has both; the first one unscales."""
    source = flow.source
    ways = [{at, *source.around(at)} for node in unscaled for at in leading_to(flow, node)]
    inside: list[Node] = []
    for outer in (step, *source.around(step)):
        if isinstance(outer, (cst.FunctionDef, cst.For, cst.While)) and inside:
            break
        block = block_of(source, outer) if isinstance(outer, _STATEMENTS) else []
        before = block[: block.index(outer)] if outer in block else []
        places = [at for at, line in enumerate(before) if any(line in way for way in ways)]
        if places:
            return [*before[max(places) :], *inside]
        inside = [*before, *inside]
    return []


def _is_of_torch(source: Source, node: Node) -> bool:
    """Not a call of code that is not seen, which may look at gradients."""
    if not isinstance(node, cst.Call) or isinstance(node.func, cst.Attribute):
        return True
    origin = source.origin(node.func) or ""
    return origin.startswith("torch.") or source.names.builtin(node.func) is not None


def _bound_again(state: _StepState, name: str, judge: Callable[[Node], None]) -> _StepState:
    """After a name is bound again, what was done with it before was done with another optimizer."""
    for optimizer, step in state.by_hand:
        if optimizer == name:
            judge(step)
    by_hand = frozenset(pair for pair in state.by_hand if pair[0] != name)
    return replace(state, stepped=state.stepped - {name}, by_hand=by_hand)


def _judge(state: _StepState, event: Event, say: Say) -> None:
    if event.optimizer in state.stepped:
        say.bad(event.node, _TWICE)
    elif state.scaled and not state.plain and not state.unscaled:
        say.bad(event.node)
    elif state.plain or state.hidden or state.unscaled:  # else a loop of backwards had no round
        say.good(event.node)


def _cancels(source: Source, step: Node) -> bool:
    """Return True if a factor on all gradients cancels: Adam divides by their size, if `eps` is nothing beside it.

    That holds for one factor alone: as long as no scaler of the file updates its scale.
    """
    func = step.func if isinstance(step, cst.Call) else None
    definition = source.values.constructed(func.value) if isinstance(func, cst.Attribute) else None
    if not isinstance(definition, cst.Call) or source.origin(definition.func) not in _ADAMS:
        return False
    arguments = Arguments.of(definition)
    epsilon, decay = (
        constant(source, arguments.get(n, at)) for n, at in (("eps", 3), ("weight_decay", 4))
    )
    no_decay = arguments.get("weight_decay", 4) is None or decay == 0
    updates = any(source.instance(owner) in SCALERS for _, owner, _ in source.methods("update"))
    return epsilon is not None and epsilon <= _NO_EPS and no_decay and not updates


def _by_scaler(source: Source, flow: FunctionFlow, scaler: str, node: Node) -> Fix | None:
    """`scaler.step(optimizer)` for the only step, if the scaler is updated after it in the same block."""
    events = flow.events()
    own = next((e.optimizer for e in events if e.node is node), None)
    steps = [
        e
        for e in events
        if e.kind in ("optimizer_step", "scaler_step")
        or (e.kind == "unscale" and e.optimizer != own)
    ]
    updates = [e for e in events if e.kind == "update" and e.scaler == scaler]
    line = line_of(source, node)
    if len(steps) != 1 or len(updates) != 1 or line is None or not is_plain(scaler):
        return None
    block = block_of(source, line)
    after = block[block.index(line) :] if line in block else []
    assert isinstance(node, cst.Call)
    if line_of(source, updates[0].node) not in after or node.args:
        return None
    assert isinstance(node.func, cst.Attribute)
    edit = source.replace(node, f"{scaler}.step({source.code(node.func.value)})")
    return source.fix("Let the scaler step", edit, unsafe=True)


def _fix(source: Source, flow: FunctionFlow, node: Node) -> Fix | None:
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


RULE = LintRule(
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
    example="""
 import torch

 optimizer = torch.optim.SGD(model.parameters(), 0.1)
 scaler = torch.amp.GradScaler("cuda")
 for batch in batches:
     optimizer.zero_grad()
     scaler.scale(model(batch)).backward()
-    optimizer.step()
+    scaler.step(optimizer)
     scaler.update()
""",
)
