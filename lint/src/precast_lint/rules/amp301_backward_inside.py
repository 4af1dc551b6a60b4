"""AMP301: a backward pass inside a region."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.callers import runs_in_region
from precast_lint.meaning.regions import is_trainer
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_TRIALS = re.compile(r"(^|[/\\_])(tests?|testing|bench|benchmarks?)([/\\_.]|$)", re.IGNORECASE)


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each backward pass inside a region."""
    for call in source.all(cst.Call):
        if not _is_backward(source, call):
            continue
        if runs_in_region(source, call):
            is_trial = _TRIALS.search(source.filename) is not None
            severity = Severity.INFORMATION if is_trial else RULE.severity
            yield source.find(RULE, call, severity=severity)


def _is_backward(source: Source, call: cst.Call) -> bool:
    if source.origin(call.func) == "torch.autograd.backward":
        return True
    if not isinstance(call.func, cst.Attribute):
        return False
    arguments = Arguments.of(call)
    owner, name = call.func.value, call.func.attr.value
    if name == "manual_backward" or (name == "backward" and is_trainer(source, owner)):
        return len(arguments.positional) == 1
    return name == "backward" and not arguments.starred and _is_loss(source, owner, arguments)


def _is_loss(source: Source, owner: Node, arguments: Arguments) -> bool:
    """Return True if the receiver of `backward` is a loss: by its value, its name, or the arguments of `backward`."""
    if {"gradient", "retain_graph", "create_graph"} & set(arguments.keywords):
        return True
    if arguments.positional or arguments.keywords:
        return False
    if isinstance(owner, cst.BinaryOperation):
        return any(_is_loss(source, side, arguments) for side in (owner.left, owner.right))
    if isinstance(owner, cst.UnaryOperation):
        return _is_loss(source, owner.expression, arguments)
    if isinstance(owner, cst.Call):
        scaled = isinstance(owner.func, cst.Attribute) and owner.func.attr.value == "scale"
        return scaled or _gives_loss(source, owner.func)
    last = (key(source, owner) or "").rpartition(".")[2].lower()
    is_named = "loss" in last and isinstance(owner, (cst.Name, cst.Attribute, cst.Subscript))
    return is_named or _is_made_as_loss(source, owner)


def _is_made_as_loss(source: Source, owner: Node) -> bool:
    """Return True if each value of a name is a mean, a sum, or the result of a loss of PyTorch."""
    bindings = source.names.bindings(owner) if isinstance(owner, cst.Name) else []
    return bool(bindings) and all(
        b.kind == "assign" and isinstance(b.value, cst.Call) and _gives_loss(source, b.value.func)
        for b in bindings
    )


def _gives_loss(source: Source, func: Node) -> bool:
    if isinstance(func, cst.Attribute) and func.attr.value in ("sum", "mean"):
        return True
    definition = source.instance(func) or ""
    origin = source.origin(func) or ""
    is_function = origin.startswith("torch.nn.functional.") and origin.endswith(
        ("loss", "cross_entropy", "kl_div", "cross_entropy_with_logits")
    )
    return is_function or (definition.startswith("torch.nn.") and definition.endswith("Loss"))


RULE = LintRule(
    code="AMP301",
    name="backward-in-region",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="backward inside a region; PyTorch's advice is to end the region before it",
    what="`backward()` of a loss, by hand or by a trainer, inside a region that is not switched off.",
    why=(
        "Backward uses the dtypes of forward and needs no region. Inside a region its operations are cast too, so "
        "gradients of operations that ran in float32 on purpose are computed in lower precision."
    ),
    fine=(
        "Nothing in the region runs in float32 on purpose, and no custom autograd Function takes part. In tests and "
        "benchmarks it is an information."
    ),
    words=("autocast backward",),
    check=check,
    example="""
 import torch

 with torch.autocast("cuda"):
     l = model(x).mean()
-    l.backward()
+l.backward()
""",
)
