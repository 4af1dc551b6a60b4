"""Which of several assignments of a name a read of it sees, in straight code.

Invariant: the answer holds on every path to the read; where a branch or a loop may have come between, there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["values_seen"]

_Inside = list[tuple[Binding, set[Node]]]  # bindings, each with the nodes around it


def values_seen(source: Source, name: cst.Name) -> list[Binding]:
    """The bindings that a read may see: the last one before it if that is certain, else all of the name's."""
    known = source.cache.setdefault("values seen", {})
    assert isinstance(known, dict)
    if name not in known:
        bindings = source.names.bindings(name)
        last = _last(source, name, bindings) if len(bindings) > 1 else None
        known[name] = bindings if last is None else [last]
    found = known[name]
    assert isinstance(found, list)
    return found


def _last(source: Source, name: cst.Name, bindings: list[Binding]) -> Binding | None:
    home = source.scopes.scope_of[name].home(name.value)
    if home is None or home.node is not (source.function(name) or source.module):
        return None
    inside = [(binding, {binding.node, *source.around(binding.node)}) for binding in bindings]
    inner = source.statement(name)
    while True:
        block = source.parents[inner]
        before = _before(block, inner)
        found = _in_block(before, inside)
        if isinstance(found, Binding):
            return found
        outer = source.parents.get(block) if not isinstance(block, cst.Module) else None
        if found is _UNSURE or outer is None or _is_unsure(outer, inside):
            return None
        if isinstance(outer, cst.FunctionDef):
            params = [binding for binding in bindings if binding.kind == "param"]
            return params[0] if len(params) == 1 else None
        inner = outer if isinstance(outer, cst.BaseStatement) else source.statement(outer)


_UNSURE = "unsure"


def _before(block: Node, inner: Node) -> Sequence[Node]:
    body: Sequence[Node] = block.body if isinstance(block, (cst.IndentedBlock, cst.Module)) else ()
    return body[: list(body).index(inner)] if inner in body else ()


def _in_block(statements: Sequence[Node], inside: _Inside) -> Binding | str | None:
    """The last binding that some statements make for certain; None: none of them binds the name."""
    for statement in reversed(statements):
        hits = [binding for binding, around in inside if statement in around]
        if not hits:
            continue
        if isinstance(statement, cst.SimpleStatementLine):
            return hits[-1]
        if isinstance(statement, cst.With) and isinstance(statement.body, cst.IndentedBlock):
            return _in_block(statement.body.body, inside) or _UNSURE
        return _UNSURE
    return None


def _is_unsure(outer: Node, inside: _Inside) -> bool:
    """Whether code around a read may have bound the name in an order that is not seen: a loop, a `try`, a test."""
    if isinstance(outer, cst.FunctionDef):
        return False
    loops = (cst.For, cst.While, cst.Try, cst.TryStar, cst.ExceptHandler, cst.Finally, cst.Match)
    others = isinstance(outer, (*loops, cst.With, cst.MatchCase, cst.ClassDef))
    return others and any(outer in around for _, around in inside)
