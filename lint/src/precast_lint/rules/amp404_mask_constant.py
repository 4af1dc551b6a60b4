"""AMP404: masks with numbers beyond the range of float16."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.regions import regions, regions_around
from precast_lint.meaning.tensors import (
    constant,
    is_half,
    is_lowered,
    number_in,
    operation,
    value_of,
)
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk

__all__ = ["RULE"]

_FILLS = {
    **dict.fromkeys(("masked_fill", "masked_fill_"), ("value", 1)),
    **dict.fromkeys(("index_fill", "index_fill_", "pad", "scatter", "scatter_"), ("value", 2)),
    "fill_diagonal_": ("fill_value", 0),
    "fill_": ("value", 0),
}
_LARGEST = 65504.0
_INFINITE = "in float16 this is infinite, and a row with only such values becomes NaN; use `torch.finfo(x.dtype).min`"
_WIDE = ("torch.float32", "torch.float", "torch.float64", "torch.double", "numpy.float32")


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `masked_fill` of a product of matrices with a number beyond float16."""
    for call in source.all(cst.Call):
        fill = operation(source, call, *_FILLS)
        value = fill.get(*_FILLS[fill.name]) if fill is not None else None
        if fill is None or value is None:
            continue
        if _is_too_large(source, value) and _is_float16(source, fill.operand):
            yield source.find(RULE, value)
    yield from _in_assignments(source)
    yield from _in_new_tensors(source)
    for product in source.all(cst.BinaryOperation):
        if not isinstance(product.operator, cst.Multiply):
            continue
        for value, other in ((product.left, product.right), (product.right, product.left)):
            if _is_too_large(source, value) and _is_additive(source, other):
                yield _silent_overflow(source, value)


def _silent_overflow(source: Source, value: Node) -> LintFinding:
    return source.find(RULE, value, _INFINITE, severity=Severity.WARNING)


def _is_additive(source: Source, mask: Node) -> bool:
    """Return True if a factor is float16: by itself, or because it gets the dtype of a product of matrices."""
    if is_half(source, mask):
        return True
    takes_dtype = any(
        isinstance(n, cst.Attribute) and n.attr.value in ("dtype", "type_as", "ones_like")
        for inner in (mask, value_of(source, mask))
        for n in walk(inner)
    )
    return takes_dtype and _is_float16(source, mask)


def _in_new_tensors(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `torch.where(mask, scores, -1e9)`."""
    for _, arguments in source.calls("torch.where"):
        argument = arguments.positional
        for value, tensor in zip(argument[1:], argument[:0:-1], strict=True):
            number = number_in(source, value_of(source, value)) or value
            if _is_too_large(source, number) and _is_float16(source, tensor):
                yield _silent_overflow(source, number)


def _in_assignments(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `scores[mask] = -1e9`."""
    for statement in source.all(cst.Assign):
        target = statement.targets[0].target
        if (
            len(statement.targets) == 1
            and isinstance(target, cst.Subscript)
            and _is_too_large(source, statement.value)
            and _is_float16(source, target.value)
        ):
            yield _silent_overflow(source, statement.value)


def _is_float16(source: Source, node: Node) -> bool:
    return is_half(source, node) or _is_product(source, node)


def _is_product(source: Source, node: Node) -> bool:
    """Return True if a tensor is a product of matrices, and no region of another dtype computes it."""
    return (
        is_lowered(source, node)
        and not _is_in_other_region(source, node)
        and not _has_only_other_regions(source)
    )


def _has_only_other_regions(source: Source) -> bool:
    dtypes = {region.dtype for region in regions(source) if region.enabled is not False}
    return bool(dtypes) and not dtypes & {None, "torch.float16"}


def _is_in_other_region(source: Source, node: Node, depth: int = 3) -> bool:
    """Return True if a tensor is computed in a region that is off, or of another dtype."""
    bindings = source.names.bindings(node)
    arguments = [
        value for b in bindings if depth for value in source.values.call_arguments.for_parameter(b)
    ]
    if any(
        value is not None and _is_in_other_region(source, value, depth - 1) for value in arguments
    ):
        return True
    values = [b.value for b in bindings if b.value is not None]
    around = [next(regions_around(source, value), None) for value in (values or [node])]
    entries = [region for region in around if region is not None]
    return any(r.enabled is False or r.dtype not in (None, "torch.float16") for r in entries)


def _is_too_large(source: Source, value: Node) -> bool:
    number = constant(source, value)
    return number is not None and abs(number) > _LARGEST


RULE = LintRule(
    code="AMP404",
    name="mask-beyond-float16",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="float16 ends at 65504: this raises in a float16 region; use `torch.finfo(x.dtype).min`",
    what=(
        "A number beyond 65504, or the limit of float32, in `masked_fill`, `torch.where`, an assignment to an index or "
        "a mask that is added, for a product of matrices: such products are float16 in a float16 region."
    ),
    why=(
        '`masked_fill` raises "value cannot be converted to type c10::Half without overflow"; in the other forms the '
        "number becomes infinite, and a fully masked row becomes NaN."
    ),
    fine="The code runs in float32 or bfloat16 only.",
    words=(
        "masked_fill",
        "autocast mask",
        "float16 mask",
        ".half() mask",
        *(f"torch -{digit}e" for digit in range(1, 10)),
        *(f"torch {name}" for name in ("index_fill", "fill_diagonal_")),
        *(f"torch mask 1e{digit}" for digit in range(1, 10)),
        *("finfo(torch.float", "finfo(np.float", "torch -9999", "torch -100000", "torch 10**"),
    ),
    check=check,
    example="""
 import torch

 scores = torch.matmul(q, k.transpose(-2, -1)) / d**0.5
-scores = scores.masked_fill(mask == 0, -1e9)
+scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
""",
)
