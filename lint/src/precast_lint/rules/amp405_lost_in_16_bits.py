"""AMP405: values that 16 bits round: positions, averages, operands in float32, and weights in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.assignments import the_value
from precast_lint.meaning.callers import runs_in_region
from precast_lint.meaning.tensors import constant, operation, value_of
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, string_value
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_WHOLE = {"torch.bfloat16": 256, "torch.float16": 2048, "torch.half": 2048}
_CASTS = {"bfloat16": "torch.bfloat16", "half": "torch.float16"}
_LENGTHS = re.compile(r"seq(uence)?_?len|max_(len|pos|seq)|context|block_size|steps", re.IGNORECASE)
_TIMES = re.compile(r"^(t|sigma\w*|time\w*)$", re.IGNORECASE)
_VIEWS = ("t", "transpose", "permute", "view", "reshape", "unsqueeze", "expand", "contiguous")
_KEEPS = ("cpu", "cuda", "eval", "train", "requires_grad_", "state_dict")
_SLOW = 0.01  # an average that takes less than this of the new value
_POSITIONS = "{dtype} holds whole numbers up to {largest} only: compute this in float32"
_OPERANDS = "the region rounds these float32 operands to 16 bits again: switch it off here"
_AVERAGE = "an average in 16 bits does not move: its updates are smaller than half a step; keep it in float32"
_WEIGHTS = "training goes on from these weights, and each time they are rounded to 16 bits: save them in float32"


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each such value."""
    for call in source.all(cst.Call):
        if (dtype := _cast(source, call)) is not None:
            yield from _positions(source, call, dtype)
        if source.origin(call.func) == "torch.save" and call.args:
            yield from _checkpoint(source, call.args[0].value)
        product = operation(source, call, "matmul", "mm", "bmm")
        other = product.get("other", 0) or product.get("mat2", 0) if product is not None else None
        if product is not None and other is not None:
            yield from _product(source, call, product.operand, other)
        if _is_slow_average(source, call) and _is_of_low_model(source, call):
            yield source.find(RULE, call, _AVERAGE)
    for node in source.all(cst.BinaryOperation):
        if isinstance(node.operator, cst.MatrixMultiply):
            yield from _product(source, node, node.left, node.right)
        elif isinstance(node.operator, cst.Multiply):
            yield from _times(source, node)


def _cast(source: Source, node: Node) -> str | None:
    """Return the 16-bit dtype of the tensor or module that a call makes or casts."""
    if not isinstance(node, cst.Call):
        return None
    arguments = Arguments.of(node)
    name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
    if name in _CASTS and not node.args:
        return _CASTS[name]
    is_cast = name == "to" or source.origin(node.func) in ("torch.arange", "torch.randint")
    values = [arguments.keywords.get("dtype"), *(arguments.positional if name == "to" else ())]
    dtypes = [d for value in values if is_cast and (d := source.origin(value)) in _WHOLE]
    return dtypes[0] if dtypes else None


def _positions(source: Source, call: cst.Call, dtype: str) -> Iterator[LintFinding]:
    is_maker = source.origin(call.func) is not None
    value = call if is_maker else value_of(source, call.func.value)  # type: ignore[attr-defined]
    if not isinstance(value, cst.Call):
        return
    if source.origin(value.func) not in ("torch.arange", "torch.randint"):
        return
    numbers = Arguments.of(value).positional[:2]
    ends = [number for number in numbers if not isinstance(number, cst.Tuple)]
    limits = [constant(source, end) for end in ends]
    is_large = any(limit is not None and limit > _WHOLE[dtype] + 1 for limit in limits)
    is_long = any(
        n is None and _LENGTHS.search(key(source, e) or "")
        for n, e in zip(limits, ends, strict=True)
    )
    if is_large or (is_long and dtype == "torch.bfloat16"):
        yield source.find(RULE, call, _POSITIONS.format(dtype=dtype, largest=_WHOLE[dtype]))


def _times(source: Source, product: cst.BinaryOperation) -> Iterator[LintFinding]:
    for side, factor in ((product.left, product.right), (product.right, product.left)):
        dtype, number = _cast(source, side), constant(source, factor)
        if dtype is None or number is None or number <= _WHOLE[dtype]:
            continue
        owner = side.func.value  # type: ignore[attr-defined]
        is_random = isinstance(owner, cst.Call) and source.origin(owner.func) == "torch.rand"
        if is_random or _TIMES.search(key(source, owner) or ""):
            yield source.find(RULE, product, _POSITIONS.format(dtype=dtype, largest=_WHOLE[dtype]))


