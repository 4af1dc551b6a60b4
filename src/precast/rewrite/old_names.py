"""The deprecated names of PyTorch's AMP: every use in a file, and what has to change for it to be new.

Rules AMP001 to AMP006 each report one kind of use from here. The fixes are made together, because
one import may carry names of several rules.

Invariants:
    - A use through `torch.` has a fix of its own. A use through a name that an import binds shares one
      fix with that import and all other uses of the name; if one of them can't be changed, none is.
    - Guarded uses and uses that the oldest supported PyTorch has no new name for are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from precast.rewrite.guards import is_guarded
from precast.rewrite.imports import move_names, name_for
from precast.rewrite.model import Edit, Finding, Fix, Rule
from precast.rewrite.old_calls import call_edits, device_edits, has_new_arguments
from precast.rewrite.scopes import Binding, Scope
from precast.rewrite.source import Source
from precast.rewrite.syntax import Node, cst

__all__ = ["OLD", "Old", "Use", "findings", "uses"]


@dataclass(frozen=True)
class Old:
    """A deprecated name: what is new, since which PyTorch, and the rule for calls of it."""

    device: str
    kind: str  # autocast, scaler or custom
    since: str
    code: str


OLD = {
    "torch.cuda.amp.autocast": Old("cuda", "autocast", "1.12", "AMP001"),
    "torch.cpu.amp.autocast": Old("cpu", "autocast", "1.12", "AMP002"),
    "torch.cuda.amp.GradScaler": Old("cuda", "scaler", "2.3", "AMP003"),
    "torch.cpu.amp.GradScaler": Old("cpu", "scaler", "2.3", "AMP003"),
    "torch.cuda.amp.custom_fwd": Old("cuda", "custom", "2.4", "AMP004"),
    "torch.cuda.amp.custom_bwd": Old("cuda", "custom", "2.4", "AMP004"),
}
_MODULES = ("torch.cuda.amp", "torch.cpu.amp")


@dataclass(eq=False)
class Use:
    """One place where a deprecated name is used.

    Attributes:
        node: the expression that stands for the name.
        place: the node that is reported.
        origin: the deprecated name.
        kind: call, decorator, import, or how else the name is used.
        code: the rule that reports it.
        edits: what has to change here besides the import; None: it can't be changed.
        unsafe: whether that may change what the program does.
    """

    node: Node
    place: Node
    origin: str
    kind: str
    code: str
    edits: tuple[Edit, ...] | None
    unsafe: bool = False
    fix: Fix | None = None


@dataclass(eq=False)
class _Group:
    """A name that is bound by imports, with all its uses."""

    bindings: list[Binding]
    uses: list[Use] = field(default_factory=list)
    foreign: bool = False  # it is used in a way that is not listed


def findings(source: Source, rule: Rule, *kinds: str) -> Iterator[Finding]:
    """The findings of a rule: its uses, of some kinds if any are given."""
    for use in uses(source):
        if use.code == rule.code and (not kinds or use.kind in kinds):
            message = rule.message.format(old=use.origin, new=new_name(use.origin))
            yield source.find(rule, use.place, message, use.fix)


def new_name(path: str) -> str:
    """`torch.cuda.amp.autocast` -> `torch.amp.autocast`."""
    return path.replace("torch.cuda.amp", "torch.amp").replace("torch.cpu.amp", "torch.amp")


def uses(source: Source) -> list[Use]:
    """All uses of deprecated names in a file, in the order of the text; computed once."""
    known = source.cache.get("old names")
    if known is None:
        known = source.cache["old names"] = _uses(source)
    assert isinstance(known, list)
    return known


def _uses(source: Source) -> list[Use]:
    found = list(_expressions(source))
    groups: dict[tuple[Scope, str], _Group] = {}
    for use in found:
        key = _group_key(source, use.node)
        if key is None:
            use.fix = _own_fix(source, use)
        else:
            scope, name = key
            groups.setdefault(key, _Group(scope.bindings[name])).uses.append(use)
    _complete(source, groups)
    found += _share_fixes(source, groups)
    return sorted(found, key=lambda use: source.span(use.place))


def _expressions(source: Source) -> Iterator[Use]:
    """Names and dotted names that stand for a deprecated name."""
    inner = (cst.Attribute, cst.Name)
    for node in [*source.all(cst.Attribute), *source.all(cst.Name)]:
        origin = source.origin(node)
        if origin not in OLD or (isinstance(node, cst.Name) and node not in source.scopes.scope_of):
            continue
        if isinstance(source.parents.get(node), cst.Attribute) and isinstance(node, inner):
            continue  # `autocast.__init__`: not a use that we know; the group is told by _complete
        if _is_bound_here(source, node) or not source.allows(OLD[origin].since):
            continue
        if not is_guarded(source, node):
            yield _classified(source, node, origin)


def _is_bound_here(source: Source, node: Node) -> bool:
    """Whether a name is being assigned, not read."""
    return isinstance(node, cst.Name) and any(b.node is node for b in source.names.bindings(node))


def _classified(source: Source, node: Node, origin: str) -> Use:
    parent = source.parents[node]
    old = OLD[origin]
    if isinstance(parent, cst.Call) and parent.func is node:
        if has_new_arguments(source, parent, old.kind):
            guess = parent.args[0].keyword is None  # what it did before is not what it says
            return Use(node, parent, origin, "call", "AMP106", (), unsafe=guess)
        return Use(
            node,
            parent,
            origin,
            "call",
            old.code,
            call_edits(source, parent, parent.args, old.kind, old.device),
        )
    if isinstance(parent, cst.Decorator):
        if old.kind == "custom":
            quote = source.quote
            edits = (source.after(node, f"(device_type={quote}{old.device}{quote})"),)
            return Use(node, node, origin, "decorator", old.code, edits)
        edits = (source.after(node, f"({source.quote}{old.device}{source.quote})"),)
        return Use(node, node, origin, "bare decorator", "AMP103", edits, unsafe=True)
    return _reference(source, node, origin)


def _reference(source: Source, node: Node, origin: str) -> Use:
    """A use that is no call: AMP006."""
    parent = source.parents[node]
    if isinstance(parent, cst.Arg):
        return _handed_on(source, node, parent, origin)
    if any(isinstance(outer, cst.Annotation) for outer in source.around(node)):
        return Use(node, node, origin, "annotation", "AMP006", ())
    return Use(node, node, origin, "reference", "AMP006", None)


def _handed_on(source: Source, node: Node, arg: cst.Arg, origin: str) -> Use:
    """A deprecated name as an argument: of partial, of isinstance, of anything else, or a base class."""
    call = source.parents[arg]
    if not isinstance(call, cst.Call):
        return Use(node, node, origin, "subclass", "AMP006", None)
    is_partial = source.origin(call.func) == "functools.partial"
    if is_partial and call.args[0] is arg and not arg.star:
        old = OLD[origin]
        edits = device_edits(source, arg, call.args[1:], old.kind, old.device)
        return Use(node, node, origin, "partial", "AMP006", edits)
    if source.names.builtin(call.func) in ("isinstance", "issubclass"):
        return Use(node, node, origin, "isinstance", "AMP006", ())
    return Use(node, node, origin, "argument", "AMP006", None)


# --- fixes ---


def _root(node: Node) -> Node:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def _group_key(source: Source, node: Node) -> tuple[Scope, str] | None:
    """The name through which a deprecated module or name was imported; None for `torch.` itself."""
    root = _root(node)
    path = source.names.path(root) or ""
    if not path.startswith(_MODULES):
        return None
    assert isinstance(root, cst.Name)
    home = source.scopes.scope_of[root].home(root.value)
    assert home is not None
    return home, root.value


def _own_fix(source: Source, use: Use) -> Fix | None:
    """The fix of `torch.cuda.amp.autocast()`, which no other use has a part in."""
    if use.edits is None:
        return None
    inner = use.node
    while source.names.path(inner) not in _MODULES and isinstance(inner, cst.Attribute):
        inner = inner.value
    named = name_for(source, "torch", _root(use.node))
    if named is None or not isinstance(inner, cst.Attribute):
        return None
    torch, added = named
    message = f"Use {new_name(use.origin)}"
    return source.fix(
        message, source.replace(inner, f"{torch}.amp"), added, use.edits, unsafe=use.unsafe
    )


def _complete(source: Source, groups: dict[tuple[Scope, str], _Group]) -> None:
    """Adds groups of imports without uses, and finds uses of the names that are not listed."""
    for scope in {source.scopes.module, *source.scopes.owned.values()}:
        for name, bindings in scope.bindings.items():
            if bindings and all((b.path or "").startswith(_MODULES) for b in bindings):
                groups.setdefault((scope, name), _Group(bindings))
    for (scope, name), group in groups.items():
        known = {_root(use.node) for use in group.uses}
        group.foreign = any(
            node not in known and not _is_bound_here(source, node)
            for node in source.scopes.references(scope, name)
        )
        group.foreign |= name in _exported(source) or source.filename.endswith("__init__.py")


def _exported(source: Source) -> set[str]:
    """The names in `__all__`."""
    names = set()
    for binding in source.scopes.module.bindings.get("__all__", ()):
        if isinstance(binding.value, (cst.List, cst.Tuple)):
            names |= {getattr(e.value, "evaluated_value", "") for e in binding.value.elements}
    return names


def _share_fixes(source: Source, groups: dict[tuple[Scope, str], _Group]) -> Iterator[Use]:
    """Gives each group's uses one fix, together with the groups of the same import; yields the imports."""
    by_statement: dict[Node, list[_Group]] = {}
    for group in groups.values():
        statements = {
            source.parents.get(b.node) for b in group.bindings if b.kind in ("import", "from")
        }
        if len(statements) == 1 and len(group.bindings) == 1:
            by_statement.setdefault(next(iter(statements)), []).append(group)  # type: ignore[arg-type]
        yield from _import_uses(source, group)
    for statement, together in by_statement.items():
        ready = [group for group in together if _is_fixable(source, group)]
        safe = [group for group in ready if not any(use.unsafe for use in group.uses)]
        _give_fix(source, statement, safe, safe)
        if len(safe) < len(ready):
            _give_fix(source, statement, ready, [group for group in ready if group not in safe])


