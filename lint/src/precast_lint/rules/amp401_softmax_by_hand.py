"""AMP401: a softmax that is written out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.editing.imports import name_for
from precast_lint.editing.lines import block_of
from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.tensors import (
    Operation,
    constant,
    operation,
    starts_with_layer,
    value_of,
    written,
)
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, children, cst

__all__ = ["RULE"]

# Parts of names that say that an exponent is bounded. A maximum or a distance bounds nothing unless it is subtracted.
_SMALL = re.compile(
    r"(?<![a-z])(log(p|pt|prob|probs|norm|density)?|log_?softmax|stab\w*|shift\w*|clamp\w*|clip(ped)?|sigma|tanh|cos"
    r"(ine)?|normali[sz]ed?|a?range|linspace)(?![a-z])"
)
_SUBTRACT = ("sub_", "subtract_", "clamp_", "clamp_max_", "clip_", "neg_")
_DEPTH = 4  # an expression, what its names are given, and so on
_STEPS = 6  # masks of a numerator
_SEVERAL = 4  # values of a name


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `exp(x) / exp(x).sum(...)`."""
    for division, left, right in _divisions(source):
        power = _power(source, _picked_of(source, left))
        total = _sum(source, right)
        if power is None or total is None or _is_bounded(source, power.operand):
            continue
        whole = _picked_of(source, left)
        same = source.code(total.operand) == source.code(whole) or (
            source.code(value_of(source, total.operand)) == source.code(power.call)
        )
        if same:
            plain = isinstance(division, cst.BinaryOperation) and division.left is power.call
            fix = _fix(source, division, power, total) if plain else None
            yield source.find(RULE, division, fix=fix)
    for call, arguments in source.calls("torch.nn.functional.normalize"):
        order = arguments.get("p", 1)
        if order is None or constant(source, order) != 1 or not arguments.positional:
            continue
        power = _power(source, arguments.positional[0])
        if power is not None and not _is_bounded(source, power.operand):
            yield source.find(RULE, call)


def _picked_of(source: Source, node: Node) -> Node:
    """The tensor of which the targets' elements are divided: `e` of `e.gather(1, y[:, None]).squeeze(1)`."""
    found = node
    for _ in range(_DEPTH):
        shape = operation(source, value_of(source, found), "squeeze", "gather")
        if shape is None:
            return node
        found = shape.operand
        if shape.name == "gather":
            return found
    return node


def _power(source: Source, node: Node, depth: int = _STEPS) -> Operation | None:
    """The exponential that a numerator is, with or without a mask as a factor, also where a test masks it."""
    if depth == 0:
        return None
    if isinstance(node, cst.Name):
        powers = [_power(source, value, depth - 1) for value in _values(source, node)]
        found = [power for power in powers if power is not None]
        return found[0] if found and len(found) == len(powers) else _in_place(source, node)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
        left, right = (_power(source, side, depth - 1) for side in (node.left, node.right))
        return left or right
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
    """What a name may be given where it is read; what multiplies it in place, or divides what is read, is left out."""
    if name not in source.scopes.scope_of:
        return []
    found = values_seen(source, name)
    if len(found) > _SEVERAL or not _are_zeros(source, name):
        return []
    around = {name, *source.around(name)}
    values: list[Node] = []
    for binding in found:
        outer = source.parents.get(binding.node)
        if isinstance(outer, cst.AugAssign) and outer.target is binding.node:
            if isinstance(outer.operator, cst.MultiplyAssign):
                values += [outer.target] if len(found) == 1 else []
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
    """Whether all that is stored in parts of a tensor is zero: `weights[mask] = 0`."""
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


