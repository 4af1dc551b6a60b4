"""Which reads of a name are reads of a tensor that a region has computed in lower precision.

Invariants: the name's value is a product of matrices, or one in another shape, on all ways; the region in
which it was computed is in the same function and not said to be off.
"""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.regions import Region, region_in_force, regions
from precast_lint.meaning.tensors import is_lowered
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["consumer", "lowered_reads"]

_SHAPES = (
    "detach",
    "cpu",
    "view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "flatten",
    "contiguous",
    "clone",
)


def lowered_reads(source: Source) -> Iterator[tuple[cst.Name, Region]]:
    """The reads of names that hold such tensors, with the region that computed them."""
    if not regions(source):
        return
    for name in source.all(cst.Name):
        if name not in source.scopes.scope_of:
            continue
        bindings = values_seen(source, name)
        if not bindings or any(b.kind != "assign" or b.node is name for b in bindings):
            continue
        region = _region_beside(source, name, bindings[0].node)
        if region is None or not all(_region_beside(source, name, b.node) for b in bindings):
            continue
        if is_lowered(source, name):
            yield name, region


def _region_beside(source: Source, name: Node, node: Node) -> Region | None:
    """The region in force around a node, if it is in the function of a name."""
    region = region_in_force(source, node)
    function = source.function(name)
    is_beside = region is not None and function in (region.node, source.function(region.node))
    return region if is_beside else None


def consumer(source: Source, name: Node) -> tuple[Node, Node]:
    """What takes a tensor, and the tensor as it gets there: `out.detach().cpu()` for the read of `out`."""
    tensor = name
    while True:
        parent = source.parents[tensor]
        call = source.parents.get(parent)
        if not isinstance(parent, cst.Attribute) or parent.attr.value not in _SHAPES:
            return parent, tensor
        if not isinstance(call, cst.Call) or call.func is not parent:
            return parent, tensor
        tensor = call
