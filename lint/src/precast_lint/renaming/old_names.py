"""The deprecated names of PyTorch's AMP: every use in a file, and what has to change for it to be new.

Rules AMP001 to AMP006 and AMP010 each report one kind of use from here. The fixes are made together, because
one import may carry names of several rules; `move_fixes.py` makes them.

Invariant: guarded uses, uses that the oldest supported PyTorch has no new name for, and classes that are only
listed or compared (there the old name is meant) are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from precast_lint.editing.imports import name_for
from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Edit, LintFinding, LintRule
from precast_lint.parsing.names import canonical
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.renaming.move_fixes import Group, groups_of, share
from precast_lint.renaming.moves import Move, NameUse, expressions, in_string, reference_kind
from precast_lint.renaming.old_calls import call_edits, device_edits, has_new_arguments

__all__ = ["MOVE", "OLD", "Old", "findings", "is_listed", "new_name", "uses"]


@dataclass(frozen=True)
class Old:
    """A deprecated name: what is new, since which PyTorch, and the rule for calls of it."""

    device: str
    kind: str  # autocast, scaler, custom, cast or same: how its arguments change
    since: str
    code: str


OLD = {
    "torch.cuda.amp.autocast": Old("cuda", "autocast", "1.12", "AMP001"),
    "torch.cpu.amp.autocast": Old("cpu", "autocast", "1.12", "AMP002"),
    "torch.cuda.amp.GradScaler": Old("cuda", "scaler", "2.3", "AMP003"),
    "torch.cpu.amp.GradScaler": Old("cpu", "scaler", "2.3", "AMP003"),
    "torch.cuda.amp.custom_fwd": Old("cuda", "custom", "2.4", "AMP004"),
    "torch.cuda.amp.custom_bwd": Old("cuda", "custom", "2.4", "AMP004"),
    "torch.cuda.amp._cast": Old("cuda", "cast", "2.4", "AMP010"),
    "torch.cuda.amp._refresh_per_optimizer_state": Old("cuda", "same", "2.3", "AMP010"),
    "torch.cuda.amp._MultiDeviceReplicator": Old("cuda", "same", "2.3", "AMP010"),
}
MOVE = Move(
    modules={"torch.cuda.amp": "torch.amp", "torch.cpu.amp": "torch.amp"},
    names=frozenset(OLD),
    message="Use torch.amp",
)


def findings(source: Source, rule: LintRule) -> Iterator[LintFinding]:
    """The findings of a rule: its uses."""
    for use in uses(source):
        if use.code == rule.code:
            message = rule.message.format(old=use.origin, new=new_name(use.origin))
            yield source.find(rule, use.place, message, use.fix)


def new_name(path: str) -> str:
    """`torch.cuda.amp.autocast` -> `torch.amp.autocast`."""
    return MOVE.new(path)


def uses(source: Source) -> list[NameUse]:
    """All uses of deprecated names in a file, in the order of the text; computed once."""
    cached = source.cache.get("old names")
    if cached is None:
        cached = source.cache["old names"] = _uses(source)
    assert isinstance(cached, list)
    return cached


def _uses(source: Source) -> list[NameUse]:
    results = [
        _classified(source, *expression)
        for expression in expressions(source, MOVE)
        if _counts(source, *expression[1:])
    ]
    groups = groups_of(source, MOVE, results)
    imports = [use for group in groups.values() for use in _import_uses(source, group)]
    share(source, MOVE, results, groups)
    return sorted([*results, *imports], key=lambda use: source.span(use.place))


def _counts(source: Source, place: Node, origin: str) -> bool:
    """Return True if a use is one that rules report."""
    old = OLD.get(origin)
    if old is not None and not source.allows(old.since):
        return False
    return not is_listed(source, place) and not is_guarded(source, place)


def is_listed(source: Source, node: Node) -> bool:
    """Return True if a class stands in a list, is a key, or is compared: code about the old name, not with it."""
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


def _classified(source: Source, node: Node, place: Node, origin: str) -> NameUse:
    if node is not place:
        edits = in_string(source, place, node, MOVE)
        return NameUse(node, place, origin, "annotation", "AMP006", edits and (), renamed=edits)
    parent = source.parents[node]
    old = OLD.get(origin)
    if old is None:
        return NameUse(node, node, origin, "alias", "", (), unsafe=True)
    unsafe = old.code == "AMP010"
    if isinstance(parent, cst.Call) and parent.func is node:
        if has_new_arguments(source, parent, old.kind):
            # A lone text was taken for a flag that is true; beside others it has always raised.
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
    """A use that is no call: AMP006."""
    kind = reference_kind(source, node)
    if kind in ("annotation", "isinstance"):
        return NameUse(node, node, origin, kind, code, ())
    old = OLD[origin]
    if kind == "alias":
        alone = old.kind == "same" or _is_only_value(source, node)
        edits = () if alone else _kept_calls(source, node, old)
        return NameUse(node, node, origin, kind, code, edits, unsafe=True)
    if kind == "partial":
        arg = source.parents[node]
        call = source.parents[arg]
        assert isinstance(arg, cst.Arg)
        assert isinstance(call, cst.Call)
        edits = device_edits(source, arg, call.args[1:], old.kind, old.device)
        return NameUse(node, node, origin, kind, code, edits)
    if kind == "value" and old.kind != "cast":
        return NameUse(node, node, origin, kind, code, _with_device(source, node, old), unsafe=True)
    return NameUse(node, node, origin, kind, code, None)


def _is_only_value(source: Source, node: Node) -> bool:
    """Return True if a name has just this value, so that its calls are known to be calls of it, and can be changed."""
    statement = source.parents[node]
    targets = statement.targets if isinstance(statement, cst.Assign) else ()
    return all(source.names.only_binding(target.target) is not None for target in targets)


def _kept_calls(source: Source, node: Node, old: Old) -> tuple[Edit, ...] | None:
    """A value that is called as before, for a name that has others too; None where one hands on a position."""
    statement = source.parents[node]
    names = {t.target.value for t in statement.targets if isinstance(t.target, cst.Name)}  # type: ignore[attr-defined]
    calls = [
        c for c in source.all(cst.Call) if isinstance(c.func, cst.Name) and c.func.value in names
    ]
    if any(arg.keyword is None for call in calls for arg in call.args):
        return None
    return _with_device(source, node, old)


def _with_device(source: Source, node: Node, old: Old) -> tuple[Edit, ...] | None:
    """`functools.partial` with the device, for code that calls what it finds in a table."""
    if old.kind == "same":
        return ()
    named = name_for(source, "functools", node)
    if named is None:
        return None
    keyword = "device_type=" if old.kind == "custom" else ""
    device = keyword + source.quoted(old.device, node)
    before = source.before(node, f"{named[0]}.partial(")
    return (before, source.after(node, f", {device})"), *named[1])


def _import_uses(source: Source, group: Group) -> Iterator[NameUse]:
    """The imports of a group, as uses that AMP005 reports, those of private names AMP010."""
    for binding in group.bindings:
        path = binding.path or ""
        if binding.kind not in ("import", "from") or is_guarded(source, binding.node):
            continue
        if not MOVE.covers(path):  # the other of two imports
            continue
        if not source.allows(_since(path, group)):
            continue
        old = OLD.get(canonical(path))
        code = "AMP010" if old is not None and old.code == "AMP010" else "AMP005"
        use = NameUse(binding.node, binding.node, path, "import", code, ())
        use.unsafe = not group.uses  # someone else may import it from here
        group.uses.append(use)
        yield use


def _since(path: str, group: Group) -> str:
    """The PyTorch that has the new names of all that is used through an import."""
    if canonical(path) in OLD:
        return OLD[canonical(path)].since
    used = [OLD[use.origin].since for use in group.uses if use.origin in OLD]
    return max(used, default="1.12")