def _in_place(source: Source, name: cst.Name) -> Operation | None:
    """`scores.exp_()`, a statement that comes before a read of the name in any case."""
    for call, owner, arguments in source.methods("exp_"):
        is_it = isinstance(owner, cst.Name) and owner.value == name.value
        if not is_it or source.function(call) is not source.function(name):
            continue
        line = source.statement(call)
        block = block_of(source, line)
        behind = block[block.index(line) + 1 :] if line in block else []
        is_read = {*behind} & {*source.around(name)} and not arguments.positional
        if is_read and not _is_lowered(source, name):
            return Operation("exp", owner, (), {}, call, is_method=True)
    return None


def _is_lowered(source: Source, name: cst.Name) -> bool:
    """Whether a function subtracts from a tensor in place: `scores.sub_(scores.max())`, `scores -= scores.max()`."""
    lowered = [owner for _, owner, _ in source.methods("sub_", "subtract_")]
    updates = source.all(cst.AugAssign)
    lowered += [u.target for u in updates if isinstance(u.operator, cst.SubtractAssign)]
    return any(
        isinstance(node, cst.Name)
        and node.value == name.value
        and source.function(node) is source.function(name)
        for node in lowered
    )


def _divisions(source: Source) -> Iterator[tuple[Node, Node, Node]]:
    """`a / b`, `torch.div(a, b)` and `a.div(b)`: each with what is divided, and by what."""
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
        found = operation(source, call, "div", "div_", "divide", "true_divide")
        other = found.get("other", 0) if found is not None else None
        if found is not None and other is not None:
            yield call, found.operand, other


def _inverted(source: Source, node: Node) -> Node | None:
    """The x of `1 / x`, `x.reciprocal()` and `x ** -1`, or of a name for one of them."""
    node = value_of(source, node)
    if isinstance(node, cst.BinaryOperation):
        if isinstance(node.operator, cst.Divide):
            return node.right if constant(source, node.left) == 1 else None
        is_power = isinstance(node.operator, cst.Power) and constant(source, node.right) == -1
        return node.left if is_power else None
    found = operation(source, node, "reciprocal")
    return found.operand if found is not None else None


def _sum(source: Source, node: Node) -> Operation | None:
    """The sum in a denominator: it, or a name of it, with or without a small number beside it."""
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
    """Whether an exponent can't be large, as far as its text says and that of what its names are given."""
    seen: set[Node] = set()
    latest = {node}
    for _ in range(_DEPTH):
        if any(_says_small(source, inner) for inner in latest):
            return True
        seen |= latest
        latest = {value for inner in latest for value in _given(source, inner)} - seen
    return False


def _says_small(source: Source, node: Node) -> bool:
    """Whether an expression has a difference, a sign, or a name that bounds it."""
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
    """Whether something is taken from a tensor in place: `x -= x.max()`, `x.sub_(x.max())`, `x.clamp_(max=10)`."""
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
    """The values that the names in an expression are given."""
    bound = [b for name in _names(source, node) for b in source.names.bindings(name)]
    return {b.value for b in bound if b.value is not None}


def _names(source: Source, node: Node) -> list[cst.Name]:
    """The names in an expression, without those in what a layer gets: its weights may make that large."""
    waiting, found = [node], []
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, cst.Name):
            found.append(inner)
        elif not (isinstance(inner, cst.Call) and starts_with_layer(source, inner.func)):
            waiting += children(inner)
    return found


def _fix(source: Source, division: Node, power: Operation, total: Operation) -> Fix | None:
    """One call, if the sum keeps its dimension and both exponentials stand there."""
    assert isinstance(division, cst.BinaryOperation)
    dim = total.get("dim", 0)
    keep = total.get("keepdim", 1)
    is_kept = isinstance(keep, cst.Name) and keep.value == "True"
    direct = power.call is division.left and total.call is division.right
    known = {"dim", "keepdim"} >= set(total.keywords) and len(total.positional) <= 2
    if dim is None or not is_kept or not direct or not known or isinstance(dim, cst.Tuple):
        return None
    name = name_for(source, "torch", division)
    if name is None or b"#" in source.code(division).encode():
        return None
    text = f"{name[0]}.softmax({source.code(power.operand)}, dim={written(source, dim)})"
    return source.fix("Call softmax", source.replace(division, text), name[1], unsafe=True)


