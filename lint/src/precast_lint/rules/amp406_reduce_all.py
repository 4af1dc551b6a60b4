"""AMP406: reductions and squeezes over all dimensions."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.tensor_values import is_module_method, is_tensor
from precast_lint.meaning.tensors import Operation, operation
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_REDUCTIONS = ("sum", "mean", "prod", "max", "min", "std", "var", "norm", "squeeze")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each of them that is one of a tensor."""
    for call in source.all(cst.Call):
        found = operation(source, call, *_REDUCTIONS)
        if found is None or found.positional or found.keywords:
            continue
        function = source.function(call)
        if not _is_tensor(source, function, found):
            continue
        if _is_of_batch(source, function or source.module, found):
            yield source.find(RULE, call, RULE.message.format(name=found.name))


def _is_tensor(source: Source, function: cst.FunctionDef | None, found: Operation) -> bool:
    """Whether what is reduced is a tensor: by the function it is in, or by how it was made."""
    if not found.is_method:
        return True
    is_forward = function is not None and function.name.value == "forward"
    return (is_forward and is_module_method(source, found.call)) or is_tensor(source, found.operand)


def _is_of_batch(source: Source, place: Node, found: Operation) -> bool:
    """Whether it is `squeeze`, or one number by which the same tensor is shifted or divided."""
    if found.name == "squeeze":
        return True
    tensor = key(source, _itself(found.operand))
    statement = source.parents[found.call]
    names: list[str | None] = []
    if isinstance(statement, cst.Assign):
        names = [key(source, target.target) for target in statement.targets]
    for node in walk(place):
        left, right = _scaled(node)
        if left is None or right is None:
            continue
        if not any(key(source, part) == tensor for part in _terms(left)):
            continue
        if any(n is found.call or key(source, n) in names for n in _terms(right)):
            return True
    return False


def _itself(node: Node) -> Node:
    """The tensor whose sizes, or whose copy, something is: x in `x.abs()` and `x.detach()`."""
    while (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in ("abs", "detach", "float")
    ):
        node = node.func.value
    return node


def _scaled(node: Node) -> tuple[Node | None, Node | None]:
    """A tensor, and what is subtracted from it or what it is divided by."""
    if isinstance(node, cst.BinaryOperation):
        is_scale = isinstance(node.operator, (cst.Divide, cst.Subtract))
        return (node.left, node.right) if is_scale else (None, None)
    if isinstance(node, cst.AugAssign):
        is_scale = isinstance(node.operator, (cst.DivideAssign, cst.SubtractAssign))
        return (node.target, node.value) if is_scale else (None, None)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and len(node.args) == 1:
        is_scale = node.func.attr.value in ("div", "div_", "sub", "sub_")
        return (node.func.value, node.args[0].value) if is_scale else (None, None)
    return None, None


def _terms(node: Node) -> Iterator[Node]:
    """The parts of a sum or difference: `x.max() - x.min() + eps`."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Add, cst.Subtract)):
        yield from _terms(node.left)
        yield from _terms(node.right)
    elif (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in ("clamp", "clamp_min", "item")
    ):
        yield from _terms(node.func.value)
        yield node
    else:
        yield node


VALID = (
    Case("""
        import torch

        class Loss(torch.nn.Module):
            def forward(self, x, y):
                loss = (x - y).abs().mean()
                count = y.sum()
                longest = y.max()
                return loss / count.clamp(min=1) * longest
    """),
    Case("""
        import torch

        class Pool(torch.nn.Module):
            def forward(self, x):
                x = x.mean(dim=(2, 3))
                return x.squeeze(-1)
    """),
    Case("""
        import numpy

        def forward(x):
            return x.squeeze()
    """),
    Case(
        """
        import numpy as np
        import torch

        def normalized(x: np.ndarray, y):
            return torch.from_numpy(x / x.max()), y / y.max()
        """,
        note="An array, and what nobody knows.",
    ),
    Case("""
        import numpy as np
        import torch

        def normalized(x):
            x = np.asarray(x)
            return (x - x.min()) / (x.max() - x.min())
    """),
)

INVALID = (
    Case("""
        import torch

        class Head(torch.nn.Module):
            def forward(self, x):
                return self.linear(x).squeeze()
    """),
    Case("""
        import torch
        from torch import nn

        class Gate(nn.Module):
            def forward(self, x):
                scale = torch.max(x)
                return x / scale
    """),
    Case(
        """
        import torch

        def normalized(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
            return (x - x.min()) / (x.max() - x.min() + eps)
        """,
        count=3,
        note="Outside of a module too, where it is certainly a tensor.",
    ),
    Case(
        """
        import torch

        @torch.no_grad()
        def evaluate(model, batches):
            model.eval()
            for x, y in batches:
                print(model(x).squeeze() - y)
        """,
    ),
    Case("""
        import torch

        model = torch.nn.Linear(8, 1)
        for x, y in batches:
            loss = torch.nn.functional.mse_loss(model(x).squeeze(), y)
    """),
    Case(
        """
        import torch

        class Attention(torch.nn.Module):
            def __init__(self, size):
                super().__init__()
                self.query = torch.nn.Linear(size, size)

            def scores(self, x):
                scores = self.query(x)
                return scores / scores.abs().max()

            def forward(self, x):
                x /= x.norm()
                x = x.div(x.sum())
                return self.scores(x)
        """,
        count=3,
    ),
)

RULE = Rule(
    code="AMP406",
    name="reduction-without-dim",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="`{name}` without a dim works on the batch as well",
    what=(
        "`squeeze` of a tensor without a dim, and a tensor from which its own mean over all is taken, or that is "
        "divided by its own maximum, norm or sum: in the `forward` of a module, and wherever the value is certainly a "
        "tensor."
    ),
    why=(
        "The result of one example then depends on the others in the batch; `squeeze` takes the batch's dimension away "
        "if it has one example. A sum over everything is also what overflows float16 first."
    ),
    fine="One number for the whole batch is meant.",
    words=(
        "torch forward",
        *(f"torch .{name}()" for name in _REDUCTIONS),
        *(f"torch.{name}(" for name in _REDUCTIONS),
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
    default=False,
)
