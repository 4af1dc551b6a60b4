"""AMP502: a tensor that a Python loop takes apart."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each loop over a tensor's size that indexes it with the loop's number."""
    for loop in source.all(cst.For):
        tensor = _tensor(source, loop.iter)
        if tensor is None or not isinstance(loop.target, cst.Name):
            continue
        number = loop.target.value
        for node in walk(loop.body):
            is_item = isinstance(node, cst.Subscript) and key(source, node.value) == tensor
            if is_item and _is_at(node, number):
                yield source.find(RULE, loop.iter)
                break


def _tensor(source: Source, iterated: Node) -> str | None:
    """The tensor of `range(x.size(0))` and `range(x.shape[0])`."""
    if not isinstance(iterated, cst.Call) or source.names.builtin(iterated.func) != "range":
        return None
    if len(iterated.args) != 1:
        return None
    size = iterated.args[0].value
    if isinstance(size, cst.Call) and isinstance(size.func, cst.Attribute):
        return key(source, size.func.value) if size.func.attr.value == "size" else None
    if isinstance(size, cst.Subscript) and isinstance(size.value, cst.Attribute):
        return key(source, size.value.value) if size.value.attr.value == "shape" else None
    return None


def _is_at(node: Node, number: str) -> bool:
    assert isinstance(node, cst.Subscript)
    indices = [e.slice.value for e in node.slice if isinstance(e.slice, cst.Index)]
    return any(isinstance(index, cst.Name) and index.value == number for index in indices)


VALID = (
    Case("""
        import torch

        for row in x:
            print(row)
        for i in range(10):
            y[i] = i
        for i in range(x.size(0)):
            print(names[i])
    """),
)

INVALID = (
    Case(
        """
        import torch

        for i in range(x.shape[0]):
            out.append(weight @ x[i])
        """,
        count=1,
    ),
    Case(
        """
        import torch

        for t in range(x.size(1)):
            h = cell(x[:, t], h)
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP502",
    name="tensor-sliced-in-loop",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="each round is a kernel of its own: compute on the whole tensor, or loop over `x.unbind()`",
    what="`for i in range(x.shape[0])` with `x[i]` in the loop.",
    why=(
        "Each slice and each operation on it starts a kernel, and autocast casts each slice anew. One operation on the "
        "whole tensor does it at once; `unbind` makes all slices in one call, with one node for the gradients."
    ),
    fine="The tensor is short, or it is no tensor.",
    words=("torch range( .size(", "torch range( .shape["),
    check=check,
    valid=VALID,
    invalid=INVALID,
    default=False,
)
