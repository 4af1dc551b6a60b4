"""Names that move to another module: every use in a file, and one fix for each set that has to change together.

`old_names.py` moves deprecated names to `torch.amp`; AMP601 moves those of `torch.amp` to precast.
What has to change at a use besides its name, they say; what an import or an alias binds, this file does.

Invariants:
    - A use through a module that stays (`torch.`) has a fix of its own. A use through a name that an import
      or an assignment binds shares one fix with that and with all other uses of the name; if one of
      them can't be changed, none is.
    - A name that other files may see is changed by unsafe fixes at most: an alias. An import that
      `__all__` or an `__init__.py` offers is not changed at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from precast.rewrite.imports import move_names, name_for
from precast.rewrite.model import Edit, Fix
from precast.rewrite.names import canonical
from precast.rewrite.scopes import Binding, Scope
from precast.rewrite.source import Source
from precast.rewrite.syntax import Node, cst, strings, walk

__all__ = [
    "Group",
    "Move",
    "Use",
    "exported",
    "expressions",
    "group_key",
    "groups_of",
    "in_string",
    "reference_kind",
    "root",
    "share",
]


@dataclass(frozen=True)
class Move:
    """What moves: dotted names, or modules with all that is in them, and where to.

    Attributes:
        modules: old -> new.
        names: the documented dotted names whose uses count.
        message: of fixes that change an import.
    """

    modules: Mapping[str, str]
    names: frozenset[str]
    message: str

    def covers(self, path: str | None) -> bool:
        """Whether a dotted name, as it is spelled, moves."""
        return path is not None and self._old(path) is not None

    def new(self, path: str) -> str:
        """Where a dotted name that moves is then."""
        old = self._old(path)
        assert old is not None
        return self.modules[old] + path[len(old) :]

    def knows(self, path: str | None) -> bool:
        """Whether a dotted name is one of the names, or a module that they are in."""
        return path is not None and (
            canonical(path) in self.names or canonical(path) in self.modules
        )

    def _old(self, path: str) -> str | None:
        fits = [m for m in self.modules if path == m or path.startswith(m + ".")]
        return max(fits, key=len) if fits else None


@dataclass(eq=False)
class Use:
    """One place where a name that moves is used.

    Attributes:
        node: the expression that stands for the name.
        place: the node that is reported.
        origin: the name.
        kind: call, decorator, import, or how else the name is used.
        code: the rule that reports it; empty: none does.
        edits: what has to change here besides the name; None: it can't be changed.
        unsafe: whether that may change what the program does.
        followers: the uses of the alias that is bound here.
        renamed: the edits that change the name here, if that is no replacement of the node.
    """

    node: Node
    place: Node
    origin: str
    kind: str
    code: str
    edits: tuple[Edit, ...] | None
    unsafe: bool = False
    fix: Fix | None = None
    followers: list[Use] = field(default_factory=list)
    renamed: tuple[Edit, ...] | None = None


@dataclass(eq=False)
class Group:
    """A name that is bound by imports or assignments, with all its uses."""

    bindings: list[Binding]
    uses: list[Use] = field(default_factory=list)
    foreign: bool = False  # it is used in a way that is not listed


_Groups = dict[tuple[Scope, str], Group]


def root(node: Node) -> Node:
    """The first name of a dotted name."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


# --- finding uses ---


def expressions(source: Source, move: Move) -> Iterator[tuple[Node, Node, str]]:
    """What stands for a name that moves: the expression, where it is reported, the name.

    In a quoted annotation the expression is that of the text, and it is reported at the string.
    """
    node: Node
    for node in [*source.all(cst.Attribute), *source.all(cst.Name)]:
        if isinstance(node, cst.Name) and node not in source.scopes.scope_of:
            continue
        origin = source.origin(node)
        counts = origin in move.names or _is_module_alias(source, node, move)
        # `autocast.__init__` is no use that we know: groups see it as a foreign one.
        inside = isinstance(source.parents.get(node), cst.Attribute)
        if origin and counts and not inside and not _is_bound_here(source, node):
            yield node, node, origin
    for string, tree in source.scopes.quoted_trees.items():
        inner = {n.value for n in walk(tree) if isinstance(n, cst.Attribute)}
        for node in walk(tree):
            origin = source.origin(node)
            if origin in move.names and node not in inner:
                yield node, string, origin


def _is_bound_here(source: Source, node: Node) -> bool:
    """Whether a name is being assigned, not read."""
    return isinstance(node, cst.Name) and any(b.node is node for b in source.names.bindings(node))


