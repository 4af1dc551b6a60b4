"""AMP405: constants that float16 can't hold."""

from __future__ import annotations

import math
from collections.abc import Iterator

from precast_lint.meaning.assignments import the_value
from precast_lint.meaning.tensors import constant, is_half, is_lowered
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings

__all__ = ["RULE"]

_TO_INFINITY = 65520.0  # rounded to infinity from here on
_TO_ZERO = 2.0**-25
_HALF = ("torch.float16", "torch.half")
_LEGACY = ("torch.HalfTensor", "torch.cuda.HalfTensor")
_CREATORS = {
    **{"torch.tensor": 0, "torch.as_tensor": 0, "torch.asarray": 0, "torch.full": 1},
    **dict.fromkeys(_LEGACY, 0),
}
_SUMS = {"add_": 0, "add": 0, "sub_": 0, "sub": 0}
_FILLS = {"fill_": 0, "new_full": 1, "new_tensor": 0, "fill_diagonal_": 0, **_SUMS}
_VALUES = {"torch.full": "fill_value", "torch.asarray": "obj"}


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each such constant that becomes a float16 tensor or is added to one."""
    for call, arguments in source.calls(*_CREATORS):
        origin = source.origin(call.func) or ""
        value = arguments.get(_VALUES.get(origin, "data"), _CREATORS[origin])
        if isinstance(value, cst.Integer) and origin in _LEGACY:
            continue  # a size
        dtype = arguments.get("dtype")
        argument = source.origin(dtype) or source.origin(the_value(source, dtype))
        is_half_made = origin in _LEGACY or argument in _HALF
        if value is not None and (is_half_made or _is_cast(source, call)):
            for number in _numbers(value):
                if _is_lost(source, number):
                    yield source.find(RULE, number)
    for number, like in _filled(source):
        is_mask = _is_infinite(source, number) and is_lowered(source, like)  # for AMP404
        if _is_lost(source, number) and is_half(source, like) and not is_mask:
            yield source.find(RULE, number)
    for node in source.all(cst.BinaryOperation):
        if isinstance(node.operator, (cst.Add, cst.Subtract)):
            for number, other in ((node.right, node.left), (node.left, node.right)):
                if _is_infinite(source, number) and is_half(source, other):
                    yield source.find(RULE, number)


def _filled(source: Source) -> Iterator[tuple[Node, Node]]:
    """The numbers with which tensors are filled, or that are added in place, each with the tensor."""
    for call, owner, arguments in source.methods(*_FILLS):
        assert isinstance(call.func, cst.Attribute)
        value = arguments.get("fill_value", _FILLS[call.func.attr.value])
        is_sum = call.func.attr.value in _SUMS  # a small number beside one is for AMP403
        if value is None or arguments.get("dtype") is not None:
            continue
        if not is_sum or _is_infinite(source, value):
            yield from ((number, owner) for number in _numbers(value))
    for _, arguments in source.calls("torch.full_like"):
        value, like = arguments.get("fill_value", 1), arguments.get("input", 0)
        if value is not None and like is not None and arguments.get("dtype") is None:
            yield value, like


def _is_cast(source: Source, call: cst.Call) -> bool:
    """`torch.tensor(...).half()` and `torch.tensor(...).to(torch.float16)`, on another device or on the same."""
    method = source.parents.get(call)
    cast = source.parents.get(method) if isinstance(method, cst.Attribute) else None
    if not isinstance(method, cst.Attribute) or not isinstance(cast, cst.Call):
        return False
    values = [source.origin(arg.value) for arg in cast.args]
    if (
        cast.func is method
        and method.attr.value in ("cuda", "cpu", "to")
        and not {*values} & {*_HALF}
    ):
        is_moved = method.attr.value != "to" or all(strings(arg.value) for arg in cast.args)
        return is_moved and _is_cast(source, cast)
    names = [strings(arg.value) for arg in cast.args]
    is_to = method.attr.value in ("to", "type") and any(
        dtype in (*_HALF, *_LEGACY) for dtype in (*values, *names)
    )
    return cast.func is method and (method.attr.value == "half" or is_to)


def _numbers(value: Node) -> Iterator[Node]:
    """The numbers of a literal, which may be nested lists."""
    if isinstance(value, (cst.List, cst.Tuple)):
        for element in value.elements:
            yield from _numbers(element.value)
    else:
        yield value


def _is_lost(source: Source, node: Node) -> bool:
    value = constant(source, node)
    is_zero = value is not None and 0 < abs(value) <= _TO_ZERO
    return is_zero or _is_infinite(source, node)


def _is_infinite(source: Source, node: Node) -> bool:
    value = constant(source, node)
    return value is not None and math.isfinite(value) and abs(value) >= _TO_INFINITY


RULE = LintRule(
    code="AMP405",
    name="constant-beyond-float16",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="float16 can't hold this: it reaches from 6e-8 to 65504",
    what="A constant in a float16 tensor, or added to one, that becomes infinity or zero there.",
    why="`torch.tensor` makes infinity or zero of it without a word; `torch.full` raises.",
    fine="Infinity, or zero, is what is meant: then write that.",
    words=("torch .half", "torch .float16", "torch HalfTensor"),
    check=check,
    example="""
 import torch

-limit = torch.tensor(-1e9, dtype=torch.float16)
+limit = torch.tensor(-1e4, dtype=torch.float16)
""",
)
