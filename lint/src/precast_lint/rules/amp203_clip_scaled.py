"""AMP203: gradients that are clipped or measured while they are scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.training_step.flow import FunctionFlow, Say
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import may_use, no_other_calls, scales_by_hand, wrong_nodes

__all__ = ["RULE"]

_State = str | frozenset[cst.Call | None]
"""The state of the gradients, or the optimizers whose gradients were unscaled after a scaled backward."""

_SCALED, _UNSCALED, _UNKNOWN, _HIDDEN = "scaled", "unscaled", "unknown", "hidden"
# Methods whose result depends on the size of a gradient.
_MEASURES = {"clamp", "clamp_", "clip", "clip_", "norm", "pow", "square", "std", "var"}
_SAME = ("clone", "data", "detach", "flatten", "float", "ravel", "reshape", "view")
_JOINS = ("torch.cat", "torch.concat", "torch.hstack", "torch.stack")
_ADDS = {"add", "add_", "sub", "sub_"}
_FUNCTIONS = {
    "torch.clamp",
    "torch.clamp_",
    "torch.clip",
    "torch.clip_",
    "torch.norm",
    "torch.linalg.norm",
    "torch.linalg.vector_norm",
    "torch.nn.utils.get_total_norm",
    "torch.nn.utils.clip_grad.get_total_norm",
    "torch._foreach_norm",
}


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each clip and norm of gradients between a scaled backward and its step."""

    def follow(
        flow: FunctionFlow, scaler: str
    ) -> tuple[_State, Callable[[_State, Event, Say], _State]] | None:
        if not any(_needs_size(source, event) for event in flow.events()):
            return None
        if scales_by_hand(flow, scaler) or not no_other_calls(flow, scaler, "unscale_"):
            return None
        return _before(source, flow, scaler), _follower(source, scaler)

    for node, message in wrong_nodes(source, follow):
        yield source.find(RULE, node, message)


def _before(source: Source, flow: FunctionFlow, scaler: str) -> str:
    """Return the state of the gradients at a function's start.

    They are scaled if a method steps a scaler that its class creates, another method of the class runs the backward,
    and nothing in the file unscales: whatever calls the methods, the step follows the backward.
    """
    home = source.values.enclosing_class(flow.node)
    events = [e for e in flow.events() if e.scaler == scaler or e.kind == "backward"]
    kinds = {e.kind for e in events}
    if not isinstance(home, cst.ClassDef) or home.bases or not scaler.startswith("self."):
        return _UNKNOWN
    if "scaler_step" not in kinds or kinds & {"backward", "unscale"} or "unscale" in source.words:
        return _UNKNOWN
    definitions = [
        n for n in walk(home) if isinstance(n, cst.AssignTarget) and key(source, n.target) == scaler
    ]
    backwards = [
        call
        for call, owner, _ in source.methods("backward")
        if source.values.enclosing_class(call) is home and f"{scaler}.scale(" in source.code(owner)
    ]
    others = [
        call
        for call, _, _ in source.methods("backward")
        if source.values.enclosing_class(call) is home and call not in backwards
    ]
    return _SCALED if len(definitions) == 1 and backwards and not others else _UNKNOWN


def _follower(source: Source, scaler: str) -> Callable[[_State, Event, Say], _State]:
    def on(state: _State, event: Event, say: Say) -> _State:
        if event.kind == "backward":
            return _SCALED if event.scaler == scaler else _UNKNOWN
        if event.kind == "unscale" and event.scaler == scaler:
            definition = _optimizer_of(source, event)
            if isinstance(state, str) and state != _SCALED:
                return _UNSCALED  # the gradients that were unscaled before are unknown
            return (state if isinstance(state, frozenset) else frozenset()) | {definition}
        if event.kind in ("scaler_step", "zero_grad", "optimizer_step"):
            return _UNKNOWN
        if may_use(source, event, scaler):
            return _HIDDEN if state in (_SCALED, _HIDDEN) else _UNKNOWN
        if _needs_size(source, event):
            is_other = isinstance(state, frozenset) and _is_of_other(source, event, state)
            if state == _SCALED or is_other:
                say.bad(event.node)
            elif state != _UNKNOWN:  # code that is not followed may have unscaled them
                say.good(event.node)
        return state

    return on


def _optimizer_of(source: Source, event: Event) -> cst.Call | None:
    """Return the call that creates the optimizer whose gradients are unscaled; None if it is unknown."""
    value = event.arguments.get("optimizer", 0) if event.arguments is not None else None
    definition = source.values.constructor(value)
    return definition if isinstance(definition, cst.Call) else None


def _is_of_other(source: Source, event: Event, unscaled: frozenset[cst.Call | None]) -> bool:
    """Return True if the clipped gradients belong to another optimizer than the unscaled ones."""
    value = event.arguments.get("parameters", 0) if event.arguments is not None else None
    func = value.func if isinstance(value, cst.Call) else None
    if event.kind != "clip" or not isinstance(func, cst.Attribute) or None in unscaled:
        return False
    if func.attr.value != "parameters":
        return False
    model = key(source, func.value)
    makers = [
        call
        for call in source.all(cst.Call)
        if (source.origin(call.func) or "").startswith("torch.optim.")
    ]
    makers = [call for call in makers if any(_gives(source, arg, model) for arg in call.args)]
    return bool(makers) and unscaled.isdisjoint(makers)