def in_string(source: Source, string: Node, node: Node, move: Move) -> tuple[Edit, ...] | None:
    """Edits that rename a dotted name in a quoted annotation; None where the text is not that plain."""
    text, value = source.code(string), strings(string)
    base = source.names.path(root(node))
    if value is None or text[1:-1] != value or base is None:
        return None
    if move.covers(base):
        return ()  # its import is changed
    tree: Node = node
    while not (path := source.names.path(tree) or "") or path not in move.modules:
        if not isinstance(tree, cst.Attribute):
            return None
        tree = tree.value
    top, dot, rest = move.modules[path].partition(".")
    first = root(node)
    available = name_for(source, top, first)
    if available is None or not isinstance(first, cst.Name):
        return None
    spelled = first.value + path[len(base) :]
    wanted = available[0] + dot + rest
    start = source.span(string).start + 1
    found = re.finditer(rf"(?<![\w.]){re.escape(spelled)}(?!\w)", value)
    edits = (
        Edit(start + _bytes(value[: m.start()]), start + _bytes(value[: m.end()]), wanted)
        for m in found
    )
    return (*edits, *available[1])


def _bytes(text: str) -> int:
    return len(text.encode("utf-8"))


def _is_module_alias(source: Source, node: Node, move: Move) -> bool:
    """`amp = torch.cuda.amp`."""
    parent = source.parents.get(node)
    is_value = isinstance(parent, cst.Assign) and parent.value is node
    return is_value and source.names.path(node) in move.modules


def reference_kind(source: Source, node: Node) -> str:
    """How a name is used that is not called: annotation, partial, isinstance, alias, value (of a table) ..."""
    parent = source.parents[node]
    if any(isinstance(outer, cst.Annotation) for outer in source.around(node)):
        return "annotation"
    if isinstance(parent, cst.Element):  # isinstance(x, (A, B))
        parent = source.parents[source.parents[parent]]
    if isinstance(parent, cst.Arg):
        return _argument_kind(source, node, parent)
    if isinstance(parent, cst.DictElement) and parent.value is node:
        return "value"
    if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
        return "alias" if isinstance(parent.targets[0].target, cst.Name) else "reference"
    return "reference"


def _argument_kind(source: Source, node: Node, arg: cst.Arg) -> str:
    call = source.parents[arg]
    if not isinstance(call, cst.Call):
        return "subclass"
    if source.names.builtin(call.func) in ("isinstance", "issubclass"):
        return "isinstance"
    first = call.args[0] is arg and arg.value is node and not arg.star
    is_partial = first and source.origin(call.func) == "functools.partial"
    return "partial" if is_partial else "argument"


# --- groups ---


def group_key(source: Source, node: Node, move: Move) -> tuple[Scope, str] | None:
    """The name through which something that moves was bound; None for `torch.` itself."""
    name = root(node)
    if not isinstance(name, cst.Name) or not move.covers(source.names.path(name)):
        return None
    home = source.scopes.scope_of[name].home(name.value)
    assert home is not None
    return home, name.value


def groups_of(source: Source, move: Move, uses: list[Use]) -> _Groups:
    """The groups of a file, imports and aliases without uses among them."""
    groups: dict[tuple[Scope, str], Group] = {}
    for use in uses:
        key = group_key(source, use.node, move)
        if key is not None:
            scope, name = key
            groups.setdefault(key, Group(scope.bindings[name])).uses.append(use)
    for scope in {source.scopes.module: 0, **dict.fromkeys(source.scopes.owned.values())}:
        for name, bindings in scope.bindings.items():
            if bindings and all(move.knows(_path(source, b)) for b in bindings):
                groups.setdefault((scope, name), Group(bindings))
    for (scope, name), group in groups.items():
        group.foreign = not all(move.knows(_path(source, b)) for b in group.bindings)
        known = {root(use.node) for use in group.uses}
        group.foreign |= any(
            node not in known and not _is_bound_here(source, node)
            for node in source.scopes.references(scope, name)
        )
        group.foreign |= name in exported(source) or source.filename.endswith("__init__.py")
        group.foreign |= scope.is_class or len(group.bindings) > 1
    return groups


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


