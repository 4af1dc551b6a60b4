"""AMP317: a region in float16 on the CPU; off by default."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.imports import name_for
from precast_lint.meaning.regions import region_of_call
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each region that is told both."""
    for call in source.all(cst.Call):
        region = region_of_call(source, call, call)
        if region is None or region.device != "cpu" or region.enabled is False:
            continue
        if region.dtype == "torch.float16" and not _is_tried_out(source, call):
            yield source.find(RULE, call, fix=_fix(source, call))


def _is_tried_out(source: Source, node: Node) -> bool:
    """Whether a test is about numbers of float16, not about speed."""
    function = source.function(node)
    names = [source.filename.replace("\\", "/").rpartition("/")[2]]
    names += [function.name.value] if function is not None else []
    return any(name.startswith("test") or name.endswith("_test.py") for name in names)


def _fix(source: Source, call: cst.Call) -> Fix | None:
    """The CPU's own lower precision."""
    dtype = Arguments.of(call).get("dtype", 1)
    name = name_for(source, "torch", call)
    if dtype is None or name is None:
        return None
    edit = source.replace(dtype, f"{name[0]}.bfloat16")
    return source.fix("Compute in bfloat16", edit, name[1], unsafe=True)


VALID = (
    Case("""
        import torch

        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
    """),
    Case("""
        import torch

        with torch.autocast("cuda", dtype=torch.float16):
            y = model(x)
    """),
    Case("""
        import torch

        with torch.autocast("cpu", dtype=torch.float16, enabled=False):
            y = model(x)
    """),
    Case(
        """
        import torch

        with torch.autocast(device.type, dtype=torch.float16):
            y = model(x)
        """,
        note="The device is not known.",
    ),
    Case(
        """
        import torch

        def test_overflow_is_seen():
            with torch.autocast("cpu", dtype=torch.float16):
                assert not model(x).isfinite().all()
        """,
        note="A test of what float16 does.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
            y = model(x)
        """,
        """
        import torch

        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch
        from torch import float16

        region = torch.cpu.amp.autocast(dtype=float16)
        """,
        """
        import torch
        from torch import float16

        region = torch.cpu.amp.autocast(dtype=torch.bfloat16)
        """,
        unsafe=True,
    ),
)

RULE = Rule(
    code="AMP317",
    name="float16-on-cpu",
    severity=Severity.INFORMATION,
    fix=Applicability.UNSAFE,
    message="most processors emulate float16; bfloat16 is the lower precision of the CPU",
    what="A region for the CPU whose dtype is float16, outside tests.",
    why=(
        "Few processors multiply in float16 (those with AVX512-FP16 or AMX-FP16). On others PyTorch converts each "
        "number: on one thread of an AMD EPYC with AVX512-BF16, a product of 512 x 512 matrices took 98 ms in "
        "float16, 2.6 ms in float32 and 1.2 ms in bfloat16."
    ),
    fine="The processor has float16, or the region is there to see what float16 does to the numbers.",
    words=("autocast cpu float16", "autocast cpu half"),
    check=check,
    valid=VALID,
    invalid=INVALID,
    default=False,
)
