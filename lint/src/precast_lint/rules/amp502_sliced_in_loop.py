"""AMP502: a tensor that a Python loop takes apart."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.tensor_values import is_tensor
from precast_lint.meaning.tensors import value_of
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each loop over a tensor's size that indexes it with the loop's number."""
    for loop in source.all(cst.For):
        if isinstance(loop.target, cst.Name):
            yield from _sliced(source, loop.target, loop.iter, loop.body)
    for comprehension in source.all(cst.ListComp, cst.GeneratorExp):
        part = comprehension.for_in
        if isinstance(part.target, cst.Name) and part.inner_for_in is None:
            yield from _sliced(source, part.target, part.iter, comprehension.elt)


def _sliced(source: Source, number: cst.Name, iterated: Node, body: Node) -> Iterator[Finding]:
    """A finding if a loop's body takes a tensor apart by the loop's number."""
    size = _size(source, iterated)
    if size is None:
        return
    tensor = _tensor(source, size)
    for node in walk(body):
        if not isinstance(node, cst.Subscript) or not _is_at(node, number.value):
            continue
        if isinstance(source.parents.get(node), (cst.AssignTarget, cst.AugAssign)):
            continue
        known = tensor is not None and key(source, node.value) == tensor
        if known or _is_of_that_length(source, node, size):
            yield source.find(RULE, iterated)
            return


def _size(source: Source, iterated: Node) -> Node | None:
    """Up to where `range` counts by ones; the value that a name of it is given."""
    if not isinstance(iterated, cst.Call) or source.names.builtin(iterated.func) != "range":
        return None
    if not 1 <= len(iterated.args) <= 2 or any(a.star or a.keyword for a in iterated.args):
        return None
    last = iterated.args[-1].value
    if isinstance(last, cst.BinaryOperation) and isinstance(last.operator, (cst.Add, cst.Subtract)):
        last = last.left
    return value_of(source, last) if isinstance(last, cst.Name) else last


def _tensor(source: Source, size: Node) -> str | None:
    """The tensor of `x.size(0)`, `x.shape[0]`, and of a name that `b, t = x.shape` binds."""
    if isinstance(size, cst.Call) and isinstance(size.func, cst.Attribute):
        return key(source, size.func.value) if size.func.attr.value == "size" else None
    if isinstance(size, cst.Subscript) and isinstance(size.value, cst.Attribute):
        return key(source, size.value.value) if size.value.attr.value == "shape" else None
    if isinstance(size, cst.Name):
        binding = source.names.only_binding(size)
        statement = source.statement(binding.node) if binding is not None else None
        line = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if isinstance(line, cst.Assign) and isinstance(line.targets[0].target, cst.Tuple):
            whole = line.value
            if isinstance(whole, cst.Call) and not whole.args:
                whole = whole.func
            if isinstance(whole, cst.Attribute) and whole.attr.value in ("shape", "size"):
                return key(source, whole.value)
    return None


def _is_of_that_length(source: Source, item: cst.Subscript, size: Node) -> bool:
    """Whether what is indexed is certainly a tensor, and the bound is its `len` or a number."""
    if isinstance(size, cst.Call):
        is_len = source.names.builtin(size.func) == "len" and len(size.args) == 1
        if not is_len or key(source, size.args[0].value) != key(source, item.value):
            return False
    elif not isinstance(size, cst.Integer):
        return False
    return is_tensor(source, item.value)


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
    Case(
        """
        import torch

        def run(layers, x, y: torch.Tensor):
            for i in range(len(layers)):
                x = layers[i](x)
            for i in range(len(y)):
                y[i] = i
            return x
        """,
    ),
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
    Case(
        """
        import torch

        def apply(x: torch.Tensor, weight):
            first = [weight @ x[i] for i in range(len(x))]
            b, t, d = x.shape
            for i in range(1, t):
                first.append(x[:, i] @ weight)
            return first
        """,
        count=2,
    ),
    Case(
        """
        import torch

        x = torch.randn(16, 3)
        for i in range(16):
            out.append(x[i].relu())
        """,
    ),
)

RULE = Rule(
    code="AMP502",
    name="tensor-sliced-in-loop",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="each round is a kernel of its own: compute on the whole tensor, or loop over `x.unbind()`",
    what=(
        "`for i in range(x.shape[0])` with `x[i]` in the loop, or in a comprehension; `range(len(x))` and `range(16)` "
        "where `x` is certainly a tensor."
    ),
    why=(
        "Each slice and each operation on it starts a kernel, and autocast casts each slice anew. One operation on the "
        "whole tensor does it at once; `unbind` makes all slices in one call, with one node for the gradients."
    ),
    fine="The tensor is short, or it is no tensor.",
    words=("torch range(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
    default=False,
)
