"""Random programs and costs, for tests that compare with what can be found by trying everything."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from precast.policy.policy import Rule
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.sites import OperationSite, TensorEdge, TunedProgram

F32, LOW = torch.float32, torch.bfloat16
_MODULES = ("", "a", "a.0", "a.1", "a.0.x", "a.1.x", "b", "b.x")
_OPS = ("linear", "add", "softmax", "relu")


@st.composite
def sites(draw, most):
    keys = st.tuples(st.sampled_from([None, *_MODULES]), st.sampled_from(_OPS))
    return [
        OperationSite(
            *key,
            rule=draw(st.sampled_from([None, None, Rule.LOWER, Rule.FP32, Rule.PROMOTE])),
            barred=draw(st.sampled_from(["", "", "", "it overflows"])),
            casts_down=draw(st.sampled_from([True, True, True, False])),
            pinned=draw(st.sampled_from([False, False, False, True])),
        )
        for key in draw(st.lists(keys, min_size=1, max_size=most, unique=True))
    ]


@st.composite
def programs(draw, most=10):
    """Up to `most` sites; each gets tensors from earlier ones and from outside."""
    found = draw(sites(most))
    edges, makers = [], []
    for i, site in enumerate(found):
        is_in_place = bool(makers) and draw(st.integers(0, 5)) == 0
        for n in range(draw(st.integers(1, 3))):
            sizes = {
                "elements": draw(st.sampled_from([1, 100, 10_000])),
                "count": draw(st.integers(1, 2)),
            }
            decides = n == 0 or draw(st.booleans())
            if is_in_place and n == 0:
                producer = draw(st.sampled_from(makers))
                edges.append(TensorEdge(producer, site, **sizes, is_written=True))
            elif makers and draw(st.integers(0, 3)):
                producer = draw(st.sampled_from(makers))
                edges.append(
                    TensorEdge(
                        producer, site, **sizes, decides=decides, needs_grad=draw(st.booleans())
                    )
                )
            elif draw(st.booleans()):
                weight = draw(st.sampled_from(["w", "v"]))
                edges.append(
                    TensorEdge(None, site, **sizes, dtype=F32, weight=weight, decides=decides)
                )
            else:
                dtype = draw(st.sampled_from([F32, F32, LOW]))
                edges.append(TensorEdge(None, site, **sizes, dtype=dtype, decides=decides))
        if not is_in_place:
            makers.append(site)
        del i
    return TunedProgram(tuple(found), tuple(edges), LOW, "cpu", _MODULES)


@st.composite
def costs_of(draw, program):
    """Times in whole microseconds, so that sums compare exactly enough."""
    seconds = st.integers(0, 50).map(lambda n: n * 1e-6)
    kept = st.integers(0, 50)
    known = {
        site: {dtype: CallCost(draw(seconds), 0.0, draw(kept)) for dtype in (F32, LOW)}
        for site in program.sites
    }
    sizes = (1, 100, 10_000)
    casts = {down: {size: draw(seconds) for size in sizes} for down in (True, False)}
    return ProgramCosts(known, casts)


def total_cost(program, costs, choice, objective="time"):
    """Return the cost of a choice: operations with rows, casts along edges, and one copy of each weight."""
    low, is_time = program.low, objective == "time"
    whole = sum(costs.amount(site, F32, objective) for site in program.sites)
    row = whole * min(1e-3, 0.1 / len(program.sites))

    def cast(edge, down):
        back = costs.cast(edge.elements, down=not down) if edge.needs_grad else 0.0
        return costs.cast(edge.elements, down=down) + back

    total = 0.0
    for site in program.sites:
        differs = (site.rule is Rule.LOWER and choice[site] is F32) or (
            site.rule is Rule.FP32 and choice[site] is low
        )
        total += costs.amount(site, choice[site], objective) + row * differs
    weights = {}
    for edge in program.edges:
        if edge.is_written or not (edge.decides or edge.consumer.rule is Rule.LOWER):
            continue
        if edge.weight:
            weights.setdefault(edge.weight, []).append(edge)
        elif is_time and edge.dtype_under(choice) is not choice[edge.consumer]:
            total += edge.count * cast(edge, down=choice[edge.consumer] is low)
    for edges in weights.values():
        largest = max(edges, key=lambda edge: edge.elements)
        is_low = [choice[edge.consumer] is low for edge in edges]
        if program.is_inference:
            total -= 0.0 if is_time else 2.0 * largest.elements * all(is_low)
        elif any(is_low):
            total += cast(largest, down=True) if is_time else 2.0 * largest.elements
    return total
