"""One fix for each set of uses that have to change together.

Invariants:
    - A use that starts with `torch.` has its own fix. A use of an imported or assigned name shares one fix with the
      import or assignment and with all other uses of the name; if one of them cannot be changed, none is.
    - An alias, which other files may use, is changed by unsafe fixes only. An import that `__all__` or an
      `__init__.py` exports is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from precast_lint.editing.imports import move_names, name_for
from precast_lint.model import Edit, Fix
from precast_lint.parsing.names import canonical
from precast_lint.parsing.scopes import Binding, Scope
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.renaming.moves import (
    MODULES,
    NameUse,
    is_bound_here,
    is_deprecated,
    is_in_old_module,
    new_name,
    root,
)

__all__ = ["Group", "exported", "group_key", "groups_of", "share"]


@dataclass(eq=False)
class Group:
    """A name that is bound by imports or assignments, with all its uses."""

    bindings: list[Binding]
    uses: list[NameUse] = field(default_factory=list)
    foreign: bool = False  # True if the name has a use that is not listed


# Why a use of some kind makes the fix of its import unsafe.
_WHY = {
    "import": "nothing uses it here, so other files may import it from here",
    "alias": "other files may call the alias in the old way",
    "call": "a call gives a device, which the old name takes for something else",
    "bare decorator": "the old name as a bare decorator did not do what it says",
    "value": "code that is not seen may call what is handed over in the old way",
}
_Groups = dict[tuple[Scope, str], Group]


def group_key(source: Source, node: Node) -> tuple[Scope, str] | None:
    """Return the scope and name that a deprecated name is read through; None if that is `torch` itself."""
    name = root(node)
    if not isinstance(name, cst.Name) or not is_in_old_module(source.names.path(name)):
        return None
    home = source.scopes.scope_of[name].home(name.value)
    assert home is not None
    return home, name.value


def groups_of(source: Source, uses: list[NameUse]) -> _Groups:
    """Return the groups of a file, also those of imports and aliases without uses."""
    groups: dict[tuple[Scope, str], Group] = {}
    for use in uses:
        key = group_key(source, use.node)
        if key is not None:
            scope, name = key
            groups.setdefault(key, Group(scope.bindings[name])).uses.append(use)
    for scope in {source.scopes.module: 0, **dict.fromkeys(source.scopes.owned.values())}:
        for name, bindings in scope.bindings.items():
            if bindings and _is_moved(source, bindings):
                groups.setdefault((scope, name), Group(bindings))
    quoted = {n for tree in source.scopes.quoted_trees.values() for n in walk(tree)}
    for (scope, name), group in groups.items():
        group.foreign = not all(is_deprecated(_path(source, b)) for b in group.bindings)
        entries = quoted | {root(use.node) for use in group.uses}
        group.foreign |= any(
            node not in entries and not is_bound_here(source, node)
            for node in source.scopes.references(scope, name)
        )
        group.foreign |= name in exported(source) or source.filename.endswith("__init__.py")
        group.foreign |= scope.is_class or len(group.bindings) > 1
    return groups


def _is_moved(source: Source, bindings: list[Binding]) -> bool:
    """Return True if a name is only bound to deprecated names, or to one beside its replacement."""
    paths = [_path(source, binding) for binding in bindings]
    if all(map(is_deprecated, paths)):
        return True
    old = [
        b.path
        for b in bindings
        if b.kind == "from" and b.path and is_deprecated(b.path) and is_in_old_module(b.path)
    ]
    return bool(old) and not {new_name(path) for path in old} & {canonical(p or "") for p in paths}


def _path(source: Source, binding: Binding) -> str | None:
    if binding.kind == "assign":
        return source.names.path(binding.value)
    return binding.path


def exported(source: Source) -> set[str]:
    """The names in `__all__`."""
    names = set()
    for binding in source.scopes.module.bindings.get("__all__", ()):
        if isinstance(binding.value, (cst.List, cst.Tuple)):
            names |= {getattr(e.value, "evaluated_value", "") for e in binding.value.elements}
    return names


# --- fixes ---


def share(source: Source, uses: list[NameUse], groups: _Groups) -> None:
    """Give each use its fix: its own, or one for its group and the groups of the same import."""
    for (scope, name), group in groups.items():
        if [b.kind for b in group.bindings] == ["assign"]:
            _follow(group, [u for u in uses if _binds(source, u, scope, name)])
    for use in uses:
        if group_key(source, use.node) is None:
            _give([use], _own_fix(source, use))
    by_statement: dict[Node, list[Group]] = {}
    for group in groups.values():
        binding = group.bindings[0]
        if len(group.bindings) == 1 and binding.kind in ("import", "from"):
            by_statement.setdefault(source.parents[binding.node], []).append(group)
    for statement, together in by_statement.items():
        ready = [group for group in together if _is_fixable(source, group)]
        safe = [group for group in ready if not any(use.unsafe for use in group.uses)]
        _share(source, statement, safe, safe)
        if len(safe) < len(ready):
            _share(source, statement, ready, [group for group in ready if group not in safe])


def _binds(source: Source, use: NameUse, scope: Scope, name: str) -> bool:
    parent = source.parents.get(use.node)
    if use.kind != "alias" or not isinstance(parent, cst.Assign):
        return False
    target = parent.targets[0].target
    return isinstance(target, cst.Name) and any(b.node is target for b in scope.bindings[name])


def _follow(group: Group, aliases: list[NameUse]) -> None:
    """Add the edits for the uses of an alias to the assignment that binds it."""
    for alias in aliases:
        alias.followers = group.uses
        if group.foreign or any(use.edits is None for use in group.uses):
            alias.edits = None


def _all(use: NameUse) -> Iterator[NameUse]:
    yield use
    for follower in use.followers:
        yield from _all(follower)


def _edits(uses: list[NameUse]) -> tuple[Edit, ...] | None:
    """Return the edits of uses and of the uses of their aliases; None if one of them cannot be changed."""
    results: list[Edit] = []
    for use in (inner for outer in uses for inner in _all(outer)):
        if use.edits is None:
            return None
        results += use.edits
    return tuple(results)


def _is_selected(source: Source, uses: list[NameUse]) -> bool:
    codes = source.codes
    return codes is None or all(
        use.code in codes or not use.code or use.kind == "import"
        for outer in uses
        for use in _all(outer)
    )


def _give(uses: list[NameUse], fix: Fix | None) -> None:
    for use in (inner for outer in uses for inner in _all(outer)):
        use.fix = fix


def _own_fix(source: Source, use: NameUse) -> Fix | None:
    """Return the fix of a use such as `torch.cuda.amp.autocast()`, with the uses of its alias."""
    edits = _edits([use])
    if edits is None or not _is_selected(source, [use]):
        return None
    renamed = _renamed(source, use.node)
    if renamed is None:
        return None
    unsafe = any(inner.unsafe for inner in _all(use))
    return source.fix(f"Use {new_name(use.origin)}", renamed, edits, unsafe=unsafe)


def _renamed(source: Source, node: Node) -> tuple[Edit, ...] | None:
    inner = node
    while source.names.path(inner) not in MODULES:
        if not isinstance(inner, cst.Attribute):
            return None
        inner = inner.value
    named = name_for(source, "torch", root(node))
    if named is None:
        return None
    name, added = named
    return (source.replace(inner, f"{name}.amp"), *added)


def _is_fixable(source: Source, group: Group) -> bool:
    return not group.foreign and _is_selected(source, group.uses) and _edits(group.uses) is not None


def _share(source: Source, statement: Node, moved: list[Group], receivers: list[Group]) -> None:
    definition = _definition_edits(source, statement, moved)
    if definition is None or not moved:
        return
    uses = [use for group in moved for use in group.uses]
    why = [
        _WHY[use.kind] for outer in uses for use in _all(outer) if use.unsafe and use.kind in _WHY
    ]
    unsafe = any(use.unsafe for outer in uses for use in _all(outer))
    message = f"Use torch.amp (unsafe: {why[0]})" if why else "Use torch.amp"
    fix = source.fix(message, definition, _edits(uses) or (), unsafe=unsafe)
    for group in receivers:
        _give(group.uses, fix)


def _definition_edits(
    source: Source, statement: Node, moved: list[Group]
) -> tuple[Edit, ...] | None:
    bindings = [group.bindings[0] for group in moved]
    if isinstance(statement, cst.Import):
        return tuple(
            source.replace(b.node.name, new_name(source.code(b.node.name)))
            for b in bindings
            if isinstance(b.node, cst.ImportAlias)
        )
    if isinstance(statement, cst.ImportFrom):
        new = {b.node: new_name(b.path or "") for b in bindings}
        selection = [b.node for b in bindings if isinstance(b.node, cst.ImportAlias)]
        return move_names(source, statement, selection, new)
    return None
