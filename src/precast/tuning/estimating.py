"""Estimates what calls cost that there was no time to measure, from calls of the same operation at other sizes.

Invariants:

- the largest call of each operation comes first in the order of measuring, so an estimate is between calls that were
  measured, or for a smaller one, which costs less;
- between two measured sizes a cost is a straight line in logarithms; below the smallest it is that of the smallest,
  because a short call takes as long as it takes to make; memory is less in proportion;
- an operation of which no call was measured has no estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from precast.tuning.calls import arguments_of
from precast.tuning.sites import Argument, Call
from precast.tuning.timing import Figure

__all__ = ["Cost", "estimated", "in_order", "size"]

_NOTHING: Final = Figure(0.0)
_PRODUCTS: Final = frozenset(
    {"aten::matmul", "aten::mm", "aten::bmm", "aten::scaled_dot_product_attention"}
)
"""Operations whose work is that of a product of matrices without a weight among them."""


@dataclass(frozen=True)
class Cost:
    """What calls cost in one dtype.

    Attributes:
        forward: the time of forward.
        backward: the time of backward; none where no gradient is needed.
        kept: the bytes that autograd keeps for backward, without weights. What two operations keep counts for both. Of
            a model that is only run, it is the bytes of the results.
    """

    forward: Figure
    backward: Figure = _NOTHING
    kept: int = 0

    @property
    def seconds(self) -> float:
        """The time of both passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def spread(self) -> float:
        """The spread of that time, in seconds."""
        return self.forward.plus(self.backward).spread


_Costs = Mapping[torch.dtype, Cost]


def size(call: Call) -> float:
    """About how much work a call is: multiplications of a product of matrices, and else elements."""
    tensors = arguments_of(call)
    matrices = [a for a in tensors if a.dtype.is_floating_point and len(a.shape) > 1]
    elements = float(sum(math.prod(argument.shape) for argument in tensors))
    if len(matrices) < 2 or not (matrices[1].is_weight or call.overload in _PRODUCTS):
        return elements
    return max(elements, _product(matrices[0], matrices[1]))


def in_order(calls: Mapping[object, Call], counts: Mapping[object, int]) -> list[object]:
    """The keys of calls in the order of measuring: the largest of each operation, and then by what a step spends.

    Args:
        calls: key -> the call.
        counts: key -> how often a step makes it.
    """
    largest: dict[object, object] = {}
    for key, call in calls.items():
        known = largest.setdefault(_kind(call), key)
        if size(call) > size(calls[known]):
            largest[_kind(call)] = key
    first = set(largest.values())

    def spent(key: object) -> float:
        return size(calls[key]) * counts[key]

    return sorted(calls, key=lambda key: (key not in first, -spent(key)))


def estimated(calls: Mapping[object, Call], known: Mapping[object, _Costs]) -> dict[object, _Costs]:
    """What the calls cost that are not known, as far as calls of the same operation are."""
    by_kind: dict[object, list[tuple[float, _Costs]]] = {}
    for key, costs in known.items():
        if costs:
            by_kind.setdefault(_kind(calls[key]), []).append((size(calls[key]), costs))
    found: dict[object, _Costs] = {}
    for key, call in calls.items():
        measured = by_kind.get(_kind(call), [])
        if key not in known and measured:
            found[key] = _between(size(call), measured)
    return found


def _kind(call: Call) -> object:
    """Calls of one kind cost the same but for their sizes."""
    return call.overload, any(argument.needs_grad for argument in arguments_of(call))


def _product(one: Argument, other: Argument) -> float:
    """The multiplications of a product of matrices, whose largest common size is what is summed over."""
    shared = max(set(one.shape) & set(other.shape), default=1)
    return math.prod(one.shape) * math.prod(other.shape) / max(1, shared)


def _between(wanted: float, measured: Sequence[tuple[float, _Costs]]) -> _Costs:
    """The costs at a size, by those at the nearest sizes."""
    found = {}
    for dtype in set.intersection(*(set(costs) for _, costs in measured)):
        points = [(at, costs[dtype]) for at, costs in measured]
        kept = [(at, float(cost.kept)) for at, cost in points]
        smallest = min(kept)
        found[dtype] = Cost(
            _figure(wanted, [(at, cost.forward) for at, cost in points]),
            _figure(wanted, [(at, cost.backward) for at, cost in points]),
            round(_value(wanted, kept) * min(1.0, wanted / max(smallest[0], 1.0))),
        )
    return found


def _figure(wanted: float, points: Sequence[tuple[float, Figure]]) -> Figure:
    """A time, with the spread of that at the nearest size."""
    nearest = min(points, key=lambda point: abs(point[0] - wanted))[1]
    return Figure(_value(wanted, [(at, figure.seconds) for at, figure in points]), nearest.spread)


def _value(wanted: float, points: Sequence[tuple[float, float]]) -> float:
    """What lies at a size on the lines through the points; below them it is the first, and beyond, proportional."""
    ordered = sorted(points)
    below = [point for point in ordered if point[0] <= wanted]
    above = [point for point in ordered if point[0] >= wanted]
    if not below:
        return ordered[0][1]
    if not above:
        return ordered[-1][1] * wanted / max(ordered[-1][0], 1.0)
    (low, one), (high, other) = below[-1], above[0]
    if low == high or min(one, other) <= 0:
        return one
    share = math.log(wanted / low) / math.log(high / low)
    return float(one ** (1 - share) * other**share)
