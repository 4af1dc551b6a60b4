"""AMP406: reductions and squeezes over all dimensions."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.tensors import Operation, operation
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_REDUCTIONS = ("sum", "mean", "prod", "max", "min", "std", "var", "norm", "squeeze")
_MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each of them in a module's forward."""
    for function in source.all(cst.FunctionDef):
        if function.name.value == "forward" and _is_module(source, function):
            for call in source.all(cst.Call):
                found = operation(source, call, *_REDUCTIONS)
                if found is None or source.function(call) is not function:
                    continue
                if found.positional or found.keywords:
                    continue
                if _is_of_batch(source, function, found):
                    yield source.find(RULE, call, RULE.message.format(name=found.name))


def _is_module(source: Source, function: cst.FunctionDef) -> bool:
    home = source.values.enclosing_class(function)
    return isinstance(home, cst.ClassDef) and any(
        source.origin(base.value) in _MODULES for base in home.bases
    )


def _is_of_batch(source: Source, function: cst.FunctionDef, found: Operation) -> bool:
    """Whether it is `squeeze`, or one number by which the same tensor is shifted or divided."""
    if found.name == "squeeze":
        return True
    tensor = key(source, found.operand)
    statement = source.parents[found.call]
    names: list[str | None] = []
    if isinstance(statement, cst.Assign):
        names = [key(source, target.target) for target in statement.targets]
    for node in walk(function.body):
        if not isinstance(node, cst.BinaryOperation) or key(source, node.left) != tensor:
            continue
        is_scale = isinstance(node.operator, (cst.Divide, cst.Subtract))
        if is_scale and (node.right is found.call or key(source, node.right) in names):
            return True
    return False


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
)

RULE = Rule(
    code="AMP406",
    name="reduction-without-dim",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="`{name}` without a dim works on the batch as well",
    what=(
        "In the `forward` of a module: `squeeze` without a dim, and a tensor from which its own mean over all is "
        "taken, or that is divided by its own maximum, norm or sum."
    ),
    why=(
        "The result of one example then depends on the others in the batch; `squeeze` takes the batch's dimension away "
        "if it has one example. A sum over everything is also what overflows float16 first."
    ),
    fine="One number for the whole batch is meant.",
    words=("torch forward",),
    check=check,
    valid=VALID,
    invalid=INVALID,
    default=False,
)
