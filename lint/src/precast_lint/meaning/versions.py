"""How an expression holds PyTorch's version: as a text, parsed, as a tuple of numbers, as a number, or its major part.

Invariant: what is not one of these forms, with `torch.__version__` in it, is None.
"""

from __future__ import annotations

import re

from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings, walk

__all__ = ["PARSERS", "minor_kind", "text_cut", "unpacked", "value_given", "version_kind"]

PARSERS = re.compile(r"(packaging\.version\.(parse|Version)|.*\.(parse_version|LooseVersion))")


def version_kind(source: Source, node: Node) -> str | None:
    """How an expression with PyTorch's version compares: as "text", "parsed", as a tuple of "numbers", or "own"."""
    if source.origin(node) is None and (value := value_given(source, node)) is not node:
        return version_kind(source, value)
    origin = source.origin(node)
    if origin == "torch.__version__":
        # From 1.10 on it is a text that compares as a version does; older ones are asked about where they are named.
        return "own" if source.min_torch is not None else "parsed"
    if _is_tuple_of_version(source, node) or _are_parts_of_version(source, node):
        return "numbers"
    if _is_first_part(source, node):
        return "major"
    if isinstance(node, cst.Attribute) and node.attr.value in ("release", "major"):
        is_parsed = version_kind(source, node.value) == "parsed"
        return {"release": "numbers", "major": "major"}[node.attr.value] if is_parsed else None
    if isinstance(node, cst.Call) and source.names.builtin(node.func) == "float":
        read = any(source.origin(inner) == "torch.__version__" for inner in walk(node))
        return "number" if read else None
    if origin == "torch.version.__version__" or _is_text_of_version(source, node):
        return "text"
    if isinstance(node, cst.Call) and PARSERS.fullmatch(source.origin(node.func) or ""):
        inner = node.args[0].value if len(node.args) == 1 else None
        known = inner is not None and (
            source.origin(inner) in ("torch.__version__", "torch.version.__version__")
            or _is_text_of_version(source, inner)
        )
        return "parsed" if known else None
    return None


def _is_tuple_of_version(source: Source, node: Node) -> bool:
    """`tuple(int(part) for part in torch.__version__.split(".")[:2])`, with `map` or as a list as well."""
    is_call = isinstance(node, cst.Call) and source.names.builtin(node.func) in (
        "tuple",
        "list",
        "map",
    )
    if not is_call and not isinstance(node, (cst.ListComp, cst.GeneratorExp)):
        return False
    inner = list(walk(node))
    has_int = any(source.names.builtin(n) == "int" for n in inner)
    return has_int and any(source.origin(n) == "torch.__version__" for n in inner)


def unpacked(source: Source, node: Node) -> tuple[Node, int] | None:
    """What a name is unpacked from, and its place there: `major, minor = ...`."""
    binding = source.names.only_binding(node)
    line = source.statement(binding.node) if binding is not None else None
    statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    if binding is None or not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0].target
    if not isinstance(target, (cst.Tuple, cst.List)):
        return None
    places: list[Node] = [element.value for element in target.elements]
    return (statement.value, places.index(binding.node)) if binding.node in places else None


def _are_parts_of_version(source: Source, node: Node) -> bool:
    """`(major, minor)` after `major, minor = map(int, torch.__version__.split(".")[:2])`."""
    if not isinstance(node, cst.Tuple):
        return False
    found = [unpacked(source, element.value) for element in node.elements]
    return bool(found) and all(
        part is not None and part[1] == place and _is_tuple_of_version(source, part[0])
        for place, part in enumerate(found)
    )


def _is_first_part(source: Source, node: Node) -> bool:
    """The major version: the first of its numbers by that name, or `int(torch.__version__.split(".")[0])`."""
    return _number_at(source, node, 0)


def minor_kind(source: Source, node: Node) -> str | None:
    """How an expression that is the minor version alone compares: as a "number", or as a "text"."""
    if _number_at(source, node, 1):
        return "number"
    if isinstance(node, cst.Attribute) and node.attr.value == "minor":
        return "number" if version_kind(source, node.value) == "parsed" else None
    node = value_given(source, node)
    return "text" if _is_part(source, node, 1) else None


def _number_at(source: Source, node: Node, place: int) -> bool:
    """Whether an expression is one of the version's numbers: by a name, or read from its text."""
    part = unpacked(source, node) if isinstance(node, cst.Name) else None
    if part is not None:
        return part[1] == place and _is_tuple_of_version(source, part[0])
    node = value_given(source, node)
    if isinstance(node, cst.Subscript) and _index(node) == place:
        return _is_tuple_of_version(source, value_given(source, node.value))
    if not isinstance(node, cst.Call) or source.names.builtin(node.func) != "int" or not node.args:
        return False
    return _is_part(source, node.args[0].value, place)


def _is_part(source: Source, item: Node, place: int) -> bool:
    """`torch.__version__.split(".")[1]`, in one line or two."""
    if not isinstance(item, cst.Subscript) or _index(item) != place:
        return False
    split = value_given(source, item.value)
    if not isinstance(split, cst.Call):
        return False
    func = split.func
    return (
        isinstance(func, cst.Attribute)
        and func.attr.value == "split"
        and [strings(arg.value) for arg in split.args[:1]] == ["."]
        and _is_version(source, func.value)
    )


def _is_version(source: Source, node: Node) -> bool:
    """`torch.__version__`, or its text without what stands after `+`."""
    return source.origin(node) == "torch.__version__" or _is_text_of_version(source, node)


def _is_first(item: cst.Subscript) -> bool:
    """`x[0]`."""
    return _index(item) == 0


def _index(item: cst.Subscript) -> int | None:
    """The number in `x[0]`."""
    index = item.slice[0].slice
    if len(item.slice) != 1 or not isinstance(index, cst.Index):
        return None
    return int(index.value.value) if isinstance(index.value, cst.Integer) else None


def text_cut(source: Source, node: Node) -> int | None:
    """The number of characters in `torch.__version__[:3]`."""
    node = value_given(source, node)
    part = node.slice[0].slice if isinstance(node, cst.Subscript) else None
    if not isinstance(node, cst.Subscript) or not isinstance(part, cst.Slice):
        return None
    lower = part.lower
    from_start = lower is None or (isinstance(lower, cst.Integer) and lower.value == "0")
    if not from_start or part.step is not None or not isinstance(part.upper, cst.Integer):
        return None
    return int(part.upper.value) if _is_version(source, node.value) else None


def value_given(source: Source, node: Node) -> Node:
    """The one value that a name or an attribute of self gets, or the expression itself."""
    found = source.values.sources(node)
    if len(found) != 1 or source.origin(node) is not None:
        return node
    return found[0][0] if found[0][0] is not None else node


def _is_text_of_version(source: Source, node: Node) -> bool:
    """`str(torch.__version__)`, and `torch.__version__.split("+")[0]` or with `partition`."""
    if isinstance(node, cst.Call) and len(node.args) == 1:
        is_str = source.names.builtin(node.func) == "str"
        return is_str and source.origin(node.args[0].value) == "torch.__version__"
    if not isinstance(node, cst.Subscript) or not isinstance(node.value, cst.Call):
        return False
    func = node.value.func
    return (
        isinstance(func, cst.Attribute)
        and func.attr.value in ("split", "rsplit", "partition")
        and source.origin(func.value) == "torch.__version__"
        and [strings(arg.value) for arg in node.value.args[:1]] == ["+"]
        and _is_first(node)
    )
