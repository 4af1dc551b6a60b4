"""AMP302: an optimizer's step inside a region."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.callers import runs_in_region
from precast_lint.meaning.regions import AUTOCASTS
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import is_optimizer, key

__all__ = ["RULE"]

_NAMED = re.compile(r"(.*[._])?(optimizer|optim|opt)(_\w+|\d+)?(\[.*\])?", re.IGNORECASE)
_PYTORCHS = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)*[A-Z]\w*")


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each step inside a region."""
    for call, owner, arguments in source.methods("step"):
        by_scaler = source.instance(owner) in SCALERS and bool(arguments.positional)
        if not by_scaler and not _is_optimizer(source, owner):
            continue
        if runs_in_region(source, call):
            yield source.find(RULE, call)


def _is_optimizer(source: Source, node: Node) -> bool:
    entry = source.instance(node)
    if entry is not None:
        return is_optimizer(source, node)
    home = source.values.object_class(node)
    if home is not None and _is_class_of_optimizers(source, home):
        return not _opens_region(source, home)
    name = key(source, node) or ""
    return _NAMED.fullmatch(name) is not None and "sched" not in name.lower()


def _is_class_of_optimizers(source: Source, home: cst.ClassDef) -> bool:
    bases = (
        source.origin(base.value) or ""
        for one in (home, *source.values.family.bases(home))
        for base in one.bases
    )
    return any(_PYTORCHS.fullmatch(base) is not None for base in bases)


def _opens_region(source: Source, home: cst.ClassDef) -> bool:
    return any(
        source.origin(node) in AUTOCASTS
        for one in (home, *source.values.family.bases(home))
        for node in walk(one)
        if isinstance(node, (cst.Name, cst.Attribute))
    )


RULE = LintRule(
    code="AMP302",
    name="step-in-region",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="the optimizer steps inside a region; end the region before it",
    what="`optimizer.step()` or `scaler.step(optimizer)` inside a region that is not switched off.",
    why=(
        "The cache of cast weights lives until the outermost region ends. A region around a loop of forward, backward "
        "and step uses the weights of the first iteration in all iterations: the loss does not change. Also, the "
        "step's operations are cast, which matters for optimizers that multiply matrices (Muon, Shampoo)."
    ),
    fine="The optimizer works element by element, and the region ends before the next forward.",
    words=("autocast .step(",),
    check=check,
    example="""
 import torch

 def train(model, x, optimizer):
     scaler = torch.amp.GradScaler("cuda")
     with torch.autocast("cuda"):
         scaler.scale(model(x).mean()).backward()
-        scaler.step(optimizer)
-        scaler.update()
+    scaler.step(optimizer)
+    scaler.update()
""",
)
