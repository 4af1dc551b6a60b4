"""AMP107: a number or a flag where a scaler wants its device, and a flag where it wants its scale."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.kinds import is_flag, is_number
from precast_lint.model import Applicability, Fix, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node

__all__ = ["RULE"]

_NEW = ("torch.amp.GradScaler", "precast.GradScaler")
_OLD = ("torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler")
_AS_SCALE = "this flag is taken for the initial scale; give `enabled` by keyword"


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each number or flag in the place of another argument."""
    for call, arguments in source.calls(*_NEW, *_OLD):
        if arguments.starred or is_tried(source, call):
            continue
        is_new = source.origin(call.func) in _NEW
        device = arguments.get("device", 0) if is_new else None
        scale = arguments.get("init_scale", 1 if is_new else 0)
        if is_flag(source, device) and device is not None:
            yield source.find(RULE, device, fix=_as_enabled(source, arguments, device))
        elif is_number(source, device) and device is not None:
            fix = None
            if device in arguments.positional and "init_scale" not in arguments.keywords:
                text = f"{source.quote}cuda{source.quote}, "
                edit = source.before(source.parents[device], text)
                fix = source.fix("Give the device that is meant without one", edit, unsafe=True)
            yield source.find(RULE, device, fix=fix)
        elif is_flag(source, scale) and scale is not None:
            yield source.find(RULE, scale, _AS_SCALE, _as_enabled(source, arguments, scale))


def _as_enabled(source: Source, arguments: Arguments, value: Node) -> Fix | None:
    """Gives the last positional argument by keyword."""
    if "enabled" in arguments.keywords or arguments.positional[-1:] != (value,):
        return None
    edit = source.before(source.parents[value], "enabled=")
    return source.fix("Give it by keyword", edit, unsafe=True)


RULE = LintRule(
    code="AMP107",
    name="scaler-device-slot",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="this is taken for the device, and has no other effect; PyTorch does not complain",
    what="A number or a flag as the first argument of `torch.amp.GradScaler`, or a flag as a scaler's initial scale.",
    why=(
        "`torch.amp.GradScaler` has the device in front of the parameters of `torch.cuda.amp.GradScaler`, and accepts "
        "anything there. `GradScaler(1024.0)` begins with a scale of 65536, `GradScaler(False)` is enabled."
    ),
    fine="Never: the argument does nothing, or not what it is for.",
    words=("GradScaler",),
    check=check,
    example="""
 import torch

-scaler = torch.amp.GradScaler(2.0**10)
+scaler = torch.amp.GradScaler("cuda", 2.0**10)
""",
)