VALID = (
    Case(
        """
        import torch

        def weigh(x, limit, hard):
            e = torch.exp(x)
            if limit is not None:
                e = e.clamp(max=limit)
            w = torch.relu(x)
            if not hard:
                w = torch.exp(x)
            return e / e.sum(-1, keepdim=True) + w / w.sum(-1, keepdim=True)
        """,
        note="What is divided may be something else than an exponential.",
    ),
    Case(
        """
        import torch

        def weigh(x, y, mask):
            x -= x.max(-1, keepdim=True)[0]
            e = torch.exp(x)
            if mask is not None:
                e = e * mask
            y.sub_(y.amax(-1, keepdim=True))
            f = torch.exp(y)
            g = y.sub(y.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True) + f / f.sum(-1, keepdim=True) + g / g.sum(-1, keepdim=True)
        """,
        note="The maximum is subtracted in place.",
    ),
    Case("""
        import torch

        score = torch.nn.Linear(8, 1)
        e = torch.tanh(score(x))
        weights = torch.exp(e) / torch.exp(e).sum(dim=1, keepdim=True)
    """),
    Case("""
        import torch

        x = x * (1 / x.sum())
        e = torch.exp(x - x.max())
        p = e * e.sum().reciprocal()
        q = torch.exp(x) * (2 / torch.exp(y).sum())
    """),
    Case("""
        import torch

        weights = torch.softmax(x, dim=-1)
    """),
    Case(
        """
        import torch

        def in_place(scores, others, dim):
            scores.sub_(scores.amax(dim, keepdim=True))
            scores.exp_()
            total = scores.sum(dim, keepdim=True)
            scores.div_(total)
            others -= others.amax(dim, keepdim=True)
            others.exp_()
            return scores, others / others.sum(dim, keepdim=True)
        """,
        note="The maximum is subtracted in place.",
    ),
    Case(
        """
        import torch

        e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
        weights = e / e.sum(dim=-1, keepdim=True)
        """,
        note="The maximum is subtracted.",
    ),
    Case("""
        import torch

        shifted = x - torch.amax(x, 1, keepdim=True)
        weights = shifted.exp() / shifted.exp().sum(1, keepdim=True)
    """),
    Case(
        """
        import torch

        kernel = torch.exp(-((grid - 5) ** 2) / (2 * width**2))
        kernel = kernel / kernel.sum()
        blur = torch.exp(-(grid**2)) / torch.exp(-(grid**2)).sum()
        """,
        note="An exponent that is never above zero.",
    ),
    Case(
        """
        import torch

        x = torch.linspace(-3, 3, 50)
        weights = torch.exp(x) / torch.exp(x).sum()
        steps = torch.arange(8)
        decay = steps.exp() / steps.exp().sum()
        """,
        note="Numbers whose size is written down.",
    ),
    Case("""
        import numpy as np
        import torch

        weights = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    """),
    Case("""
        import torch

        e = torch.exp(x)
        e[mask] = other
        weights = e / e.sum(-1, keepdim=True)
    """),
    Case("""
        import torch

        ratio = torch.exp(x) / torch.exp(y).sum(-1, keepdim=True)
    """),
    Case(
        """
        import torch

        power = torch.exp(log_prob)
        weights = power / power.sum(dim=-1, keepdim=True)
        """,
    ),
)

