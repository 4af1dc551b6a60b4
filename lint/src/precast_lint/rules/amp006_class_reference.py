"""AMP006: deprecated classes and functions that are named without being called."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint import old_names
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.source import Source

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each reference."""
    yield from old_names.findings(source, RULE)


VALID = (
    Case(
        """
        import torch

        try:
            from torch.amp import GradScaler
        except Exception:
            GradScaler = torch.cuda.amp.GradScaler
        """,
        note="The fallback of an import, whatever it catches.",
    ),
    Case("""
        import torch

        custom_fwd = getattr(torch.amp, "custom_fwd", None) or torch.cuda.amp.custom_fwd
    """),
    Case("""
        import torch

        def train(scaler: torch.amp.GradScaler) -> None:
            assert isinstance(scaler, torch.amp.GradScaler)
    """),
    Case(
        """
        import torch

        KNOWN = [torch.cuda.amp.GradScaler, torch.amp.GradScaler]
        NAMES = {torch.cuda.amp.autocast: "autocast"}
        old = kind is torch.cuda.amp.autocast
        """,
        note="Code about the old name: what is listed, a key, or compared is meant.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        def train(scaler: torch.cuda.amp.GradScaler | None) -> None:
            assert isinstance(scaler, torch.cuda.amp.GradScaler)
        """,
        """
        import torch

        def train(scaler: torch.amp.GradScaler | None) -> None:
            assert isinstance(scaler, torch.amp.GradScaler)
        """,
        count=2,
    ),
    Case(
        """
        from torch.cuda import amp

        type Maybe = amp.GradScaler | None

        def make[S: amp.GradScaler](kind: type[S]) -> S:
            return kind()
        """,
        """
        from torch import amp

        type Maybe = amp.GradScaler | None

        def make[S: amp.GradScaler](kind: type[S]) -> S:
            return kind()
        """,
        count=2,
    ),
    Case(
        """
        from functools import partial
        from torch.cuda.amp import autocast

        region = partial(autocast, enabled=False)
        """,
        """
        from functools import partial
        from torch.amp import autocast

        region = partial(autocast, "cuda", enabled=False)
        """,
    ),
    Case(
        """
        import torch

        region = torch.cuda.amp.autocast

        def f(x):
            with region(False):
                return x
        """,
        """
        import torch

        region = torch.amp.autocast

        def f(x):
            with region("cuda", enabled=False):
                return x
        """,
        also=("AMP001",),
        unsafe=True,
        count=1,
        note="Other files may call an alias of a module in the old way, so the fix is unsafe.",
    ),
    Case(
        """
        from torch.cuda import amp

        old = amp
        KINDS = {"scaler": amp.GradScaler, "region": old.autocast}
        """,
        """
        import functools
        from torch import amp

        old = amp
        KINDS = {"scaler": functools.partial(amp.GradScaler, "cuda"), "region": functools.partial(old.autocast, "cuda")}
        """,
        unsafe=True,
        count=2,
        note="Who calls what the table holds goes on calling it as before, if by keywords.",
    ),
    Case("""
        from torch.cuda.amp import GradScaler

        Scaler = GradScaler

        class Mine(Scaler):
            pass
    """),
    Case(
        """
        import torch

        class Scaler(torch.cuda.amp.GradScaler):
            pass
        """,
        note="The new class has another signature: what the subclass hands on has to be read by a person.",
    ),
    Case(
        """
        import torch

        try:
            autocast = torch.cuda.amp.autocast
            has_amp = torch.cuda.is_available()
        except:
            class autocast:
                def __init__(self, enabled):
                    pass

        with autocast(enabled=True):
            pass
        """,
        """
        import functools
        import torch

        try:
            autocast = functools.partial(torch.amp.autocast, "cuda")
            has_amp = torch.cuda.is_available()
        except:
            class autocast:
                def __init__(self, enabled):
                    pass

        with autocast(enabled=True):
            pass
        """,
        unsafe=True,
        note="The name has another value too: its calls stay as they are.",
    ),
)

RULE = Rule(
    code="AMP006",
    name="class-reference",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; use `{new}`",
    what="Deprecated names not called: annotations, `isinstance`, `functools.partial`, aliases, tables, subclasses.",
    why=(
        "They keep the deprecated name alive, and hand it to code that calls it. The class `torch.amp.GradScaler` is "
        "the base of the deprecated ones, so annotations and `isinstance` fit both."
    ),
    fine="A subclass that has to run on PyTorch before 2.3.",
    words=("cuda autocast", "cpu autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
