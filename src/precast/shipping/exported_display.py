"""Display of an exported program as a tree of modules, and of the differences of two programs as a table.

Invariant: everything that is displayed comes from `exported_reading`.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from precast.shipping.exported_reading import ModulePart, ProgramContents, ProgramDifference

__all__ = ["differences_table", "tree"]


def tree(contents: ProgramContents) -> RenderableType:
    """Return the modules of a program, each with its operations by dtype."""
    root = Tree(Text("exported program"))
    branches = {"": root}
    for name, part in contents.parts.items():
        if not name:
            _add(root, part)
            continue
        _add(_branch(name, branches, contents), part)
    facts, sizes = contents.facts, contents.weight_bytes
    lines = [
        Text(f"policy {facts['policy']} ({facts['fingerprint']}), precast {facts['precast']}")
    ] * bool(facts)
    stored = ", ".join(f"{size:,} bytes {dtype}" for dtype, size in sizes.items()) or "none"
    return Group(*lines, Text(f"weights: {stored}"), root)


def _branch(name: str, branches: dict[str, Tree], contents: ProgramContents) -> Tree:
    if name not in branches:
        parent, _, own = name.rpartition(".")
        outer = _branch(parent, branches, contents)
        part = contents.parts.get(name)
        branches[name] = outer.add(Text(f"{own}  {part.kind if part else ''}".rstrip()))
    return branches[name]


def _add(branch: Tree, part: ModulePart) -> None:
    for dtype, operations in part.operations.items():
        terms = (f"{op} x{n}" if n > 1 else op for op, n in operations.items())
        branch.add(Text(f"{dtype}: {', '.join(terms)}"))
    for (before, after), count in part.casts.items():
        branch.add(Text(f"cast {before} -> {after}" + (f" x{count}" if count > 1 else "")))
    stored: dict[str, list[str]] = {}
    for weight, dtype in part.weights.items():
        stored.setdefault(dtype, []).append(weight.rpartition(".")[2])
    for dtype, names in stored.items():
        branch.add(Text(f"weights in {dtype}: {', '.join(names)}"))


def differences_table(
    differences: list[ProgramDifference], first: str, second: str
) -> RenderableType:
    """Return a table of the differences of two programs."""
    if not differences:
        return Text("the same operations and weights in the same dtypes")
    table = Table("module", "what", first, second)
    for each in differences:
        table.add_row(each.module or "the model", each.what, each.first, each.second)
    return table
