"""Edits of imports: adding a module, removing one, and moving names to another module."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from precast_lint.model import Edit
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted

__all__ = ["is_alone", "move_names", "name_for", "without_import"]


def name_for(source: Source, module: str, at: Node) -> tuple[str, tuple[Edit, ...]] | None:
    """Return a name for a top-level module at a node, and the edits that import the module if needed.

    Return None if the module's name means something else there.
    """
    scope = source.scope(at)
    for name, bindings in source.scopes.module.bindings.items():
        binds = all(b.kind == "import" and b.path == module for b in bindings)
        if binds and scope.lookup(name) is bindings:
            return name, ()
    if results := scope.lookup(module):
        is_it = all(b.kind == "import" and b.path == module for b in results)
        return (module, ()) if is_it else None
    return module, (_insert(source, f"import {module}"),)


def _insert(source: Source, line: str) -> Edit:
    """Return an edit that adds a line before the first import that is not from `__future__`, or at the top."""
    module = source.module
    assert isinstance(module, cst.Module)
    after = None
    for statement in module.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        first = statement.body[0]
        docstring = isinstance(first, cst.Expr) and isinstance(
            first.value, (cst.SimpleString, cst.ConcatenatedString)
        )
        future = isinstance(first, cst.ImportFrom) and dotted(first.module) == "__future__"
        if not docstring and not future:
            if isinstance(first, (cst.Import, cst.ImportFrom)):
                start = source.text.line_start(source.span(statement).start)
                return Edit(start, start, line + source.text.newline)
            break
        after = statement
    if after is None:
        start = 0
        while source.text.data[start : start + 1] == b"#":  # a shebang, an encoding, a licence
            end = source.text.data.find(b"\n", start)
            start = len(source.text.data) if end < 0 else end + 1
        return Edit(start, start, line + source.text.newline)
    end = source.text.data.find(b"\n", source.span(after).end)
    if end < 0:
        end = len(source.text.data)
        return Edit(end, end, source.text.newline + line)
    return Edit(end + 1, end + 1, line + source.text.newline)


def is_alone(source: Source, statement: Node) -> bool:
    """Return True if a simple statement is alone on its line: no semicolons, no `if x: import y`."""
    line = source.parents.get(statement)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return False
    start = source.span(statement).start
    return not source.text.data[source.text.line_start(start) : start].strip()


def without_import(source: Source, statement: cst.Import, alias: cst.ImportAlias) -> Edit | None:
    """Return an edit that removes a module from an import, or the whole import; None if that is not possible."""
    if len(statement.names) > 1:
        return next(iter(_without(source, statement.names, [alias])))
    line = source.parents.get(statement)
    if not is_alone(source, statement) or source.parents.get(line) is not source.module:  # type: ignore[arg-type]
        return None
    start = source.text.line_start(source.span(statement).start)
    end = source.text.data.find(b"\n", start) + 1
    return Edit(start, end or len(source.text.data), "")


def move_names(
    source: Source,
    statement: cst.ImportFrom,
    moved: Collection[cst.ImportAlias],
    new: Mapping[Node, str],
) -> tuple[Edit, ...] | None:
    """Return edits that import some names of a `from` import from another module, under the same names.

    Args:
        source: the file.
        statement: the import.
        moved: its names that move.
        new: the new dotted name of each of them, or the new module.

    Return None if other code would have to change.
    """
    assert not isinstance(statement.names, cst.ImportStar)
    homes = {new[alias].rpartition(".")[0] for alias in moved}
    everything = len(moved) == len(statement.names)
    same = all(new[a].rpartition(".")[2] == dotted(a.name) for a in moved)
    if everything and same and len(homes) == 1 and statement.module is not None:
        return (source.replace(statement.module, homes.pop()),)
    if everything and len(homes) == 1 and statement.rpar is None:
        return (source.replace(statement, _line("", list(moved), new)),)
    if not is_alone(source, statement) or everything:
        return None
    start = source.text.line_start(source.span(statement).start)
    indent = source.text.data[start : source.span(statement).start].decode("utf-8")
    lines = []
    for home in sorted(homes):
        names = [a for a in statement.names if a in moved and new[a].rpartition(".")[0] == home]
        lines.append(f"{indent}{_line(home, names, new)}{source.text.newline}")
    return (Edit(start, start, "".join(lines)), *_without(source, statement.names, moved))


def _line(home: str, aliases: Sequence[cst.ImportAlias], new: Mapping[Node, str]) -> str:
    names = []
    for alias in aliases:
        bound = dotted(alias.asname.name if alias.asname else alias.name) or ""
        name = new[alias].rpartition(".")[2]
        names.append(name if name == bound else f"{name} as {bound}")
    return f"from {home} import {', '.join(names)}" if home else f"import {', '.join(names)}"


def _without(
    source: Source, aliases: Sequence[cst.ImportAlias], removals: Collection[cst.ImportAlias]
) -> list[Edit]:
    """Return edits that delete names of an import list; at least one name stays."""
    edits = []
    last_kept = max(i for i, alias in enumerate(aliases) if alias not in removals)
    for alias, following in itertools.pairwise(aliases[: last_kept + 1]):
        if alias in removals:
            edits.append(Edit(source.span(alias).start, source.span(following).start, ""))
    if last_kept < len(aliases) - 1:
        edits.append(Edit(source.span(aliases[last_kept]).end, source.span(aliases[-1]).end, ""))
    return edits
