"""Detection of losses on which `backward` is called, in the function that computes the loss or in its callers.

Invariant: the loss reaches `backward` by sums, names, attributes of self and results of functions of this file.
"""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.callers import calls_of
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.training_step.flow_events import key

__all__ = ["has_no_grad", "is_propagated"]

_MOST_CALLS = 3  # calls through which a returned loss is followed
_NO_GRAD = ("torch.no_grad", "torch.inference_mode")


def has_no_grad(source: Source, node: Node) -> bool:
    """Return True if a `with` or a decorator of a node's function switches gradients off."""
    for outer in source.around(node):
        if isinstance(outer, cst.FunctionDef):
            decorators = [d.decorator for d in outer.decorators]
            return any(
                source.origin(d.func if isinstance(d, cst.Call) else d) in _NO_GRAD
                for d in decorators
            )
        if isinstance(outer, cst.With):
            items = [i.item for i in outer.items if isinstance(i.item, cst.Call)]
            if any(source.origin(item.func) in _NO_GRAD for item in items):
                return True
    return False


def _with_dependents(source: Source, function: Node | None, names: set[str]) -> set[str]:
    """Return `names`, and the names whose values use them: `total = loss + penalty`, `scaled = scaler.scale(loss)`."""
    results = set(names)
    for assign in source.all(cst.Assign):
        assert isinstance(assign, cst.Assign)
        if source.function(assign) is not function:
            continue
        used = {
            key(source, n) for n in walk(assign.value) if isinstance(n, (cst.Name, cst.Attribute))
        }
        if used & names and not used & {"item", "detach"}:
            results |= {key(source, t.target) or "" for t in assign.targets if _is_plain(t.target)}
    return results


def _is_plain(target: Node) -> bool:
    return isinstance(target, cst.Name) or (
        isinstance(target, cst.Attribute) and dotted(target.value) == "self"
    )


def is_propagated(source: Source, loss: Node, depth: int = _MOST_CALLS) -> bool:
    """Return True if `backward` is called on a loss, also after it is scaled, assigned or returned."""
    function = source.function(loss)
    statement = source.parents.get(loss)
    while isinstance(statement, cst.BinaryOperation):  # a sum of losses
        statement = source.parents.get(statement)
    names = {"\0"}
    if isinstance(statement, cst.Element):  # one of several results of a call: its own name
        names = {key(source, loss) or ""}
    if isinstance(statement, (cst.Assign, cst.AugAssign)):
        targets = [t.target for t in statement.targets] if isinstance(statement, cst.Assign) else []
        targets = targets or [statement.target]  # type: ignore[union-attr]
        names = {key(source, target) or "" for target in targets}
        while (more := _with_dependents(source, function, names)) > names:
            names = more
    loss_class = source.values.enclosing_class(loss)
    attributes = {name for name in names if name.startswith("self.")}
    for other, owner, arguments in source.methods("backward"):
        inside = [n for part in (owner, *arguments.positional) for n in walk(part)]
        used = {key(source, n) for n in inside if isinstance(n, (cst.Name, cst.Attribute))}
        if source.function(other) is function and (loss in inside or used & names):
            return True
        if used & attributes and source.values.enclosing_class(other) is loss_class:
            return True
    return depth > 0 and any(
        is_propagated(source, value, depth - 1) for value in _returned_to(source, loss, names)
    )


def _returned_to(source: Source, loss: Node, names: set[str]) -> Iterator[Node]:
    """Yield the callers' expressions for a returned loss: the call, or the name of one of several results."""
    function = source.function(loss)
    if not isinstance(function, cst.FunctionDef):
        return
    for value in returned_by(function):
        items = value.elements if isinstance(value, cst.Tuple) else ()
        at = next(
            (i for i, one in enumerate(items) if _contains_loss(source, one, loss, names)), None
        )
        if at is None and (items or not _contains_loss(source, value, loss, names)):
            continue
        for call in calls_of(source, function):
            if at is None:
                yield call
            else:
                yield from _item_of(source, call, at)


def _contains_loss(source: Source, value: Node, loss: Node, names: set[str]) -> bool:
    """Return True if a returned value is a loss, or a sum with it or with its name."""
    inner = list(walk(value))
    if any(isinstance(n, cst.Attribute) and n.attr.value in ("item", "detach") for n in inner):
        return False
    return loss in inner or any(
        key(source, n) in names for n in inner if isinstance(n, (cst.Name, cst.Attribute))
    )


def _item_of(source: Source, call: cst.Call, at: int) -> Iterator[Node]:
    """Yield the name for one of several results: `loss, logits = step(batch)`."""
    outer = source.parents[call]
    for one in outer.targets if isinstance(outer, cst.Assign) else ():
        target = one.target
        if isinstance(target, (cst.Tuple, cst.List)) and at < len(target.elements):
            yield target.elements[at].value
