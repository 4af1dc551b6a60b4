"""AMP504: copies where broadcasting does."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.tensors import constant, operation
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `expand_as` and `repeat` beside an operator that would broadcast."""
    for node in source.all(cst.BinaryOperation):
        if not isinstance(node.operator, (cst.Add, cst.Subtract, cst.Multiply, cst.Divide)):
            continue
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if _expands_to(source, side, other) or (
                _repeats(source, side) and not _repeats(source, other)
            ):
                yield source.find(RULE, side)


def _expands_to(source: Source, node: Node, other: Node) -> bool:
    """`y.expand_as(x)` beside x itself."""
    found = operation(source, node, "expand_as")
    like = found.get("other", 0) if found is not None else None
    return like is not None and key(source, like) == key(source, other)


def _repeats(source: Source, node: Node) -> bool:
    """`y.unsqueeze(1).repeat(1, n, 1)`: the new dimension alone is repeated, the others once."""
    found = operation(source, node, "repeat")
    if found is None or found.keywords:
        return False
    inner = operation(source, found.operand, "unsqueeze")
    place = _new_place(found.operand)
    if inner is not None:
        place = constant(source, inner.get("dim", 0))
    if place is None or not -len(found.positional) <= place < len(found.positional):
        return False
    others = list(found.positional)
    del others[int(place)]
    return all(constant(source, times) == 1 for times in others)


def _new_place(node: Node) -> float | None:
    """Where `y[None]` and `y[:, None]` have a new dimension."""
    if not isinstance(node, cst.Subscript):
        return None
    parts = [element.slice for element in node.slice]
    new = [i for i, p in enumerate(parts) if isinstance(p, cst.Index) and is_none(p.value)]
    whole = all(
        isinstance(p, cst.Slice) and (p.lower, p.upper, p.step) == (None, None, None)
        for i, p in enumerate(parts)
        if i not in new
    )
    return float(new[0]) if len(new) == 1 and whole else None


VALID = (
    Case("""
        import torch

        a = x + y
        b = x + y.unsqueeze(1)
        c = torch.cat([x, y.unsqueeze(1).repeat(1, n, 1)])
        d = x.unsqueeze(0).repeat(n, 1) - y.unsqueeze(1).repeat(1, m)
        e = z * y.expand_as(x)
        f = x * y.repeat(2, n)
    """),
    Case("""
        import torch

        y = a - b[0].repeat(a.size(0), 1)
        z = a * b[:, None].repeat(2, n, 1) + c[:5, None].repeat(1, n)
    """),
)

INVALID = (
    Case(
        """
        import torch

        y = x * mask.unsqueeze(1).repeat(1, n, 1)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        y = x - x.mean(1, keepdim=True).expand_as(x)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        y = a - b[None].repeat(a.size(0), 1, 1)
        z = a * b[:, None].repeat(1, n, 1)
        """,
        count=2,
    ),
)

RULE = Rule(
    code="AMP504",
    name="repeat-instead-of-broadcast",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="the operator broadcasts: this can stay as small as it was",
    what="`y.unsqueeze(1).repeat(1, n, 1)` or `y.expand_as(x)` as an operand of `+`, `-`, `*` or `/`.",
    why="`repeat` writes a copy as large as the other operand, which costs memory and time. `expand_as` does nothing.",
    fine="The other operand does not have that size itself.",
    words=("torch .repeat(", "torch .expand_as("),
    check=check,
    valid=VALID,
    invalid=INVALID,
    default=False,
)
