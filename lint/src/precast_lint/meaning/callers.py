"""The regions in which the functions of a file are called.

Invariant: calls in other files are not seen. The caller decides whether one call is enough, or all have to agree.
"""

from __future__ import annotations

from precast_lint.meaning.functions import called_forward, called_function
from precast_lint.meaning.regions import Region, region_in_force, regions_around
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst

__all__ = ["calls_of", "regions_of_callers", "runs_in_region"]

_DEEP = 3


def calls_of(source: Source, function: cst.FunctionDef) -> list[cst.Call]:
    """The calls of a function, a method by `self`, or the `forward` of a module, in this file."""
    return _calls_of_functions(source).get(function, [])


@once
def _calls_of_functions(source: Source) -> dict[Node, list[cst.Call]]:
    table: dict[Node, list[cst.Call]] = {}
    for call in source.all(cst.Call):
        target = called_function(source, call) or called_forward(source, call)
        if target is not None:
            table.setdefault(target, []).append(call)
    return table


def regions_of_callers(
    source: Source, node: Node, trainers: bool = False, depth: int = _DEEP
) -> list[Region | None]:
    """Return the region around each call of a node's function in this file; None for a call outside of regions.

    The list is empty if the node's own function has a region around the node, or if nothing calls the function.
    """
    function = source.function(node)
    if (
        function is None
        or depth == 0
        or next(regions_around(source, node, trainers), None) is not None
    ):
        return []
    results: list[Region | None] = []
    for call in calls_of(source, function):
        if source.function(call) is function:
            continue
        region = region_in_force(source, call, trainers)
        if region is None and next(regions_around(source, call, trainers), None) is None:
            results += regions_of_callers(source, call, trainers, depth - 1) or [None]
        else:
            results.append(region)
    return results


def runs_in_region(source: Source, node: Node) -> bool:
    """Return True if a node is in an enabled region, or if all calls of its function in this file are."""
    if region_in_force(source, node, trainers=True) is not None:
        return True
    result = regions_of_callers(source, node, trainers=True)
    return bool(result) and None not in result