def _gives(source: Source, arg: cst.Arg, model: str | None) -> bool:
    return any(
        isinstance(node, cst.Attribute)
        and node.attr.value == "parameters"
        and key(source, node.value) == model
        for node in walk(arg)
    )


def _needs_size(source: Source, event: Event) -> bool:
    if event.kind == "grad_read":
        return _measures(source, event.node)
    return event.kind == "clip" or (event.kind == "assign" and _adds(source, event))


def _adds(source: Source, event: Event) -> bool:
    """Return True for `p.grad += 0.1 * p` and `p.grad = p.grad + noise`: the term is not scaled."""
    target, value = event.node, event.value
    if isinstance(target, cst.Attribute) and target.attr.value == "data":
        target = target.value
    if not isinstance(target, cst.Attribute) or target.attr.value != "grad" or value is None:
        return False
    statement = source.parents[event.node]
    if isinstance(statement, cst.AugAssign):
        is_sum = isinstance(statement.operator, (cst.AddAssign, cst.SubtractAssign))
        return is_sum and _is_foreign(value)
    if not isinstance(value, cst.BinaryOperation):
        return False
    sides = sorted(_is_foreign(side) for side in (value.left, value.right))
    return isinstance(value.operator, (cst.Add, cst.Subtract)) and sides == [False, True]


def _is_foreign(value: Node) -> bool:
    """Return True if no name in a value suggests a gradient, except as an argument of `zeros_like` and the like."""
    shaped = {
        inner
        for n in walk(value)
        if isinstance(n, cst.Call) and (dotted(n.func) or "").endswith("_like")
        for inner in walk(n)
    }
    if shaped and not {n for n in walk(value) if isinstance(n, cst.Name)} - shaped:
        return True
    names = [n.value.lower() for n in walk(value) if isinstance(n, cst.Name) and n not in shaped]
    return bool(names) and not any("grad" in name or "scale" in name for name in names)


def _measures(source: Source, grad: Node) -> bool:
    """Return True if a read of a gradient uses its size."""
    node = grad
    parent = source.parents[node]
    while isinstance(parent, cst.Attribute) and parent.attr.value in _SAME:
        node, parent = parent, source.parents[parent]
        if isinstance(parent, cst.Call) and parent.func is node:
            node, parent = parent, source.parents[parent]
    if isinstance(parent, cst.Attribute) and parent.attr.value in _ADDS:
        outer = source.parents[parent]
        return isinstance(outer, cst.Call) and any(_is_foreign(arg.value) for arg in outer.args)
    if isinstance(parent, cst.Attribute):
        return parent.attr.value in _MEASURES
    if isinstance(parent, cst.BinaryOperation):
        return isinstance(parent.operator, cst.Power) and parent.left is node
    if isinstance(parent, (cst.ListComp, cst.GeneratorExp)) and parent.elt is node:
        return _is_measured(source, parent)
    call = source.parents.get(parent)
    return (
        isinstance(parent, cst.Arg)
        and isinstance(call, cst.Call)
        and (source.origin(call.func) in _FUNCTIONS)
    )


def _is_measured(source: Source, grads: Node) -> bool:
    """Return True if the norm of a list of gradients is computed, directly or by its name."""
    for use in _uses(source, grads):
        parent = source.parents.get(use)
        call = source.parents.get(parent) if isinstance(parent, cst.Arg) else None
        if not isinstance(call, cst.Call):
            continue
        if source.origin(call.func) in _FUNCTIONS:
            return True
        if source.origin(call.func) in _JOINS:
            places = [(one, source.parents.get(one)) for one in _uses(source, call)]
            outer = [
                (source.parents.get(by) if isinstance(by, cst.Arg) else by) for _, by in places
            ]
            if any(_takes_norm(source, one) for one in outer):
                return True
    return False


def _takes_norm(source: Source, node: Node | None) -> bool:
    if isinstance(node, cst.Call):
        return source.origin(node.func) in _FUNCTIONS
    return isinstance(node, cst.Attribute) and node.attr.value in _MEASURES


def _uses(source: Source, value: Node) -> list[Node]:
    """Return the uses of a value: itself, or the reads of the name that it is assigned to."""
    statement = source.parents[value]
    if isinstance(statement, cst.Assign) and isinstance(statement.targets[0].target, cst.Name):
        name = statement.targets[0].target
        home = source.scope(name).home(name.value)
        return list(source.scopes.references(home, name.value)) if home is not None else []
    return [value]


RULE = LintRule(
    code="AMP203",
    name="clip-scaled-gradients",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="gradients are still scaled here; call `scaler.unscale_(optimizer)` first",
    what=(
        "`clip_grad_norm_`, `clip_grad_value_`, the norm of a `.grad`, or a term that is added to one, between a "
        "scaled backward and its step, without `unscale_` before."
    ),
    why=(
        "The gradients are those of the scaled loss, 65536 times too large with the default scale. Clipped to norm "
        "1, they make the step 65536 times too small, and the step changes whenever the scale does."
    ),
    fine="Code of another file unscales the gradients.",
    words=("clip_grad scale(", ".grad scale("),
    check=check,
    example="""
 import torch

 scaler = torch.amp.GradScaler("cuda")
 for batch in batches:
     scaler.scale(model(batch)).backward()
+    scaler.unscale_(optimizer)
     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
     scaler.step(optimizer)
     scaler.update()
""",
)
