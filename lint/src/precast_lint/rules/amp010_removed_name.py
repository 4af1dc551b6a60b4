"""AMP010: names that PyTorch has removed, and private ones of its AMP."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from precast_lint.meaning.guards import is_expected_to_fail, is_guarded
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted
from precast_lint.renaming import old_names

__all__ = ["PACKAGES", "RULE"]

_COMMON_NAMES = frozenset({"GradScaler", "autocast", "autocast_mode", "grad_scaler"})
_DECORATORS = frozenset({"custom_bwd", "custom_fwd"})
# The packages of AMP, each with the public names that it has had in any version of PyTorch.
PACKAGES = {
    "torch.amp": _COMMON_NAMES | _DECORATORS | {"autocast_decorator", "is_autocast_available"},
    "torch.cuda.amp": _COMMON_NAMES | _DECORATORS | {"amp_definitely_not_available", "common"},
    "torch.cpu.amp": _COMMON_NAMES,
}


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each private name, each use of `torch._six`, and each name that AMP has never had."""
    yield from old_names.findings(source, RULE)
    for statement in source.all(cst.ImportFrom):
        is_six = dotted(statement.module) == "torch._six" and not statement.relative
        if is_six and not is_guarded(source, statement):
            yield source.find(RULE, statement, _SIX_MESSAGE)
        if dotted(statement.module) == "torch" and not isinstance(statement.names, cst.ImportStar):
            for alias in statement.names:
                if dotted(alias.name) == "_six" and not is_guarded(source, statement):
                    yield source.find(RULE, alias, _SIX_MESSAGE)
    yield from _unknown(source)
    for node in source.all(cst.Attribute):
        if source.names.path(node) == "torch._six" and not is_guarded(source, node):
            yield source.find(RULE, node, _SIX_MESSAGE)


def _unknown(source: Source) -> Iterator[LintFinding]:
    for statement in source.all(cst.ImportFrom):
        package = None if statement.relative else dotted(statement.module)
        if package not in PACKAGES or isinstance(statement.names, cst.ImportStar):
            continue
        for alias in statement.names:
            name = dotted(alias.name) or ""
            if _is_unknown(package, name) and not _is_expected(source, statement):
                yield source.find(RULE, alias, _message(package, name))
    assigned = {source.names.path(n.target) for n in source.all(cst.AssignTarget)}
    for node in source.all(cst.Attribute):
        path = source.names.path(node) or ""
        package, _, name = path.rpartition(".")
        if package not in PACKAGES or not _is_unknown(package, name) or path in assigned:
            continue
        is_prefix = isinstance(source.parents.get(node), cst.Attribute)
        if not is_prefix and not _is_expected(source, node):
            yield source.find(RULE, node, _message(package, name))


def _is_unknown(package: str, name: str) -> bool:
    return name not in PACKAGES[package] and not name.startswith("_")


def _is_expected(source: Source, node: Node) -> bool:
    return is_guarded(source, node) or is_expected_to_fail(source, node)


def _message(package: str, name: str) -> str:
    same = [f"{other}.{name}" for other in PACKAGES if name in PACKAGES[other]]
    near = difflib.get_close_matches(name.lower(), [n.lower() for n in PACKAGES[package]], 1, 0.75)
    similar = [f"{package}.{n}" for n in PACKAGES[package] if n.lower() in near]
    candidates = same or similar
    hint = f"; did you mean `{candidates[0]}`?" if candidates else ""
    return f"`{package}` has no `{name}` in any version of PyTorch{hint}"


_SIX_MESSAGE = "`torch._six` was removed in PyTorch 2.0; use Python's own names, such as `math.inf`"


RULE = LintRule(
    code="AMP010",
    name="removed-name",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="`{old}` is private to PyTorch: it has moved, and may be removed without a warning",
    what=(
        "Private names that moved with `torch.amp` (`_cast`, `_refresh_per_optimizer_state`), `torch._six`, which was "
        "removed, and names that `torch.amp`, `torch.cuda.amp` and `torch.cpu.amp` have never had."
    ),
    why="The import fails on a current PyTorch, or will fail on a future one.",
    fine="The code runs on one fixed, old version of PyTorch only.",
    words=(
        "torch _six",
        "cuda _refresh_per_optimizer_state",
        "cuda _MultiDeviceReplicator",
        "autocast _cast",
        "torch.amp",
        "cuda.amp",
        "cpu.amp",
        "torch amp.Grad",
        "torch amp.auto",
    ),
    check=check,
    example="""
-from torch.cuda.amp.grad_scaler import _refresh_per_optimizer_state
+from torch.amp.grad_scaler import _refresh_per_optimizer_state
""",
)
