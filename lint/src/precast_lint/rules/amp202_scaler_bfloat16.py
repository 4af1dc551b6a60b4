"""AMP202: a scaler with regions in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.regions import regions
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings, walk
from precast_lint.parsing.values import SCALERS

__all__ = ["RULE"]


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each scaler that is on, in a file whose regions are all in bfloat16."""
    results = [region for region in regions(source) if region.enabled is not False]
    if not results or any(region.dtype != "torch.bfloat16" for region in results):
        return
    is_on_cpu = all(region.device == "cpu" for region in results)
    scales = [owner for _, owner, _ in source.methods("scale")]
    if not any(source.instance(owner) in SCALERS for owner in scales):
        return
    for call, arguments in source.calls(*SCALERS):
        enabled = arguments.get("enabled")
        is_on = enabled is None or (isinstance(enabled, cst.Name) and enabled.value == "True")
        if is_on_cpu and not _is_for_cpu(source, call, arguments):
            continue  # bfloat16 is the default there; the scaler may be for a device that this file does not name
        if is_on and not arguments.starred and not _is_conditional(source, call):
            yield source.find(RULE, call)


def _is_conditional(source: Source, call: cst.Call) -> bool:
    """`GradScaler() if dtype == torch.float16 else None`."""
    return any(
        isinstance(outer, cst.IfExp) or (isinstance(outer, cst.If) and not _is_main(outer.test))
        for outer in source.around(call)
    )


def _is_main(test: Node) -> bool:
    """`__name__ == "__main__"`, which asks nothing of dtypes."""
    return any(isinstance(node, cst.Name) and node.value == "__name__" for node in walk(test))


def _is_for_cpu(source: Source, call: cst.Call, arguments: Arguments) -> bool:
    if (source.origin(call.func) or "").startswith("torch.cpu."):
        return True
    device = arguments.get("device", 0)
    return device is not None and strings(device) == "cpu"


RULE = LintRule(
    code="AMP202",
    name="scaler-with-bfloat16",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="bfloat16 needs no scaler: its range is that of float32",
    what="A `GradScaler` that is on, where all regions of the file are in bfloat16.",
    why=(
        "Gradients do not become zero in bfloat16. The scaler costs a look at all gradients, doubles the scale until "
        "something overflows, and then skips a step."
    ),
    fine="The scaler is used with regions in other files.",
    words=(
        "GradScaler bfloat16 scale(",
        "GradScaler cpu scale(",
    ),
    check=check,
    example="""
 import torch

-scaler = torch.amp.GradScaler("cuda")
 with torch.autocast("cuda", dtype=torch.bfloat16):
     loss = model(batch)
-scaler.scale(loss).backward()
-scaler.step(optimizer)
-scaler.update()
+loss.backward()
+optimizer.step()
""",
)
