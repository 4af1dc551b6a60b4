"""AMP406: reductions and squeezes over all dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast.rewrite.model import Applicability, Case, Finding, Rule, Severity
from precast.rewrite.source import Source
from precast.rewrite.syntax import Node, cst
from precast.rewrite.tensors import Operation, operation

__all__ = ["RULE"]

_REDUCTIONS = ("sum", "mean", "prod", "max", "min", "std", "var", "norm", "squeeze")
_SCALAR = re.compile(r"loss|penalty|reg|total|count|num|acc|metric|correct|norm|err", re.IGNORECASE)
_MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each of them in a module's forward."""
    for function in source.all(cst.FunctionDef):
        if function.name.value == "forward" and _is_module(source, function):
            for call in source.all(cst.Call):
                found = operation(source, call, *_REDUCTIONS)
                if found is None or source.function(call) is not function:
                    continue
                if not found.positional and not found.keywords and not _is_scalar(source, found):
                    yield source.find(RULE, call, RULE.message.format(name=found.name))


def _is_module(source: Source, function: cst.FunctionDef) -> bool:
    home = source.values.enclosing_class(function)
    return isinstance(home, cst.ClassDef) and any(
        source.origin(base.value) in _MODULES for base in home.bases
    )


def _is_scalar(source: Source, found: Operation) -> bool:
    """Whether one number is meant: a loss, a count, an argument, part of a comparison or arithmetic."""
    if found.name == "squeeze":
        return False
    node: Node = found.call
    parent = source.parents[node]
    if isinstance(parent, cst.Assign):
        names = "".join(source.code(target.target) for target in parent.targets)
        return bool(_SCALAR.search(names))
    return not isinstance(parent, cst.Return) or bool(_SCALAR.search(source.code(found.operand)))


VALID = (
    Case("""
        import torch

        class Loss(torch.nn.Module):
            def forward(self, x, y):
                loss = (x - y).abs().mean()
                count = y.sum()
                return loss / count.clamp(min=1)
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
    what="In the `forward` of a module: a reduction of all dimensions to one number, or `squeeze` without a dim.",
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
