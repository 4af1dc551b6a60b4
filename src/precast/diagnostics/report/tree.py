"""Where time went, by module and by dtype: sums over the rows of a trace.

Invariants: a module's numbers hold those of all modules inside it; modules stand in the order of the model, each before
what is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from precast.diagnostics.schema import Row, TraceData

__all__ = ["Node", "ran_in", "seconds_by_dtype", "tree"]

_SUMS = ("seconds", "cast_seconds", "casts", "cast_bytes", "calls")
_FLOATS = ("float", "bfloat", "complex")
_WIDE = ("float64", "complex128")
_OUTSIDE = "outside of all modules"


@dataclass(slots=True)
class Node:
    """One module: what ran in it and in all modules inside it."""

    name: str
    type: str
    depth: int
    parent: int | None
    """Its place in the list that `tree` gives."""
    dtypes: dict[str, float] = field(default_factory=dict)
    """Dtype -> seconds."""
    seconds: float = 0.0
    cast_seconds: float = 0.0
    casts: int = 0
    cast_bytes: float = 0.0
    calls: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As the page has it."""
        return {name: getattr(self, name) for name in self.__slots__}


def ran_in(row: Row) -> str:
    """The dtype that an operation worked in, as its rule and its tensors say; "other" where none is floating-point."""
    floats = [d for d in (*row.output, *row.inputs) if d.startswith(_FLOATS)]
    if row.rule is not None and row.rule.startswith("fp32"):
        wide = [d for d in floats if d in _WIDE]  # which no rule casts
        return wide[0] if wide else "float32"
    return floats[0] if floats else "other"


def seconds_by_dtype(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds of operations, casts left out, by the dtype they worked in; the longest first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        sums[ran_in(row)] += max(0.0, row.seconds - row.cast_seconds)
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def tree(trace: TraceData) -> list[Node]:
    """The modules of a trace; the first is the model itself, and what ran outside of all modules is the last."""
    types = {module.name: module.type for module in trace.modules}
    names = dict.fromkeys(types)
    names |= dict.fromkeys(row.module for row in trace.rows if row.module is not None)
    nodes = [Node("", types.get("", ""), 0, None)]
    places: dict[str | None, int] = {"": 0}
    _place("", _children(names), types, nodes, places)
    if any(row.module is None for row in trace.rows):
        places[None] = len(nodes)
        nodes.append(Node(_OUTSIDE, "", 0, None))
    for row in trace.rows:
        _add(row, nodes, places[row.module])
    return nodes


def _children(names: Iterable[str]) -> dict[str, dict[str, None]]:
    """Each module's name with those directly inside it, also where nothing was traced in between."""
    children: dict[str, dict[str, None]] = {}
    for name in names:
        while name:
            parent = name.rpartition(".")[0]
            children.setdefault(parent, {})[name] = None
            name = parent  # noqa: PLW2901 - up to the root
    return children


def _place(
    parent: str,
    children: dict[str, dict[str, None]],
    types: dict[str, str],
    nodes: list[Node],
    places: dict[str | None, int],
) -> None:
    stack = [(name, parent) for name in reversed(children.get(parent, {}))]
    while stack:
        name, above = stack.pop()
        places[name] = len(nodes)
        nodes.append(Node(name, types.get(name, ""), nodes[places[above]].depth + 1, places[above]))
        stack += [(inner, name) for inner in reversed(children.get(name, {}))]


def _add(row: Row, nodes: list[Node], place: int | None) -> None:
    dtype, seconds = ran_in(row), max(0.0, row.seconds - row.cast_seconds)
    while place is not None:
        node = nodes[place]
        for key in _SUMS:
            setattr(node, key, getattr(node, key) + getattr(row, key))
        node.dtypes[dtype] = node.dtypes.get(dtype, 0.0) + seconds
        place = node.parent
