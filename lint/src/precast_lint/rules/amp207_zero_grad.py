"""AMP207: zero_grad between backward and step, or nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from precast_lint.model import Applicability, Finding, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.rules.zero_grad_cases import INVALID, VALID
from precast_lint.training_step.counters import counted_test
from precast_lint.training_step.flow import Flow, Say, flows
from precast_lint.training_step.flow_events import Event, is_optimizer, key
from precast_lint.training_step.protocol import (
    comes_each_time,
    followed,
    loop_around,
    loop_in,
    loops_around,
    may_backward,
)

__all__ = ["RULE"]

_NOWHERE = "nothing sets the gradients to zero: each step uses the sum of all gradients so far"
_EACH_ROUND = "each round takes away the gradients of those before: the step, which is for several, has the last one's"
_OPTIMIZER = re.compile(r"(^|_)(optim(izer)?|opt)(_|$)", re.IGNORECASE)
_ZEROED = re.compile(r"zero_grad|set_to_none", re.MULTILINE)


@dataclass(frozen=True)
class _State:
    """Whether gradients wait for a step, which optimizers were emptied meanwhile, where, and what came before."""

    waiting: bool = False
    emptied: frozenset[tuple[str, Node]] = frozenset()
    before: frozenset[Node] = frozenset()


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each zero_grad that takes gradients away, and each step where there is none."""

    def on(state: _State, event: Event, say: Say) -> _State:
        return _State() if may_backward(source, event) else _on(source, state, event, say)

    for flow in flows(source):
        if flow.scalers and flow.comes_by("zero_grad"):
            for node, message in flow.run(_State(), on):
                yield source.find(RULE, node, message)
    for flow in dict.fromkeys(flow for flow, _ in followed(source)):
        yield from _in_each_round(source, flow)
    if not _ZEROED.search(source.words) and not any(
        n.attr.value == "grad" and source.origin(n) is None for n in source.all(cst.Attribute)
    ):
        for flow, scaler in followed(source):
            yield from _nowhere(source, flow, scaler)


def _in_each_round(source: Source, flow: Flow) -> Iterator[Finding]:
    """Each `zero_grad` that every round of a loop calls, while its gradients are gathered for a step of several."""
    events = flow.events()
    steps = [e for e in events if e.kind in ("scaler_step", "optimizer_step")]
    if len({e.optimizer for e in steps}) != 1:
        return
    backwards = [e.node for e in events if e.kind in ("backward", "autograd_grad")]
    for event in events:
        loop = loop_around(source, event.node) if event.kind == "zero_grad" else None
        if loop is None or event.optimizer != steps[0].optimizer or not backwards:
            continue
        is_together = all(loop_around(source, node) is loop for node in backwards)
        each = all(comes_each_time(source, node, loop) for node in (event.node, *backwards))
        if not each or not is_together or _may_end(loop):
            continue
        before = [n for n in backwards if source.span(n).start < source.span(event.node).start]
        if all(_is_for_several(source, e.node, loop) for e in steps) and not before:
            yield source.find(RULE, event.node, _EACH_ROUND, severity=Severity.WARNING)


def _is_for_several(source: Source, step: Node, loop: Node) -> bool:
    """Whether a step waits for several rounds of a loop: behind it, or under the test of a counter in it."""
    if loop in source.around(step):
        return loop_around(source, step) is loop and counted_test(source, step, loop) is not None
    outer = source.parents.get(loop)
    return (
        isinstance(outer, cst.IndentedBlock)
        and outer in source.around(step)
        and (source.span(step).start > source.span(loop).end)
    )


def _may_end(loop: Node) -> bool:
    """Whether a round may be the last one, or is tried."""
    ends = (cst.Break, cst.Return, cst.Raise, cst.Try)
    return any(isinstance(inner, ends) for inner in walk(loop))


def _on(source: Source, state: _State, event: Event, say: Say) -> _State:
    if event.kind in ("backward", "autograd_grad"):
        for node in state.before:
            say.good(node)
        return _State(waiting=True)
    emptied = event.optimizer or event.receiver
    if event.kind == "zero_grad" and emptied is not None:
        if (
            not state.waiting
        ):  # right, if a backward comes behind it: the loop of them may have no round
            return replace(state, before=state.before | {event.node})
        return replace(state, emptied=state.emptied | {(emptied, event.node)})
    if event.kind in ("scaler_step", "optimizer_step"):
        stepped = (event.optimizer, _model_of(source, event))
        for owner, node in state.emptied:
            if owner in stepped:
                say.bad(node)
        others = frozenset(pair for pair in state.emptied if pair[0] not in stepped)
        return _State(bool(others), others, state.before)
    if event.kind == "assign":
        return replace(state, emptied=frozenset(p for p in state.emptied if p[0] != event.assigned))
    return state


