"""AMP002: calls of torch.cpu.amp.autocast."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint import old_names
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.source import Source

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each call and decorator."""
    yield from old_names.findings(source, RULE)


VALID = (
    Case("""
        import torch

        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass
    """),
    Case("""
        import torch

        if torch.__version__ >= "1.12":
            region = torch.amp.autocast("cpu")
        else:
            region = torch.cpu.amp.autocast()
    """),
)

INVALID = (
    Case(
        """
        import torch

        with torch.cpu.amp.autocast():
            pass
        """,
        """
        import torch

        with torch.amp.autocast("cpu"):
            pass
        """,
    ),
    Case(
        """
        import torch
        from torch.cpu.amp import autocast

        @autocast(True, dtype=torch.bfloat16)
        def f(x):
            return x
        """,
        """
        import torch
        from torch.amp import autocast

        @autocast("cpu", enabled=True, dtype=torch.bfloat16)
        def f(x):
            return x
        """,
    ),
)

RULE = Rule(
    code="AMP002",
    name="cpu-autocast",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; use `{new}` with the device type",
    what="Calls of `torch.cpu.amp.autocast`, and decorators made by one.",
    why="It is deprecated since PyTorch 2.4 and warns whenever it is called.",
    fine="The code has to run on PyTorch before 1.12: set `min-torch`.",
    words=("cpu autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
