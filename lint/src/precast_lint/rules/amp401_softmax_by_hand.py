"""AMP401: a softmax that is written out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.tensors import TensorOperation, constant, is_layer, operation, value_of
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, children, cst

__all__ = ["RULE"]

# Parts of names that suggest a bounded exponent. A maximum or a distance bounds it only if it is subtracted.
_SMALL = re.compile(
    r"(?<![a-z])(log(p|pt|prob|probs|norm|density)?|log_?softmax|stab\w*|shift\w*|clamp\w*|clip(ped)?|sigma|tanh|cos"
    r"(ine)?|normali[sz]ed?|a?range|linspace)(?![a-z])"
)
_SUBTRACT = ("sub_", "subtract_", "clamp_", "clamp_max_", "clip_", "neg_")
_DEPTH = 4  # an expression, what its names are given, and so on
_STEPS = 6  # masks of a numerator
_SEVERAL = 4  # values of a name


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `exp(x) / exp(x).sum(...)`."""
    for division, rest, right in _divisions(source):
        power = _power(source, _picked_of(source, rest))
        total = _sum(source, right)
        if power is None or total is None or _is_bounded(source, power.operand):
            continue
        whole = _picked_of(source, rest)
        same = source.code(total.operand) == source.code(whole) or (
            source.code(value_of(source, total.operand)) == source.code(power.call)
        )
        if same:
            yield source.find(RULE, division)
    for call, arguments in source.calls("torch.nn.functional.normalize"):
        order = arguments.get("p", 1)
        if order is None or constant(source, order) != 1 or not arguments.positional:
            continue
        power = _power(source, arguments.positional[0])
        if power is not None and not _is_bounded(source, power.operand):
            yield source.find(RULE, call)


def _picked_of(source: Source, node: Node) -> Node:
    """Return the tensor whose elements are selected: `e` of `e.gather(1, y[:, None]).squeeze(1)`."""
    result = node
    for _ in range(_DEPTH):
        shape = operation(source, value_of(source, result), "squeeze", "gather")
        if shape is None:
            return node
        result = shape.operand
        if shape.name == "gather":
            return result
    return node


def _power(source: Source, node: Node, depth: int = _STEPS) -> TensorOperation | None:
    """Return the exponential in a numerator, also with a mask as a factor or by a test."""
    if depth == 0:
        return None
    if isinstance(node, cst.Name):
        powers = [_power(source, value, depth - 1) for value in _values(source, node)]
        results = [power for power in powers if power is not None]
        return results[0] if results and len(results) == len(powers) else _in_place(source, node)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
        rest, right = (_power(source, side, depth - 1) for side in (node.left, node.right))
        return rest or right
    if isinstance(node, cst.IfExp):
        first, second = (_power(source, side, depth - 1) for side in (node.body, node.orelse))
        return first if second is not None else None
    masked = operation(source, node, "masked_fill", "mul", "masked_fill_", "mul_")
    if masked is not None:
        return _power(source, masked.operand, depth - 1)
    if isinstance(node, cst.Call) and source.origin(node.func) == "torch.where":
        chosen = [arg.value for arg in node.args[1:] if arg.keyword is None]
        return next((p for n in chosen if (p := _power(source, n, depth - 1)) is not None), None)
    return operation(source, node, "exp")


def _values(source: Source, name: cst.Name) -> list[Node]:
    """Return the possible values of a name at a read, without in-place factors and divisors."""
    if name not in source.scopes.scope_of:
        return []
    results = values_seen(source, name)
    if len(results) > _SEVERAL or not _are_zeros(source, name):
        return []
    around = {name, *source.around(name)}
    values: list[Node] = []
    for binding in results:
        outer = source.parents.get(binding.node)
        if isinstance(outer, cst.AugAssign) and outer.target is binding.node:
            if isinstance(outer.operator, cst.MultiplyAssign):
                values += [outer.target] if len(results) == 1 else []
            elif outer not in around:
                return []
        elif binding.value in around:
            continue
        elif binding.kind != "assign" or binding.value is None:
            return []
        else:
            values.append(binding.value)
    return values


def _are_zeros(source: Source, name: cst.Name) -> bool:
    """Return True if only zeros are assigned to parts of a tensor: `weights[mask] = 0`."""
    scope = source.scopes.scope_of[name].home(name.value)
    for other in source.scopes.references(scope, name.value) if scope is not None else ():
        item = source.parents.get(other)
        target = source.parents.get(item) if isinstance(item, cst.Subscript) else None
        if isinstance(target, (cst.AugAssign, cst.AssignTarget)):
            statement = source.parents[target] if isinstance(target, cst.AssignTarget) else None
            value = statement.value if isinstance(statement, cst.Assign) else None
            if constant(source, value) != 0:
                return False
    return True


def _in_place(source: Source, name: cst.Name) -> TensorOperation | None:
    """Return the operation of `scores.exp_()`, a statement that always runs before a read of the name."""
    for call, owner, arguments in source.methods("exp_"):
        is_it = isinstance(owner, cst.Name) and owner.value == name.value
        if not is_it or source.function(call) is not source.function(name):
            continue
        line = source.statement(call)
        block = source.block(line)
        behind = block[block.index(line) + 1 :] if line in block else []
        is_read = {*behind} & {*source.around(name)} and not arguments.positional
        if is_read and not _is_subtracted(source, name):
            return TensorOperation("exp", owner, (), {}, call, is_method=True)
    return None


