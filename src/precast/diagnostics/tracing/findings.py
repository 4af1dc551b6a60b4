"""Findings of a trace: time that could be saved, each with what to do, its cost or saving, and its spread.

Invariants: a cost was measured in the trace, and a saving in a trial; advice is given only where following it takes
away a measured cost, or was faster in a trial; everything else is an observation, without advice. The most expensive
come first, at most `MOST` of each kind; a policy file is whole: the policy that was in force, with one rule changed.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from precast._internal import cures
from precast._internal.display import dtype_name
from precast.diagnostics.report.words import duration, plural
from precast.diagnostics.schema import Cost, Finding, Row, Totals, Where
from precast.diagnostics.tracing.facts import Facts, Island
from precast.diagnostics.tracing.lineage import Noticed, Site
from precast.diagnostics.tracing.recorder import HEAVY
from precast.diagnostics.tracing.trials import Saving
from precast.errors import PolicyError
from precast.policy.policy import TUNED, Policy
from precast.policy.shortest_text import whole_file

__all__ = ["MOST", "findings_of"]

MOST: Final = 10
_T = TypeVar("_T")
_LOW: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


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
        search.rounded(),
        search.round_trips(),
        search.islands(),
        search.casts_again(),
        search.in_float32(),
        search.spread(),
    )
    most = (finding for kind in kinds for finding in sorted(kind, key=_dear)[:MOST])
    return sorted(most, key=_dear)


def _dear(finding: Finding) -> tuple[bool, float, int]:
    return not finding.suggestion, -(finding.cost.seconds or 0.0), -(finding.cost.bytes or 0)


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
        trips = (trip for trip in self.facts.round_trips.values() if not trip.is_used)
        for some in _alike(trips, lambda t: (_site(t), t.dtype, t.rule, _site(t.back))):
            trip = some[0]
            dtype, here = dtype_name(trip.dtype), _places(some)
            title = (
                f"{trip.op}{here} casts {dtype} to float32, and "
                f"{trip.back.op}{_places([each.back for each in some])} casts it back: "
                f"{_times(sum(each.times for each in some))}, and nothing in between needed float32."
            )
            do, policy = "", None
            device = devices.get(trip.op, "cpu")
            if trip.rule is None:
                do = cures.DROP_THE_CAST(place=here, dtype=dtype)
            elif self._may_change(device) and self._are_all(trip.op, self._trips_of(trip.op)):
                do = cures.KEEP_THE_DTYPE(op=trip.op, dtype=dtype)
                policy = self._policy(trip.op, "keep", device)
            yield self._finding("round-trip", title, some, self._measured(some), do, policy=policy)

    def rounded(self) -> Iterator[Finding]:
        """Whole numbers that the program made float32, and that a rule rounds to 16 bits, so that several are one."""
        for each in self.facts.rounded.values():
            different, remaining = map(int, each.values)
            if remaining == different:
                continue
            start, verb = each.start, "makes" if each.start.op.startswith("arange") else "casts"
            title = (
                f"{each.op}{_places([each])} rounds whole numbers that {start.op}{_places([Noticed(*start)])} {verb} "
                f"float32: of {different:,} different values {remaining:,} are left in {each.dtype}."
            )
            do = cures.WHOLE_NUMBERS(op=each.op)
            where = Where(each.module, each.op, each.source)
            yield Finding("rounded by a rule", title, Cost(), do, None, where)

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
            cost, do, policy = self._measured(some), "", None
            saving = self._saving_of(some)
            if saving is not None and self._may_change(device):
                cost = self._saved(saving, some)
                do = cures.LOWER_THE_ISLAND(op=op, device=device, saved=_range(saving))
                policy = self._policy(op, "lower", device)
            yield self._finding("float32-island", title, some, cost, do, policy=policy)

    def casts_again(self) -> Iterator[Finding]:
        """Weights that were cast more than once while they stayed the same."""
        for some in _alike((cast for cast in self.facts.weights if cast.again), _site):
            most = max(some, key=lambda cast: cast.casts)
            casts, again = sum(cast.casts for cast in some), sum(cast.again for cast in some)
            title = (
                f"{most.op}{_places(some)} casts {plural(len(some), 'weight')} again and again: {casts:,} casts, "
                f"{again:,} of them of a weight that had not changed (shape {list(most.shape)}, to {most.dtype})."
            )
            do = ""
            if any(cast.holdable for cast in some):
                do = cures.HOLD_THE_WEIGHTS()
            elif not any(cast.is_in_one_region for cast in some):
                do = cures.ONE_REGION()
            yield self._finding("weight-cast-again", title, some, self._measured(some), do)

    def in_float32(self) -> Iterator[Finding]:
        """Operations that are worth 16 bits and ran in float32, though nothing asked for that."""
        lower = next(
            (_LOW[d] for row in self.rows if row.rule == "lower" for d in row.output if d in _LOW),
            None,
        )
        if lower is None:
            return
        for some in _alike(filter(_is_unexpected, self.rows), _of_row):
            row = some[0]
            op, device = row.op, row.device
            cost, do, policy = self._of_rows(some), "", None
            saving = self._saving_in(some, lower)
            if saving is not None:
                saved = _range(saving)
                if row.region is None:
                    cost, do = (
                        self._saved(saving, some),
                        cures.REGION_AROUND(device=device, saved=saved),
                    )
                elif (
                    row.rule is None
                    and _NO_ROW.match(row.reason or "")
                    and self._may_change(device)
                ):
                    cost, policy = self._saved(saving, some), self._policy(op, "lower", device)
                    do = cures.RULE_FOR_IT(op=op, device=device, saved=saved) if policy else ""
            calls = _times(sum(each.calls for each in some))
            title = f"{op}{_places(some)} ran in float32 {calls}: {row.reason}."
            yield self._finding("float32-op", title, some, cost, do, policy=policy)

    def spread(self) -> Iterator[Finding]:
        """Operations without a rule whose inputs have two dtypes: PyTorch gives the wider one.

        No advice: another rule for the operation would hold wherever it runs, and move the casts to what follows.
        """
        spreading = filter(_is_spreading, self.rows)
        for some in _alike(spreading, lambda row: (_of_row(row), *row.inputs)):
            row = some[0]
            title = (
                f"{row.op}{_places(some)} mixes {' and '.join(dict.fromkeys(row.inputs))}, and gives float32: "
                f"{_times(sum(each.calls for each in some))}."
            )
            yield self._finding("float32-spread", title, some, self._of_rows(some), "")

    @staticmethod
    def _finding(
        kind: str,
        title: str,
        some: Sequence[Noticed | Row],
        cost: Cost,
        suggestion: str,
        *,
        policy: str | None = None,
    ) -> Finding:
        """Return a finding, at the place of the one of `some` that cost most."""
        dearest = max(some, key=lambda each: each.seconds)
        where = Where(dearest.module, dearest.op, dearest.source)
        return Finding(kind, title, cost, suggestion, policy, where)

    # --- costs and savings ---

    def _measured(self, some: Sequence[Noticed]) -> Cost:
        """Return the cost of casts, with its spread over the steps."""
        by_step: Counter[int] = Counter()
        for each in some:
            by_step.update(each.by_step)
        low, high = self.facts.spread_of(by_step) or (None, None)
        seconds = sum(each.seconds for each in some)
        return Cost(seconds, sum(each.bytes for each in some), self._share(seconds), low, high)

    def _of_rows(self, some: Sequence[Row]) -> Cost:
        seconds = sum(row.seconds for row in some)
        return Cost(seconds, None, self._share(seconds))

    def _saved(self, saving: Saving, some: Sequence[Island] | Sequence[Row]) -> Cost:
        """Return what a trial saved, for all calls of the trace."""
        calls = sum(each.calls for each in some)
        low, middle, high = (self._share(seconds * calls) for seconds in saving)
        sizes = [each.bytes for each in some if isinstance(each, Noticed)]
        return Cost(saving.middle * calls, sum(sizes) or None, middle, low, high)

    def _share(self, seconds: float) -> float | None:
        return min(1.0, seconds / self.totals.seconds) if self.totals.seconds else None

    def _saving_of(self, some: Sequence[Island]) -> Saving | None:
        """Return the saving of a call of islands in 16 bits, if all their results are cast back, and it is certain."""
        are_left = all(not island.used and island.returned >= island.calls for island in some)
        if not are_left or not self._are_all(some[0].op, sum(island.calls for island in some)):
            return None
        return _mean(
            [
                (self.facts.saving(_at(each), each.returns, each.returns), each.calls)
                for each in some
            ]
        )

    def _saving_in(self, some: Sequence[Row], lower: torch.dtype) -> Saving | None:
        """Return the saving of a call of rows in 16 bits, if it is certain."""
        return _mean([(self.facts.saving(_at(row), lower, None), row.calls) for row in some])

    # --- policies ---

    def _trips_of(self, op: str) -> int:
        trips = self.facts.round_trips.values()
        return sum(trip.times for trip in trips if trip.op == op and not trip.is_used)

    def _are_all(self, op: str, calls: int) -> bool:
        """Return True if an operation has no other calls with a rule in forward, which a new rule would change."""
        return (
            sum(r.calls for r in self.rows if r.op == op and r.rule and r.phase == "forward")
            <= calls
        )

    def _may_change(self, device: str) -> bool:
        """Return True if the policy is not one that `tune` chose: it measured what a rule costs, for the whole step."""
        policy = self.policies.get(device)
        return policy is None or policy.name != TUNED

    def _policy(self, op: str, rule: str, device: str) -> str | None:
        return _file(self.policies.get(device) or Policy.load("default"), op, rule, device)


@functools.lru_cache(maxsize=256)
def _file(policy: Policy, op: str, rule: str, device: str) -> str | None:
    """The whole file of a policy with another rule for one operation; None if the operation has no such rule."""
    try:
        return whole_file(policy, ops={device: {op: rule}})
    except PolicyError:
        return None


_NO_ROW: Final = re.compile("no row|no rule", re.IGNORECASE)


def _mean(savings: Sequence[tuple[Saving | None, int]]) -> Saving | None:
    """Return the mean saving of a call, of sites with their numbers of calls; None if it is not known of one."""
    known = [(saving, calls) for saving, calls in savings if saving is not None]
    total = sum(calls for _, calls in known)
    if len(known) < len(savings) or not total:
        return None
    return Saving(*(sum(s[i] * calls for s, calls in known) / total for i in range(3)))


def _range(saving: Saving) -> str:
    """Return the saving of a call in words."""
    return f"{duration(saving.low)} to {duration(saving.high)}"


def _at(each: Noticed | Row) -> Site:
    return Site(each.op, each.module, each.source)


def _is_unexpected(row: Row) -> bool:
    base = row.op.partition(".")[0]
    if row.phase != "forward" or base not in HEAVY or row.rule == "lower":
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
