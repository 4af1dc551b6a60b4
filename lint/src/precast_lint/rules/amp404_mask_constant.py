"""AMP404: masks with numbers that float16 does not have."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.imports import name_for
from precast_lint.meaning.tensors import constant, is_half, is_lowered, operation
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_LARGEST = 65504.0
_WIDE = ("torch.float32", "torch.float", "torch.float64", "torch.double", "numpy.float32")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `masked_fill` of a product of matrices with such a number."""
    for call in source.all(cst.Call):
        fill = operation(source, call, "masked_fill", "masked_fill_")
        value = fill.get("value", 1) if fill is not None else None
        if fill is None or value is None:
            continue
        sign = _too_large(source, value)
        if sign and _is_float16(source, fill.operand):
            yield source.find(RULE, value, fix=_fix(source, fill.operand, value, sign))
    yield from _stored(source)
    for product in source.all(cst.BinaryOperation):
        if not isinstance(product.operator, cst.Multiply):
            continue
        for value, other in ((product.left, product.right), (product.right, product.left)):
            if _too_large(source, value) and is_half(source, other):
                yield source.find(RULE, value)


def _stored(source: Source) -> Iterator[Finding]:
    """`scores[mask] = -1e9`."""
    for statement in source.all(cst.Assign):
        target = statement.targets[0].target
        sign = _too_large(source, statement.value)
        if not sign or len(statement.targets) > 1 or not isinstance(target, cst.Subscript):
            continue
        if _is_float16(source, target.value):
            fix = _fix(source, target.value, statement.value, sign)
            yield source.find(RULE, statement.value, fix=fix)


def _is_float16(source: Source, node: Node) -> bool:
    return is_half(source, node) or is_lowered(source, node)


def _too_large(source: Source, value: Node) -> int:
    """-1 or 1 for a number below or above float16's range, else 0."""
    if isinstance(value, cst.UnaryOperation) and isinstance(value.operator, cst.Minus):
        return -_too_large(source, value.expression)
    number = constant(source, value)
    if number is not None:
        return 0 if abs(number) <= _LARGEST else 1 if number > 0 else -1
    if isinstance(value, cst.Name):
        binding = source.names.only_binding(value)
        inner = binding.value if binding is not None and binding.kind == "assign" else None
        return _limit(source, inner)
    return _limit(source, value)


def _limit(source: Source, node: Node | None) -> int:
    """`torch.finfo(torch.float32).min` and `.max`."""
    if not isinstance(node, cst.Attribute) or not isinstance(node.value, cst.Call):
        return 0
    call = node.value
    if source.origin(call.func) not in ("torch.finfo", "numpy.finfo") or len(call.args) != 1:
        return 0
    if source.origin(call.args[0].value) not in _WIDE:
        return 0
    return {"min": -1, "max": 1}.get(node.attr.value, 0)


def _fix(source: Source, tensor: Node, value: Node, sign: int) -> Fix | None:
    """The limit of the tensor's own dtype, if the tensor has a name."""
    name = name_for(source, "torch", value)
    if not isinstance(tensor, (cst.Name, cst.Attribute)) or name is None:
        return None
    limit = "min" if sign < 0 else "max"
    text = f"{name[0]}.finfo({source.code(tensor)}.dtype).{limit}"
    return source.fix(
        "Use the limit of the dtype", source.replace(value, text), name[1], unsafe=True
    )


VALID = (
    Case("""
        import torch

        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    """),
    Case(
        """
        import torch

        scores = torch.matmul(q, k)
        a = scores.masked_fill(mask, float("-inf"))
        b = scores.masked_fill(mask, -torch.inf)
        c = scores.masked_fill(mask, -1e4)
        """,
        note="Infinity and -1e4 are fine.",
    ),
    Case("""
        import torch

        labels = batch["labels"].masked_fill(mask, 10000000)
        rewards = rewards.masked_fill(done, -1e9)
    """),
    Case(
        """
        import torch

        scores = torch.matmul(q, k).float()
        scores = scores.masked_fill(mask, -1e9)
        """,
        note="In float32.",
    ),
    Case("""
        import torch

        def attend(scores, q):
            scores = torch.softmax(scores @ q, -1)
            return scores.masked_fill(mask, -1e9).to(q.dtype)
    """),
    Case(
        """
        import torch

        def additive(mask):
            lower = mask.to(torch.float16)
            return (1.0 - lower) * -1e4
        """,
    ),
)

INVALID = (
    Case(
        """
        import torch

        scores = torch.matmul(q, k.transpose(-2, -1)) / d**0.5
        scores = scores.masked_fill(mask == 0, -1e9)
        """,
        """
        import torch

        scores = torch.matmul(q, k.transpose(-2, -1)) / d**0.5
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        NEVER = torch.finfo(torch.float32).min

        def attend(q, k, mask, causal):
            dots = torch.einsum("bid,bjd->bij", q, k) * 0.125
            if causal:
                dots.masked_fill_(mask, value=NEVER)
            return dots.softmax(-1)
        """,
        """
        import torch

        NEVER = torch.finfo(torch.float32).min

        def attend(q, k, mask, causal):
            dots = torch.einsum("bid,bjd->bij", q, k) * 0.125
            if causal:
                dots.masked_fill_(mask, value=torch.finfo(dots.dtype).min)
            return dots.softmax(-1)
        """,
        unsafe=True,
        count=1,
    ),
    Case("""
        import torch

        weights = torch.softmax((q @ k).masked_fill(mask, -1e10), dim=-1)
    """),
    Case(
        """
        import math
        import torch

        def attend(q, k, mask):
            with torch.autocast("cuda", dtype=torch.float16):
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
                scores[mask == 0] = -1e9
                return scores.softmax(-1)
        """,
        """
        import math
        import torch

        def attend(q, k, mask):
            with torch.autocast("cuda", dtype=torch.float16):
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
                scores[mask == 0] = torch.finfo(scores.dtype).min
                return scores.softmax(-1)
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def additive(mask):
            lower = mask.to(torch.float16)
            return (1.0 - lower) * -1e9
        """,
        note="The product is minus infinity, and a row of only that is NaN after softmax.",
    ),
)

RULE = Rule(
    code="AMP404",
    name="mask-beyond-float16",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="float16 ends at 65504: this raises in a float16 region; use `torch.finfo(x.dtype).min`",
    what=(
        "`masked_fill` with a number beyond 65504, or with the limit of float32, on a product of matrices: such "
        "products are float16 in a float16 region."
    ),
    why='`masked_fill` raises "value cannot be converted to type c10::Half without overflow".',
    fine="The code runs in float32 or bfloat16 only.",
    words=("masked_fill", "autocast mask", "float16 mask", ".half() mask"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
