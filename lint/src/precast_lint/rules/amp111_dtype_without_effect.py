"""AMP111: a region with a dtype that its device has no autocast for."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.kinds import is_dtype
from precast_lint.meaning.regions import PYTORCHS_AUTOCASTS, region_of_call
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source

__all__ = ["RULE"]

_WIDE = {"torch.float32", "torch.float", "torch.float64", "torch.double"}
_DEVICES = {"cpu", "xpu", "mps"}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each region that PyTorch switches off because of its dtype."""
    for call, arguments in source.calls(*PYTORCHS_AUTOCASTS):
        region = region_of_call(source, call, call)
        value = arguments.get("dtype", 1)
        if region is None or region.enabled is False or is_tried(source, call):
            continue
        known = is_dtype(source, value) and region.dtype in _WIDE
        if region.device in _DEVICES and known and value is not None:
            message = RULE.message.format(dtype=region.dtype, device=region.device)
            yield source.find(RULE, value, message)


VALID = (
    Case("""
        import torch

        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu"):
            pass
    """),
    Case(
        """
        import torch

        with torch.autocast("cuda", dtype=torch.float32):
            pass
        """,
        note="On CUDA it has an effect: all operations that have a lower precision run in float32.",
    ),
    Case("""
        import torch

        with torch.autocast("cpu", dtype=torch.float32, enabled=False):
            pass
    """),
    Case("""
        import torch

        def run(device, dtype):
            with torch.autocast(device, dtype=torch.float32), torch.autocast("cpu", dtype=dtype):
                pass
    """),
    Case("""
        import torch

        def test_warning(self):
            with self.assertWarns(UserWarning):
                with torch.autocast("cpu", torch.float64):
                    pass
    """),
    Case("""
        import torch

        device_type = "cpu"
        if torch.cuda.is_available():
            device_type = "cuda"
        with torch.autocast(device_type, dtype=torch.float32):
            pass
    """),
)

INVALID = (
    Case("""
        import torch

        with torch.autocast("cpu", dtype=torch.float32):
            pass
    """),
    Case("""
        import torch

        WIDE = torch.float

        @torch.autocast("cpu", WIDE)
        def f(x):
            return x

        with torch.cpu.amp.autocast(dtype=torch.float64, enabled=amp):
            pass
    """),
    Case("""
        import torch

        device_type = "cpu"
        with torch.autocast(device_type, dtype=torch.float32):
            pass
    """),
)

RULE = Rule(
    code="AMP111",
    name="dtype-without-effect",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="{device} has no autocast for {dtype}: PyTorch warns and switches the region off",
    what="A region of the CPU (or XPU, MPS) with float32 or float64 as its dtype.",
    why=(
        "PyTorch warns and switches the region off. Inside another region that means full precision, which "
        "`enabled=False` says without a warning; elsewhere the region does nothing."
    ),
    fine="Full precision is meant, and the warning does not disturb.",
    words=("autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
