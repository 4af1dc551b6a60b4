"""Findings: what could be better in what was traced, what it costs, and the line or the call that improves it.

Invariants: a finding's cost was measured, and its share is that of the traced time; the findings that cost most come
first, at most `MOST` of each kind; a policy file is whole: the policy that was in force, with one rule changed.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from precast.diagnostics.report.words import plural
from precast.diagnostics.schema import Cost, Finding, Row, Totals, Where
from precast.diagnostics.tracing.facts import Facts
from precast.diagnostics.tracing.lineage import Noticed, Site
from precast.engine.operator_kinds import dtype_name
from precast.errors import PolicyError
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

__all__ = ["MOST", "findings_of"]

MOST: Final = 10
_T = TypeVar("_T")
_HEAVY: Final = (
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "matmul", "einsum"}
    | {"convolution", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
)  # fmt: skip


def findings_of(
    rows: list[Row], totals: Totals, facts: Facts, policies: Mapping[str, Policy]
) -> list[Finding]:
    """All findings of a trace.

    Args:
        rows: what ran.
        totals: their sums.
        facts: what was noticed beside the rows.
        policies: device type -> the policy that was in force there; "default" where none was.
    """
    search = _Search(rows, totals, facts, policies)
    kinds = (
        search.round_trips(),
        search.islands(),
        search.casts_again(),
        search.in_float32(),
        search.spread(),
    )
    most = (finding for kind in kinds for finding in sorted(kind, key=_dear)[:MOST])
    return sorted(most, key=_dear)


def _dear(finding: Finding) -> tuple[float, int]:
    return -(finding.cost.seconds or 0.0), -(finding.cost.bytes or 0)


@dataclass(frozen=True)
class _Search:
    """Looks for the findings of one trace."""

    rows: list[Row]
    totals: Totals
    facts: Facts
    policies: Mapping[str, Policy]

    def round_trips(self) -> Iterator[Finding]:
        """Tensors that were cast to float32 and back, and only moved in between."""
        devices = {row.op: row.device for row in self.rows}
        trips = self.facts.round_trips.values()
        for some in _alike(trips, lambda t: (_site(t), t.dtype, t.rule, _site(t.back))):
            trip = some[0]
            dtype, here = dtype_name(trip.dtype), _places(some)
            title = (
                f"{trip.op}{here} casts {dtype} to float32, and "
                f"{trip.back.op}{_places([each.back for each in some])} casts it back: "
                f"{_times(sum(each.times for each in some))}, and nothing in between needed float32."
            )
            policy = None
            if trip.rule is None:
                do = f"Take the cast to float32{here} away: the values are {dtype}, and become {dtype} again."
            else:
                policy = self._policy(trip.op, "keep", devices.get(trip.op, "cpu"))
                do = f"{trip.op} only moves numbers: keep it in {dtype}, by the rule keep in a policy file."
            yield self._finding("round-trip", title, some, do, policy)

    def islands(self) -> Iterator[Finding]:
        """Operations that a rule runs in float32 between operations in 16 bits."""
        islands = self.facts.islands.values()
        for some in _alike(islands, lambda island: (island.op, island.device, island.policy)):
            if not any(island.returned for island in some):
                continue  # what follows wants float32, as the end of a loss does
            op, device = some[0].op, some[0].device
            title = (
                f"{op} is a float32 island in 16 bits: the policy {some[0].policy!r} has it cast up "
                f"{_times(sum(island.calls for island in some))}, and its results were cast back "
                f"{_times(sum(island.returned for island in some))}."
            )
            do = (
                f"If the results stay good enough, run {op} in 16 bits on {device}, by the rule lower in a policy "
                'file; policy="lean" has those that lose nothing by it.'
            )
            policy = self._policy(op, "lower", device)
            yield self._finding("float32-island", title, some, do, policy)

    def casts_again(self) -> Iterator[Finding]:
        """Weights that were cast more than once while they stayed the same."""
        for some in _alike((cast for cast in self.facts.weights if cast.again), _site):
            most = max(some, key=lambda cast: cast.casts)
            casts, again = sum(cast.casts for cast in some), sum(cast.again for cast in some)
            title = (
                f"{most.op}{_places(some)} casts {plural(len(some), 'weight')} again and again: {casts:,} casts, "
                f"{again:,} of them of a weight that had not changed (shape {list(most.shape)}, to {most.dtype})."
            )
            do = "open one region around all of them, with its cache on: "
            do += "casts are kept until the outermost region ends."
            if any(cast.holdable for cast in some):
                hold = "precast.attach(model, optimizer=optimizer)"
                do = f"hold the weights, so that they are cast once a step: {hold}; or {do}"
            yield self._finding("weight-cast-again", title, some, do[:1].upper() + do[1:])

    def in_float32(self) -> Iterator[Finding]:
        """Operations that are worth 16 bits and ran in float32, though nothing asked for that."""
        if not any(row.rule == "lower" for row in self.rows):
            return
        for some in _alike(filter(_is_unexpected, self.rows), _of_row):
            row, policy = some[0], None
            if row.region is None:
                do = f'Open the region around it, too: with precast.autocast("{row.device}"): ...'
            else:
                policy = self._policy(row.op, "lower", row.device)
                do = f"Have {row.op} run in 16 bits on {row.device}, by the rule lower in a policy file."
            calls = _times(sum(each.calls for each in some))
            title = f"{row.op}{_places(some)} ran in float32 {calls}: {row.reason}."
            yield self._finding("float32-op", title, some, do, policy)

    def spread(self) -> Iterator[Finding]:
        """Operations without a rule whose inputs have two dtypes: PyTorch gives the wider one."""
        spreading = filter(_is_spreading, self.rows)
        for some in _alike(spreading, lambda row: (_of_row(row), *row.inputs)):
            row = some[0]
            title = (
                f"{row.op}{_places(some)} mixes {' and '.join(dict.fromkeys(row.inputs))}, and what follows is "
                f"float32: {_times(sum(each.calls for each in some))}."
            )
            do = (
                f"Cast the float32 input once, or run {row.op} in 16 bits on {row.device}, by the rule lower in a "
                "policy file."
            )
            policy = self._policy(row.op, "lower", row.device)
            yield self._finding("float32-spread", title, some, do, policy)

    def _finding(
        self,
        kind: str,
        title: str,
        some: Sequence[Noticed | Row],
        suggestion: str,
        policy: str | None = None,
    ) -> Finding:
        """A finding with the cost of `some`, at the place of the one that cost most."""
        dearest = max(some, key=lambda each: each.seconds)
        seconds = sum(each.seconds for each in some)
        sizes = [each.bytes for each in some if isinstance(each, Noticed)]
        share = min(1.0, seconds / self.totals.seconds) if self.totals.seconds else None
        cost = Cost(seconds, sum(sizes) if sizes else None, share)
        where = Where(dearest.module, dearest.op, dearest.source)
        return Finding(kind, title, cost, suggestion, policy, where)

    def _policy(self, op: str, rule: str, device: str) -> str | None:
        return _file(self.policies.get(device) or Policy.load("default"), op, rule, device)


@functools.lru_cache(maxsize=256)
def _file(policy: Policy, op: str, rule: str, device: str) -> str | None:
    """The whole file of a policy with another rule for one operation; None if the operation has no such rule."""
    try:
        return whole_file(policy, ops={device: {op: rule}})
    except PolicyError:
        return None


def _is_unexpected(row: Row) -> bool:
    base = row.op.partition(".")[0]
    if row.phase != "forward" or base not in _HEAVY or row.rule == "lower":
        return False
    if "float32" not in row.output or row.module_rule is not None:
        return False
    is_off = row.rule is None and (row.reason or "").startswith("autocast is off")
    return row.region is None or not is_off  # else somebody switched it off


def _is_spreading(row: Row) -> bool:
    mixed = "float32" in row.inputs and {"bfloat16", "float16"} & set(row.inputs)
    if row.phase != "forward" or not mixed or row.output != ["float32"] or row.op == "_to_copy":
        return False
    return row.rule is None and row.region is not None


def _alike(items: Iterable[_T], key: Callable[[_T], Any]) -> Iterable[list[_T]]:
    """Lists of items with the same key: the blocks of a stack have one finding, not one each."""
    groups: defaultdict[Any, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def _site(at: Site | Noticed | Row) -> tuple[object, ...]:
    """A site, the same for modules whose names differ in their numbers."""
    return _pattern(at.module), at.source, at.op


def _of_row(row: Row) -> tuple[object, ...]:
    return *_site(row), row.device, row.reason, row.region is None


def _pattern(module: str | None) -> str:
    """A module's name without its numbers: "layers.*.mlp"."""
    return re.sub(r"\d+", "*", module or "")


def _places(some: Sequence[Site | Noticed | Row]) -> str:
    """Where it is: in one module, or in several whose names differ in their numbers."""
    names = list(dict.fromkeys(each.module for each in some))
    name = names[0] if len(names) == 1 else f"{_pattern(names[0])} ({len(names)} modules)"
    source = some[0].source
    return (f" in {name}" if name else "") + (f" at {source}" if source else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
