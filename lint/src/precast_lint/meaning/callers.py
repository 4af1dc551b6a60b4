"""The regions in which the functions of a file are called, for what stands in those functions.

Invariant: only calls of this file are seen; who asks says whether one of them is enough, or all have to agree.
"""

from __future__ import annotations

from precast_lint.meaning.functions import MODULES, called_forward, called_function, methods_of
from precast_lint.meaning.regions import Region, region_in_force, regions_around
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, dotted, methods_named

__all__ = ["calls_of", "regions_of_callers", "runs_in_region"]

_DEEP = 3
_SAME_MODULE = ("bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "to", "train")


def calls_of(source: Source, function: cst.FunctionDef) -> list[cst.Call]:
    """The calls of a function, a method by `self`, or the `forward` of a module, in this file."""
    return _calls_of_functions(source).get(function, [])


@once
def _calls_of_functions(source: Source) -> dict[Node, list[cst.Call]]:
    """Return the calls of each function of a file."""
    table: dict[Node, list[cst.Call]] = {}
    for call in source.all(cst.Call):
        target = called_function(source, call) or called_forward(source, call)
        for one in [target] if target is not None else _forwards(source, call):
            table.setdefault(one, []).append(call)
    return table


def _forwards(source: Source, call: cst.Call) -> list[cst.FunctionDef]:
    """The `forward` of each module of this file that a call runs: of `cls(d)` for each `cls` of `(First, Second)`."""
    if not isinstance(call.func, (cst.Name, cst.Attribute)):
        return []
    family = source.values.family
    results: list[cst.FunctionDef] = []
    for home in _classes_made(source, call.func, set()) or ():
        above = (home, *family.bases(home))
        if any(source.origin(base.value) in MODULES for one in above for base in one.bases):
            own = bool(methods_named(home, "forward"))
            place = home if own else family.provider(home, "forward")
            method = methods_of(source, place).get("forward") if place is not None else None
            if method is not None and not method.decorators and method.node not in results:
                results.append(method.node)
    return results


def _classes_made(
    source: Source, node: Node | None, visited: set[object]
) -> set[cst.ClassDef] | None:
    """The classes of this file that make the objects that an expression may be; None where not all are known.

    Args:
        source: the file.
        node: the expression.
        visited: the variables and calls that are looked at already, which add nothing.
    """
    definition = _module(node)
    if definition is None:
        return None
    place = source.values.variable(definition) or definition
    if place in visited:
        return set()
    visited.add(place)
    if isinstance(definition, cst.Call):
        arguments: list[Node | None] = list(source.values.returned(definition))
        if not arguments:
            return _classes_named(source, definition.func)
    elif isinstance(definition, (cst.Name, cst.Attribute)):
        values = source.values.sources(definition)
        if any(note is not None for _, note in values) or _is_stored_outside(source, definition):
            return None
        arguments = [value for value, _ in values if not is_none(value)]
    else:
        return None
    classes: set[cst.ClassDef] = set()
    for value in arguments:
        more = _classes_made(source, value, visited)
        if more is None:
            return None
        classes |= more
    return classes if arguments else None


def _classes_named(source: Source, name: Node) -> set[cst.ClassDef] | None:
    """The classes that a name stands for: a class itself, or what a loop or an argument gives."""
    binding = source.names.only_binding(name)
    if binding is not None and isinstance(binding.node, cst.ClassDef):
        return {binding.node}
    values = [value for value, _ in source.values.sources(name)]
    bindings = [source.names.only_binding(value) if value is not None else None for value in values]
    nodes = [one.node if one is not None else None for one in bindings]
    classes = {node for node in nodes if isinstance(node, cst.ClassDef)}
    return classes if nodes and all(isinstance(node, cst.ClassDef) for node in nodes) else None


def _module(node: Node | None) -> Node | None:
    """The module in `module.cuda().eval()` and other methods that give the module itself."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        if node.func.attr.value not in _SAME_MODULE:
            break
        node = node.func.value
    return node


def _is_stored_outside(source: Source, node: Node) -> bool:
    """Return True if objects get an attribute of this name from outside: `model.head = ...`."""
    return isinstance(node, cst.Attribute) and node.attr.value in _attributes_stored(source)


@once
def _attributes_stored(source: Source) -> set[str]:
    """Return the names of the attributes that are assigned on other objects than `self`."""
    targets = [one.target for one in source.all(cst.AssignTarget)]
    return {
        target.attr.value
        for target in targets
        if isinstance(target, cst.Attribute) and dotted(target.value) != "self"
    }


def regions_of_callers(
    source: Source, node: Node, trainers: bool = False, depth: int = _DEEP
) -> list[Region | None]:
    """The region in which each call of this file runs the function of a node; None for one that runs in none.

    Empty where the node stands in a region of its own function, or where nothing calls that.
    """
    function = source.function(node)
    if (
        function is None
        or depth == 0
        or next(regions_around(source, node, trainers), None) is not None
    ):
        return []
    results: list[Region | None] = []
    for call in calls_of(source, function):
        if source.function(call) is function:
            continue
        region = region_in_force(source, call, trainers)
        if region is None and next(regions_around(source, call, trainers), None) is None:
            results += regions_of_callers(source, call, trainers, depth - 1) or [None]
        else:
            results.append(region)
    return results


def runs_in_region(source: Source, node: Node) -> bool:
    """Return True if a node is in an enabled region, or if all calls of its function in this file are."""
    if region_in_force(source, node, trainers=True) is not None:
        return True
    result = regions_of_callers(source, node, trainers=True)
    return bool(result) and None not in result
