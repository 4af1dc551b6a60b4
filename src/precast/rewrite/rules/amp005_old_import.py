"""AMP005: imports of torch.cuda.amp and torch.cpu.amp."""

from __future__ import annotations

from collections.abc import Iterator

from precast.rewrite import old_names
from precast.rewrite.model import Applicability, Case, Finding, Rule, Severity
from precast.rewrite.source import Source

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each name that an import takes from there."""
    yield from old_names.findings(source, RULE)


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
)

INVALID = (
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
    words=("cuda autocast", "cpu autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
