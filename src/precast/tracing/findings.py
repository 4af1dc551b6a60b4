"""Findings: what could be better in what was traced, what it costs, and the line or the call that mends it.

Invariants: a finding's cost is what was measured, its share that of the traced time; the dearest come first, `MOST` of
each kind; a line for a policy file is one that `Policy.load` reads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

from precast.tracing.rows import Cost, Finding, Row, Totals, Where

__all__ = ["MOST", "findings_of", "policy_line"]

MOST: Final = 10
_HEAVY: Final = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "linear",
    "matmul",
    "einsum",
} | {
    "convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
}


def policy_line(op: str, rule: str) -> str:
    """A row of a policy file."""
    key = op if re.fullmatch(r"\w+", op) else f'"{op}"'
    return f'{key} = {{ rule = "{rule}" }}'


def findings_of(rows: list[Row], totals: Totals, facts: Any) -> list[Finding]:
    """All findings of a trace."""
    kinds = (
        _round_trips(facts.round_trips.values(), totals),
        _islands(facts.islands.values(), totals),
        _casts_again(facts.weights, totals),
        _in_float32(rows, totals),
        _spread(rows, totals),
    )
    found = [finding for kind in kinds for finding in sorted(kind, key=_cost)[:MOST]]
    return sorted(found, key=_cost)


def _cost(finding: Finding) -> tuple[float, int]:
    return -(finding.cost.seconds or 0.0), -(finding.cost.bytes or 0)


def _price(seconds: float, size: int | None, totals: Totals) -> Cost:
    return Cost(seconds, size, min(1.0, seconds / totals.seconds) if totals.seconds else None)


def _round_trips(trips: Iterable[Any], totals: Totals) -> Iterator[Finding]:
    for trip in trips:
        up = trip.up
        dtype = str(up.dtype).removeprefix("torch.")
        here = _place(up.module, up.source)
        title = (
            f"{up.op}{here} casts {dtype} to float32, and {trip.op}{_place(trip.module, trip.source)} casts it back: "
            f"{_times(trip.times)}, and nothing in between needed float32."
        )
        line = None
        if up.rule is None:
            do = f"Take the cast to float32{here} away: the values are {dtype}, and become {dtype} again."
        else:
            line = policy_line(up.op, "keep")
            do = f"{up.op} only moves numbers: keep it in {dtype} with the policy line {line}."
        where = Where(up.module, up.op, up.source)
        yield Finding(
            "round-trip", title, _price(trip.seconds, trip.bytes, totals), do, line, where
        )


def _islands(islands: Iterable[Any], totals: Totals) -> Iterator[Finding]:
    by_op: defaultdict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for island in islands:
        by_op[island.op, island.device, island.policy].append(island)
    for (op, device, policy), some in by_op.items():
        if not any(island.returned for island in some):
            continue  # what follows wants float32, as the end of a loss does
        calls, back = sum(i.calls for i in some), sum(i.returned for i in some)
        seconds, size = sum(i.seconds for i in some), sum(i.bytes for i in some)
        dearest = max(some, key=lambda island: island.seconds)
        title = (
            f"{op} is a float32 island in 16 bits: the policy {policy!r} has it cast up {_times(calls)}, "
            f"and its results were cast back {_times(back)}."
        )
        line = policy_line(op, "lower")
        do = (
            f"If the results stay good enough, run it in 16 bits: {line} under [ops.{device}] of a policy file; "
            'policy="lean" has those that lose nothing by it.'
        )
        where = Where(dearest.module, op, dearest.source)
        yield Finding("float32-island", title, _price(seconds, size, totals), do, line, where)


def _casts_again(weights: Iterable[Any], totals: Totals) -> Iterator[Finding]:
    by_place: defaultdict[tuple[str | None, str | None, str], list[Any]] = defaultdict(list)
    for cast in weights:
        if cast.again:
            by_place[cast.module, cast.source, cast.op].append(cast)
    for (module, source, op), some in by_place.items():
        casts, again = sum(c.casts for c in some), sum(c.again for c in some)
        seconds, size = sum(c.seconds for c in some), sum(c.bytes for c in some)
        most = max(some, key=lambda cast: cast.casts)
        title = (
            f"{op}{_place(module, source)} casts {_counted(len(some), 'weight')} again and again: {casts:,} casts, "
            f"{again:,} of them of a weight that had not changed (shape {list(most.shape)}, to {most.dtype})."
        )
        one = "open one region around all of them, with its cache on: casts are kept until the outermost region ends"
        hold = "hold the weights, so that they are cast once a step: precast.attach(model, optimizer=optimizer)"
        do = f"{hold}; or {one}." if any(cast.holdable for cast in some) else f"{one}."
        do = do[:1].upper() + do[1:]
        where = Where(module, op, source)
        yield Finding("weight-cast-again", title, _price(seconds, size, totals), do, None, where)


def _in_float32(rows: list[Row], totals: Totals) -> Iterator[Finding]:
    """Operations that are worth 16 bits and ran in float32, though nothing said so."""
    if not any(row.rule == "lower" for row in rows):
        return
    for row in rows:
        base = row.op.partition(".")[0]
        if row.phase != "forward" or base not in _HEAVY or row.rule == "lower":
            continue
        if "float32" not in row.output or row.module_rule is not None:
            continue
        if row.region is None:
            do = f'Open the region around it, too: with precast.autocast("{row.device}"): ...'
            line = None
        elif row.rule is None and row.reason.startswith("autocast is off"):
            continue  # somebody switched it off
        else:
            line = policy_line(row.op, "lower")
            do = f"Have it run in 16 bits: {line} under [ops.{row.device}] of a policy file."
        title = f"{row.op}{_place(row.module, row.source)} ran in float32 {_times(row.calls)}: {row.reason}."
        where = Where(row.module, row.op, row.source)
        yield Finding("float32-op", title, _price(row.seconds, None, totals), do, line, where)


def _spread(rows: list[Row], totals: Totals) -> Iterator[Finding]:
    """Operations without a rule whose inputs are of two dtypes: PyTorch gives the wider one."""
    for row in rows:
        mixed = "float32" in row.inputs and {"bfloat16", "float16"} & set(row.inputs)
        if row.phase != "forward" or not mixed or row.output != ["float32"] or row.casts:
            continue
        if row.rule is not None or row.region is None:
            continue
        line = policy_line(row.op, "lower")
        title = (
            f"{row.op}{_place(row.module, row.source)} mixes {' and '.join(dict.fromkeys(row.inputs))}, "
            f"and what follows is float32: {_times(row.calls)}."
        )
        do = f"Cast the float32 input once, or run it in 16 bits: {line} under [ops.{row.device}]."
        where = Where(row.module, row.op, row.source)
        yield Finding("float32-spread", title, _price(row.seconds, None, totals), do, line, where)


def _place(module: str | None, source: str | None) -> str:
    return "".join(f" {word} {text}" for word, text in (("in", module), ("at", source)) if text)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
