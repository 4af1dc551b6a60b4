"""AMP302: an optimizer's step inside a region."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.callers import calls_of, runs_in_region
from precast_lint.meaning.regions import AUTOCASTS, region_in_force
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import is_optimizer, key
from precast_lint.training_step.protocol import loops_around

__all__ = ["RULE"]

_NAMED = re.compile(r"(.*[._])?(optimizer|optim|opt)(_\w+|\d+)?(\[.*\])?", re.IGNORECASE)
_MULTIPLIES = re.compile(r"muon|shampoo|soap|kron|lbfgs", re.IGNORECASE)
_DEEP = 3  # functions between the region and the step
_PYTORCHS = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)*[A-Z]\w*")


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each step inside a region."""
    for call, owner, arguments in source.methods("step"):
        by_scaler = source.instance(owner) in SCALERS and bool(arguments.positional)
        if not by_scaler and not _is_optimizer(source, owner):
            continue
        if runs_in_region(source, call):
            stepped = arguments.positional[0] if by_scaler else owner
            harms = _multiplies(source, stepped) or _outlives(source, call, _DEEP)
            severity = RULE.severity if harms else Severity.INFORMATION
            yield source.find(RULE, call, severity=severity)


def _multiplies(source: Source, optimizer: Node) -> bool:
    """Return True if an optimizer is of this file, or one that multiplies matrices by its name."""
    names = f"{source.instance(optimizer)} {key(source, optimizer)}"
    return source.values.object_class(optimizer) is not None or bool(_MULTIPLIES.search(names))


def _outlives(source: Source, node: Node, depth: int) -> bool:
    """Return True if the region around a node goes on into the next iteration of a loop."""
    region, loops = region_in_force(source, node, trainers=True), loops_around(source, node)
    if region is not None:
        return any(region.body in source.around(loop) for loop in loops)
    function = source.function(node)
    calls = calls_of(source, function) if function is not None and depth else []
    return bool(loops) or any(_outlives(source, call, depth - 1) for call in calls)


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
    fine=(
        "The optimizer works element by element, and the region ends before the next forward: this is reported as an "
        "information."
    ),
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
