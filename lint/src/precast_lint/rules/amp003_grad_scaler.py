"""AMP003: calls of torch.cuda.amp.GradScaler and torch.cpu.amp.GradScaler."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint import old_names
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.source import Source

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each call."""
    yield from old_names.findings(source, RULE)


VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
    """),
    Case(
        """
        import torch

        scaler = torch.cuda.amp.GradScaler()
        """,
        min_torch="2.2",
        note="`torch.amp.GradScaler` is there since PyTorch 2.3.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        scaler = torch.cuda.amp.GradScaler(2.0**10, enabled=use_amp)
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", 2.0**10, enabled=use_amp)
        """,
        note="The device comes first, so that the other arguments stay as they are.",
    ),
    Case(
        """
        from torch.cuda.amp import GradScaler, autocast

        scaler = GradScaler()
        with autocast():
            pass
        """,
        """
        from torch.amp import GradScaler, autocast

        scaler = GradScaler("cuda")
        with autocast("cuda"):
            pass
        """,
        also=("AMP001",),
    ),
    Case(
        """
        from torch.cuda.amp import GradScaler

        print(f"{GradScaler()} {GradScaler(enabled=False)}")
        """,
        """
        from torch.amp import GradScaler

        print(f"{GradScaler('cuda')} {GradScaler('cuda', enabled=False)}")
        """,
        count=2,
    ),
    Case(
        """
        class Trainer:
            def setup(self, **options):
                from torch.cuda.amp import GradScaler as Scaler
                self.scaler = Scaler(**options)
        """,
        """
        class Trainer:
            def setup(self, **options):
                from torch.amp import GradScaler as Scaler
                self.scaler = Scaler("cuda", **options)
        """,
    ),
)

RULE = Rule(
    code="AMP003",
    name="grad-scaler",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; use `{new}` with the device",
    what="Calls of `torch.cuda.amp.GradScaler` and `torch.cpu.amp.GradScaler`.",
    why="They are deprecated since PyTorch 2.4 and warn whenever they are called.",
    fine="The code has to run on PyTorch before 2.3: set `min-torch`.",
    words=("cuda GradScaler", "cpu GradScaler"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
