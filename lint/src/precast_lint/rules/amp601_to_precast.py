"""AMP601: PyTorch's names where precast has the same; `precast-lint fix --to precast` moves them."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.imports import without_import
from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, Edit, Fix, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.renaming.move_fixes import exported, group_key, groups_of, share
from precast_lint.renaming.moves import Move, NameUse, expressions, in_string, reference_kind, root
from precast_lint.renaming.old_names import is_listed

__all__ = ["RULE"]

_MOVE = Move(
    modules={
        "torch.amp": "precast",
        "torch.amp.autocast_mode": "precast",
        "torch.amp.grad_scaler": "precast",
        "torch.autocast": "precast.autocast",
        "torch.GradScaler": "precast.GradScaler",
    },
    names=frozenset(
        {
            "torch.amp.GradScaler",
            "torch.amp.autocast",
            "torch.amp.custom_bwd",
            "torch.amp.custom_fwd",
        }
    ),
    message="Import from precast",
)


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each use."""
    uses = [
        use
        for node, place, origin in expressions(source, _MOVE)
        if not is_listed(source, place) and not is_guarded(source, place)
        if (use := _classified(source, node, place, origin)) is not None
    ]
    if any(use.kind == "isinstance" and use.origin == "torch.amp.autocast" for use in uses):
        for use in uses:  # precast's regions are no instances of PyTorch's class
            use.unsafe |= use.origin == "torch.amp.autocast"
    share(source, _MOVE, uses, groups_of(source, _MOVE, uses))
    _drop_unused(source, uses)
    for use in uses:
        if use.code:
            message = RULE.message.format(old=use.origin, new=_MOVE.new(use.origin))
            yield source.find(RULE, use.place, message, use.fix)


def _classified(source: Source, node: Node, place: Node, origin: str) -> NameUse | None:
    """A use with what has to change besides its name: nothing, for precast's signatures are the same."""
    if node is not place:
        edits = in_string(source, place, node, _MOVE)
        return NameUse(node, place, origin, "annotation", "AMP601", edits and (), renamed=edits)
    if origin not in _MOVE.names:
        return NameUse(node, node, origin, "alias", "", (), unsafe=True)
    parent = source.parents[node]
    if isinstance(parent, cst.Call) and parent.func is node:
        return NameUse(node, parent, origin, "call", "AMP601", ())
    if isinstance(parent, cst.Decorator):
        return NameUse(node, node, origin, "decorator", "AMP601", None)
    kind = reference_kind(source, node)
    is_free = group_key(source, node, _MOVE) is None
    if kind == "isinstance" and origin.endswith("GradScaler") and is_free:
        return None  # precast's scalers are instances of PyTorch's class
    edits = None if kind == "subclass" else ()
    unsafe = kind not in ("annotation", "partial")
    return NameUse(node, node, origin, kind, "AMP601", edits, unsafe)


def _drop_unused(source: Source, uses: list[NameUse]) -> None:
    """Remove the import of torch if all of its uses move."""
    if source.filename.endswith("__init__.py"):
        return
    for name, bindings in source.scopes.module.bindings.items():
        if [b.path for b in bindings] != ["torch"] or name in exported(source):
            continue
        roots = {root(use.node): use for use in uses}
        names = list(source.scopes.references(source.scopes.module, name))
        fixes = [roots[n].fix for n in names if n in roots]
        if len(fixes) < len(names) or not fixes or None in fixes:
            continue
        fix = _together(source, bindings[0].node, [fix for fix in fixes if fix is not None])
        if fix is not None:
            for node in names:
                roots[node].fix = fix


def _together(source: Source, alias: Node, fixes: list[Fix]) -> Fix | None:
    statement = source.parents[alias]
    if not isinstance(alias, cst.ImportAlias) or not isinstance(statement, cst.Import):
        return None
    edits = {edit for fix in fixes for edit in fix.edits}
    added = {edit for edit in edits if edit.text.strip() == "import precast"}
    change: Edit | None = source.replace(alias, "precast")
    if not added:
        change = without_import(source, statement, alias)
    if change is None:
        return None
    unsafe = any(fix.applicability is Applicability.UNSAFE for fix in fixes)
    return source.fix(_MOVE.message, edits - added, change, unsafe=unsafe)


RULE = LintRule(
    code="AMP601",
    name="to-precast",
    severity=Severity.INFORMATION,
    fix=Applicability.SAFE,
    message="`{old}` is PyTorch's; precast has it as `{new}`",
    what="PyTorch's autocast, gradient scaler, `custom_fwd` and `custom_bwd`, where the project is to use precast's.",
    why=(
        "`precast-lint fix --to precast` selects this rule together with those about deprecated names. The signatures "
        "are the same, and what a program computes stays the same."
    ),
    fine="It is off unless it is asked for by its code, its name, or `--to precast`; `ALL` does not select it.",
    words=("torch autocast", "torch GradScaler", "torch custom_fwd", "torch custom_bwd"),
    check=check,
    example="""
+import precast
 import torch

-with torch.autocast("cuda", torch.float16):
+with precast.autocast("cuda", torch.float16):
     pass
""",
    default=False,
)
