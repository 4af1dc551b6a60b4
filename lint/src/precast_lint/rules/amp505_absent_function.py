"""AMP505: functions that torch does not have."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted
from precast_lint.renaming.absent import (
    ABSENT,
    ABSENT_FFT,
    ABSENT_FUNCTIONAL,
    ABSENT_LINALG,
    ABSENT_NN,
    ABSENT_RANDOM,
)

__all__ = ["RULE"]

# Only names that look like nothing else are looked for behind `xp = torch` and in imports: others are everywhere.
_TELLING = tuple(
    name for name in ABSENT if name.startswith(("reduce_", "expand_dims", "gather_nd"))
)
_ACTIVATIONS = ("elu", "gelu", "leaky_relu", "mish", "silu", "softplus", "swish")  # handed on
_WORDS = (
    *(f"torch.{name}(" for name in ABSENT),
    *(f"torch {name}" for name in _TELLING),
    *(f"torch.{name}{end}" for name in _ACTIVATIONS for end in ",)}"),
    *(f"functional .{name}" for name in ABSENT_FUNCTIONAL),
    *(f"functional import {name}" for name in ABSENT_FUNCTIONAL),
    *(f"torch linalg .{name}(" for name in ABSENT_LINALG),
    *(f"torch linalg import {name}" for name in ABSENT_LINALG),
    *(f"torch fft .{name}(" for name in ABSENT_FFT),
    *(f"torch.random.{name}(" for name in ABSENT_RANDOM),
    *(f"torch nn .{name}" for name in ABSENT_NN),
    *(f"torch.nn import {name}" for name in ABSENT_NN),
)
_OF_MODULES = {
    "torch": ABSENT,
    "torch.nn.functional": ABSENT_FUNCTIONAL,
    "torch.linalg": ABSENT_LINALG,
    "torch.fft": ABSENT_FFT,
    "torch.random": ABSENT_RANDOM,
    "torch.nn": ABSENT_NN,
}


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each of them that is called, handed on, or imported from torch."""
    set_here = {source.origin(n.target) for n in source.all(cst.AssignTarget)}
    for func in source.all(cst.Attribute):
        if not any(func.attr.value in table for table in _OF_MODULES.values()):
            continue
        path = source.names.path(func)
        there = _replacement(path)
        if not there or source.origin(func) in set_here:
            continue
        if not is_guarded(source, func):
            yield _found(source, func, path, there)
    for statement in source.all(cst.ImportFrom):
        if statement.relative or isinstance(statement.names, cst.ImportStar):
            continue
        for alias in statement.names:
            path = f"{dotted(statement.module)}.{dotted(alias.name)}"
            there = _replacement(path)
            if there and not is_guarded(source, statement):
                yield _found(source, alias, path, there)


def _replacement(path: str | None) -> str | None:
    """Return PyTorch's replacement of a name that its module does not have."""
    module, _, name = (path or "").rpartition(".")
    return _OF_MODULES.get(module, {}).get(name)


def _found(source: Source, node: Node, path: str | None, there: str) -> LintFinding:
    module, _, name = (path or "").rpartition(".")
    return source.find(RULE, node, RULE.message.format(module=module, name=name, there=there))


RULE = LintRule(
    code="AMP505",
    name="absent-function",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="{module} has no `{name}`: see `{there}`",
    what=(
        "Calls and imports of names that torch has never had, and other libraries, or other modules of PyTorch, have: "
        "`torch.reduce_max`, `torch.gelu`, `torch.nn.functional.swish`."
    ),
    why="It raises an AttributeError, maybe only after hours, where the code is rarely run.",
    fine="Something adds the name to torch.",
    words=_WORDS,
    check=check,
    example="""
-from torch.nn.functional import swish
+from torch.nn.functional import silu
""",
)
