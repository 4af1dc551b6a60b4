"""Detection of tensors that a region computed in lower precision, behind the region.

Invariants: both are said only with evidence for each value that a name may have; what the tensor came through
on its way keeps the dtype, and stands behind the region, where nothing is cast.
"""

from __future__ import annotations

import re

from precast_lint.meaning.assignments import value_stored, values_seen
from precast_lint.meaning.kinds import is_device, is_number, is_text
from precast_lint.meaning.regions import Region, region_in_force
from precast_lint.meaning.tensors import constant, is_lowered, operation
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk

__all__ = ["SHAPES", "casts_modules", "lowered_by"]

_DEEP = 8
SHAPES = (
    *(
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "flatten",
        "movedim",
        "narrow",
        "permute",
    ),
    *(
        "repeat",
        "reshape",
        "select",
        "squeeze",
        "swapaxes",
        "t",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
    ),
)
"""The operations that give the elements of their operand, or some of them, in its dtype."""

_KEEPS = (
    *(
        "abs",
        "amax",
        "amin",
        "clamp",
        "dropout",
        "exp",
        "gelu",
        "leaky_relu",
        "log",
        "log_softmax",
        "masked_fill",
    ),
    *(
        "mean",
        "neg",
        "normalize",
        "relu",
        "sigmoid",
        "silu",
        "softmax",
        "sqrt",
        "square",
        "sum",
        "tanh",
    ),
)
_VIEWS = ("T", "mT", "H", "mH", "data")
_MODULE_NAMES = re.compile(
    r"^self$|model|net|module|encoder|decoder|backbone|head|layer|proj", re.IGNORECASE
)
_LOW = ("torch.float16", "torch.half", "torch.bfloat16")


def casts_modules(source: Source) -> bool:
    """Return True if a file casts a module to 16 bits, so that weights may not be float32."""
    cached = source.cache.get("casts modules")
    if cached is None:
        cached = any(
            isinstance(source.parents[call], cst.Expr)
            or isinstance(owner, cst.Call)
            or _is_module(owner)
            for call, owner, arguments in source.methods("half", "bfloat16", "to", "type")
            if _is_low_cast(source, call, arguments)
        )
        source.cache["casts modules"] = cached
    return bool(cached)


def _is_module(owner: Node) -> bool:
    """Return True if a name says that it is a module."""
    name = dotted(owner) or ""
    return bool(_MODULE_NAMES.search(name.rpartition(".")[2]))


def _is_low_cast(source: Source, call: cst.Call, arguments: Arguments) -> bool:
    assert isinstance(call.func, cst.Attribute)
    if call.func.attr.value in ("half", "bfloat16"):
        return not call.args
    values = [*arguments.positional, *arguments.keywords.values()]
    return any(source.origin(value) in _LOW or "dtype" in source.code(value) for value in values)


def lowered_by(
    source: Source, node: Node, depth: int = _DEEP, keeps: bool = True
) -> tuple[Node, Region] | None:
    """The tensor in an expression that a region computed in lower precision, and that region.

    Args:
        source: the file.
        node: the expression.
        depth: how many names and operations are followed.
        keeps: whether operations that give the dtype of their operand are followed, and not its shapes alone.
    """
    if depth == 0:
        return None
    if isinstance(node, cst.Name):
        region = _of_name(source, node, depth, keeps)
        return (node, region) if region is not None else None
    if isinstance(node, cst.Attribute):
        if node.attr.value in _VIEWS:
            return lowered_by(source, node.value, depth - 1, keeps)
        region = _of_attribute(source, node)
        return (node, region) if region is not None else None
    if isinstance(node, cst.Subscript):
        return lowered_by(source, node.value, depth - 1, keeps)
    if isinstance(node, cst.BinaryOperation):
        if not keeps or not isinstance(
            node.operator, (cst.Add, cst.Subtract, cst.Multiply, cst.Divide)
        ):
            return None
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if _is_scalar(source, other):
                return lowered_by(source, side, depth - 1, keeps)
        return None
    if not isinstance(node, cst.Call):
        return None
    selection = operation(source, node, *SHAPES, *(_KEEPS if keeps else ()))
    if selection is not None and "dtype" not in selection.keywords:
        return lowered_by(source, selection.operand, depth - 1, keeps)
    if (
        isinstance(node.func, cst.Attribute)
        and node.func.attr.value == "to"
        and _is_moved(source, node)
    ):
        return lowered_by(source, node.func.value, depth - 1, keeps)
    region = _of_call(source, node, depth, keeps)
    return (node, region) if region is not None else None


