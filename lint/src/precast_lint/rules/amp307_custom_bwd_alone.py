"""AMP307: custom_bwd on a backward whose forward has no custom_fwd."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.functions import CUSTOM_BWD, CUSTOM_FWD, functions
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such decorator."""
    for node, methods in functions(source):
        forward, backward = methods.get("forward"), methods.get("backward")
        if forward is None or backward is None or not forward.is_known:
            continue
        found = backward.decorator(CUSTOM_BWD)
        if found is not None and not forward.decorator(CUSTOM_FWD) and not _sets_it(node):
            yield source.find(RULE, found[0].decorator)


def _sets_it(node: Node) -> bool:
    """Whether a class writes down by itself what custom_fwd would."""
    return any(
        isinstance(inner, cst.Attribute) and inner.attr.value == "_fwd_used_autocast"
        for inner in walk(node)
    )


VALID = (
    Case("""
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
            def forward(ctx, x):
                return x * x

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
    """),
    Case(
        """
        import torch
        from mine import amp_forward

        class Square(torch.autograd.Function):
            @staticmethod
            @amp_forward
            def forward(ctx, x):
                return x * x

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
        """,
        note="What this decorator does is not seen.",
    ),
    Case("""
        import torch
        from mine import Base

        class Other(Base, torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad

        class Careful(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx._dtype, ctx._fwd_used_autocast = x.dtype, False
                return x

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
    """),
)

INVALID = (
    Case("""
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * x

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
    """),
    Case("""
        from torch.autograd import Function
        from torch.cuda.amp import custom_bwd

        class Square(Function):
            @staticmethod
            def forward(ctx, x):
                return x * x

            @custom_bwd
            @staticmethod
            def backward(ctx, grad):
                return grad
    """),
)

RULE = Rule(
    code="AMP307",
    name="custom-bwd-alone",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="`custom_bwd` needs `custom_fwd` on forward: this raises AttributeError in backward",
    what="An autograd Function with `custom_bwd` on its backward and no `custom_fwd` on its forward.",
    why="`custom_bwd` reads what `custom_fwd` has written down in `ctx`; without it there is nothing to read.",
    fine="Never.",
    words=("custom_bwd",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
