"""AMP202: a scaler with regions in bfloat16."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from precast_lint.meaning.regions import arguments_of, regions
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, string_value, walk
from precast_lint.parsing.values import SCALERS

__all__ = ["RULE"]

_NO_REGION = "this program has no region: a scaler does nothing for gradients in float32"
_LOWERS = re.compile(r"autocast|half|float16|bf16|fp16|accelerat|deepspeed|apex")
_OTHERS = sys.stdlib_module_names | {"matplotlib", "numpy", "torch", "torchvision", "tqdm"}


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each enabled scaler in a file whose regions are all in bfloat16, or that needs none."""
    results = [region for region in regions(source) if region.enabled is not False]
    if not results:
        yield from _without_region(source)
    if not results or any(region.dtype != "torch.bfloat16" for region in results):
        return
    is_on_cpu = all(region.device == "cpu" for region in results)
    scales = [owner for _, owner, _ in source.methods("scale")]
    if not any(source.instance(owner) in SCALERS for owner in scales):
        return
    flags = {_text(source, arguments_of(source, r.call).get("enabled", 2)) for r in results}
    for call, arguments in source.calls(*SCALERS):
        enabled = _text(source, arguments.get("enabled"))
        is_on = enabled in (None, "True") or flags == {enabled}
        if is_on_cpu and not _is_for_cpu(source, call, arguments):
            continue  # bfloat16 is the default on the CPU, so the scaler may be for another device
        if is_on and not arguments.starred and not _is_conditional(source, call):
            yield source.find(RULE, call)


def _text(source: Source, node: Node | None) -> str | None:
    return source.code(node) if node is not None else None


def _without_region(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each scaler of a program that is one file and computes nothing in 16 bits."""
    bound = (b for results in source.scopes.module.bindings.values() for b in results)
    imported = {(b.path or "").partition(".")[0] for b in bound if b.kind in ("import", "from")}
    is_whole = imported <= _OTHERS and not any(True for _ in source.all(cst.ImportStar))
    if not is_whole or _LOWERS.search(source.text.string):
        return
    scaled = [o for _, o, _ in source.methods("scale") if source.instance(o) in SCALERS]
    stepped = [o for _, o, _ in source.methods("step") if source.instance(o) in SCALERS]
    for call, arguments in source.calls(*SCALERS) if scaled and stepped else ():
        if _text(source, arguments.get("enabled")) in (None, "True") and not arguments.starred:
            yield source.find(RULE, call, _NO_REGION)


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
    return device is not None and string_value(device) == "cpu"


RULE = LintRule(
    code="AMP202",
    name="scaler-with-bfloat16",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="bfloat16 needs no scaler: its range is that of float32",
    what=(
        "An enabled `GradScaler` in a file whose regions are all in bfloat16, also if both depend on one flag, or in a "
        "program of one file without regions."
    ),
    why=(
        "Gradients do not underflow in bfloat16. The scaler reads all gradients in each step, doubles the scale until "
        "something overflows, and then skips a step."
    ),
    fine="Regions in other files use the scaler.",
    words=("GradScaler bfloat16 scale(", "GradScaler cpu scale(", "GradScaler scale( .step("),
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
