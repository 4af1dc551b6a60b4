"""AMP008: functions for autocast's state that have the device in their name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, Edit, Fix, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.renaming.moves import is_bound_here
from precast_lint.renaming.old_names import is_listed

__all__ = ["RULE"]

_DEVICES = {"gpu": "cuda", "cpu": "cpu", "xla": "xla", "ipu": "ipu"}
_OLD = re.compile(
    r"torch\.(?P<verb>is|get|set)_autocast_(?P<device>gpu|cpu|xla|ipu)_(?P<what>dtype|enabled)"
)


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each use of an old function."""
    if not source.allows("2.4"):
        return
    patched = _patched_functions(source)
    for node in [*source.all(cst.Attribute), *source.all(cst.Name)]:
        if isinstance(node, cst.Name) and node not in source.scopes.scope_of:
            continue
        match = _OLD.fullmatch(source.origin(node) or "")
        if match is None or isinstance(source.parents.get(node), cst.Attribute):
            continue
        if match["device"] == "gpu" and match["what"] == "enabled":  # PyTorch never had it
            continue
        if is_bound_here(source, node) or is_guarded(source, node):
            continue
        if is_listed(source, node) or match[0] in patched:
            continue
        new = f"{match['verb']}_autocast_{match['what']}"
        message = RULE.message.format(old=match[0], new=f"torch.{new}")
        fix = _fix(source, node, new, _DEVICES[match["device"]])
        yield source.find(RULE, node, message, fix)


def _patched_functions(source: Source) -> set[str | None]:
    """Return the functions that the file patches, for which it has to use their old names."""
    targets = (assign.target for assign in source.all(cst.AssignTarget))
    return {source.origin(target) for target in targets if isinstance(target, cst.Attribute)}


def _fix(source: Source, node: Node, new: str, device: str) -> Fix | None:
    """Return a fix that passes the device first; None if the use is not a call through the module."""
    call = source.parents[node]
    if not isinstance(node, cst.Attribute) or not isinstance(call, cst.Call):
        return None
    if call.func is not node or any(arg.star or arg.keyword for arg in call.args):
        return None
    quoted = source.quoted(device, call)
    if call.args:
        first = source.before(call.args[0], f"{quoted}, ")
    else:
        end = source.span(call).end - 1
        first = Edit(end, end, quoted)
    return source.fix(f"Use torch.{new}", source.replace(node.attr, new), first)


RULE = LintRule(
    code="AMP008",
    name="state-functions",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; use `{new}` with the device type",
    what="`torch.get_autocast_gpu_dtype`, `torch.is_autocast_cpu_enabled` and others with a device in their name.",
    why=(
        "They are deprecated since PyTorch 2.4 and warn. The new functions take the device type, so the same code "
        "serves all devices."
    ),
    fine="The code has to run on PyTorch before 2.4: set `min-torch`.",
    words=(
        "autocast_gpu_dtype",
        "autocast_cpu_dtype",
        "autocast_cpu_enabled",
        "autocast_xla_",
        "autocast_ipu_",
    ),
    check=check,
    example="""
 import torch

-print(torch.is_autocast_cpu_enabled())
+print(torch.is_autocast_enabled("cpu"))
""",
)
