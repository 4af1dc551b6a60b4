"""The regions in which the functions of a file are called, for what stands in those functions.

Invariant: only calls of this file are seen; who asks says whether one of them is enough, or all have to agree.
"""

from __future__ import annotations

from precast_lint.meaning.functions import called_forward, called_function
from precast_lint.meaning.regions import Region, region_in_force, regions_around
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["calls_of", "is_called_in_region", "regions_of_callers", "runs_in_region"]

_DEEP = 3


def calls_of(source: Source, function: cst.FunctionDef) -> list[cst.Call]:
    """The calls of a function, or of a method by `self`, in this file; computed once."""
    known = source.cache.get("calls of functions")
    if known is None:
        table: dict[Node, list[cst.Call]] = {}
        for call in source.all(cst.Call):
            target = called_function(source, call) or called_forward(source, call)
            if target is not None:
                table.setdefault(target, []).append(call)
        known = source.cache["calls of functions"] = table
    assert isinstance(known, dict)
    found: list[cst.Call] = known.get(function, [])
    return found


def regions_of_callers(
    source: Source, node: Node, trainers: bool = False, depth: int = _DEEP
) -> list[Region | None]:
    """The region in which each call of this file runs the function of a node; None for one that runs in none.

    Empty where the node stands in a region of its own function, or where nothing calls that.
    """
    function = source.function(node)
    if (
        function is None
        or depth == 0
        or next(regions_around(source, node, trainers), None) is not None
    ):
        return []
    found: list[Region | None] = []
    for call in calls_of(source, function):
        if source.function(call) is function:
            continue
        region = region_in_force(source, call, trainers)
        if region is None and next(regions_around(source, call, trainers), None) is None:
            found += regions_of_callers(source, call, trainers, depth - 1) or [None]
        else:
            found.append(region)
    return found


def runs_in_region(source: Source, node: Node) -> bool:
    """Whether a node stands in a region, or in a function that all calls of this file run in one."""
    if region_in_force(source, node) is not None:
        return True
    found = regions_of_callers(source, node)
    return bool(found) and None not in found


def is_called_in_region(source: Source, node: Node) -> bool:
    """Whether the function of a node runs in regions alone, as far as the calls of this file show."""
    found = regions_of_callers(source, node, trainers=True)
    return bool(found) and None not in found