def _product(source: Source, node: Node, first: Node, second: Node) -> Iterator[LintFinding]:
    if _is_float(first) and _is_float(second) and runs_in_region(source, node):
        yield source.find(RULE, node, _OPERANDS)


def _is_float(node: Node) -> bool:
    while isinstance(node, cst.Subscript) or (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in _VIEWS
    ):
        node = node.value if isinstance(node, cst.Subscript) else node.func.value  # type: ignore[attr-defined]
    func = node.func if isinstance(node, cst.Call) and not node.args else None
    return isinstance(func, cst.Attribute) and func.attr.value == "float"


def _checkpoint(source: Source, state: Node) -> Iterator[LintFinding]:
    """Yield a finding for weights in 16 bits that are saved beside the optimizer's state."""
    table = value_of(source, state)
    elements = table.elements if isinstance(table, cst.Dict) else ()
    entries = [
        (string_value(e.key) or "", e.value) for e in elements if isinstance(e, cst.DictElement)
    ]
    if any("optim" in name and "state_dict" in source.code(value) for name, value in entries):
        low = [v for name, v in entries if "optim" not in name and _is_low_model(source, v)]
        for value in low[:1]:
            yield source.find(RULE, value, _WEIGHTS)


def _is_low_model(source: Source, node: Node) -> bool:
    """Return True for `copy.deepcopy(model).half()`, also with other methods behind it."""
    node = the_value(source, node) or node
    while isinstance(node, cst.Call):
        func = node.func
        if source.origin(func) == "copy.deepcopy" and node.args:
            node = the_value(source, node.args[0].value) or node.args[0].value
        elif not isinstance(func, cst.Attribute) or _cast(source, node) is not None:
            return isinstance(func, cst.Attribute)
        elif func.attr.value in (*_KEEPS, "to"):
            node = func.value
        else:
            return False
    return False


def _is_slow_average(source: Source, call: cst.Call) -> bool:
    update = operation(source, call, "lerp_", "add_")
    if update is None:
        return False
    if update.name == "lerp_":
        weight = constant(source, update.get("weight", 1))
        return weight is not None and weight <= _SLOW
    factor = operation(source, update.operand, "mul_")
    decay = constant(source, factor.get("other", 0)) if factor is not None else None
    return decay is not None and 1 - _SLOW <= decay < 1


def _is_of_low_model(source: Source, call: cst.Call) -> bool:
    """Return True if the updated tensor is a parameter of a model in 16 bits: of `zip(a.parameters(), ...)`."""
    target: Node = call
    while isinstance(target, cst.Call) and isinstance(target.func, cst.Attribute):
        target = target.func.value
    for loop in (outer for outer in source.around(call) if isinstance(outer, cst.For)):
        names = loop.target.elements if isinstance(loop.target, cst.Tuple) else ()
        arguments = loop.iter.args if isinstance(loop.iter, cst.Call) else ()
        for name, argument in zip(names, arguments, strict=False):
            func = argument.value.func if isinstance(argument.value, cst.Call) else None
            if key(source, name.value) == key(source, target) and isinstance(func, cst.Attribute):
                return _is_low_model(source, func.value)
    return False


RULE = LintRule(
    code="AMP405",
    name="lost-in-16-bits",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message=_POSITIONS,
    what=(
        "Values that 16 bits round, and that the program needs exactly: positions and time steps above 256 in bfloat16 "
        "or 2048 in float16; operands that are cast with `.float()` for a product in a region, which casts them back; "
        "averages of a model in 16 bits; weights that are saved in 16 bits beside the optimizer's state."
    ),
    why=(
        "Above 256 bfloat16 has no odd numbers, so neighbouring positions become one. An average that takes 0.001 of a "
        "new value changes by less than half a step, and stays what it was. Training that goes on from a checkpoint "
        "in float16 rounds its weights at each start."
    ),
    fine="The values need not be exact, or the checkpoint is for inference.",
    words=(
        *(
            f"torch {number}( {dtype}"
            for number in ("arange", "randint")
            for dtype in ("bfloat16", "float16", "half(")
        ),
        *(f"torch {dtype} 000" for dtype in ("bfloat16", "float16")),
        "autocast .float()",
        *(
            f"torch {update}( {dtype}"
            for update in ("lerp_", "mul_")
            for dtype in ("bfloat16", "half(")
        ),
        *(f"torch.save optim {dtype}" for dtype in ("half(", "float16")),
    ),
    check=check,
    example="""
 import torch

-positions = torch.arange(4096, dtype=torch.bfloat16)
+positions = torch.arange(4096, dtype=torch.float32)
 angles = positions[:, None] * frequencies
""",
)
