"""AMP005: imports of torch.cuda.amp and torch.cpu.amp."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.imports import without_import
from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst, dotted
from precast_lint.renaming import old_names

__all__ = ["RULE"]

_MODULES = ("torch.cuda.amp", "torch.cpu.amp")


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each import of a deprecated module or of its names."""
    yield from old_names.findings(source, RULE)
    yield from _unused_imports(source)
    for statement in source.all(cst.ImportFrom):
        module = None if statement.relative else dotted(statement.module)
        is_old = isinstance(statement.names, cst.ImportStar) and module in _MODULES
        if is_old and source.allows("2.4") and not is_guarded(source, statement):
            yield source.find(RULE, statement, RULE.message.format(old=f"{module}.*"))


def _unused_imports(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `import torch.cuda.amp` in a file that does not use the module."""
    used = {source.names.path(node) for node in source.all(cst.Attribute)}
    for statement in source.all(cst.Import):
        for alias in statement.names:
            module = dotted(alias.name) or ""
            if module not in _MODULES or alias.asname is not None or module in used:
                continue
            if not source.allows("2.4") or is_guarded(source, statement):
                continue
            others = source.scopes.module.bindings.get("torch", ())
            is_imported_twice = any(b.kind == "import" and b.node is not alias for b in others)
            edit = without_import(source, statement, alias) if is_imported_twice else None
            edit = edit or source.replace(alias.name, "torch")
            message = RULE.message.format(old=module)
            yield source.find(RULE, alias, message, source.fix("Import torch alone", edit))


RULE = LintRule(
    code="AMP005",
    name="old-import",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; import from `torch.amp`",
    what="Imports of names of `torch.cuda.amp` and `torch.cpu.amp`, or of these modules under a name.",
    why="These names have been deprecated since PyTorch 2.4. The fix changes an import and all uses of its names.",
    fine="Other files import the name from this file and call it with the old arguments.",
    words=(
        "cuda autocast",
        "cpu autocast",
        "GradScaler",
        "custom_fwd",
        "custom_bwd",
        "import torch.cuda.amp",
        "import torch.cpu.amp",
        "torch.cuda.amp import *",
        "torch.cpu.amp import *",
    ),
    check=check,
    example="""
-import torch.cuda.amp
 import torch

 with torch.amp.autocast("cuda"):
     pass
""",
)
