"""Functions that the rules about the order of a scaler's calls (AMP2xx) share.

Invariants: a scaler is not followed if it is passed to code that is not followed, or has `enabled=False`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from precast_lint.meaning.functions import followed_call
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, is_self, methods_named, walk
from precast_lint.training_step.flow import FunctionFlow, Say, flows
from precast_lint.training_step.flow_events import Event, key

__all__ = [
    "assigned_in",
    "comes_each_time",
    "depends_on_scale",
    "innermost_loop",
    "is_off",
    "leading_to",
    "loop_around",
    "loops_around",
    "may_use",
    "no_other_calls",
    "scaler_flows",
    "scales_by_hand",
    "wrong_nodes",
]

_State = TypeVar("_State", bound=Hashable)
_LOGGING_METHOD = re.compile(
    r"add_scalar|append|cpu|debug|detach|get_last_lr|get_scale|info|item|items|"
    r"log|named_parameters|parameters|set_description|set_postfix|size|values|write"
)
_WRITING_CALL = re.compile(
    r"print|str|format|round|float|warning|error|exception|add_scalars|update"
)


@once
def scaler_flows(source: Source) -> list[tuple[FunctionFlow, str]]:
    """Return all pairs of a function and a scaler that can be followed in it."""
    return [
        (flow, scaler)
        for flow in flows(source)
        for scaler in flow.scalers
        if not flow.leaks(scaler) and not any(is_off(source, n) for n in flow.reads(scaler))
    ]


def no_other_calls(flow: FunctionFlow, scaler: str, *methods: str) -> bool:
    """Return True if no other function of the file calls these methods of a scaler."""
    return flow.is_local(scaler) or not flow.called_elsewhere(scaler, *methods)


def wrong_nodes(
    source: Source,
    follow: Callable[
        [FunctionFlow, str], tuple[_State, Callable[[_State, Event, Say], _State]] | None
    ],
) -> Iterator[tuple[Node, str | None]]:
    """Yield each node that is wrong in all functions that run it, with its message.

    `follow` gets a function and a scaler. It returns the start state and the function for events, or None to skip both.
    """
    says: dict[str, Say] = {}
    for flow, scaler in scaler_flows(source):
        start_and_rule = follow(flow, scaler)
        if start_and_rule is not None:
            flow.judge(*start_and_rule, says.setdefault(scaler, Say()))
    if not any(True for say in says.values() for _ in say.reported()):
        return
    flow_of = {node: flow for flow in flows(source) for node in flow.nodes}
    reported: set[Node] = set()
    for scaler, say in says.items():
        for node, message in say.reported():
            flow = flow_of[node]
            is_own = scaler in flow.scalers
            others = [other for name, other in says.items() if name != scaler]
            if not is_own and any(other.is_good(node) for other in others):
                continue  # correct for the scaler of another caller
            if node not in reported:
                reported.add(node)
                yield node, message


def may_use(source: Source, event: Event, scaler: str) -> bool:
    """Return True if code that is not followed may use a scaler, because it gets the object that holds it."""
    if event.kind != "call" or "." not in scaler:
        return False
    return _may_use_owner(source, event, scaler.rpartition(".")[0])


@once
def _may_use_owner(source: Source, event: Event, owner: str) -> bool:
    if owner.partition(".")[0] == "self" and _uses_self(source, event.node):
        return True
    return owner != "self" and _uses_owner(source, event, owner)


def _uses_owner(source: Source, event: Event, owner: str) -> bool:
    """Return True if a call that is not followed runs a method of the object that holds a scaler, or passes it."""
    call = event.node
    if not isinstance(call, cst.Call):
        return False
    if any(key(source, arg.value) == owner for arg in call.args):
        return True
    if event.receiver != owner or not isinstance(call.func, cst.Attribute):
        return False
    class_def = source.values.object_class(call.func.value)
    name = call.func.attr.value
    if class_def is not None and name in source.values.attributes(class_def):
        return False  # `state.model(batch)`
    results = methods_named(class_def, name) if class_def is not None else []
    return len(results) != 1 or any(
        isinstance(node, cst.Name) and node.value == "self" for node in walk(results[0].body)
    )


def _uses_self(source: Source, call: Node) -> bool:
    if not isinstance(call, cst.Call):
        return False
    if any(isinstance(arg.value, cst.Name) and arg.value.value == "self" for arg in call.args):
        return True
    func = call.func
    if not isinstance(func, cst.Attribute):
        return False
    owner = func.value
    if isinstance(owner, cst.Call):
        is_super = source.names.builtin(owner.func) == "super"
        return is_super and followed_call(source, call) is None
    if not is_self(owner):
        return False
    class_def = source.values.enclosing_class(call)
    if not isinstance(class_def, cst.ClassDef):
        return True
    family = (class_def, *source.values.family.related(class_def))
    return not any(func.attr.value in source.values.attributes(one) for one in family)


def depends_on_scale(flow: FunctionFlow, scaler: str) -> bool:
    """Return True if a function uses the scale of a scaler other than in logs and products."""
    source = flow.source
    return any(
        not _is_logged(source, read) and not _is_product(source.parents[read])
        for read in _reads_of_scale(flow, scaler)
    )


def scales_by_hand(flow: FunctionFlow, scaler: str) -> bool:
    """Return True if a function multiplies or divides by the scale, so that it may scale or unscale by itself.

    If `torch.autograd.grad` gets the scaled loss, divisions do not count, because its result has to be divided.
    """
    reads = list(_reads_of_scale(flow, scaler))
    if not reads:
        return False
    names = {name for read in reads if (name := _assigned_name(flow.source, read)) is not None}
    all_nodes = [*flow.nodes, *(node for _, nodes in flow.called for node in nodes)]
    reads += [n for n in all_nodes if isinstance(n, cst.Name) and n.value in names]
    if any(e.kind == "autograd_grad" and e.scaler == scaler for e in flow.events()):
        reads = [read for read in reads if not _is_divisor(flow.source.parents[read], read)]
    return any(_is_factor(flow.source, read) for read in reads)


def _reads_of_scale(flow: FunctionFlow, scaler: str) -> Iterator[Node]:
    source = flow.source
    if not _scale_reads(source):
        return
    node_lists: list[tuple[Callable[[Node], str | None], list[Node]]]
    node_lists = [(lambda node: key(source, node), flow.nodes)]
    node_lists += [(frame.named, nodes) for frame, nodes in flow.called]
    for named, nodes in node_lists:
        for node in nodes:
            if (
                isinstance(node, cst.Attribute)
                and node in _scale_reads(source)
                and named(node.value) == scaler
            ):
                call = source.parents[node]
                yield call if isinstance(call, cst.Call) and call.func is node else node


@once
def _scale_reads(source: Source) -> set[Node]:
    names = ("get_scale", "_scale", "_get_scale_async", "scale_value")
    return {node for node in source.all(cst.Attribute) if node.attr.value in names}


def _is_logged(source: Source, node: Node) -> bool:
    for outer in source.around(node):
        if isinstance(outer, cst.FormattedStringExpression):
            return True
        if isinstance(outer, cst.Call):
            name = outer.func.attr if isinstance(outer.func, cst.Attribute) else outer.func
            if isinstance(name, cst.Name) and (
                _WRITING_CALL.fullmatch(name.value) or _LOGGING_METHOD.fullmatch(name.value)
            ):
                return True
        if isinstance(outer, (cst.BinaryOperation, cst.Comparison, cst.BaseSmallStatement)):
            return isinstance(outer, cst.Expr) and outer.value is node
    return False


def _assigned_name(source: Source, value: Node) -> str | None:
    statement = source.parents[value]
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0].target
    return target.value if isinstance(target, cst.Name) else None


def _is_product(node: Node) -> bool:
    return isinstance(node, cst.BinaryOperation) and isinstance(
        node.operator, (cst.Multiply, cst.Divide)
    )


def _is_divisor(parent: Node, read: Node) -> bool:
    is_division = isinstance(parent, cst.BinaryOperation) and isinstance(
        parent.operator, cst.Divide
    )
    return is_division and isinstance(parent, cst.BinaryOperation) and parent.right is read


def _is_factor(source: Source, node: Node) -> bool:
    """Return True if a value is a factor or divisor, or code that may use it as one gets it."""
    parent = source.parents[node]
    if isinstance(parent, cst.BinaryOperation):
        return _is_product(parent)
    if isinstance(parent, cst.AugAssign):
        return parent.value is node
    if isinstance(parent, cst.Arg):
        return not _is_logged(source, node)
    return isinstance(parent, (cst.Return, cst.Element))


def may_backward(source: Source, event: Event) -> bool:
    """Return True if a call may run a backward. Calls of PyTorch, of builtins and of logging methods do not."""
    call = event.node
    if event.kind != "call" or not isinstance(call, cst.Call):
        return False
    origin = source.origin(call.func) or ""
    if origin.startswith("torch.") or source.names.builtin(call.func) is not None:
        return False
    return not (
        isinstance(call.func, cst.Attribute) and _LOGGING_METHOD.fullmatch(call.func.attr.value)
    )


def loops_around(source: Source, node: Node) -> list[Node]:
    """Return the loops in its function in which a node runs, the innermost first."""
    results: list[Node] = []
    inner = node
    for outer in source.around(node):
        if isinstance(outer, (cst.FunctionDef, cst.Lambda)):
            break
        if isinstance(outer, (cst.For, cst.While)) and inner is outer.body:
            results.append(outer)
        inner = outer
    return results


def loop_around(source: Source, node: Node) -> Node | None:
    """Return the innermost loop in its function in which a node runs."""
    return next(iter(loops_around(source, node)), None)


def innermost_loop(flow: FunctionFlow, node: Node) -> Node | None:
    """Return the innermost loop in which a node runs, in its function or around a call that leads to it."""
    return next(
        (loop for at in leading_to(flow, node) for loop in loops_around(flow.source, at)), None
    )


def leading_to(flow: FunctionFlow, node: Node) -> Iterator[Node]:
    """Yield a node, the call of its function, the call of the function of this call, and so on."""
    source = flow.source
    visited: set[Node] = set()
    while True:
        yield node
        function = source.function(node)
        if function is flow.node or function is None or function in visited:
            return
        visited.add(function)
        if function not in flow.leading:
            return
        node = flow.leading[function]


def assigned_in(source: Source, loop: Node) -> set[str | None]:
    """Return the keys of all variables that a loop assigns, including its target."""
    results: set[str | None] = set()
    for node in walk(loop):
        if isinstance(node, (cst.AssignTarget, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr)):
            results |= {
                key(source, n)
                for n in walk(node.target)
                if isinstance(n, (cst.Name, cst.Attribute)) and not is_self(n)
            }
    return results


def comes_each_time(source: Source, node: Node, loop: Node) -> bool:
    """Return True if each iteration of a loop runs a node, because no test around it may change its result."""
    assigned = assigned_in(source, loop)
    inner: Node = node
    for outer in source.around(node):
        if outer is loop:
            return True
        if isinstance(outer, (cst.If, cst.IfExp)) and inner is not outer.test:
            test_nodes = list(walk(outer.test))
            if any(isinstance(n, (cst.Modulo, cst.Call)) for n in test_nodes):
                return False
            if any(
                key(source, n) in assigned
                for n in test_nodes
                if isinstance(n, (cst.Name, cst.Attribute))
            ):
                return False
        if isinstance(outer, (cst.Try, cst.TryStar, cst.Match, cst.BooleanOperation)):
            return False
        inner = outer
    return False


def is_off(source: Source, scaler: Node) -> bool:
    """Return True if a scaler is created with `enabled=False`."""
    call = source.values.constructor(scaler)
    enabled = Arguments.of(call).get("enabled") if isinstance(call, cst.Call) else None
    return isinstance(enabled, cst.Name) and enabled.value == "False"
