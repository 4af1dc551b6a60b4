"""AMP106: the device type as an argument of a deprecated name, which does not take it."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded, is_tried
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.renaming import old_names
from precast_lint.renaming.old_calls import has_new_arguments

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each call of an old name with a device."""
    fixes = {use.place: use.fix for use in old_names.uses(source)}
    for call, _ in source.calls(*old_names.OLD):
        origin = source.origin(call.func) or ""
        if not has_new_arguments(source, call, old_names.OLD[origin].kind):
            continue
        if not is_tried(source, call) and not is_guarded(source, call):
            message = RULE.message.format(old=origin, new=old_names.new_name(origin))
            yield source.find(RULE, call, message, fixes.get(call))


VALID = (
    Case("""
        import torch

        with torch.amp.autocast("cuda"), torch.cuda.amp.autocast(True):
            scaler = torch.amp.GradScaler("cuda")
            other = torch.cuda.amp.GradScaler(2.0**10)
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
        note="The name stands for two things.",
    ),
    Case("""
        from torch.cuda.amp import autocast

        def region(device, options):
            return autocast(device), autocast(**options)
    """),
    Case("""
        import torch

        if hasattr(torch.amp, "GradScaler"):
            from torch.amp import GradScaler
        else:
            from torch.cuda.amp import GradScaler

        scaler = GradScaler("cuda")
    """),
    Case("""
        from mine import autocast

        with autocast("cuda"):
            pass
    """),
)

INVALID = (
    Case(
        """
        import torch

        scaler = torch.cuda.amp.GradScaler(device="cuda", **asdict(config))
        """,
        """
        import torch

        scaler = torch.amp.GradScaler(device="cuda", **asdict(config))
        """,
    ),
    Case(
        """
        from torch.cuda.amp import GradScaler, autocast

        scaler = GradScaler(device="cuda", init_scale=1024)
        with autocast(device_type="cuda", dtype=torch.float16):
            pass
        """,
        """
        from torch.amp import GradScaler, autocast

        scaler = GradScaler(device="cuda", init_scale=1024)
        with autocast(device_type="cuda", dtype=torch.float16):
            pass
        """,
        count=2,
    ),
    Case(
        """
        import torch

        def run(x):
            with torch.cuda.amp.autocast("cuda"):
                return torch.cpu.amp.GradScaler("cpu")
        """,
        """
        import torch

        def run(x):
            with torch.amp.autocast("cuda"):
                return torch.amp.GradScaler("cpu")
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        from torch.cuda.amp import custom_fwd

        @custom_fwd(device_type="cuda")
        def forward(ctx, x):
            return x
        """,
        """
        from torch.amp import custom_fwd

        @custom_fwd(device_type="cuda")
        def forward(ctx, x):
            return x
        """,
    ),
    Case(
        """
        import torch

        scaler = torch.cuda.amp.GradScaler("cuda")
        """,
        min_torch="2.2",
        note="PyTorch 2.2 has no `torch.amp.GradScaler`: there is no fix.",
    ),
    Case(
        """
        import torch

        def run(x):
            with torch.cuda.amp.autocast(x.device.type, enabled=False):
                pass
            with torch.cuda.amp.autocast("cuda", dtype=torch.float16):
                pass
        """,
        """
        import torch

        def run(x):
            with torch.amp.autocast(x.device.type, enabled=False):
                pass
            with torch.amp.autocast("cuda", dtype=torch.float16):
                pass
        """,
        note="Both have always raised, so the fix is safe.",
    ),
)

RULE = Rule(
    code="AMP106",
    name="new-arguments-to-old-name",
    severity=Severity.ERROR,
    fix=Applicability.SAFE,
    message="`{old}` takes no device; `{new}` does",
    what="`torch.cuda.amp.autocast`, `GradScaler`, `custom_fwd` or `custom_bwd` with a device type.",
    why=(
        "Only the names in `torch.amp` take it. By keyword it raises TypeError. By position it is taken for `enabled`, "
        "which raises when the region is entered, or for the initial scale, which raises with the first loss."
    ),
    fine="Never. Where both names are imported, under one name and a test of the version, nothing is found.",
    words=("autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
