"""Findings: what could be better in what was traced, what it costs, and the line or the call that mends it.

Invariants: a finding's cost is what was measured, its share that of the traced time; the dearest come first, `MOST` of
each kind; a policy file is whole: what was in force, with what mends the finding.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from precast.diagnostics.report.words import plural
from precast.diagnostics.schema import Cost, Finding, Row, Totals, Where
from precast.errors import PolicyError
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

__all__ = ["MOST", "findings_of"]

MOST: Final = 10
_T = TypeVar("_T")
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


class Remedies:
    """Writes the policy files that mend findings.

    Args:
        policies: device type -> the policy in force there; `default` where none was.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self._policies = policies

    def file(self, op: str, rule: str, device: str) -> str | None:
        """The whole file of that policy with another rule for one operation; None where there can be none."""
        return _file(self._policies.get(device) or Policy.load("default"), op, rule, device)


@functools.lru_cache(maxsize=256)
def _file(policy: Policy, op: str, rule: str, device: str) -> str | None:
    try:
        return whole_file(policy, ops={device: {op: rule}})
    except PolicyError:  # the operation has no such rule
        return None


def findings_of(
    rows: list[Row], totals: Totals, facts: Any, policies: Mapping[str, Policy]
) -> list[Finding]:
    """All findings of a trace; `policies` are those in force, by device type."""
    remedies = Remedies(policies)
    kinds = (
        _round_trips(facts.round_trips.values(), rows, totals, remedies),
        _islands(facts.islands.values(), totals, remedies),
        _casts_again(facts.weights, totals),
        _in_float32(rows, totals, remedies),
        _spread(rows, totals, remedies),
    )
    found = [finding for kind in kinds for finding in sorted(kind, key=_cost)[:MOST]]
    return sorted(found, key=_cost)


def _cost(finding: Finding) -> tuple[float, int]:
    return -(finding.cost.seconds or 0.0), -(finding.cost.bytes or 0)


def _price(seconds: float, size: int | None, totals: Totals) -> Cost:
    return Cost(seconds, size, min(1.0, seconds / totals.seconds) if totals.seconds else None)


def _round_trips(
    trips: Iterable[Any], rows: list[Row], totals: Totals, remedies: Remedies
) -> Iterator[Finding]:
    devices = {row.op: row.device for row in rows}

    def ends(trip: Any) -> tuple[Any, ...]:
        up = trip.up
        back = _pattern(trip.module), trip.source, trip.op
        return _pattern(up.module), up.source, up.op, up.dtype, up.rule, *back

    for some in _alike(trips, ends):
        up = some[0].up
        dtype = str(up.dtype).removeprefix("torch.")
        here = _place([trip.up.module for trip in some], up.source)
        back = f"{some[0].op}{_place([trip.module for trip in some], some[0].source)}"
        title = (
            f"{up.op}{here} casts {dtype} to float32, and {back} casts it back: "
            f"{_times(sum(trip.times for trip in some))}, and nothing in between needed float32."
        )
        line = None
        if up.rule is None:
            do = f"Take the cast to float32{here} away: the values are {dtype}, and become {dtype} again."
        else:
            line = remedies.file(up.op, "keep", devices.get(up.op, "cpu"))
            do = f"{up.op} only moves numbers: keep it in {dtype}, by the rule keep in a policy file."
        seconds, size = sum(t.seconds for t in some), sum(t.bytes for t in some)
        where = Where(max(some, key=lambda trip: trip.seconds).up.module, up.op, up.source)
        yield Finding("round-trip", title, _price(seconds, size, totals), do, line, where)


def _islands(islands: Iterable[Any], totals: Totals, remedies: Remedies) -> Iterator[Finding]:
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
        line = remedies.file(op, "lower", device)
        do = (
            f"If the results stay good enough, run {op} in 16 bits on {device}, by the rule lower in a policy file; "
            'policy="lean" has those that lose nothing by it.'
        )
        where = Where(dearest.module, op, dearest.source)
        yield Finding("float32-island", title, _price(seconds, size, totals), do, line, where)


