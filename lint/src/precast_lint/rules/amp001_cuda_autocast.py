"""AMP001: calls of torch.cuda.amp.autocast."""

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

        with torch.autocast("cuda"):
            pass
    """),
    Case(
        """
        try:
            from torch.amp import autocast
        except ImportError:
            from torch.cuda.amp import autocast

        with autocast("cuda"):
            pass
        """,
        note="A fallback is there on purpose.",
    ),
    Case("""
        import torch

        if hasattr(torch, "amp"):
            region = torch.amp.autocast("cuda")
        else:
            region = torch.cuda.amp.autocast()
    """),
    Case(
        """
        from torch.cuda.amp import autocast

        def autocast(*args):
            return args

        autocast()
        """,
        note="The name stands for something else.",
    ),
    Case(
        """
        import torch

        with torch.cuda.amp.autocast():
            pass
        """,
        min_torch="1.10",
        note="PyTorch 1.10 has no `torch.amp`.",
    ),
    Case(
        """
        import torch

        def region():
            if hasattr(torch, "autocast"):
                return torch.autocast("cuda")
            return torch.cuda.amp.autocast()
        """,
        note="What follows a test that returns is its other side.",
    ),
    Case("""
        from mine.torch.cuda.amp import autocast

        autocast()
    """),
    Case("""
        def f(torch):
            return torch.cuda.amp.autocast()
    """),
)

INVALID = (
    Case(
        """
        import torch

        with torch.cuda.amp.autocast():
            pass
        """,
        """
        import torch

        with torch.amp.autocast("cuda"):
            pass
        """,
    ),
    Case(
        """
        from torch.cuda.amp import autocast

        with autocast(use_amp, torch.bfloat16):
            pass
        """,
        """
        from torch.amp import autocast

        with autocast("cuda", enabled=use_amp, dtype=torch.bfloat16):
            pass
        """,
        note="What was positional is written as keywords: the new name has its parameters in another order.",
    ),
    Case(
        """
        import torch as th
        from torch.cuda import amp

        @amp.autocast(enabled=False)
        def f(x):
            with th.cuda.amp.autocast(  # why
                dtype=th.bfloat16,
            ):
                return x
        """,
        """
        import torch as th
        from torch import amp

        @amp.autocast("cuda", enabled=False)
        def f(x):
            with th.amp.autocast(  # why
                "cuda", dtype=th.bfloat16,
            ):
                return x
        """,
        count=2,
    ),
    Case(
        """
        import torch

        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            with torch.cuda.amp.autocast():
                pass
        """,
        """
        import torch

        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            with torch.amp.autocast("cuda", dtype=torch.float16):
                pass
        """,
        count=2,
        note="The old name has a dtype of its own; the new one takes that of the region around.",
    ),
    Case(
        """
        from torch.cuda.amp import GradScaler, autocast

        scaler = GradScaler()
        with autocast(enabled=True):
            pass
        """,
        """
        from torch.amp import autocast
        from torch.cuda.amp import GradScaler

        scaler = GradScaler()
        with autocast("cuda", enabled=True):
            pass
        """,
        min_torch="2.0",
        note="PyTorch 2.0 has no `torch.amp.GradScaler`, so that stays.",
    ),
    Case(
        """
        from torch.cuda.amp import autocast

        def region(*args):
            return autocast(*args)
    """,
        note="What `*args` holds is not known, so there is no fix.",
    ),
    Case(
        """
        import torch.cuda as tc

        with tc.amp.autocast():
            pass
        """,
        """
        import torch
        import torch.cuda as tc

        with torch.amp.autocast("cuda"):
            pass
        """,
    ),
    Case(
        """
        try:
            import torch
            from torch.cuda.amp.autocast_mode import autocast as region
        finally:
            pass

        def f():
            with region(): return 1
        """,
        """
        try:
            import torch
            from torch.amp.autocast_mode import autocast as region
        finally:
            pass

        def f():
            with region("cuda"): return 1
        """,
    ),
)

RULE = Rule(
    code="AMP001",
    name="cuda-autocast",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; use `{new}` with the device type",
    what="Calls of `torch.cuda.amp.autocast`, and decorators made by one.",
    why=(
        "It is deprecated since PyTorch 2.4 and warns whenever it is called. The new name takes the device type first "
        "and has its other parameters in another order: PyTorch's own advice, to write the device type before the "
        "old arguments, raises for positional ones."
    ),
    fine="The code has to run on PyTorch before 1.12: set `min-torch`.",
    words=("cuda autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
