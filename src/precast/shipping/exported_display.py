"""Prints what a program computes as a tree of modules, and where two programs differ as a table.

Invariants: nothing is added to what `exported_reading` found.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from precast.shipping.exported_reading import Contents, Difference, Part

__all__ = ["differences_table", "tree"]


def tree(contents: Contents) -> RenderableType:
    """The modules of a program, each with what it computes in which dtype."""
    root = Tree(Text("exported program"))
    branches = {"": root}
    for name, part in contents.parts.items():
        if not name:
            _add(root, part)
            continue
        _add(_branch(name, branches, contents), part)
    said, sizes = contents.said, contents.weight_bytes
    lines = [
        Text(f"policy {said['policy']} ({said['fingerprint']}), precast {said['precast']}")
    ] * bool(said)
    stored = ", ".join(f"{size:,} bytes {dtype}" for dtype, size in sizes.items()) or "none"
    return Group(*lines, Text(f"weights: {stored}"), root)


def _branch(name: str, branches: dict[str, Tree], contents: Contents) -> Tree:
    if name not in branches:
        around, _, own = name.rpartition(".")
        outer = _branch(around, branches, contents)
        part = contents.parts.get(name)
        branches[name] = outer.add(Text(f"{own}  {part.kind if part else ''}".rstrip()))
    return branches[name]


def _add(branch: Tree, part: Part) -> None:
    for dtype, found in part.operations.items():
        counted = (f"{op} x{n}" if n > 1 else op for op, n in found.items())
        branch.add(Text(f"{dtype}: {', '.join(counted)}"))
    for (before, after), count in part.casts.items():
        branch.add(Text(f"cast {before} -> {after}" + (f" x{count}" if count > 1 else "")))
    stored: dict[str, list[str]] = {}
    for weight, dtype in part.weights.items():
        stored.setdefault(dtype, []).append(weight.rpartition(".")[2])
    for dtype, names in stored.items():
        branch.add(Text(f"weights in {dtype}: {', '.join(names)}"))


def differences_table(found: list[Difference], first: str, second: str) -> RenderableType:
    """Where two programs differ."""
    if not found:
        return Text("the same operations and weights in the same dtypes")
    table = Table("module", "what", first, second)
    for each in found:
        table.add_row(each.module or "the model", each.what, each.first, each.second)
    return table