def _casts_again(weights: Iterable[Any], totals: Totals) -> Iterator[Finding]:
    again_at = (cast for cast in weights if cast.again)
    for some in _alike(again_at, lambda cast: (_pattern(cast.module), cast.source, cast.op)):
        casts, again = sum(c.casts for c in some), sum(c.again for c in some)
        seconds, size = sum(c.seconds for c in some), sum(c.bytes for c in some)
        most = max(some, key=lambda cast: cast.casts)
        title = (
            f"{most.op}{_place([c.module for c in some], most.source)} casts {plural(len(some), 'weight')} again and "
            f"again: {casts:,} casts, {again:,} of them of a weight that had not changed "
            f"(shape {list(most.shape)}, to {most.dtype})."
        )
        one = "open one region around all of them, with its cache on: casts are kept until the outermost region ends"
        hold = "hold the weights, so that they are cast once a step: precast.attach(model, optimizer=optimizer)"
        do = f"{hold}; or {one}." if any(cast.holdable for cast in some) else f"{one}."
        do = do[:1].upper() + do[1:]
        dearest = max(some, key=lambda cast: cast.seconds)
        where = Where(dearest.module, dearest.op, dearest.source)
        yield Finding("weight-cast-again", title, _price(seconds, size, totals), do, None, where)


def _in_float32(rows: list[Row], totals: Totals, remedies: Remedies) -> Iterator[Finding]:
    """Operations that are worth 16 bits and ran in float32, though nothing said so."""
    if not any(row.rule == "lower" for row in rows):
        return
    for some in _alike(filter(_is_unexpected, rows), _of_row):
        row, place = some[0], _place([row.module for row in some], some[0].source)
        if row.region is None:
            do = f'Open the region around it, too: with precast.autocast("{row.device}"): ...'
            line = None
        else:
            line = remedies.file(row.op, "lower", row.device)
            do = (
                f"Have {row.op} run in 16 bits on {row.device}, by the rule lower in a policy file."
            )
        calls = _times(sum(each.calls for each in some))
        title = f"{row.op}{place} ran in float32 {calls}: {row.reason}."
        yield _of_rows("float32-op", title, some, totals, (do, line))


def _is_unexpected(row: Row) -> bool:
    base = row.op.partition(".")[0]
    if row.phase != "forward" or base not in _HEAVY or row.rule == "lower":
        return False
    if "float32" not in row.output or row.module_rule is not None:
        return False
    is_off = row.rule is None and (row.reason or "").startswith("autocast is off")
    return row.region is None or not is_off  # else somebody switched it off


def _spread(rows: list[Row], totals: Totals, remedies: Remedies) -> Iterator[Finding]:
    """Operations without a rule whose inputs are of two dtypes: PyTorch gives the wider one."""
    for some in _alike(filter(_is_spreading, rows), lambda row: (*_of_row(row), *row.inputs)):
        row = some[0]
        line = remedies.file(row.op, "lower", row.device)
        title = (
            f"{row.op}{_place([row.module for row in some], row.source)} mixes "
            f"{' and '.join(dict.fromkeys(row.inputs))}, and what follows is float32: "
            f"{_times(sum(each.calls for each in some))}."
        )
        do = f"Cast the float32 input once, or run {row.op} in 16 bits on {row.device}, by the rule lower in a policy "
        do += "file."
        yield _of_rows("float32-spread", title, some, totals, (do, line))


def _is_spreading(row: Row) -> bool:
    mixed = "float32" in row.inputs and {"bfloat16", "float16"} & set(row.inputs)
    if row.phase != "forward" or not mixed or row.output != ["float32"] or row.op == "_to_copy":
        return False
    return row.rule is None and row.region is not None


def _of_rows(
    kind: str, title: str, rows: list[Row], totals: Totals, mend: tuple[str, str | None]
) -> Finding:
    dearest = max(rows, key=lambda row: row.seconds)
    cost = _price(sum(row.seconds for row in rows), None, totals)
    where = Where(dearest.module, dearest.op, dearest.source)
    return Finding(kind, title, cost, *mend, where)


def _of_row(row: Row) -> tuple[Any, ...]:
    return _pattern(row.module), row.source, row.op, row.device, row.reason, row.region is None


def _alike(items: Iterable[_T], key: Callable[[_T], Any]) -> Iterable[list[_T]]:
    """Lists of items with the same key: the blocks of a stack have one finding, not one each."""
    groups: defaultdict[Any, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def _pattern(module: str | None) -> str:
    """A module's name without its numbers: "layers.*.mlp"."""
    return re.sub(r"\d+", "*", module or "")


def _place(modules: list[str | None], source: str | None) -> str:
    """Where it is, of one module or of several whose names differ in their numbers."""
    names = list(dict.fromkeys(modules))
    name = names[0] if len(names) == 1 else f"{_pattern(names[0])} ({len(names)} modules)"
    return "".join(f" {word} {text}" for word, text in (("in", name), ("at", source)) if text)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
