"""AMP001 to AMP004 and AMP006: uses of deprecated names of PyTorch's AMP.

`renaming/old_names.py` finds the uses, with the code of the rule for each, and makes the fixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.renaming import old_names

__all__ = ["RULES"]


def _rule(*, code: str, **texts: Any) -> LintRule:
    """Return a rule that reports the uses with this code. `texts` are the other fields of `LintRule`."""

    def check(source: Source) -> Iterator[LintFinding]:
        yield from old_names.findings(source, rule)

    fix = Applicability.SAFE
    rule = LintRule(code=code, severity=Severity.WARNING, fix=fix, check=check, **texts)
    return rule


RULES = (
    _rule(
        code="AMP001",
        name="cuda-autocast",
        message="`{old}` is deprecated; use `{new}` with the device type",
        what="Calls of `torch.cuda.amp.autocast`, also as decorators.",
        why=(
            "It has been deprecated since PyTorch 2.4 and warns at each call. The new name takes the device type first "
            "and has its other parameters in another order, so positional arguments have to change."
        ),
        fine="The code has to run on PyTorch before 1.12: set `min-torch`.",
        words=("cuda autocast",),
        example="""
 import torch

-with torch.cuda.amp.autocast():
+with torch.amp.autocast("cuda"):
     pass
""",
    ),
    _rule(
        code="AMP002",
        name="cpu-autocast",
        message="`{old}` is deprecated; use `{new}` with the device type",
        what="Calls of `torch.cpu.amp.autocast`, also as decorators.",
        why="It has been deprecated since PyTorch 2.4 and warns at each call.",
        fine="The code has to run on PyTorch before 1.12: set `min-torch`.",
        words=("cpu autocast",),
        example="""
 import torch

-with torch.cpu.amp.autocast():
+with torch.amp.autocast("cpu"):
     pass
""",
    ),
    _rule(
        code="AMP003",
        name="grad-scaler",
        message="`{old}` is deprecated; use `{new}` with the device",
        what="Calls of `torch.cuda.amp.GradScaler` and `torch.cpu.amp.GradScaler`.",
        why="They have been deprecated since PyTorch 2.4 and warn at each call.",
        fine="The code has to run on PyTorch before 2.3: set `min-torch`.",
        words=("cuda GradScaler", "cpu GradScaler"),
        example="""
 import torch

-scaler = torch.cuda.amp.GradScaler(2.0**10, enabled=use_amp)
+scaler = torch.amp.GradScaler("cuda", 2.0**10, enabled=use_amp)
""",
    ),
    _rule(
        code="AMP004",
        name="custom-fwd-bwd",
        message="`{old}` is deprecated; use `{new}` with the device type",
        what="Uses of `torch.cuda.amp.custom_fwd` and `torch.cuda.amp.custom_bwd`.",
        why=(
            "They have been deprecated since PyTorch 2.4 and warn at each call. The new ones need the device type as a "
            "keyword argument, so a decorator without parentheses becomes a call."
        ),
        fine="The code has to run on PyTorch before 2.4: set `min-torch`.",
        words=("custom_fwd", "custom_bwd"),
        example="""
 import torch

-forward = torch.cuda.amp.custom_fwd(run)
+forward = torch.amp.custom_fwd(run, device_type="cuda")
""",
    ),
    _rule(
        code="AMP006",
        name="class-reference",
        message="`{old}` is deprecated; use `{new}`",
        what=(
            "Deprecated names that are not called: annotations, `isinstance`, `functools.partial`, aliases, tables, "
            "subclasses."
        ),
        why=(
            "Other code may call the deprecated name through them. The class `torch.amp.GradScaler` is the base of the "
            "deprecated ones, so annotations and `isinstance` accept both."
        ),
        fine="A subclass that has to run on PyTorch before 2.3.",
        words=("cuda autocast", "cpu autocast", "GradScaler", "custom_fwd", "custom_bwd"),
        example="""
 import torch

-assert isinstance(scaler, torch.cuda.amp.GradScaler)
+assert isinstance(scaler, torch.amp.GradScaler)
""",
    ),
)