def _model_of(source: Source, event: Event) -> str | None:
    """The key of the model, all of whose parameters the optimizer of a scaler's step has; it empties them as well."""
    if event.kind != "scaler_step" or event.arguments is None:
        return None
    optimizer = event.arguments.get("optimizer", 0)
    made = source.values.constructed(optimizer) if optimizer is not None else None
    if not isinstance(made, cst.Call) or not made.args:
        return None
    given = made.args[0].value
    func = given.func if isinstance(given, cst.Call) else None
    if not isinstance(func, cst.Attribute) or func.attr.value != "parameters":
        return None
    return _attribute_of(source, func.value) or key(source, func.value)


def _attribute_of(source: Source, node: Node) -> str | None:
    """`self.model`, if a parameter of the constructor is stored there and nowhere else."""
    binding = source.names.only_binding(node)
    if binding is None or binding.kind != "param":
        return None
    stored = [
        target.target
        for assign in source.all(cst.Assign)
        if source.names.only_binding(assign.value) is binding
        for target in assign.targets
    ]
    one = stored[0] if len(stored) == 1 else None
    is_own = isinstance(one, cst.Attribute) and key(source, one.value) == "self"
    return key(source, one) if is_own else None


def _nowhere(source: Source, flow: Flow, scaler: str) -> Iterator[Finding]:
    """Steps in the loop of the backward, of an optimizer that only this function knows."""
    events = flow.events()
    backwards = [e for e in events if e.kind == "backward" and e.scaler == scaler]
    for event in events:
        if event.kind != "scaler_step" or event.scaler != scaler or event.optimizer is None:
            continue
        loops = loops_around(source, event.node)
        home = loop_in(flow, event.node)
        together = any(_is_for_step(flow, b.node, home) for b in backwards)
        is_step = loops or _comes(source, flow, event.optimizer)
        if is_step and together and _is_private(source, flow, event.optimizer):
            yield source.find(RULE, event.node, _NOWHERE, severity=Severity.WARNING)


def _is_for_step(flow: Flow, backward: Node, loop: Node | None) -> bool:
    """Whether a backward runs in the loop of a step, or in a loop in it that gathers gradients."""
    own = loop_in(flow, backward)
    return own is loop or (own is not None and loop in loops_around(flow.source, own))


def _is_private(source: Source, flow: Flow, optimizer: str) -> bool:
    """Whether an optimizer is made here, or by the class, and handed to nothing but scalers and schedulers."""
    if optimizer.startswith("self."):
        return _is_own(source, flow, optimizer)
    names = [
        n
        for n in flow.nodes
        if isinstance(n, cst.Name) and n in source.scopes.scope_of and key(source, n) == optimizer
    ]
    made = any(isinstance(source.parents[n], cst.AssignTarget) for n in names)
    handed = [value for name in names[:1] for value in _handed(source, name)]
    if not made and not handed and names:
        return _is_of_top_level(source, names[0]) or _is_of_caller(source, flow, names)
    if not (made or handed) or not all(_is_kept(source, name) for name in names):
        return False
    texts = {key(source, value) for value in handed}
    everywhere = (n for n in source.all(cst.Name) if n in source.scopes.scope_of)
    if not all(_is_kept(source, n) for n in everywhere if key(source, n) in texts):
        return False
    return not any(
        isinstance(n, (cst.FunctionDef, cst.Lambda))
        and n is not flow.node
        and any(isinstance(inner, cst.Name) and inner.value == optimizer for inner in walk(n))
        for n in flow.nodes
    )


def _is_of_top_level(source: Source, name: cst.Name) -> bool:
    """Whether the top level of the file makes an optimizer once, and all of the file keeps it."""
    scope = source.scopes.scope_of.get(name)  # a keyword has none
    home = scope.home(name.value) if scope is not None else None
    binding = source.names.only_binding(name)
    if (
        home is None
        or home is not source.scopes.module
        or binding is None
        or binding.kind != "assign"
    ):
        return False
    places = source.scopes.references(home, name.value)
    return isinstance(binding.value, cst.Call) and all(_is_kept(source, n) for n in places)