INVALID = (
    Case(
        """
        import torch

        def attend(q, k, mask=None, causal=None):
            scores = q @ k.transpose(-2, -1)
            e = torch.exp(scores)
            if mask is not None:
                e = e * mask
            elif causal is not None:
                e = torch.where(causal, e, 0.0)
            return e / e.sum(dim=-1, keepdim=True)

        def pool(x, score, mask=None):
            a = score(x).squeeze(-1)
            a = a.exp()
            a = a if mask is None else a.masked_fill(mask, 0.0)
            a[:, 0] = 0
            a /= a.sum(1, keepdim=True) + 1e-8
            return (a * x).sum(1)

        def route(x, mask):
            e = torch.matmul(x, x)
            e.exp_()
            if mask is not None:
                e *= mask
            return e / e.sum(-1, keepdim=True)
        """,
        count=3,
        note="A mask is a factor, also under a test and in place.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def loss(logits, target):
            e = torch.exp(logits)
            p = e.gather(1, target[:, None]).squeeze(1) / e.sum(1)
            return F.nll_loss(F.normalize(logits.exp(), p=1, dim=1), target) + p.mean()
        """,
        count=2,
    ),
    Case("""
        import torch

        def softmax(x):
            power = torch.exp(x)
            total = power.sum(dim=-1)
            other = power / total.unsqueeze(-1)
            return power / total[..., None]
    """),
    Case("""
        import torch
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, h):
                super().__init__()
                self.query, self.score = nn.Linear(h, h), nn.Linear(h, 1)

            def forward(self, hidden):
                e = self.score(torch.tanh(self.query(hidden))).squeeze(-1)
                return torch.exp(e) / torch.exp(e).sum(dim=1, keepdim=False)
    """),
    Case(
        """
        import torch

        def attend(scores, mask):
            e = scores.exp()
            e = e.masked_fill(mask, 0)
            return e / e.sum(1, keepdim=True).clamp(min=1e-6)

        def alpha(energy):
            alpha = torch.exp(energy)
            other = torch.exp(energy) * torch.exp(energy).sum(-1, keepdim=True).reciprocal()
            return alpha * (1 / alpha.sum(-1, keepdim=True))
        """,
        count=3,
    ),
    Case(
        """
        import torch

        def weights(scores):
            w = torch.exp(scores)
            w /= w.sum(1, keepdim=True)
            return w
        """,
        count=1,
    ),
    Case(
        """
        def masked_softmax(logits, mask):
            import torch

            weights = logits.exp() * mask
            return weights / weights.sum(-1, keepdim=True)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def weights(q, k):
            w = torch.matmul(q, k).exp()
            w = w / w.sum(dim=-1, keepdim=True)
            return w
        """,
    ),
    Case(
        """
        import torch

        weights = torch.exp(x) / torch.exp(x).sum(dim=-1, keepdim=True)
        """,
        """
        import torch

        weights = torch.softmax(x, dim=-1)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch as th

        def attend(q, k):
            return (q @ k).exp() / th.sum((q @ k).exp(), 1, True)
        """,
        """
        import torch as th

        def attend(q, k):
            return th.softmax(q @ k, dim=1)
        """,
        unsafe=True,
    ),
    Case("""
        import torch

        def attend(x):
            e = torch.exp(x)
            return e / e.sum(1)[:, None]
    """),
    Case("""
        import torch

        def attend(x):
            e = x.exp()
            total = e.sum(-1, keepdim=True)
            return e / (total + 1e-6)
    """),
    Case(
        """
        import torch

        power = torch.exp(logits)
        weights = power / power.sum(dim=-1, keepdim=True)
        """,
    ),
    Case(
        """
        import torch

        def attend(catalog):
            power = torch.exp(catalog)
            return torch.div(power, power.sum(-1, keepdim=True))
        """,
    ),
)

RULE = Rule(
    code="AMP401",
    name="softmax-by-hand",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="`exp(x)` overflows float16 above 11, float32 above 88: use `torch.softmax`",
    what="A softmax that is written as `exp(x) / exp(x).sum(...)`, without the maximum subtracted first.",
    why="inf divided by inf is NaN. `torch.softmax` subtracts the maximum, and is one kernel instead of three.",
    fine="The values are known to be small.",
    words=("torch exp( sum(", "torch exp_( sum(", "torch exp( functional normalize( p=1"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