def _divisions(source: Source) -> Iterator[tuple[Node, Node, Node]]:
    """Yield each `a / b`, `torch.div(a, b)` and `a.div(b)`, with its numerator and denominator."""
    for division in source.all(cst.BinaryOperation):
        if isinstance(division.operator, cst.Divide):
            yield division, division.left, division.right
        elif isinstance(division.operator, cst.Multiply):
            sides = (division.left, division.right)
            for one, factor in (sides, sides[::-1]):
                below = _inverted(source, factor)
                if below is not None:
                    yield division, one, below
    for update in source.all(cst.AugAssign):
        if isinstance(update.operator, cst.DivideAssign):
            yield update, update.target, update.value
    for call in source.all(cst.Call):
        result = operation(source, call, "div", "div_", "divide", "true_divide")
        other = result.get("other", 0) if result is not None else None
        if result is not None and other is not None:
            yield call, result.operand, other


def _inverted(source: Source, node: Node) -> Node | None:
    """Return the x of `1 / x`, `x.reciprocal()` and `x ** -1`, or of a name for one of them."""
    node = value_of(source, node)
    if isinstance(node, cst.BinaryOperation):
        if isinstance(node.operator, cst.Divide):
            return node.right if constant(source, node.left) == 1 else None
        is_power = isinstance(node.operator, cst.Power) and constant(source, node.right) == -1
        return node.left if is_power else None
    result = operation(source, node, "reciprocal")
    return result.operand if result is not None else None


def _sum(source: Source, node: Node) -> TensorOperation | None:
    """Return the sum in a denominator, also by a name and with a small number added."""
    node = value_of(source, node)
    plus = node if isinstance(node, cst.BinaryOperation) else None
    if plus and isinstance(plus.operator, cst.Add) and constant(source, plus.right) is not None:
        node = value_of(source, plus.left)
    limited = operation(source, node, "clamp", "clamp_min", "add")
    node = value_of(source, limited.operand) if limited is not None else node
    if isinstance(node, cst.Subscript):
        node = value_of(source, node.value)
    if (shape := operation(source, node, "unsqueeze", "view", "expand_as")) is not None:
        node = value_of(source, shape.operand)
    return operation(source, node, "sum")


def _is_bounded(source: Source, node: Node) -> bool:
    """Return True if an exponent, or the value of a name in it, suggests that it is not large."""
    visited: set[Node] = set()
    latest = {node}
    for _ in range(_DEPTH):
        if any(_says_small(source, inner) for inner in latest):
            return True
        visited |= latest
        latest = {value for inner in latest for value in _given(source, inner)} - visited
    return False


def _says_small(source: Source, node: Node) -> bool:
    """Return True if an expression has a difference, a sign, or a name that bounds it."""
    first = node
    while isinstance(first, cst.BinaryOperation):
        if isinstance(first.operator, cst.Subtract):
            return True
        first = first.left
    if isinstance(first, cst.UnaryOperation) and isinstance(first.operator, cst.Minus):
        return True
    value = constant(source, first)
    if value is not None and value < 0:
        return True
    if operation(source, first, "sub", "subtract", "sub_", "neg") is not None:
        return True
    if isinstance(first, cst.Name) and _is_subtracted(source, first):
        return True
    return any(_SMALL.search(inner.value) for inner in _names(source, node))


def _is_subtracted(source: Source, name: cst.Name) -> bool:
    home = source.scopes.scope_of[name].home(name.value) if name in source.scopes.scope_of else None
    for other in source.scopes.references(home, name.value) if home is not None else ():
        outer = source.parents.get(other)
        if isinstance(outer, cst.AugAssign) and outer.target is other:
            if isinstance(outer.operator, cst.SubtractAssign):
                return True
        elif isinstance(outer, cst.Attribute) and outer.attr.value in _SUBTRACT:
            return True
    return False


def _given(source: Source, node: Node) -> set[Node]:
    bound = [b for name in _names(source, node) for b in source.names.bindings(name)]
    return {b.value for b in bound if b.value is not None}


def _names(source: Source, node: Node) -> list[cst.Name]:
    """Return the names in an expression, without those in a layer's input: the layer's result may be large."""
    waiting, result = [node], []
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, cst.Name):
            result.append(inner)
        elif not (isinstance(inner, cst.Call) and is_layer(source, inner.func)):
            waiting += children(inner)
    return result


RULE = LintRule(
    code="AMP401",
    name="softmax-by-hand",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="`exp(x)` overflows float16 above 11, float32 above 88: use `torch.softmax`",
    what="A softmax that is written as `exp(x) / exp(x).sum(...)`, without subtracting the maximum first.",
    why="inf divided by inf is NaN. `torch.softmax` subtracts the maximum, and is one kernel instead of three.",
    fine="The values are always small.",
    words=("torch exp( sum(", "torch exp_( sum(", "torch exp( functional normalize( p=1"),
    check=check,
    example="""
 import torch

-weights = torch.exp(x) / torch.exp(x).sum(dim=-1, keepdim=True)
+weights = torch.softmax(x, dim=-1)
""",
)