def share(source: Source, move: Move, uses: list[Use], groups: _Groups) -> None:
    """Gives each use its fix: its own, or that of its group together with groups of the same import."""
    for (scope, name), group in groups.items():
        if [b.kind for b in group.bindings] == ["assign"]:
            _follow(group, [u for u in uses if _binds(source, u, scope, name)])
    for use in uses:
        if group_key(source, use.node, move) is None:
            _give([use], _own_fix(source, move, use))
    by_statement: dict[Node, list[Group]] = {}
    for group in groups.values():
        binding = group.bindings[0]
        if len(group.bindings) == 1 and binding.kind in ("import", "from"):
            by_statement.setdefault(source.parents[binding.node], []).append(group)
    for statement, together in by_statement.items():
        ready = [group for group in together if _is_fixable(source, group)]
        safe = [group for group in ready if not any(use.unsafe for use in group.uses)]
        _share(source, move, statement, safe, safe)
        if len(safe) < len(ready):
            _share(source, move, statement, ready, [group for group in ready if group not in safe])


def _binds(source: Source, use: Use, scope: Scope, name: str) -> bool:
    parent = source.parents.get(use.node)
    if use.kind != "alias" or not isinstance(parent, cst.Assign):
        return False
    target = parent.targets[0].target
    return isinstance(target, cst.Name) and any(b.node is target for b in scope.bindings[name])


def _follow(group: Group, aliases: list[Use]) -> None:
    """Hands what the uses of an alias need to the place that binds it."""
    for alias in aliases:
        alias.followers = group.uses
        if group.foreign or any(use.edits is None for use in group.uses):
            alias.edits = None


def _all(use: Use) -> Iterator[Use]:
    yield use
    for follower in use.followers:
        yield from _all(follower)


def _edits(uses: list[Use]) -> tuple[Edit, ...] | None:
    """The edits of uses and of all that follow them; None if one of them can't be changed."""
    found: list[Edit] = []
    for use in (inner for outer in uses for inner in _all(outer)):
        if use.edits is None:
            return None
        found += use.edits
    return tuple(found)


def _is_selected(source: Source, uses: list[Use]) -> bool:
    codes = source.codes
    return codes is None or all(
        use.code in codes or not use.code or use.kind == "import"
        for outer in uses
        for use in _all(outer)
    )


def _give(uses: list[Use], fix: Fix | None) -> None:
    for use in (inner for outer in uses for inner in _all(outer)):
        use.fix = fix


def _own_fix(source: Source, move: Move, use: Use) -> Fix | None:
    """The fix of `torch.cuda.amp.autocast()`, which no other use has a part in but those of an alias."""
    edits = _edits([use])
    if edits is None or not _is_selected(source, [use]):
        return None
    renamed = use.renamed if use.renamed is not None else _renamed(source, move, use.node)
    if renamed is None:
        return None
    unsafe = any(inner.unsafe for inner in _all(use))
    return source.fix(f"Use {move.new(use.origin)}", renamed, edits, unsafe=unsafe)


def _renamed(source: Source, move: Move, node: Node) -> tuple[Edit, ...] | None:
    inner = node
    while source.names.path(inner) not in move.modules:
        if not isinstance(inner, cst.Attribute):
            return None
        inner = inner.value
    new = move.modules[source.names.path(inner) or ""]
    top, dot, rest = new.partition(".")
    named = name_for(source, top, root(node))
    if named is None:
        return None
    name, added = named
    return (source.replace(inner, name + dot + rest), *added)


def _is_fixable(source: Source, group: Group) -> bool:
    return not group.foreign and _is_selected(source, group.uses) and _edits(group.uses) is not None


def _share(
    source: Source, move: Move, statement: Node, moved: list[Group], receivers: list[Group]
) -> None:
    definition = _definition_edits(source, move, statement, moved)
    if definition is None or not moved:
        return
    uses = [use for group in moved for use in group.uses]
    unsafe = any(use.unsafe for outer in uses for use in _all(outer))
    fix = source.fix(move.message, definition, _edits(uses) or (), unsafe=unsafe)
    for group in receivers:
        _give(group.uses, fix)


def _definition_edits(
    source: Source, move: Move, statement: Node, moved: list[Group]
) -> tuple[Edit, ...] | None:
    bindings = [group.bindings[0] for group in moved]
    if isinstance(statement, cst.Import):
        return tuple(
            source.replace(b.node.name, move.new(source.code(b.node.name)))
            for b in bindings
            if isinstance(b.node, cst.ImportAlias)
        )
    if isinstance(statement, cst.ImportFrom):
        new = {b.node: move.new(b.path or "") for b in bindings}
        kept = [b.node for b in bindings if isinstance(b.node, cst.ImportAlias)]
        return move_names(source, statement, kept, new)
    return None
