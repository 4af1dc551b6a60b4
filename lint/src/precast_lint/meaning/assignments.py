"""The assignments that a read of a name can see, in straight code.

Invariant: the answer holds on every path to the read. Where a branch came between, there are several; where a loop may
have, all.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast_lint.parsing.names import is_none
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst

__all__ = ["default_of_field", "the_value", "value_stored", "values_seen"]

_Inside = list[tuple[Binding, set[Node]]]  # bindings, each with the nodes around it
_DEEP = 4  # calls that hand an object on


@once
def values_seen(source: Source, name: cst.Name) -> list[Binding]:
    """The bindings that a read may see: those since the last certain one before it, else all of the name's."""
    bindings = source.names.bindings(name)
    last = _last(source, name, bindings) if len(bindings) > 1 else None
    return bindings if last is None else last


def _last(source: Source, name: cst.Name, bindings: list[Binding]) -> list[Binding] | None:
    home = source.scopes.scope_of[name].home(name.value)
    if home is None or home.node is not (source.function(name) or source.module):
        return None
    return _reaching(source, name, bindings)


def the_value(source: Source, node: Node | None) -> Node | None:
    """The expression itself, or the one thing that its name, or that attribute of self, is given anywhere."""
    for _ in range(_DEEP):
        if isinstance(node, cst.Name):
            binding = source.names.only_binding(node)
            result = binding.value if binding is not None and binding.kind == "assign" else None
        elif isinstance(node, (cst.Attribute, cst.Subscript)):
            values = source.values.sources(node)
            result = values[0][0] if len(values) == 1 and values[0][1] is None else None
        else:
            return node
        if result is None or is_none(result):
            return node
        node = result
    return node


def default_of_field(source: Source, attribute: cst.Attribute) -> Node | None:
    """The default value of a class's field, `cfg.eps` of `eps: float = 1e-8`, if nothing here gives another."""
    result = source.values.sources(attribute)
    value, note = result[0] if len(result) == 1 else (None, None)
    line = source.parents.get(value) if value is not None and note is not None else None
    if not isinstance(line, cst.AnnAssign) or not isinstance(line.target, cst.Name):
        return None
    home = source.values.enclosing_class(line)
    assert home is not None
    names, classes = _given_in_calls(source)
    return None if attribute.attr.value in names or home in classes else value


@once
def _given_in_calls(source: Source) -> tuple[set[str], set[Node]]:
    """The keywords of all calls of a file, and the classes that are called with arguments that have none."""
    names: set[str] = set()
    classes: set[Node] = set()
    for call in source.all(cst.Call):
        if not (source.origin(call.func) or "").startswith("torch."):
            names.update(arg.keyword.value for arg in call.args if arg.keyword is not None)
        binding = source.names.only_binding(call.func)
        if binding is not None and any(arg.keyword is None for arg in call.args):
            classes.add(binding.node)
    return names, classes


def value_stored(source: Source, attribute: cst.Attribute) -> Node | None:
    """The value that an attribute of an object, `args.device`, got last in straight code; None where that is not known.

    A parameter is what the calls of this file hand to it: where there are several, they have to agree in their text.
    """
    if not isinstance(attribute.value, cst.Name) or attribute.value.value in ("self", "cls"):
        return None
    return _stored_on(source, attribute.value, attribute.attr.value, attribute, _DEEP)


def _stored_on(source: Source, owner: cst.Name, name: str, at: Node, depth: int) -> Node | None:
    stores = [
        store
        for store in _stores(source).get((owner.value, name), [])
        if source.function(store.node) is source.function(at)
    ]
    if stores:
        result = _last_in_straight_code(source, at, stores)
        return result.value if result is not None else None
    binding = source.names.only_binding(owner)
    arguments = source.values.handed.to(binding) if binding is not None and depth else []
    values = [
        _stored_on(source, value, name, value, depth - 1) if isinstance(value, cst.Name) else None
        for value in arguments
    ]
    texts = {source.code(value) if value is not None else None for value in values}
    return values[0] if len(texts) == 1 else None


@once
def _stores(source: Source) -> dict[tuple[str, str], list[Binding]]:
    """The values that attributes of names get in a file, by the name and the attribute."""
    table: dict[tuple[str, str], list[Binding]] = {}
    for assign in source.all(cst.Assign):
        for one in assign.targets:
            target = one.target
            if isinstance(target, cst.Attribute) and isinstance(target.value, cst.Name):
                pair = target.value.value, target.attr.value
                result = Binding(target.attr.value, "assign", target, assign.value)
                table.setdefault(pair, []).append(result)
    return table


def _last_in_straight_code(source: Source, name: Node, bindings: list[Binding]) -> Binding | None:
    """The last of some bindings before a node, if it is certain which one that is."""
    result = _reaching(source, name, bindings)
    return result[0] if result is not None and len(result) == 1 else None


def _reaching(source: Source, name: Node, bindings: list[Binding]) -> list[Binding] | None:
    """Return the bindings that a node may see: the last certain one, and those of later tests and loops."""
    inside = [(binding, {binding.node, *source.around(binding.node)}) for binding in bindings]
    several: list[Binding] = []
    inner = source.statement(name)
    while True:
        block = source.parents[inner]
        if isinstance(block, cst.If):  # an `elif`, which is a statement inside the one before it
            inner = block
            continue
        result, is_sure = _in_block(_before(block, inner), inside)
        several += result
        if is_sure:
            return several
        outer = source.parents.get(block) if not isinstance(block, cst.Module) else None
        if outer is None or _is_unsure(outer, inside):
            return None
        if isinstance(outer, cst.FunctionDef):
            params = [binding for binding in bindings if binding.kind == "param"]
            return several + params if len(params) == 1 else None
        inner = outer if isinstance(outer, cst.BaseStatement) else source.statement(outer)


def _before(block: Node, inner: Node) -> Sequence[Node]:
    body: Sequence[Node] = block.body if isinstance(block, (cst.IndentedBlock, cst.Module)) else ()
    return body[: list(body).index(inner)] if inner in body else ()


def _in_block(statements: Sequence[Node], inside: _Inside) -> tuple[list[Binding], bool]:
    """The bindings of some statements that are seen behind them, and whether one of them is made for certain."""
    several: list[Binding] = []
    for statement in reversed(statements):
        hits = [binding for binding, around in inside if statement in around]
        if not hits:
            continue
        if isinstance(statement, cst.SimpleStatementLine):
            return [*several, hits[-1]], True
        if isinstance(statement, cst.With) and isinstance(statement.body, cst.IndentedBlock):
            result, is_sure = _in_block(statement.body.body, inside)
            if is_sure:
                return several + result, True
        several += hits
    return several, False


def _is_unsure(outer: Node, inside: _Inside) -> bool:
    """Return True if code around a read may have bound the name in an order that is not seen."""
    if isinstance(outer, cst.FunctionDef):
        return False
    if isinstance(outer, cst.With):  # what its body binds behind the read comes too late
        return any(outer in around and outer.body not in around for _, around in inside)
    loops = (cst.For, cst.While, cst.Try, cst.TryStar, cst.ExceptHandler, cst.Finally, cst.Match)
    others = isinstance(outer, (*loops, cst.MatchCase, cst.ClassDef))
    return others and any(outer in around for _, around in inside)
