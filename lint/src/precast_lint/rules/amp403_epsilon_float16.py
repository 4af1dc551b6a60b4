"""AMP403: an epsilon that float16 rounds to zero."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.callers import regions_of_callers
from precast_lint.meaning.regions import region_in_force, regions_around
from precast_lint.meaning.tensors import (
    TensorOperation,
    constant,
    is_half,
    is_lowered,
    number_in,
    operation,
    value_of,
)
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_ONE = "{dtype} rounds this to 1, and the logarithm of 1 - x is -inf there"
_GAPS = {"torch.float16": 2.0**-12, "torch.bfloat16": 2.0**-9}  # half a step below 1
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
        upper = result.get("max", 1) if result.name in ("clamp", "clamp_") else None
        gap = _below_one(source, upper)
        dtype = _dtype(source, result) if gap is not None and gap <= max(_GAPS.values()) else None
        if upper is not None and gap is not None and 0 < gap <= _GAPS.get(dtype or "", 0):
            yield source.find(RULE, upper, _ONE.format(dtype=dtype))
    yield from _limits(source)


def _below_one(source: Source, node: Node | None) -> float | None:
    """Return the distance from 1 of a number, also of `1 - eps`."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Subtract):
        return constant(source, node.right) if constant(source, node.left) == 1 else None
    number = constant(source, node)
    return 1 - number if number is not None else None


def _dtype(source: Source, clamp: TensorOperation) -> str | None:
    """Return the 16-bit dtype of a clamped tensor: float16, or a sigmoid of a product of matrices in a region."""
    if is_half(source, clamp.operand):
        return "torch.float16"
    inner = operation(source, value_of(source, clamp.operand), "sigmoid", "sigmoid_")
    if inner is None or not is_lowered(source, inner.operand):
        return None
    around = regions_of_callers(source, clamp.call) or [region_in_force(source, clamp.call)]
    dtypes = {region.dtype if region is not None else None for region in around}
    return dtypes.pop() if len(dtypes) == 1 else None


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
    what=(
        "A number up to 3e-8 that is added to a float16 tensor, or is the lower limit of its `clamp`. An upper limit "
        "that the tensor's dtype rounds to 1, such as `1 - 1e-4` in float16 or `1 - 1e-3` in bfloat16."
    ),
    why=(
        "An epsilon avoids a division by zero, or the logarithm of zero. In float16 this one is zero, and with this "
        "limit `log(1 - x)` is -inf."
    ),
    fine="A zero is harmless there.",
    words=tuple(
        f"torch {dtype} {number}"
        for dtype in ("half(", "torch.half", "float16", "autocast")
        for number in ("e-8", "e-08", "e-9", "e-09", "e-1", ".tiny", ".smallest_normal", "clamp")
    ),
    check=check,
    example="""
 import torch

 y = x.half()
-z = 1.0 / (y + 1e-8)
+z = 1.0 / (y + 1e-4)
""",
)
