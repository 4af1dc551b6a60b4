"""AMP108: an AMP class that is imported as if it were a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from precast_lint.editing.lines import remove
from precast_lint.meaning.guards import is_tried
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted

__all__ = ["RULE"]

_NAMES = frozenset(
    {"torch.autocast", "torch.GradScaler"}
    | {
        f"torch.{module}.{name}"
        for module in ("amp", "cuda.amp", "cpu.amp")
        for name in ("autocast", "GradScaler")
    }
    | {f"torch.{m}.{n}" for m in ("amp", "cuda.amp") for n in ("custom_fwd", "custom_bwd")}
)


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such import."""
    for statement in source.all(cst.Import):
        for alias in statement.names:
            if dotted(alias.name) in _NAMES and not _is_expected(source, statement):
                fix = _plain_fix(source, statement, alias)
                yield source.find(RULE, alias, fix=_as_safe_as(source, statement, fix))
    for other in source.all(cst.ImportFrom):
        if other.relative or other.module is None or dotted(other.module) not in _NAMES:
            continue
        if not _is_expected(source, other):
            fix = _from_fix(source, other)
            yield source.find(RULE, other.module, fix=_as_safe_as(source, other, fix))


def _is_expected(source: Source, statement: cst.Import | cst.ImportFrom) -> bool:
    """Whether an import is seen to fail on purpose. A fallback behind it is no reason: the import never works."""
    return is_tried(source, statement) and not any(
        isinstance(outer, cst.Try) for outer in source.around(statement)
    )


def _as_safe_as(source: Source, statement: Node, fix: Fix | None) -> Fix | None:
    """The fix; an unsafe one where there is a fallback, which has always run and then runs no longer."""
    if fix is None or not any(isinstance(outer, cst.Try) for outer in source.around(statement)):
        return fix
    return replace(fix, applicability=Applicability.UNSAFE)


def _plain_fix(source: Source, statement: cst.Import, alias: cst.ImportAlias) -> Fix | None:
    module, _, name = (dotted(alias.name) or "").rpartition(".")
    if alias.asname is None:
        line = source.parents[statement]
        if len(statement.names) == 1 and _is_imported_beside(source, line):
            edit = remove(source, line)
            return source.fix("Leave it out", edit) if edit is not None else None
        return source.fix("Import the module", source.replace(alias.name, module))
    if len(statement.names) > 1:
        return None
    bound = dotted(alias.asname.name)
    text = name if bound == name else f"{name} as {bound}"
    return source.fix("Import the name", source.replace(statement, f"from {module} import {text}"))


def _is_imported_beside(source: Source, line: Node) -> bool:
    """Whether `import torch`, which brings the modules of AMP along, stands in the same block."""
    return any(
        source.parents[source.parents[other]] is source.parents[line]
        for other in source.all(cst.Import)
        if any(dotted(alias.name) == "torch" and alias.asname is None for alias in other.names)
    )


def _from_fix(source: Source, statement: cst.ImportFrom) -> Fix | None:
    """`from torch.amp.autocast import autocast` -> `from torch.amp import autocast`."""
    module, _, name = (dotted(statement.module) or "").rpartition(".")
    if isinstance(statement.names, cst.ImportStar) or statement.module is None:
        return None
    if any(dotted(alias.name) != name for alias in statement.names):
        return None
    return source.fix("Import the name", source.replace(statement.module, module))


VALID = (
    Case("""
        import torch.amp
        import torch.cuda.amp as amp
        import torch.amp.autocast_mode
        from torch.amp import autocast
        from torch.cuda.amp.grad_scaler import GradScaler
        from .torch.amp.autocast import autocast as mine
    """),
    Case("""
        import pytest

        with pytest.raises(ImportError):
            import torch.amp.autocast as autocast
    """),
)

INVALID = (
    Case(
        """
        import torch.GradScaler

        scaler = torch.GradScaler("cuda")
        """,
        """
        import torch

        scaler = torch.GradScaler("cuda")
        """,
        count=1,
    ),
    Case(
        """
        import torch.cuda.amp.autocast as autocast
        """,
        """
        from torch.cuda.amp import autocast
        """,
    ),
    Case(
        """
        import os, torch.amp.GradScaler

        scaler = torch.amp.GradScaler("cuda")
        """,
        """
        import os, torch.amp

        scaler = torch.amp.GradScaler("cuda")
        """,
    ),
    Case(
        """
        def train():
            import torch.autocast as region  # all of it
            from torch.amp.GradScaler import GradScaler
        """,
        """
        def train():
            from torch import autocast as region  # all of it
            from torch.amp import GradScaler
        """,
        count=2,
    ),
    Case("""
        import os, torch.amp.autocast as autocast
    """),
    Case(
        """
        try:
            import torch.amp.autocast as autocast
        except ImportError:
            autocast = None
        """,
        """
        try:
            from torch.amp import autocast
        except ImportError:
            autocast = None
        """,
        unsafe=True,
        note="It fails with every PyTorch, so the fallback always runs. The fix is unsafe: the other branch runs then.",
    ),
)

RULE = Rule(
    code="AMP108",
    name="class-as-module",
    severity=Severity.ERROR,
    fix=Applicability.SAFE,
    message="this is a class or function, no module: the import raises ModuleNotFoundError",
    what="`import torch.cuda.amp.autocast`, and the same with the other names of AMP.",
    why=(
        "`import a.b.c` needs a module c. The error says that there is no module named `torch.cuda.amp.autocast`, "
        "which reads as if PyTorch were too old or broken. Installing it again changes nothing."
    ),
    fine="Never.",
    words=("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
