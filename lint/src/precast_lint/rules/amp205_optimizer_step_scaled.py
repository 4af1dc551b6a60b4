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
from precast_lint.training_step.protocol import may_use, no_other_calls, scales_by_hand, wrong_nodes

__all__ = ["RULE"]

_ADAMS = ("torch.optim.Adam", "torch.optim.NAdam", "torch.optim.RAdam", "torch.optim.Adamax")
_NEGLIGIBLE_EPS = 1e-12
_UNSKIPPED = "nothing skips this step where the unscaled gradients are inf or NaN: use `scaler.step(optimizer)`"
_INSPECTING_NAME = re.compile(
    r"isnan|isinf|finite|(^|_)(nan|inf|valid|check|skip|overflow)(_|s?$)|_states$", re.IGNORECASE
)
_TWICE = "`scaler.step` has stepped this optimizer already"
_AGAIN = "`scaler.step` steps this optimizer again: leave the step to the scaler, which skips it after an overflow"


@dataclass(frozen=True)
class _StepState:
    """The backward passes since the last step, and the later uses of their gradients.

    Attributes:
        scaled: True after a backward of a scaled loss.
        plain: True after a backward of another loss.
        unscaled: True after `unscale_`.
        inspected: True if code that may look for inf and NaN ran after `unscale_`.
        stepped: The optimizers that the scaler has stepped.
        by_hand: The optimizers that the program itself stepped with unscaled gradients, each with the step and with
            True if a test may skip it. The step is wrong if no test does, or if the scaler steps the optimizer too.
        hidden: True after a call of code that is not followed and may have computed the gradients.
    """

    scaled: bool = False
    plain: bool = False
    unscaled: bool = False
    inspected: bool = False
    stepped: frozenset[str] = frozenset()
    by_hand: frozenset[tuple[str, Node, bool]] = frozenset()
    hidden: bool = False


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `optimizer.step()` with scaled gradients or in addition to `scaler.step`."""

    def follow(
        flow: FunctionFlow, scaler: str
    ) -> tuple[_StepState, Callable[[_StepState, Event, Say], _StepState]] | None:
        if not flow.has_events("optimizer_step"):
            return None
        by_hand = scales_by_hand(flow, scaler)
        is_unused = not any(e.kind in ("scaler_step", "unscale") for e in flow.events())
        is_unused = is_unused and no_other_calls(flow, scaler, "step")
        inspects = _inspects(flow)

        def on(state: _StepState, event: Event, say: Say) -> _StepState:
            if _only_reads(event, scaler) and not by_hand:
                return state
            if may_use(source, event, scaler) or event.kind in ("backward", "zero_grad", "return"):
                state = _report_steps_by_hand(state, state.by_hand, say)
            if event.kind == "optimizer_step" and _computes_gradients(source, event.node):
                return _StepState()
            if is_unused and event.kind == "optimizer_step" and not state.scaled:
                return _StepState()  # not `say.good`: on another path the loss may be scaled
            if event.kind == "assign":  # the variable now refers to another optimizer
                name = event.receiver or ""
                repeated = frozenset(entry for entry in state.by_hand if entry[0] == name)
                state = _report_steps_by_hand(state, repeated, say)
                return replace(state, stepped=state.stepped - {name})
            if may_use(source, event, scaler):
                return _StepState(hidden=True)
            # A program can also test whether `update` has lowered the scale.
            if inspects or event.kind == "update" or _calls_unknown_function(source, event):
                state = replace(state, inspected=state.inspected or state.unscaled)
            return _next_state(state, event, say, scaler)

        return (_StepState(), on) if no_other_calls(flow, scaler, "unscale_") else None

    for node, message in wrong_nodes(source, follow):
        if message == _TWICE or not _scale_cancels(source, node):
            yield source.find(RULE, node, message)


def _computes_gradients(source: Source, step: Node) -> bool:
    """Return True if a step has a closure, which computes gradients, and does not scale the loss."""
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


def _only_reads(event: Event, scaler: str) -> bool:
    call = event.node
    return (
        event.kind == "call"
        and event.receiver == scaler
        and isinstance(call, cst.Call)
        and isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("get_scale", "is_enabled", "state_dict")
    )


def _next_state(state: _StepState, event: Event, say: Say, scaler: str) -> _StepState:
    if event.kind == "backward":
        if event.scaler == scaler:
            return replace(state, scaled=True, unscaled=False, inspected=False, stepped=frozenset())
        return replace(state, plain=True, stepped=frozenset())
    if event.kind == "unscale":
        return replace(state, unscaled=True)
    if event.kind == "scaler_step":
        repeated = frozenset(entry for entry in state.by_hand if entry[0] == event.optimizer)
        for _, step, _ in repeated:
            say.bad(step, _AGAIN)
        stepped = state.stepped | {event.optimizer or ""}
        return replace(state, stepped=stepped, by_hand=state.by_hand - repeated)
    if event.kind == "optimizer_step":
        if state.unscaled and not state.plain and event.optimizer not in state.stepped:
            entry = (event.optimizer or "", event.node, state.inspected)
            return _StepState(by_hand=state.by_hand | {entry})
        _report_step(state, event, say)
        return _StepState()
    if event.kind == "zero_grad" or (event.kind == "call" and event.receiver == scaler):
        return _StepState()
    return state


def _inspects(flow: FunctionFlow) -> bool:
    """Return True if a name in a function, or in one that it calls, suggests a test for inf and NaN."""
    nodes = [*flow.nodes, *(node for _, inner in flow.called for node in inner)]
    return any(_INSPECTING_NAME.search(node.value) for node in nodes if isinstance(node, cst.Name))


def _calls_unknown_function(source: Source, event: Event) -> bool:
    """Return True if an event calls a function that is not PyTorch's, not built in and not followed."""
    func = event.node.func if isinstance(event.node, cst.Call) else None
    if event.kind != "call" or not isinstance(func, cst.Name):
        return False
    is_torchs = (source.origin(func) or "").startswith("torch.")
    return not is_torchs and source.names.builtin(func) is None


