"""Time by module and by dtype: sums over the rows of a trace.

Invariants: a module's sums include those of all modules inside it; modules are in the order of the model, each before
those inside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from precast.report.schema import OperationRow, TraceData

__all__ = ["TreeNode", "ran_in", "seconds_by_dtype", "tree"]

_SUMS = ("seconds", "cast_seconds", "casts", "cast_bytes", "calls")
_FLOATS = ("float", "bfloat", "complex")
_WIDE = ("float64", "complex128")
_OUTSIDE = "outside of all modules"


@dataclass(slots=True)
class TreeNode:
    """The sums of one module and of all modules inside it."""

    name: str
    type: str
    depth: int
    parent: int | None
    """Its parent's place in the list that `tree` returns."""
    dtypes: dict[str, float] = field(default_factory=dict)
    """Maps each dtype to seconds."""
    seconds: float = 0.0
    cast_seconds: float = 0.0
    casts: int = 0
    cast_bytes: float = 0.0
    calls: int = 0


def ran_in(row: OperationRow) -> str:
    """Return the dtype in which an operation computed, from its rule and tensors; "other" without floating point."""
    floats = [d for d in (*row.output, *row.inputs) if d.startswith(_FLOATS)]
    rule = row.rule or ""
    if rule.startswith("fp32") and rule != "fp32_if_refused":
        return next((d for d in floats if d in _WIDE), "float32")  # no rule casts wider dtypes
    return floats[0] if floats else "other"


def seconds_by_dtype(rows: Iterable[OperationRow]) -> dict[str, float]:
    """Return the seconds of operations without casts by dtype, the longest first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        sums[ran_in(row)] += _seconds(row)
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def tree(trace: TraceData) -> list[TreeNode]:
    """Return the modules of a trace. The first is the model itself; operations outside of modules are the last."""
    types = {module.name: module.type for module in trace.modules}
    names = dict.fromkeys([*types, *(row.module for row in trace.rows if row.module is not None)])
    children = _children(names)
    nodes: list[TreeNode] = []
    places: dict[str | None, int] = {}
    waiting: list[tuple[str, int | None]] = [("", None)]
    while waiting:
        name, parent = waiting.pop()
        places[name] = len(nodes)
        depth = 0 if parent is None else nodes[parent].depth + 1
        nodes.append(TreeNode(name, types.get(name, ""), depth, parent))
        waiting += [(inner, places[name]) for inner in reversed(children.get(name, {}))]
    if any(row.module is None for row in trace.rows):
        places[None] = len(nodes)
        nodes.append(TreeNode(_OUTSIDE, "", 0, None))
    for row in trace.rows:
        _add(row, nodes, places[row.module])
    return nodes


def _children(names: Iterable[str]) -> dict[str, dict[str, None]]:
    """Return the modules directly inside each module, also if no operation of the outer one was traced."""
    children: dict[str, dict[str, None]] = {}
    for name in names:
        while name:
            parent = name.rpartition(".")[0]
            children.setdefault(parent, {})[name] = None
            name = parent  # noqa: PLW2901 - up to the root
    return children


def _add(row: OperationRow, nodes: list[TreeNode], place: int | None) -> None:
    dtype, seconds = ran_in(row), _seconds(row)
    while place is not None:
        node = nodes[place]
        for key in _SUMS:
            setattr(node, key, getattr(node, key) + getattr(row, key))
        node.dtypes[dtype] = node.dtypes.get(dtype, 0.0) + seconds
        place = node.parent


def _seconds(row: OperationRow) -> float:
    """Return the time of an operation without its casts."""
    return max(0.0, row.seconds - row.cast_seconds)
