"""Detection of flags, numbers, texts and devices.

Invariants: True only with evidence: a literal, an operation that gives nothing else, an annotation, a
default value, or a name all of whose values have such evidence. A variable's name is no evidence.
"""

from __future__ import annotations

from collections.abc import Callable

from precast_lint.meaning.assignments import value_stored
from precast_lint.meaning.regions import TRAINERS
from precast_lint.meaning.tensor_values import is_tensor
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings

__all__ = [
    "is_device",
    "is_flag",
    "is_number",
    "is_text",
    "texts",
]

_FLAG_BUILTINS = {"bool", "isinstance", "issubclass", "hasattr", "callable", "any", "all"}
_NUMBER_BUILTINS = {"int", "float", "len", "abs", "round"}
_COUNTS = ("os.cpu_count", "multiprocessing.cpu_count", "torch.cuda.device_count")
_TENSOR = {"torch.Tensor", "torch.nn.Parameter", "torch.nn.parameter.Parameter"}
_MAKERS = {"torch.zeros", "torch.ones", "torch.tensor", "torch.randn", "torch.rand", "torch.empty"}
_DEPTH = 6


def is_flag(source: Source, node: Node | None) -> bool:
    """Return True if an expression is True or False."""
    return node is not None and _flag(source, node, _DEPTH)


def is_number(source: Source, node: Node | None) -> bool:
    """Return True if an expression is an int or a float."""
    return node is not None and _number(source, node, _DEPTH)


def is_text(source: Source, node: Node | None) -> bool:
    """Return True if an expression is a string."""
    return node is not None and _text(source, node, _DEPTH)


def is_device(source: Source, node: Node | None) -> bool:
    """Return True if an expression is a `torch.device`."""
    return node is not None and _device(source, node, _DEPTH)


def texts(source: Source, node: Node | None) -> frozenset[str]:
    """The strings that an expression may be, if it is certainly one of some; else empty."""
    return _texts(source, node, _DEPTH)


def _flag(source: Source, node: Node, depth: int) -> bool:
    if isinstance(node, (cst.Comparison, cst.UnaryOperation)):
        return isinstance(node, cst.Comparison) or isinstance(node.operator, cst.Not)
    if isinstance(node, cst.BooleanOperation):
        return _flag(source, node.left, depth) and _flag(source, node.right, depth)
    if isinstance(node, cst.Call):
        origin = source.origin(node.func) or ""
        asks = origin.startswith("torch.") and origin.rpartition(".")[2].startswith("is_")
        return asks or source.names.builtin(node.func) in _FLAG_BUILTINS
    if isinstance(node, cst.Name) and source.names.builtin(node) in ("True", "False"):
        return True
    return _everywhere(source, node, _flag, ("bool",), depth)


def _number(source: Source, node: Node, depth: int) -> bool:
    if isinstance(node, (cst.Integer, cst.Float)):
        return True
    if isinstance(node, cst.UnaryOperation):
        return not isinstance(node.operator, cst.Not) and _number(source, node.expression, depth)
    if isinstance(node, cst.BinaryOperation):
        sides = [_number(source, side, depth) for side in (node.left, node.right)]
        return all(sides) or (any(sides) and _only_numbers(node))
    if isinstance(node, cst.Call):
        return _gives_number(source, node, depth)
    return _everywhere(source, node, _number, ("int", "float"), depth)


def _only_numbers(node: cst.BinaryOperation) -> bool:
    """Return True if an operation with a number on one side takes numbers alone."""
    if isinstance(node.operator, (cst.Power, cst.Divide, cst.Subtract, cst.LeftShift)):
        return True
    is_product = isinstance(node.operator, cst.Multiply)
    return is_product and any(isinstance(side, cst.Float) for side in (node.left, node.right))


def _gives_number(source: Source, call: cst.Call, depth: int) -> bool:
    """`int(x)`, `math.sqrt(x)`, `max(1.0, 2.0)`, `os.cpu_count()`."""
    name = source.names.builtin(call.func)
    if name in ("min", "max") and len(call.args) > 1:
        return all(not arg.star and _number(source, arg.value, depth) for arg in call.args)
    path = source.origin(call.func) or ""
    return name in _NUMBER_BUILTINS or path in _COUNTS or path.startswith("math.")


def _text(source: Source, node: Node, depth: int) -> bool:
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString)):
        return not isinstance(node, cst.SimpleString) or "b" not in node.prefix.lower()
    if isinstance(node, cst.Call):
        return source.names.builtin(node.func) == "str"
    if isinstance(node, cst.Attribute) and node.attr.value == "type":
        return _device(source, node.value, depth) or (
            isinstance(node.value, cst.Attribute) and node.value.attr.value == "device"
        )
    return _everywhere(source, node, _text, ("str",), depth)


def _device(source: Source, node: Node, depth: int) -> bool:
    if source.instance(node) == "torch.device":
        return True
    stored = value_stored(source, node) if isinstance(node, cst.Attribute) else None
    if stored is not None and depth:
        return _device(source, stored, depth - 1)
    if (
        isinstance(node, cst.Attribute)
        and node.attr.value == "device"
        and _has_device(source, node.value)
    ):
        return True
    return _everywhere(source, node, _device, (), depth)


def _has_device(source: Source, node: Node) -> bool:
    """Return True if the attribute `device` of something is a `torch.device`."""
    if _is_tensor(source, node) or source.instance(node) in TRAINERS:
        return True
    return isinstance(node, cst.Name) and is_tensor(source, node)


def _is_tensor(source: Source, node: Node) -> bool:
    if isinstance(node, cst.Call):
        if source.names.builtin(node.func) == "next" and node.args:
            inner = node.args[0].value
            func = inner.func if isinstance(inner, cst.Call) else None
            return isinstance(func, cst.Attribute) and func.attr.value in ("parameters", "buffers")
        return source.origin(node.func) in _MAKERS
    return source.instance(node) in _TENSOR | _MAKERS


def _everywhere(
    source: Source,
    node: Node,
    test: Callable[[Source, Node, int], bool],
    annotations: tuple[str, ...],
    depth: int,
) -> bool:
    """Return True if all values of a name, or of both sides of `a if b else c`, pass a test."""
    if isinstance(node, cst.IfExp):
        return test(source, node.body, depth) and test(source, node.orelse, depth)
    if depth == 0 or not isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)):
        return False
    results = source.values.sources(node)
    return bool(results) and all(
        source.names.builtin(note) in annotations
        if note is not None
        else value is not None and not is_none(value) and test(source, value, depth - 1)
        for value, note in results
    )


def _texts(source: Source, node: Node | None, depth: int) -> frozenset[str]:
    if node is None or depth == 0:
        return frozenset()
    text = strings(node)
    if text is not None:
        return frozenset({text})
    if isinstance(node, cst.IfExp):
        parts = (_texts(source, side, depth) for side in (node.body, node.orelse))
    else:
        values = source.values.sources(node)
        parts = (_texts(source, value, depth - 1) for value, _ in values)
    results: frozenset[str] = frozenset()
    for part in parts:
        if not part:  # one that is not known: the others need not be
            return part
        results |= part
    return results
