"""Where time went, by module and by dtype: sums over the rows of a trace.

Invariants: a module's numbers include those of all modules inside it; modules are in the order of the model, each
before those inside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

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


def ran_in(row: Row) -> str:
    """The dtype that an operation worked in, as its rule and its tensors say; "other" where none is floating-point."""
    floats = [d for d in (*row.output, *row.inputs) if d.startswith(_FLOATS)]
    if row.rule is not None and row.rule.startswith("fp32"):
        return next((d for d in floats if d in _WIDE), "float32")  # no rule casts what is wider
    return floats[0] if floats else "other"


def seconds_by_dtype(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds of operations, casts left out, by the dtype they worked in; the longest first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        sums[ran_in(row)] += _seconds(row)
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def tree(trace: TraceData) -> list[Node]:
    """The modules of a trace; the first is the model itself, and what ran outside of all modules is the last."""
    types = {module.name: module.type for module in trace.modules}
    names = dict.fromkeys([*types, *(row.module for row in trace.rows if row.module is not None)])
    children = _children(names)
    nodes: list[Node] = []
    places: dict[str | None, int] = {}
    waiting: list[tuple[str, int | None]] = [("", None)]
    while waiting:
        name, parent = waiting.pop()
        places[name] = len(nodes)
        depth = 0 if parent is None else nodes[parent].depth + 1
        nodes.append(Node(name, types.get(name, ""), depth, parent))
        waiting += [(inner, places[name]) for inner in reversed(children.get(name, {}))]
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


def _add(row: Row, nodes: list[Node], place: int | None) -> None:
    dtype, seconds = ran_in(row), _seconds(row)
    while place is not None:
        node = nodes[place]
        for key in _SUMS:
            setattr(node, key, getattr(node, key) + getattr(row, key))
        node.dtypes[dtype] = node.dtypes.get(dtype, 0.0) + seconds
        place = node.parent


def _seconds(row: Row) -> float:
    """How long an operation took without its casts."""
    return max(0.0, row.seconds - row.cast_seconds)
