"""AMP205: a step of an optimizer with gradients of a scaled loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow import FunctionFlow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import hides, judged, only_here, scales_by_hand

__all__ = ["RULE"]

_ADAMS = ("torch.optim.Adam", "torch.optim.NAdam", "torch.optim.RAdam", "torch.optim.Adamax")
_NO_EPS = 1e-12
_UNSKIPPED = "nothing skips this step where the unscaled gradients are inf or NaN: use `scaler.step(optimizer)`"
_INSPECTION = re.compile(
    r"isnan|isinf|finite|(^|_)(nan|inf|valid|check|skip|overflow)(_|s?$)|_states$",
    re.IGNORECASE,
)
_TWICE = "`scaler.step` has stepped this optimizer already"
_AGAIN = "`scaler.step` steps this optimizer again: leave the step to the scaler, which skips it after an overflow"


@dataclass(frozen=True)
class _StepState:
    """The backward passes since the last step, and what was done with their gradients.

    Attributes:
        scaled: True after a backward of a scaled loss.
        plain: True after a backward of another loss.
        unscaled: True after `unscale_`.
        inspected: True if a function of another file ran after `unscale_`: it may look for inf and NaN.
        stepped: The optimizers that the scaler has stepped.
        by_hand: The optimizers that stepped with unscaled gradients, each with the step, and with True if something
            may skip it. The step is wrong if the scaler steps the optimizer too, or if nothing skips it.
        hidden: True after code that is not followed, which may have computed the gradients.
    """

    scaled: bool = False
    plain: bool = False
    unscaled: bool = False
    inspected: bool = False
    stepped: frozenset[str] = frozenset()
    by_hand: frozenset[tuple[str, Node, bool]] = frozenset()
    hidden: bool = False


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `optimizer.step()` with scaled gradients, and for each beside `scaler.step`."""

    def follow(
        flow: FunctionFlow, scaler: str
    ) -> tuple[_StepState, Callable[[_StepState, Event, Say], _StepState]] | None:
        if not flow.comes_by("optimizer_step"):
            return None
        by_hand = scales_by_hand(flow, scaler)
        never = not any(e.kind in ("scaler_step", "unscale") for e in flow.events())
        never = never and only_here(flow, scaler, "step")
        inspects = _inspects(flow)

        def on(state: _StepState, event: Event, say: Say) -> _StepState:
            if _only_asks(event, scaler) and not by_hand:
                return state
            if hides(source, event, scaler) or event.kind in ("backward", "zero_grad", "return"):
                state = _judge_by_hand(state, state.by_hand, say)
            if event.kind == "optimizer_step" and _has_own_gradients(source, event.node):
                return _StepState()
            if never and event.kind == "optimizer_step" and not state.scaled:
                return _StepState()  # correct, but no excuse for a path on which the loss is scaled
            if event.kind == "assign":  # the name of an optimizer now means another one
                name = event.receiver or ""
                again = frozenset(entry for entry in state.by_hand if entry[0] == name)
                state = _judge_by_hand(state, again, say)
                return replace(state, stepped=state.stepped - {name})
            if hides(source, event, scaler):
                return _StepState(hidden=True)
            # The scale that `update` makes smaller also tells that gradients were not finite.
            if inspects or event.kind == "update" or _is_foreign_call(source, event):
                state = replace(state, inspected=state.inspected or state.unscaled)
            return _on(state, event, say, scaler)

        return (_StepState(), on) if only_here(flow, scaler, "unscale_") else None

    for node, message in judged(source, follow):
        if message == _TWICE or not _cancels(source, node):
            yield source.find(RULE, node, message)


def _has_own_gradients(source: Source, step: Node) -> bool:
    """Return True if a step has a closure that computes gradients without scaling the loss."""
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
    """Return True if a call reads a scaler and does not change gradients."""
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
            return replace(state, scaled=True, unscaled=False, inspected=False, stepped=frozenset())
        return replace(state, plain=True, stepped=frozenset())
    if event.kind == "unscale":
        return replace(state, unscaled=True)
    if event.kind == "scaler_step":
        again = frozenset(entry for entry in state.by_hand if entry[0] == event.optimizer)
        for _, step, _ in again:
            say.bad(step, _AGAIN)
        stepped = state.stepped | {event.optimizer or ""}
        return replace(state, stepped=stepped, by_hand=state.by_hand - again)
    if event.kind == "optimizer_step":
        if state.unscaled and not state.plain and event.optimizer not in state.stepped:
            entry = (event.optimizer or "", event.node, state.inspected)
            return _StepState(by_hand=state.by_hand | {entry})
        _judge(state, event, say)
        return _StepState()
    if event.kind == "zero_grad" or (event.kind == "call" and event.receiver == scaler):
        return _StepState()
    return state


def _inspects(flow: FunctionFlow) -> bool:
    """Return True if a name in a function, or in one that it calls, suggests a test for inf and NaN."""
    nodes = [*flow.nodes, *(node for _, inner in flow.called for node in inner)]
    return any(_INSPECTION.search(node.value) for node in nodes if isinstance(node, cst.Name))


def _is_foreign_call(source: Source, event: Event) -> bool:
    """Return True if an event calls a function that is not PyTorch's, not built in and not followed."""
    func = event.node.func if isinstance(event.node, cst.Call) else None
    if event.kind != "call" or not isinstance(func, cst.Name):
        return False
    is_torchs = (source.origin(func) or "").startswith("torch.")
    return not is_torchs and source.names.builtin(func) is None


def _judge_by_hand(
    state: _StepState, steps: frozenset[tuple[str, Node, bool]], say: Say
) -> _StepState:
    """Judge and forget steps with unscaled gradients that the scaler did not repeat."""
    for _, step, may_be_skipped in steps:
        if may_be_skipped:
            say.good(step)
        else:
            say.bad(step, _UNSKIPPED)
    return replace(state, by_hand=state.by_hand - steps)


def _judge(state: _StepState, event: Event, say: Say) -> None:
    if event.optimizer in state.stepped:
        say.bad(event.node, _TWICE)
    elif state.scaled and not state.plain and not state.unscaled:
        say.bad(event.node)
    elif (
        state.plain or state.hidden or state.unscaled
    ):  # otherwise the loop with the backward did not run
        say.good(event.node)


def _cancels(source: Source, step: Node) -> bool:
    """Return True if the scale cancels: Adam divides by the size of gradients, if `eps` is very small.

    The scale has to be constant: no scaler of the file is updated.
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


RULE = LintRule(
    code="AMP205",
    name="optimizer-step-after-scaled-backward",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="the gradients here are those of a scaled loss: use `scaler.step(optimizer)`",
    what="`optimizer.step()` after `scaler.scale(loss).backward()`, in place of `scaler.step(optimizer)` or beside it.",
    why=(
        "The optimizer gets gradients that are 65536 times too large, and nothing skips the step if they are inf or "
        "NaN. Beside `scaler.step`, the optimizer steps twice, even if the scaler skips its step."
    ),
    fine="Code of another file unscales the gradients.",
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
