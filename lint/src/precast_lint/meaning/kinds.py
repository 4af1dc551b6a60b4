"""Detection of texts, devices and tensors.

Invariants: True only with evidence: a literal, an operation with only such results, an annotation, a
default value, or a name whose values all have such evidence. A variable's name is no evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from precast_lint.meaning.assignments import value_stored, values_seen
from precast_lint.meaning.functions import MODULES
from precast_lint.meaning.regions import TRAINERS
from precast_lint.parsing.names import is_none
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, is_self, string_value

__all__ = ["is_device", "is_tensor", "is_text", "texts"]

_TENSOR = {"torch.Tensor", "torch.nn.Parameter", "torch.nn.parameter.Parameter"}
_MAKERS = {"torch.zeros", "torch.ones", "torch.tensor", "torch.randn", "torch.rand", "torch.empty"}
_DEPTH = 6


def is_text(source: Source, node: Node | None, depth: int = _DEPTH) -> bool:
    """Return True if an expression is a string."""
    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString)):
        return not isinstance(node, cst.SimpleString) or "b" not in node.prefix.lower()
    if isinstance(node, cst.Call):
        return source.names.builtin(node.func) == "str"
    if isinstance(node, cst.Attribute) and node.attr.value == "type":
        return is_device(source, node.value, depth) or (
            isinstance(node.value, cst.Attribute) and node.value.attr.value == "device"
        )
    return _everywhere(source, node, is_text, ("str",), depth)


def is_device(source: Source, node: Node | None, depth: int = _DEPTH) -> bool:
    """Return True if an expression is a `torch.device`."""
    if source.instance(node) == "torch.device":
        return True
    stored = value_stored(source, node) if isinstance(node, cst.Attribute) else None
    if stored is not None and depth:
        return is_device(source, stored, depth - 1)
    if (
        isinstance(node, cst.Attribute)
        and node.attr.value == "device"
        and _has_device(source, node.value)
    ):
        return True
    return _everywhere(source, node, is_device, (), depth)


def _has_device(source: Source, node: Node) -> bool:
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
    node: Node | None,
    test: Callable[[Source, Node | None, int], bool],
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


def texts(source: Source, node: Node | None, depth: int = _DEPTH) -> frozenset[str]:
    """Return the possible values of an expression, if they are all strings; else empty."""
    if node is None or depth == 0:
        return frozenset()
    text = string_value(node)
    if text is not None:
        return frozenset({text})
    if isinstance(node, cst.IfExp):
        parts = (texts(source, side, depth) for side in (node.body, node.orelse))
    else:
        values = source.values.sources(node)
        parts = (texts(source, value, depth - 1) for value, _ in values)
    results: frozenset[str] = frozenset()
    for part in parts:
        if not part:  # one value is unknown
            return part
        results |= part
    return results


_NOTES = ("torch.Tensor", "torch.FloatTensor", "torch.nn.Parameter")
# Functions and methods that return a tensor; a method only if it is called on one.
_OPERATIONS = (
    r"abs|bfloat16|clone|contiguous|cpu|cuda|detach|double|exp|expand|flatten|float|half|log|masked_fill|matmul|max|"
    r"mean|min|norm|permute|prod|relu|reshape|sigmoid|softmax|squeeze|std|sum|tanh|to|transpose|unsqueeze|var|view"
)
_METHODS = re.compile(_OPERATIONS)
_FUNCTIONS = re.compile(
    rf"torch\.nn\.functional\.\w+|torch\.({_OPERATIONS}|arange|as_tensor|cat|einsum|empty|eye|from_numpy|full|linspace|"
    r"ones|rand|randn|stack|tensor|where|zeros)"
)


def is_tensor(source: Source, node: Node, depth: int = 4) -> bool:
    """Return True if a value is certainly a tensor."""
    if depth == 0:
        return False
    if isinstance(node, cst.BinaryOperation):
        return any(is_tensor(source, side, depth - 1) for side in (node.left, node.right))
    if isinstance(node, cst.Call):
        if (origin := source.origin(node.func)) is not None:
            return _FUNCTIONS.fullmatch(origin) is not None
        func = node.func
        is_method = isinstance(func, cst.Attribute) and _METHODS.fullmatch(func.attr.value)
        return bool(is_method) and is_tensor(source, func.value, depth - 1)  # type: ignore[attr-defined]
    if not isinstance(node, cst.Name) or is_self(node):
        return False
    results = values_seen(source, node)
    return bool(results) and all(_holds_tensor(source, binding, depth) for binding in results)


def _holds_tensor(source: Source, binding: Binding, depth: int) -> bool:
    if binding.annotation is not None:
        return source.origin(binding.annotation) in _NOTES
    if binding.kind == "param":  # of a module's method
        home = source.values.enclosing_class(binding.node)
        return home is not None and any(source.origin(base.value) in MODULES for base in home.bases)
    is_plain = binding.kind == "assign" and binding.value is not None
    return is_plain and is_tensor(source, binding.value, depth - 1)  # type: ignore[arg-type]
