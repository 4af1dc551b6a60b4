"""Detection of tensors: by their constructor, by an annotation, or as an input of a module.

Invariant: True only with evidence in the file; of several values of a name each needs its own.
"""

from __future__ import annotations

import re

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.functions import MODULES
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, is_self

__all__ = ["is_tensor"]

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
_DEPTH = 4


def is_tensor(source: Source, node: Node, depth: int = _DEPTH) -> bool:
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
