"""AMP211: a scaler's step with a closure."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.model import Applicability, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst
from precast_lint.parsing.values import SCALERS

__all__ = ["RULE"]

_LBFGS = ("torch.optim.LBFGS", "torch.optim.lbfgs.LBFGS")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each closure that a scaler's step gets, and each optimizer that needs one."""
    for call, owner, arguments in source.methods("step"):
        if source.instance(owner) not in SCALERS or arguments.starred or _is_off(source, owner):
            continue
        optimizer = arguments.get("optimizer", 0)
        if "closure" in arguments.keywords:
            yield source.find(RULE, call)
        elif len(arguments.positional) > 1:
            if not _is_handed_on(source, arguments.positional[1]):
                yield source.find(RULE, call)
        elif optimizer is not None and source.instance(optimizer) in _LBFGS:
            yield source.find(RULE, call, "LBFGS needs a closure, and a scaler can't step with one")


def _is_handed_on(source: Source, closure: cst.CSTNode) -> bool:
    """Whether this is a parameter that is None where nothing is given: a wrapper hands on what it gets."""
    binding = source.names.only_binding(closure)
    if binding is None or binding.kind != "param":
        return False
    return isinstance(binding.value, cst.Name) and binding.value.value == "None"


def _is_off(source: Source, owner: cst.CSTNode) -> bool:
    call = source.values.constructed(owner)
    if not isinstance(call, cst.Call):
        return False
    found = [a.value for a in call.args if a.keyword is not None and a.keyword.value == "enabled"]
    return any(isinstance(value, cst.Name) and value.value == "False" for value in found)


RULE = Rule(
    code="AMP211",
    name="scaler-step-closure",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="a scaler can't step with a closure: it would have to unscale the gradients of each call",
    what="`scaler.step(optimizer, closure)`, and a scaler's step of `torch.optim.LBFGS`, which needs a closure.",
    why=(
        "With `closure=` PyTorch raises a RuntimeError. By position it hands the closure on: the gradients that it "
        "computes are not unscaled, and nobody looks for inf in them."
    ),
    fine="The scaler is always off.",
    words=(
        "GradScaler .step(",
        ".scale( .step(",
    ),
    check=check,
    example="""
 import torch

 scaler = torch.amp.GradScaler("cuda")
-scaler.step(optimizer, closure)
+scaler.step(optimizer)
""",
)
