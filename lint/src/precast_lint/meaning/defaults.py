"""Default values of parameters and of fields of classes, if no code of the file sets another value."""

from __future__ import annotations

from precast_lint.meaning.assignments import default_of_field, the_value
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["by_default"]

_DEEP = 3


def by_default(source: Source, node: Node | None, depth: int = _DEEP) -> Node | None:
    """Return the default value of an expression: of a field, `cfg.dtype`, or of a parameter."""
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
    values = source.values.handed.whatever_to(binding) or [binding.value]
    if len(values) > 1 or values[0] is None:
        return None
    return (
        values[0]
        if source.origin(values[0])
        else by_default(source, values[0], depth - 1) or values[0]
    )
