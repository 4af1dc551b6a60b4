"""The smallest set of modules whose computation in float32 brings a model's results within a bound.

Invariants:

- the answer satisfies the bound in a run, and no module can be left out of it;
- where there are at most `_MOST_TRIALS` sets of a size, all smaller sets were tried: it is the smallest one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from torch import nn

from precast.policy.module_names import name_of_each

__all__ = ["float32_groups", "smallest_set"]

_MOST_TRIALS: Final = 256
"""The most sets of one size that are tried."""


def float32_groups(model: nn.Module) -> Iterator[list[str]]:
    """Yield sets of modules that together run a model in float32: those without children, all, and the model itself."""
    names = [(name, module) for name, module in name_of_each(model) if name]
    yield [name for name, module in names if next(module.children(), None) is None]
    yield [name for name, _ in names]
    yield [""]


def smallest_set(
    modules: Sequence[str], distance: Callable[[frozenset[str]], float], bound: float
) -> frozenset[str] | None:
    """Return the smallest set of modules with at most this distance; None if all of them together exceed it.

    Args:
        modules: the modules to choose from.
        distance: returns the distance of the results with these modules in float32.
        bound: the distance that is allowed.
    """
    every = frozenset(modules)
    if distance(every) > bound:
        return None
    gains = {name: distance(frozenset({name})) for name in modules}
    ordered = sorted(modules, key=gains.__getitem__)
    chosen: list[str] = []
    while distance(frozenset(chosen)) > bound:
        chosen.append(ordered[len(chosen)])
    for name in reversed(chosen[:-1]):
        fewer = [each for each in chosen if each != name]
        if distance(frozenset(fewer)) <= bound:
            chosen = fewer
    for size in range(1, len(chosen)):
        if math.comb(len(modules), size) > _MOST_TRIALS:
            break
        smaller = (frozenset(each) for each in itertools.combinations(ordered, size))
        answer = next((each for each in smaller if distance(each) <= bound), None)
        if answer is not None:
            return answer
    return frozenset(chosen)