def _of_name(source: Source, name: cst.Name, depth: int, keeps: bool) -> Region | None:
    """The region in which all values that a name may have were computed; None where one was not."""
    results: list[Region | None] = []
    if name not in source.scopes.scope_of:
        return None
    for binding in values_seen(source, name):
        if binding.kind != "assign" or binding.value is None or binding.node is name:
            return None
        region = _region_beside(source, name, binding)
        if region is not None:
            results.append(region if is_lowered(source, binding.value) else None)
        elif source.function(binding.node) is source.function(name):
            inner = lowered_by(source, binding.value, depth - 1, keeps)
            results.append(inner[1] if inner is not None else None)
        else:
            return None
    regions = [region for region in results if region is not None]
    return regions[0] if regions and len(regions) == len(results) else None


def _region_beside(source: Source, name: Node, binding: Binding) -> Region | None:
    """The region in force around a binding, if it is in the function of a name."""
    region = region_in_force(source, binding.node)
    function = source.function(name)
    is_beside = region is not None and function in (region.node, source.function(region.node))
    return region if is_beside else None


def _of_attribute(source: Source, node: cst.Attribute) -> Region | None:
    """The region that computed an attribute, `self.hidden`, which is given one thing, or that last in straight code."""
    values = source.values.sources(node)
    value = values[0][0] if len(values) == 1 and values[0][1] is None else None
    value = value if value is not None else value_stored(source, node)
    region = region_in_force(source, value) if value is not None else None
    return region if region is not None and is_lowered(source, value) else None  # type: ignore[arg-type]


def _of_call(source: Source, call: cst.Call, depth: int, keeps: bool) -> Region | None:
    """The region in which a function of this file computes all that it returns."""
    function = source.values.handed.function_called(call)
    if function is None or function.asynchronous is not None:
        return None
    decorators = [d.decorator for d in function.decorators]
    returned = returned_by(function)
    definitions: list[Region] = []
    for value in returned:
        region = region_in_force(source, value)
        if region is None and not decorators:
            result = lowered_by(source, value, depth - 1, keeps)
            region = result[1] if result is not None else None
        elif not is_lowered(source, value):
            return None
        if region is None:
            return None
        definitions.append(region)
    is_plain = all(any(d is region.call for region in definitions) for d in decorators)
    return definitions[0] if definitions and is_plain else None


def _is_scalar(source: Source, node: Node) -> bool:
    """Return True if a factor is a number of Python's, which changes no dtype: `0.5`, `x.size(0)`, `x.shape[0]`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name = node.func.attr.value
        return name == "numel" or (name == "size" and bool(node.args)) or is_number(source, node)
    if isinstance(node, cst.Subscript) and isinstance(node.value, cst.Attribute):
        return node.value.attr.value == "shape"
    return constant(source, node) is not None or is_number(source, node)


def _is_moved(source: Source, call: cst.Call) -> bool:
    """Return True if `x.to(...)` is told a device, and no dtype."""
    for arg in call.args:
        if arg.star:
            return False
        if arg.keyword is not None and arg.keyword.value in ("device", "non_blocking", "copy"):
            continue
        named = any(isinstance(n, cst.Name) and n.value == "device" for n in walk(arg.value))
        if arg.keyword is not None or not (
            named or is_device(source, arg.value) or is_text(source, arg.value)
        ):
            return False
    return bool(call.args)
