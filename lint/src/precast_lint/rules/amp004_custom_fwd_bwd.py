"""AMP004: torch.cuda.amp.custom_fwd and custom_bwd."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint import old_names
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.source import Source

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each decorator and call."""
    yield from old_names.findings(source, RULE)


VALID = (
    Case("""
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x):
                return x * x
    """),
    Case(
        """
        import torch

        @torch.cuda.amp.custom_fwd
        def forward(ctx, x):
            return x
        """,
        min_torch="2.3",
        note="`torch.amp.custom_fwd` is there since PyTorch 2.4.",
    ),
)

INVALID = (
    Case(
        """
        import torch
        from torch.cuda.amp import custom_bwd, custom_fwd

        class Square(torch.autograd.Function):
            @staticmethod
            @custom_fwd(cast_inputs=torch.float32)
            def forward(ctx, x):
                return x * x

            @staticmethod
            @custom_bwd
            def backward(ctx, grad):
                return grad
        """,
        """
        import torch
        from torch.amp import custom_bwd, custom_fwd

        class Square(torch.autograd.Function):
            @staticmethod
            @custom_fwd(cast_inputs=torch.float32, device_type="cuda")
            def forward(ctx, x):
                return x * x

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
        """,
        count=2,
    ),
    Case(
        """
        import torch

        forward = torch.cuda.amp.custom_fwd(run)
        """,
        """
        import torch

        forward = torch.amp.custom_fwd(run, device_type="cuda")
        """,
    ),
)

RULE = Rule(
    code="AMP004",
    name="custom-fwd-bwd",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; use `{new}` with the device type",
    what="Uses of `torch.cuda.amp.custom_fwd` and `torch.cuda.amp.custom_bwd`.",
    why=(
        "They are deprecated since PyTorch 2.4 and warn whenever they are called. The new ones need the device type, "
        "and take it by keyword alone, so a decorator without parentheses becomes a call."
    ),
    fine="The code has to run on PyTorch before 2.4: set `min-torch`.",
    words=("custom_fwd", "custom_bwd"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
