"""Detection of loss targets that make PyTorch compute the loss in 16 bits, for AMP303.

Invariant: True only with evidence for each value that the target may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.callers import calls_of
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["handed", "is_low"]

_LOW = ("torch.float16", "torch.half", "torch.bfloat16")
_INTEGERS = ("int", "long", "short")
_LIKE = {f"torch.{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn")}
_MAKERS = {
    f"torch.{name}" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "tensor")
}
_NEW = ("new_empty", "new_full", "new_ones", "new_zeros")
_KEEPS_DTYPE = re.compile(
    r"clone|contiguous|cpu|cuda|detach|diagonal|expand|expand_as|flatten|movedim|narrow|permute|repeat|reshape|select|"
    r"squeeze|swapaxes|t|transpose|unflatten|unsqueeze|view"
)
_DEEP = 8


def is_low(
    source: Source,
    node: Node,
    is_output: Callable[[Node], bool],
    depth: int = _DEEP,
    followed: frozenset[Node] = frozenset(),
) -> bool:
    """Return True if a target is 16-bit, or of integers, for certain.

    Args:
        source: the file.
        node: the target.
        is_output: returns True for what a model returned in a region, in its dtype.
        depth: the number of names, calls and operations to follow.
        followed: the values that are already followed, as in a loop with `y = y.cuda()`.
    """
    if node in followed or depth == 0:
        return node in followed

    def again(inner: Node) -> bool:
        return is_low(source, inner, is_output, depth - 1, followed | {node})

    if isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        one = index.value if len(node.slice) == 1 and isinstance(index, cst.Index) else None
        if isinstance(one, (cst.Integer, cst.SimpleString)):
            return False  # one of several results of a model may be float32
        return again(node.value)
    if is_output(node):
        return True
    if isinstance(node, cst.Call):
        return _is_low_call(source, node, again)
    if isinstance(node, cst.Attribute):
        values = [value for value, _ in source.values.sources(node)]
        return bool(values) and all(value is not None and again(value) for value in values)
    if not isinstance(node, cst.Name) or node not in source.scopes.scope_of:
        return False
    results = values_seen(source, node)
    if len(results) == 1 and results[0].kind == "param":
        argument = handed(source, node)
        return bool(argument) and all(map(again, argument))
    values = [b.value if b.kind == "assign" else None for b in results]
    return bool(values) and all(value is not None and again(value) for value in values)


def _is_low_call(source: Source, call: cst.Call, again: Callable[[Node], bool]) -> bool:
    """Return True for a cast to 16 bits or integers, a tensor created so, and operations that keep such a dtype."""
    arguments = Arguments.of(call)
    values = [*arguments.positional, *arguments.keywords.values()]
    dtype = arguments.keywords.get("dtype")

    def is_low_dtype(value: Node) -> bool:
        if isinstance(value, cst.Attribute) and value.attr.value == "dtype":
            return again(value.value)
        return source.origin(value) in _LOW

    origin = source.origin(call.func)
    if origin is not None:
        is_made_low = dtype is not None and is_low_dtype(dtype)
        if origin in _MAKERS:
            return is_made_low
        first = arguments.get("input", 0)
        return origin in _LIKE and (
            is_made_low or (dtype is None and first is not None and again(first))
        )
    if not isinstance(call.func, cst.Attribute):
        return False
    name, owner = call.func.attr.value, call.func.value
    if name in ("half", "bfloat16", *_INTEGERS):
        return not values
    if name == "type_as":
        return len(values) == 1 and again(values[0])
    if name in ("to", "type"):
        alike = len(values) == 1 and isinstance(values[0], cst.Name) and again(values[0])
        return alike or any(map(is_low_dtype, values))
    if name in _NEW:
        return is_low_dtype(dtype) if dtype is not None else again(owner)
    return bool(_KEEPS_DTYPE.fullmatch(name)) and again(owner)


def handed(source: Source, plain: Node) -> list[Node]:
    """Return the arguments of all calls of this file for a parameter; empty if one is unknown."""
    binding = source.names.only_binding(plain)
    function = source.function(plain)
    if binding is None or binding.kind != "param" or function is None:
        return []
    names = [
        param.name.value for param in (*function.params.posonly_params, *function.params.params)
    ]
    names = names[1:] if names[:1] == ["self"] else names
    at = names.index(binding.name) if binding.name in names else None
    results = [Arguments.of(call).get(binding.name, at) for call in calls_of(source, function)]
    entries = [value for value in results if value is not None]
    return entries if len(entries) == len(results) else []
