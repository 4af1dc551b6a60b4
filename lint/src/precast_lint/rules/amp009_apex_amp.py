"""AMP009: Apex's mixed precision."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded
from precast_lint.meaning.regions import AUTOCASTS
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.parsing.values import SCALERS
from precast_lint.renaming.moves import is_bound_here

__all__ = ["RULE"]

_REPLACEMENTS = {
    "initialize": "`torch.autocast` around the forward pass, and `torch.amp.GradScaler`",
    "scale_loss": "`scaler.scale(loss).backward()`",
    "master_params": "`scaler.unscale_(optimizer)` and `model.parameters()`",
    "state_dict": "`scaler.state_dict()`",
    "load_state_dict": "`scaler.load_state_dict()`",
}


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each use of a function of apex.amp in a file without PyTorch's mixed precision."""
    if _uses_pytorch_amp(source):
        return
    for node in [*source.all(cst.Attribute), *source.all(cst.Name)]:
        if isinstance(node, cst.Name) and node not in source.scopes.scope_of:
            continue
        origin = source.origin(node) or ""
        name = origin.removeprefix("apex.amp.")
        if name == origin or "." in name or name.startswith("_"):
            continue
        if (
            not is_bound_here(source, node)
            and not is_guarded(source, node)
            and not _is_for_apex(source, node)
        ):
            new = _REPLACEMENTS.get(name, "PyTorch's own autocast and gradient scaler")
            yield source.find(RULE, node, RULE.message.format(old=origin, new=new))


def _uses_pytorch_amp(source: Source) -> bool:
    """Return True if a file also uses PyTorch's mixed precision, so that Apex is only an option."""
    return any(
        source.origin(node) in SCALERS or source.origin(node) in AUTOCASTS
        for node in [*source.all(cst.Attribute), *source.scopes.names]
    )


def _is_for_apex(source: Source, node: Node) -> bool:
    return any(
        isinstance(outer, (cst.FunctionDef, cst.ClassDef)) and "apex" in outer.name.value.lower()
        for outer in source.around(node)
    )


RULE = LintRule(
    code="AMP009",
    name="apex-amp",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="`{old}` is Apex's, which is deprecated; use {new}",
    what="Functions of `apex.amp`.",
    why=(
        "Apex's mixed precision is deprecated in favour of PyTorch's own, patches PyTorch's functions for the whole "
        "process, and is removed from newer versions of Apex."
    ),
    fine=(
        "The code compares itself with Apex. A function or class with Apex in its name is not reported, nor is a file "
        "that also uses PyTorch's mixed precision."
    ),
    words=("apex amp",),
    check=check,
    example="""
-from apex import amp
+import torch

-model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
+scaler = torch.amp.GradScaler("cuda")
""",
)