def _report_steps_by_hand(
    state: _StepState, steps: frozenset[tuple[str, Node, bool]], say: Say
) -> _StepState:
    """Report steps with unscaled gradients that the scaler did not repeat, and remove them from the state."""
    for _, step, may_be_skipped in steps:
        if may_be_skipped:
            say.good(step)
        else:
            say.bad(step, _UNSKIPPED)
    return replace(state, by_hand=state.by_hand - steps)


def _report_step(state: _StepState, event: Event, say: Say) -> None:
    if event.optimizer in state.stepped:
        say.bad(event.node, _TWICE)
    elif state.scaled and not state.plain and not state.unscaled:
        say.bad(event.node)
    elif state.plain or state.hidden or state.unscaled:  # not if no backward ran on this path
        say.good(event.node)


def _scale_cancels(source: Source, step: Node) -> bool:
    """Return True if the scale has no effect: an Adam with a very small `eps` divides by the size of the gradients.

    The scale has to be constant, so no scaler of the file may be updated.
    """
    func = step.func if isinstance(step, cst.Call) else None
    definition = source.values.constructor(func.value) if isinstance(func, cst.Attribute) else None
    if not isinstance(definition, cst.Call) or source.origin(definition.func) not in _ADAMS:
        return False
    arguments = Arguments.of(definition)
    epsilon, decay = (
        constant(source, arguments.get(n, at)) for n, at in (("eps", 3), ("weight_decay", 4))
    )
    no_decay = arguments.get("weight_decay", 4) is None or decay == 0
    updates = any(source.instance(owner) in SCALERS for _, owner, _ in source.methods("update"))
    return epsilon is not None and epsilon <= _NEGLIGIBLE_EPS and no_decay and not updates


RULE = LintRule(
    code="AMP205",
    name="optimizer-step-after-scaled-backward",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="the gradients here are those of a scaled loss: use `scaler.step(optimizer)`",
    what="`optimizer.step()` after `scaler.scale(loss).backward()`, instead of `scaler.step(optimizer)` or with it.",
    why=(
        "The optimizer gets gradients that are 65536 times too large, and nothing skips the step if they are inf or "
        "NaN. In addition to `scaler.step`, the optimizer steps twice, or once although the scaler skips the step."
    ),
    fine="Code in another file unscales the gradients.",
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
