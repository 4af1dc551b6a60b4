"""AMP308: custom_fwd on a function without a ctx."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.functions import CUSTOM_FWD, functions, methods_of
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst

__all__ = ["RULE"]

_MODULES = re.compile(
    r"torch\.nn\.(modules\.(module\.|container\.)?)?(Module|ModuleDict|ModuleList|Sequential)"
)
_ON_A_MODULE = (
    "`custom_fwd` is for autograd Functions: here it writes its state into the module, "
    "and backward does not read it"
)


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `custom_fwd` without a ctx."""
    for _, methods in functions(source):
        forward = methods.get("forward")
        result = forward.decorator(CUSTOM_FWD) if forward and "setup_context" in methods else None
        if result is not None and result[1] != "precast.custom_fwd":
            yield source.find(RULE, result[0].decorator)
    for node in source.all(cst.ClassDef):
        bases = (source.origin(base.value) or "" for base in node.bases)
        if not any(map(_MODULES.fullmatch, bases)):
            continue
        forward = methods_of(source, node).get("forward")
        result = forward.decorator(CUSTOM_FWD) if forward else None
        if result is not None:
            decorator = result[0].decorator
            yield source.find(RULE, decorator, _ON_A_MODULE, severity=Severity.WARNING)


RULE = LintRule(
    code="AMP308",
    name="custom-fwd-without-ctx",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="with setup_context forward gets no ctx: `custom_fwd` writes into its first input, and backward fails",
    what="`custom_fwd` on the forward of a Function that has `setup_context`, or on the forward of a module.",
    why=(
        "It stores the state of autocast in the first argument, which has to be `ctx`. With `setup_context` that is a "
        "tensor, and `custom_bwd` raises AttributeError. On a module it is `self`; an iterable one, like "
        "`Sequential`, is replaced by a generator if inputs are cast."
    ),
    fine="It decorates a module's forward to cast its inputs, and the module is not iterable.",
    words=("custom_fwd",),
    check=check,
    example="""
 from torch import nn
 from torch.cuda.amp import custom_fwd

 class Net(nn.Module):
-    @custom_fwd(cast_inputs=torch.float32)
     def forward(self, x):
-        return x.softmax(-1)
+        return x.float().softmax(-1)
""",
)