def _is_fixable(source: Source, group: _Group) -> bool:
    codes = source.codes
    selected = codes is None or all(use.code in codes for use in group.uses if use.kind != "import")
    return selected and not group.foreign and all(use.edits is not None for use in group.uses)


def _give_fix(
    source: Source, statement: Node, moved: list[_Group], receivers: list[_Group]
) -> None:
    definition = _definition_edits(source, statement, moved)
    if definition is None or not moved:
        return
    edits = [e for group in moved for use in group.uses for e in use.edits or ()]
    unsafe = any(use.unsafe for group in moved for use in group.uses)
    fix = source.fix("Use torch.amp", definition, edits, unsafe=unsafe)
    for group in receivers:
        for use in group.uses:
            use.fix = fix


def _definition_edits(
    source: Source, statement: Node, moved: list[_Group]
) -> tuple[Edit, ...] | None:
    aliases = [group.bindings[0].node for group in moved]
    if isinstance(statement, cst.Import):
        edits = [
            source.replace(a.name, new_name(source.code(a.name)))
            for a in statement.names
            if a in aliases
        ]
        return tuple(edits)
    if isinstance(statement, cst.ImportFrom):
        modules = {
            group.bindings[0].node: new_name(group.bindings[0].path or "").rpartition(".")[0]
            for group in moved
        }
        kept = [alias for alias in aliases if isinstance(alias, cst.ImportAlias)]
        return move_names(source, statement, kept, modules)
    return None


def _import_uses(source: Source, group: _Group) -> Iterator[Use]:
    """The imports of a group, as uses that AMP005 reports."""
    for binding in group.bindings:
        path = binding.path or ""
        if binding.kind not in ("import", "from") or is_guarded(source, binding.node):
            continue
        if not source.allows(_since(path, group)):
            continue
        use = Use(binding.node, binding.node, path, "import", "AMP005", ())
        use.unsafe = not group.uses  # someone else may import it from here
        group.uses.append(use)
        yield use


def _since(path: str, group: _Group) -> str:
    if path in OLD:
        return OLD[path].since
    return max((OLD[use.origin].since for use in group.uses if use.origin in OLD), default="1.12")
