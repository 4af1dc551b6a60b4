"""The uses of deprecated names in a file, with the edits that each needs.

Rules AMP001 to AMP006 and AMP010 each report one kind of use from here. `move_fixes.py` makes their fixes together,
because one import may bind names of several rules.

Invariant: a use is left out if it is guarded, if the oldest supported PyTorch does not have the new name, or if the
code only lists or compares the class, which then means the old one.
"""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded
from precast_lint.model import LintFinding, LintRule
from precast_lint.parsing.names import canonical
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst
from precast_lint.renaming.move_fixes import Group, group_key, groups_of, share
from precast_lint.renaming.moves import (
    OLD,
    NameUse,
    expressions,
    is_in_old_module,
    new_name,
    reference_kind,
)
from precast_lint.renaming.old_calls import call_edits, device_edits, has_new_arguments

__all__ = ["findings", "is_listed"]


def findings(source: Source, rule: LintRule) -> Iterator[LintFinding]:
    """Yield the findings of a rule."""
    for use in _uses(source):
        if use.code == rule.code:
            message = rule.message.format(old=use.origin, new=new_name(use.origin))
            yield source.find(rule, use.place, message, use.fix)


@once
def _uses(source: Source) -> list[NameUse]:
    """Return all uses of deprecated names in a file, in the order of the text."""
    every = list(expressions(source))
    results = [_classified(source, *one) for one in every if _counts(source, *one)]
    groups = groups_of(source, results)
    # An import stays if the oldest supported PyTorch has a name that is read through it in the old module only.
    old = {group_key(source, node) for node, origin in every if not _is_new(source, origin)}
    imports = [
        use
        for key, group in groups.items()
        if key not in old
        for use in _import_uses(source, group)
    ]
    share(source, results, groups)
    return sorted([*results, *imports], key=lambda use: source.span(use.place))


def _is_new(source: Source, origin: str) -> bool:
    """Return True if the oldest supported PyTorch has a name in `torch.amp`."""
    return origin not in OLD or source.allows(OLD[origin].since)


def _counts(source: Source, place: Node, origin: str) -> bool:
    """Return True if a use is one that rules report."""
    return (
        _is_new(source, origin) and not is_listed(source, place) and not is_guarded(source, place)
    )


def is_listed(source: Source, node: Node) -> bool:
    """Return True if a class is in a list, a key or compared: such code is about the old name."""
    parent = source.parents[node]
    if isinstance(parent, cst.Element):
        around = source.parents[source.parents[parent]]
        return not isinstance(around, cst.Arg) or not is_instance_test(source, around)
    if isinstance(parent, cst.DictElement):
        return parent.key is node
    return isinstance(parent, (cst.Comparison, cst.ComparisonTarget, cst.Index)) and not any(
        isinstance(outer, cst.Annotation) for outer in source.around(node)
    )


def is_instance_test(source: Source, arg: cst.Arg) -> bool:
    """Return True if something is an argument of isinstance or issubclass."""
    call = source.parents[arg]
    func = call.func if isinstance(call, cst.Call) else None
    return source.names.builtin(func) in ("isinstance", "issubclass")


def _classified(source: Source, node: Node, origin: str) -> NameUse:
    parent = source.parents[node]
    old = OLD.get(origin)
    if old is None:
        return NameUse(node, node, origin, "alias", "", (), unsafe=True)
    unsafe = old.code == "AMP010"
    if isinstance(parent, cst.Call) and parent.func is node:
        if has_new_arguments(source, parent, old.kind):
            # The old class takes a single string for `enabled`; with more arguments it raises.
            guess = len(parent.args) == 1 and parent.args[0].keyword is None
            return NameUse(node, parent, origin, "call", old.code, (), unsafe=guess)
        call = call_edits(source, parent, parent.args, old.kind, old.device)
        return NameUse(node, parent, origin, "call", old.code, call, unsafe)
    if isinstance(parent, cst.Decorator):
        device = f"{source.quote}{old.device}{source.quote}"
        if old.kind == "custom":
            with_device = (source.after(node, f"(device_type={device})"),)
            return NameUse(node, node, origin, "decorator", old.code, with_device)
        with_device = (source.after(node, f"({device})"),)
        return NameUse(node, node, origin, "bare decorator", old.code, with_device, unsafe=True)
    code = "AMP010" if unsafe else "AMP006"
    return _reference(source, node, origin, code)


def _reference(source: Source, node: Node, origin: str, code: str) -> NameUse:
    kind = reference_kind(source, node)
    if kind in ("annotation", "isinstance"):
        return NameUse(node, node, origin, kind, code, ())
    old = OLD[origin]
    if kind == "alias":
        statement = source.parents[node]
        targets = statement.targets if isinstance(statement, cst.Assign) else ()
        # All calls of a name with one value are calls of the old name, and are changed with it.
        is_alone = all(source.names.only_binding(target.target) for target in targets)
        is_fixable = is_alone or old.kind == "same"
        return NameUse(node, node, origin, kind, code, () if is_fixable else None, unsafe=True)
    if kind == "partial":
        arg = source.parents[node]
        call = source.parents[arg]
        assert isinstance(arg, cst.Arg)
        assert isinstance(call, cst.Call)
        edits = device_edits(source, arg, call.args[1:], old.kind, old.device)
        return NameUse(node, node, origin, kind, code, edits)
    return NameUse(node, node, origin, kind, code, None)


def _import_uses(source: Source, group: Group) -> Iterator[NameUse]:
    """Yield the imports of a group as uses: of AMP005, or of AMP010 for private names."""
    for binding in group.bindings:
        path = binding.path or ""
        if binding.kind not in ("import", "from") or is_guarded(source, binding.node):
            continue
        if not is_in_old_module(path):  # the other one of two imports
            continue
        old = OLD.get(canonical(path))
        if not source.allows(old.since if old is not None else "1.12"):
            continue
        code = "AMP010" if old is not None and old.code == "AMP010" else "AMP005"
        use = NameUse(binding.node, binding.node, path, "import", code, ())
        use.unsafe = not group.uses  # someone else may import it from here
        group.uses.append(use)
        yield use
