"""Default values of parameters and of fields of classes, if no code of the file sets another value.

Invariant: a class or function that other code gets, such as a parser of the command line, has no default here.
"""

from __future__ import annotations

from precast_lint.meaning.assignments import default_of_field, the_value
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["by_default"]

_DEEP = 3


def by_default(source: Source, node: Node | None, depth: int = _DEEP) -> tuple[Node, bool] | None:
    """Return the default value of an expression, and True if the file itself uses that default."""
    result = the_value(source, node)
    if depth == 0 or result is None:
        return None
    if isinstance(result, cst.Attribute):
        value = default_of_field(source, result)
        home = source.values.enclosing_class(value) if value is not None else None
        if value is None or not isinstance(home, cst.ClassDef):
            return _of_attribute(source, result, depth)
        uses = _uses(source, home)
        default = _of_field(source, value)
        return None if uses is None or default is None else (default, uses > 0)
    if isinstance(result, cst.Name):
        binding = source.names.only_binding(result)
        if binding is not None and binding.kind == "param":
            return _of_parameter(source, binding, depth)
    return None


def _of_field(source: Source, value: Node) -> Node | None:
    """Return a default value, or the one in `field(default=...)`."""
    if isinstance(value, cst.Call) and source.origin(value.func) == "dataclasses.field":
        return Arguments.of(value).keywords.get("default")
    return value


def _of_attribute(source: Source, node: cst.Attribute, depth: int) -> tuple[Node, bool] | None:
    """Return the default of the parameter that is assigned to an attribute of an object of this file."""
    values = source.values.sources(node)
    value = values[0][0] if len(values) == 1 and values[0][1] is None else None
    if not isinstance(value, cst.Name):
        return None
    return by_default(source, value, depth - 1)


def _of_parameter(source: Source, binding: Binding, depth: int) -> tuple[Node, bool] | None:
    """Return the value of a parameter in all calls of this file; without calls, its default value."""
    values = source.values.handed.whatever_to(binding)
    if values:
        entries = {source.origin(value) for value in values if value is not None}
        value = values[0]
        if len(entries) != 1 or None in values or value is None:
            return None
        if None in entries:
            return by_default(source, value, depth - 1) if len(values) == 1 else None
        return value, True
    parameters = source.parents.get(binding.node)
    function = source.parents.get(parameters) if parameters is not None else None
    if not isinstance(function, cst.FunctionDef) or function.decorators or binding.value is None:
        return None
    home = source.values.enclosing_class(function)
    if isinstance(home, cst.ClassDef) and function.name.value == "__init__":
        return (binding.value, False) if _uses(source, home) == 0 else None
    return (binding.value, False) if not _is_named(source, function) else None


def _uses(source: Source, home: cst.ClassDef) -> int | None:
    """Return the number of constructor calls of a class; None if the class is used otherwise."""
    calls = 0
    for name in _named(source, home.name.value):
        binding = source.names.only_binding(name)
        if binding is None or binding.node is not home:
            continue
        parent = source.parents.get(name)
        if isinstance(parent, cst.Call) and parent.func is name:
            calls += 1
            if any(arg.star for arg in parent.args):
                return None
        elif isinstance(parent, cst.Attribute) or _is_handed_on(source, parent):
            return None
    return calls


def _is_handed_on(source: Source, parent: Node | None) -> bool:
    """Return True if a name is an argument, and not a base of a class."""
    return isinstance(parent, cst.Arg) and not isinstance(source.parents[parent], cst.ClassDef)


def _is_named(source: Source, function: cst.FunctionDef) -> bool:
    """Return True if a file uses a function, or a method of the same name."""
    name = function.name.value
    is_asked = any(node.attr.value == name for node in source.all(cst.Attribute))
    return is_asked or any(node is not function.name for node in _named(source, name))


def _named(source: Source, text: str) -> list[cst.Name]:
    """Return the names of a file with one spelling."""
    return [
        node for node in source.scopes.names if isinstance(node, cst.Name) and node.value == text
    ]
