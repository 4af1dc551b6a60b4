"""AMP005: imports of torch.cuda.amp and torch.cpu.amp."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.imports import without_import
from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst, dotted
from precast_lint.renaming import old_names

__all__ = ["RULE"]

_MODULES = ("torch.cuda.amp", "torch.cpu.amp")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each name that an import takes from there."""
    yield from old_names.findings(source, RULE)
    yield from _left_over(source)
    for statement in source.all(cst.ImportFrom):
        module = None if statement.relative else dotted(statement.module)
        is_old = isinstance(statement.names, cst.ImportStar) and module in _MODULES
        if is_old and source.allows("2.4") and not is_guarded(source, statement):
            yield source.find(RULE, statement, RULE.message.format(old=f"{module}.*"))


def _left_over(source: Source) -> Iterator[Finding]:
    """`import torch.cuda.amp` in a file that uses nothing of it: what is left behind when all uses are new."""
    used = {source.names.path(node) for node in source.all(cst.Attribute)}
    for statement in source.all(cst.Import):
        for alias in statement.names:
            module = dotted(alias.name) or ""
            if module not in _MODULES or alias.asname is not None or module in used:
                continue
            if not source.allows("2.4") or is_guarded(source, statement):
                continue
            others = source.scopes.module.bindings.get("torch", ())
            again = any(b.kind == "import" and b.node is not alias for b in others)
            edit = without_import(source, statement, alias) if again else None
            edit = edit or source.replace(alias.name, "torch")
            message = RULE.message.format(old=module)
            yield source.find(RULE, alias, message, source.fix("Import torch alone", edit))


VALID = (
    Case("""
        from torch.amp import GradScaler, autocast
    """),
    Case("""
        try:
            from torch.amp import GradScaler
        except ImportError:
            from torch.cuda.amp import GradScaler
    """),
    Case("""
        try:
            from torch.amp import *
        except ImportError:
            from torch.cuda.amp import *
    """),
    Case(
        """
        from settings import modern

        if modern:
            from torch.amp import autocast
        else:
            from torch.cuda.amp import autocast
        """,
    ),
    Case(
        """
        import torch.cuda.amp

        kinds = [torch.cuda.amp.GradScaler]
        """,
        note="Something of it is used.",
    ),
)

INVALID = (
    Case(
        """
        from torch.cuda.amp import *

        with autocast():
            pass
        """,
        count=1,
        note="Which names come from there is not known, so nothing is changed.",
    ),
    Case(
        """
        from torch.cuda.amp import (
            GradScaler,  # the scaler
            autocast,
        )

        scaler = GradScaler()
        with autocast():
            pass
        """,
        """
        from torch.amp import (
            GradScaler,  # the scaler
            autocast,
        )

        scaler = GradScaler("cuda")
        with autocast("cuda"):
            pass
        """,
        also=("AMP001", "AMP003"),
    ),
    Case(
        """
        from torch.cuda.amp import GradScaler

        __all__ = ["GradScaler"]
        """,
        note="Other files may import the name from here: there is no fix.",
    ),
    Case(
        """
        from torch.cuda.amp import autocast

        class Region(autocast):
            pass
        """,
        note="A use that can't be changed keeps the import.",
    ),
    Case(
        """
        import contextlib
        import os

        if os.environ.get("AMP"):
            from torch.cuda.amp import autocast
        else:
            autocast = contextlib.nullcontext

        with autocast():
            pass
        """,
        count=1,
        note="A setting is no test of the version. What the name stands for is not known, so there is no fix.",
    ),
    Case(
        """
        import torch.cuda.amp
        import torch

        with torch.amp.autocast("cuda"):
            pass
        """,
        """
        import torch

        with torch.amp.autocast("cuda"):
            pass
        """,
        note="Left behind when all uses are new.",
    ),
)

RULE = Rule(
    code="AMP005",
    name="old-import",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; import from `torch.amp`",
    what="Imports of names of `torch.cuda.amp` and `torch.cpu.amp`, or of these modules under a name.",
    why="What is imported is deprecated since PyTorch 2.4. All uses of the name are changed with the import.",
    fine="The file offers the name to others, which call it in the old way.",
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
    valid=VALID,
    invalid=INVALID,
)
