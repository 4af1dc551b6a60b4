"""The assignments whose value a read of a variable may get.

Invariant: the result includes the assignments on every path to the read. A branch before the read adds its
assignments. In a loop that may assign the variable, all assignments are possible.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.names import is_none
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst

__all__ = ["by_default", "default_of_field", "the_value", "value_stored", "values_seen"]

_BindingNodes = list[tuple[Binding, set[Node]]]  # each with its node and the nodes around it
_MAX_DEPTH = 4  # the number of calls through which an object is followed


@once
def values_seen(source: Source, name: cst.Name) -> list[Binding]:
    """Return the bindings that may reach a read: the last certain one and later ones, or else all of the name."""
    bindings = source.names.bindings(name)
    last = _last_bindings(source, name, bindings) if len(bindings) > 1 else None
    return bindings if last is None else last


def _last_bindings(source: Source, name: cst.Name, bindings: list[Binding]) -> list[Binding] | None:
    home = source.scopes.scope_of[name].home(name.value)
    if home is None or home.node is not (source.function(name) or source.module):
        return None
    return _reaching_bindings(source, name, bindings)


def the_value(source: Source, node: Node | None) -> Node | None:
    """Return the only value that the file assigns to a variable or an attribute, or else the expression itself."""
    for _ in range(_MAX_DEPTH):
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
    """Return the default of a field, such as 1e-8 for `cfg.eps` after `eps: float = 1e-8`, if no call sets it."""
    result = source.values.sources(attribute)
    value, annotation = result[0] if len(result) == 1 else (None, None)
    line = source.parents.get(value) if value is not None and annotation is not None else None
    if not isinstance(line, cst.AnnAssign) or not isinstance(line.target, cst.Name):
        return None
    home = source.values.enclosing_class(line)
    assert home is not None
    names, classes = _fields_set_in_calls(source)
    return None if attribute.attr.value in names or home in classes else value


@once
def _fields_set_in_calls(source: Source) -> tuple[set[str], set[Node | None]]:
    """Return the keywords of all calls in a file, and the classes whose fields may get other values.

    Such a class is called with positional arguments, is an argument (`tyro.cli(Config)`), or one of its attributes is
    read.
    """
    names: set[str] = set()
    used = [arg.value for arg in source.all(cst.Arg)] + [n.value for n in source.all(cst.Attribute)]
    classes: set[Node | None] = {source.names.class_named(node) for node in used}
    for call in source.all(cst.Call):
        if not (source.origin(call.func) or "").startswith("torch."):
            names.update(arg.keyword.value for arg in call.args if arg.keyword is not None)
        binding = source.names.only_binding(call.func)
        if binding is not None and any(arg.keyword is None for arg in call.args):
            classes.add(binding.node)
    return names, classes


def value_stored(source: Source, attribute: cst.Attribute) -> Node | None:
    """Return the last value that is assigned to an attribute such as `args.device` before a read; None if unknown.

    If the object is a parameter, the values for all calls in this file have to be equal.
    """
    if not isinstance(attribute.value, cst.Name) or attribute.value.value in ("self", "cls"):
        return None
    return _attribute_value(source, attribute.value, attribute.attr.value, attribute, _MAX_DEPTH)


def _attribute_value(
    source: Source, owner: cst.Name, name: str, at: Node, depth: int
) -> Node | None:
    assignments = [
        store
        for store in _attribute_assignments(source).get((owner.value, name), [])
        if source.function(store.node) is source.function(at)
    ]
    if assignments:
        result = _last_binding(source, at, assignments)
        return result.value if result is not None else None
    binding = source.names.only_binding(owner)
    arguments = (
        source.values.call_arguments.for_unannotated(binding)
        if binding is not None and depth
        else []
    )
    values = [
        _attribute_value(source, value, name, value, depth - 1)
        if isinstance(value, cst.Name)
        else None
        for value in arguments
    ]
    texts = {source.code(value) if value is not None else None for value in values}
    return values[0] if len(texts) == 1 else None


@once
def _attribute_assignments(source: Source) -> dict[tuple[str, str], list[Binding]]:
    table: dict[tuple[str, str], list[Binding]] = {}
    for assign in source.all(cst.Assign):
        for one in assign.targets:
            target = one.target
            if isinstance(target, cst.Attribute) and isinstance(target.value, cst.Name):
                pair = target.value.value, target.attr.value
                result = Binding(target.attr.value, "assign", target, assign.value)
                table.setdefault(pair, []).append(result)
    return table


def _last_binding(source: Source, name: Node, bindings: list[Binding]) -> Binding | None:
    """Return the only one of some bindings that may reach a node; None for several."""
    result = _reaching_bindings(source, name, bindings)
    return result[0] if result is not None and len(result) == 1 else None


def _reaching_bindings(source: Source, name: Node, bindings: list[Binding]) -> list[Binding] | None:
    """Return the bindings that may reach a node: the last certain one and those in later tests and loops."""
    nodes = [(binding, {binding.node, *source.around(binding.node)}) for binding in bindings]
    reaching: list[Binding] = []
    inner = source.statement(name)
    while True:
        block = source.parents[inner]
        if isinstance(block, cst.If):  # an `elif` is a statement inside the preceding `if`
            inner = block
            continue
        result, is_certain = _bindings_in_block(_before(block, inner), nodes)
        reaching += result
        if is_certain:
            return reaching
        outer = source.parents.get(block) if not isinstance(block, cst.Module) else None
        if outer is None or _has_unknown_order(outer, nodes):
            return None
        if isinstance(outer, cst.FunctionDef):
            params = [binding for binding in bindings if binding.kind == "param"]
            return reaching + params if len(params) == 1 else None
        inner = outer if isinstance(outer, cst.BaseStatement) else source.statement(outer)


def _before(block: Node, inner: Node) -> Sequence[Node]:
    body: Sequence[Node] = block.body if isinstance(block, (cst.IndentedBlock, cst.Module)) else ()
    return body[: list(body).index(inner)] if inner in body else ()


def _bindings_in_block(
    statements: Sequence[Node], nodes: _BindingNodes
) -> tuple[list[Binding], bool]:
    """Return the bindings in a block that may reach the code after it, and True if one of them certainly does."""
    reaching: list[Binding] = []
    for statement in reversed(statements):
        matches = [binding for binding, around in nodes if statement in around]
        if not matches:
            continue
        if isinstance(statement, cst.SimpleStatementLine):
            return [*reaching, matches[-1]], True
        if isinstance(statement, cst.With) and isinstance(statement.body, cst.IndentedBlock):
            result, is_certain = _bindings_in_block(statement.body.body, nodes)
            if is_certain:
                return reaching + result, True
        reaching += matches
    return reaching, False


def _has_unknown_order(outer: Node, nodes: _BindingNodes) -> bool:
    """Return True if the code around a read may bind the name in an unknown order."""
    if isinstance(outer, cst.FunctionDef):
        return False
    if isinstance(outer, cst.With):  # bindings of its body after the read do not reach it
        return any(outer in around and outer.body not in around for _, around in nodes)
    loops = (cst.For, cst.While, cst.Try, cst.TryStar, cst.ExceptHandler, cst.Finally, cst.Match)
    is_branch = isinstance(outer, (*loops, cst.MatchCase, cst.ClassDef))
    return is_branch and any(outer in around for _, around in nodes)


def by_default(source: Source, node: Node | None, depth: int = 3) -> Node | None:
    """Return the default value of an expression that is a field, such as `cfg.dtype`, or a parameter."""
    result = the_value(source, node)
    if depth == 0 or result is None:
        return None
    if isinstance(result, cst.Attribute):
        value = default_of_field(source, result)
        if isinstance(value, cst.Call) and source.origin(value.func) == "dataclasses.field":
            return Arguments.of(value).keywords.get("default")
        return value
    binding = source.names.only_binding(result)
    if binding is None or binding.kind != "param":
        return None
    values = source.values.call_arguments.for_parameter(binding) or [binding.value]
    if len(values) > 1 or values[0] is None:
        return None
    return (
        values[0]
        if source.origin(values[0])
        else by_default(source, values[0], depth - 1) or values[0]
    )
