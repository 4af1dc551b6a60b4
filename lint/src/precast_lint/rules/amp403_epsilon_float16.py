"""AMP403: an epsilon that float16 rounds to zero."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.regions import regions_around
from precast_lint.meaning.tensors import constant, is_half, number_in, operation
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_HALF_STEP = 2.0**-25  # half of float16's smallest number: a smaller one is rounded to zero


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each sum with such an epsilon, and each clamp to it."""
    for node in source.all(cst.BinaryOperation):
        if isinstance(node.operator, cst.Add):
            for epsilon, other in ((node.right, node.left), (node.left, node.right)):
                if _vanishes(source, epsilon) and is_half(source, other):
                    yield source.find(RULE, epsilon)
    for update in source.all(cst.AugAssign):
        is_sum = isinstance(update.operator, cst.AddAssign) and _vanishes(source, update.value)
        if is_sum and is_half(source, update.target):
            yield source.find(RULE, update.value)
    for call in source.all(cst.Call):
        result = operation(
            source, call, "clamp", "clamp_", "clamp_min", "clamp_min_", "add", "add_"
        )
        if result is None:
            continue
        value = result.get("min" if result.name.startswith("clamp") else "other", 0)
        if result.name in ("add", "add_") and "alpha" in result.keywords:
            continue
        if value is not None and _vanishes(source, value) and is_half(source, result.operand):
            yield source.find(RULE, value)
    yield from _limits(source)


def _limits(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for `torch.maximum(x, torch.tensor(1e-9))`, and `normalize(x, eps=1e-12)` outside of regions."""
    for call in source.all(cst.Call):
        result = operation(source, call, "maximum", "max", "normalize")
        if result is None or (result.is_method and result.name == "normalize"):
            continue
        if result.name == "normalize":
            value = result.get("eps", 2)
            if any(regions_around(source, call)):
                continue
        else:
            value = number_in(source, result.get("other", 0))
        if value is not None and _vanishes(source, value) and is_half(source, result.operand):
            yield source.find(RULE, value)


def _vanishes(source: Source, node: Node) -> bool:
    value = constant(source, node)
    return value is not None and 0 < value <= _HALF_STEP


RULE = LintRule(
    code="AMP403",
    name="epsilon-below-float16",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="float16 rounds this to zero: its smallest number is 6e-8",
    what="A number up to 3e-8 that is added to a float16 tensor, or is the lower limit of its `clamp`.",
    why="An epsilon avoids a division by zero. In float16 this one is zero.",
    fine="A zero is harmless there.",
    words=tuple(
        f"torch {dtype} {number}"
        for dtype in ("half(", "torch.half", "float16", "autocast")
        for number in ("e-8", "e-08", "e-9", "e-09", "e-1", ".tiny", ".smallest_normal")
    ),
    check=check,
    example="""
 import torch

 y = x.half()
-z = 1.0 / (y + 1e-8)
+z = 1.0 / (y + 1e-4)
""",
)