def _is_of_caller(source: Source, flow: Flow, names: list[cst.Name]) -> bool:
    """Whether a function that nothing here calls gets an optimizer and only steps it: no caller comes between steps."""
    binding = source.names.only_binding(names[0])
    if binding is None or binding.kind != "param" or not _OPTIMIZER.search(binding.name):
        return False
    places = [n for n in names if source.names.only_binding(n) is binding and n is not binding.node]
    plain = [n for n in places if not isinstance(source.parents[n], cst.Param)]
    return all(_is_stepped(source, n) for n in plain) and not any(
        isinstance(n, (cst.FunctionDef, cst.Lambda)) and n is not flow.node for n in flow.nodes
    )


def _is_stepped(source: Source, node: Node) -> bool:
    """Whether an optimizer is handed to a scaler's method, or asked for its settings."""
    parent = source.parents[node]
    if isinstance(parent, cst.Attribute):
        return parent.attr.value in ("param_groups", "defaults", "state_dict")
    call = source.parents[parent] if isinstance(parent, cst.Arg) else None
    func = call.func if isinstance(call, cst.Call) else None
    return isinstance(func, cst.Attribute) and func.attr.value in ("step", "unscale_")


def _comes(source: Source, flow: Flow, optimizer: str) -> bool:
    """Whether an optimizer was made before the function is called: then a step of it is one of many."""
    names = [n for n in flow.nodes if isinstance(n, cst.Name) and key(source, n) == optimizer]
    return optimizer.startswith("self.") or any(
        _handed(source, name) or _is_of_top_level(source, name) for name in names[:1]
    )


def _handed(source: Source, name: Node) -> list[Node]:
    """What the calls of this file hand to a parameter."""
    binding = source.names.only_binding(name)
    values = source.values.handed.to(binding) if binding is not None else []
    return [value for value in values if value is not None]


def _is_own(source: Source, flow: Flow, optimizer: str) -> bool:
    """Whether an optimizer is an attribute that a class without foreign bases makes and keeps for itself."""
    home = source.values.enclosing_class(flow.node)
    if not isinstance(home, cst.ClassDef):
        return False
    bases = [source.origin(base.value) or source.names.builtin(base.value) for base in home.bases]
    if any(base not in ("object", "torch.nn.Module") for base in bases):
        return False
    found = [n for n in walk(home) if isinstance(n, cst.Attribute) and key(source, n) == optimizer]
    made = any(isinstance(source.parents[node], cst.AssignTarget) for node in found)
    return made and all(_is_kept(source, node) for node in found)


def _is_kept(source: Source, node: Node) -> bool:
    """Whether an optimizer is only made here, asked for something of its own, or handed to a scaler or scheduler."""
    parent = source.parents[node]
    call = source.parents[parent] if isinstance(parent, cst.Arg) else None
    if not is_optimizer(source, node) or (
        isinstance(call, cst.Call) and not _is_known(source, call)
    ):
        return False
    return isinstance(parent, (cst.Arg, cst.AssignTarget, cst.Attribute, cst.Param))


def _is_known(source: Source, call: cst.Call) -> bool:
    if "lr_scheduler" in (source.origin(call.func) or ""):
        return True
    binding = source.names.only_binding(call.func)
    if (
        binding is not None and binding.kind == "def"
    ):  # a function of this file, where nothing is set to zero either
        return True
    is_method = isinstance(call.func, cst.Attribute) and call.func.attr.value in (
        "step",
        "unscale_",
    )
    return is_method and len(Arguments.of(call).positional) == 1


RULE = Rule(
    code="AMP207",
    name="zero-grad-misplaced",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this takes away the gradients before the step that needs them",
    what=(
        "`optimizer.zero_grad()` after the backward and before `scaler.step(optimizer)`; a loop of steps in a file "
        "where nothing sets gradients to zero."
    ),
    why=(
        "Without gradients `scaler.step` raises. Without `zero_grad` gradients add up over the steps: "
        "with a scale that changes, even the sum is wrong."
    ),
    fine="The gradients are set to zero, or computed anew, in code that the rule can't see.",
    words=(
        "GradScaler backward( .step(",
        ".scale( backward( .step(",
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
