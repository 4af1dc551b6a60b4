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
    """Yield a finding for each enabled scaler in a file whose regions are all in bfloat16."""
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
            continue  # bfloat16 is the default on the CPU, so the scaler may be for another device
        if is_on and not arguments.starred and not _is_conditional(source, call):
            yield source.find(RULE, call)


def _is_conditional(source: Source, call: cst.Call) -> bool:
    """Return True for `GradScaler() if dtype == torch.float16 else None`."""
    return any(
        isinstance(outer, cst.IfExp) or (isinstance(outer, cst.If) and not _is_main(outer.test))
        for outer in source.around(call)
    )


def _is_main(test: Node) -> bool:
    """Return True for `__name__ == "__main__"`, which does not depend on a dtype."""
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
    what="An enabled `GradScaler` in a file whose regions are all in bfloat16.",
    why=(
        "Gradients do not underflow in bfloat16. The scaler reads all gradients in each step, doubles the scale until "
        "something overflows, and then skips a step."
    ),
    fine="Regions in other files use the scaler.",
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
