"""AMP102: a flag, a text or a number where a region wants a dtype."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.imports import name_for
from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.kinds import DTYPES, is_dtype, is_flag, is_number, is_text
from precast_lint.meaning.regions import AUTOCASTS
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings

__all__ = ["RULE"]

_NOT_A_DTYPE = "a region's dtype has to be a torch.dtype; {} raises when the region is entered"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each call whose dtype is none."""
    for call, arguments in source.calls(*AUTOCASTS):
        value = arguments.get("dtype", 1)
        if value is None or arguments.starred or is_tried(source, call):
            continue
        if is_flag(source, value):
            fix = _as_enabled(source, arguments, value)
            message = (
                RULE.message if value in arguments.positional else _NOT_A_DTYPE.format("a flag")
            )
            yield source.find(RULE, value, message, fix)
        elif is_text(source, value):
            message = _NOT_A_DTYPE.format("a text")
            yield source.find(RULE, value, message, _as_dtype(source, call, value))
        elif is_number(source, value):
            yield source.find(RULE, value, _NOT_A_DTYPE.format("a number"))


def _as_enabled(source: Source, arguments: Arguments, value: Node) -> Fix | None:
    positional = arguments.positional
    if value not in positional or "enabled" in arguments.keywords or len(positional) > 3:
        return None
    edits = [source.before(source.parents[value], "enabled=")]
    if len(positional) == 3:
        if not is_dtype(source, positional[2]) or "dtype" in arguments.keywords:
            return None
        edits.append(source.before(source.parents[positional[2]], "dtype="))
    literal = isinstance(value, cst.Name) and value.value in ("True", "False")
    return source.fix("Give it by keyword", edits, unsafe=not literal)


def _as_dtype(source: Source, call: cst.Call, value: Node) -> Fix | None:
    name = strings(value)
    named = name_for(source, "torch", call)
    if named is None or f"torch.{name}" not in DTYPES:
        return None
    torch, added = named
    return source.fix(f"Use torch.{name}", source.replace(value, f"{torch}.{name}"), added)


VALID = (
    Case(
        """
        import torch

        class P:
            def parse_args(self):
                return self

        def add_argument(*a, **k):
            pass

        args = P().parse_args()
        with torch.autocast("cuda", args.amp):
            pass
        """,
    ),
    Case(
        """
        import argparse
        import torch

        ap = argparse.ArgumentParser()
        ap.add_argument("--amp", action="store_true")
        args = ap.parse_args()
        args.amp = torch.float16 if args.amp else None
        with torch.autocast("cuda", args.amp):
            pass
        """,
    ),
    Case("""
        import torch

        with torch.autocast("cuda", torch.bfloat16), torch.autocast("cuda", None, False):
            pass
    """),
    Case("""
        import torch

        def run(dtype, amp_dtype=None):
            with torch.autocast("cuda", dtype), torch.autocast("cuda", amp_dtype):
                pass
    """),
    Case(
        """
        import torch

        def run(use_amp, config):
            with torch.autocast("cuda", use_amp), torch.autocast("cuda", config.amp):
                pass
        """,
        note="A name that sounds like a flag is no evidence.",
    ),
    Case(
        """
        from torch.cuda.amp import autocast

        with autocast(True), autocast(True, torch.bfloat16):
            pass
        """,
        note="In the old names the flag comes first.",
    ),
    Case("""
        import torch

        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        with torch.autocast("cuda", dtype):
            pass
    """),
    Case("""
        import torch

        def test_flag(self):
            with self.assertRaises(TypeError):
                with torch.autocast("cuda", True):
                    pass
    """),
)

INVALID = (
    Case(
        """
        import torch

        with torch.autocast("cuda", True):
            pass
        """,
        """
        import torch

        with torch.autocast("cuda", enabled=True):
            pass
        """,
    ),
    Case(
        """
        import torch

        def run(x, amp: bool):
            with torch.autocast("cuda", amp):
                pass
            with torch.amp.autocast("cuda", (not amp), torch.float16):
                pass
        """,
        """
        import torch

        def run(x, amp: bool):
            with torch.autocast("cuda", enabled=amp):
                pass
            with torch.amp.autocast("cuda", enabled=(not amp), dtype=torch.float16):
                pass
        """,
        count=2,
        unsafe=True,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, scaler=None):
                self.use_amp = scaler is not None

            def step(self):
                with torch.autocast("cuda", self.use_amp, cache_enabled=False):
                    pass
        """,
        """
        import torch

        class Trainer:
            def __init__(self, scaler=None):
                self.use_amp = scaler is not None

            def step(self):
                with torch.autocast("cuda", enabled=self.use_amp, cache_enabled=False):
                    pass
        """,
        unsafe=True,
    ),
    Case(
        """
        from torch import autocast

        with autocast("cuda", dtype="bfloat16"):
            pass
        """,
        """
        import torch
        from torch import autocast

        with autocast("cuda", dtype=torch.bfloat16):
            pass
        """,
    ),
    Case("""
        import torch

        def run(dtype: str, precision=16):
            with torch.autocast("cuda", dtype):
                pass
    """),
)

RULE = Rule(
    code="AMP102",
    name="not-a-dtype",
    severity=Severity.ERROR,
    fix=Applicability.SAFE,
    message="a region's second positional argument is its dtype; give `enabled` by keyword",
    what="A region whose dtype is certainly a flag, a text or a number.",
    why=(
        "`torch.cuda.amp.autocast(enabled)` became `torch.autocast(device_type, dtype, enabled)`. With the device type "
        "put in front, what was `enabled` is taken for the dtype, and entering the region raises TypeError."
    ),
    fine="The code is for PyTorch 1.10 alone, whose `torch.autocast` had `enabled` in second place.",
    words=("autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
