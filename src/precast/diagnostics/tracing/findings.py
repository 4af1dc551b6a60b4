"""Findings of a trace: possible savings of time, each with its cost or saving and the spread of it.

Invariants: a cost was measured in the trace, and a saving in a trial. Advice either removes a measured cost or was
faster in a trial; other findings are observations, without advice. The most expensive come first, at most `MOST` of
each kind. A policy file is complete: the current policy with one rule changed.
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
from precast._internal.display import dtype_name, plural
from precast._torch import SIXTEEN_BIT
from precast.diagnostics.tracing.facts import CastPatterns, Float32Island
from precast.diagnostics.tracing.lineage import CastCosts
from precast.diagnostics.tracing.reasons import is_lowered
from precast.diagnostics.tracing.trials import TrialSaving
from precast.errors import PolicyError
from precast.policy.policy import TUNED, Policy
from precast.policy.rows import FLOAT32_RULES
from precast.policy.shortest_text import whole_file
from precast.report.schema import Finding, FindingCost, FindingLocation, OperationRow, TraceTotals
from precast.report.words import be, duration

__all__ = ["MOST", "findings_of"]

MOST: Final = 10
_T = TypeVar("_T")
_Trial = tuple[Float32Island | OperationRow, torch.dtype | None, torch.dtype | None]
"""Calls of one kind, the dtype to try, and the dtype to which their results are cast now."""
_LOW: Final = {dtype_name(dtype): dtype for dtype in SIXTEEN_BIT}


def findings_of(
    rows: list[OperationRow],
    totals: TraceTotals,
    patterns: CastPatterns,
    policies: Mapping[str, Policy],
) -> list[Finding]:
    """Return all findings of a trace. `policies` maps device types to their policy; "default" is used for others."""
    search = _FindingSearch(rows, totals, patterns, policies)
    kinds = (
        search.rounded(),
        search.limits(),
        search.in_16_bits(),
        search.round_trips(),
        search.islands(),
        search.casts_again(),
        search.in_float32(),
        search.spread(),
    )
    most = (finding for kind in kinds for finding in sorted(kind, key=_by_cost)[:MOST])
    return sorted(most, key=_by_cost)


def _by_cost(finding: Finding) -> tuple[bool, float, int]:
    return not finding.suggestion, -(finding.cost.seconds or 0.0), -(finding.cost.bytes or 0)


@dataclass(frozen=True)
class _FindingSearch:
    rows: list[OperationRow]
    totals: TraceTotals
    patterns: CastPatterns
    policies: Mapping[str, Policy]

    def round_trips(self) -> Iterator[Finding]:
        """Find tensors that were cast to float32 and back, and only moved in between."""
        devices = {row.op: row.device_type for row in self.rows}
        trips = [trip for trip in self.patterns.round_trips.values() if not trip.is_used]
        trips_of: Counter[str] = Counter()
        for each in trips:
            trips_of[each.op] += each.times
        for some in _alike(trips, lambda t: (_site(t.where), t.dtype, t.rule, _site(t.back))):
            trip = some[0]
            dtype, place = dtype_name(trip.dtype), _places(some)
            title = (
                f"{trip.op}{place} casts {dtype} to float32, and "
                f"{trip.back.op}{_in_words([each.back for each in some])} casts it back: "
                f"{_times(sum(each.times for each in some))}, and no operation in between needed float32."
            )
            do, policy = "", None
            device = devices.get(trip.op, "cpu")
            if trip.rule is None:
                do = cures.DROP_THE_CAST(place=place, dtype=dtype)
            elif self._may_change(device) and self._are_all(trip.op, trips_of[trip.op]):
                do = cures.KEEP_THE_DTYPE(op=trip.op, dtype=dtype)
                policy = self._policy(trip.op, "keep", device)
            yield self._finding("round-trip", title, some, self._measured(some), do, policy=policy)

    def rounded(self) -> Iterator[Finding]:
        """Find integers that the program cast to float32 and a rule rounds to 16 bits, so that several become one."""
        for each in self.patterns.rounded.values():
            different, remaining = map(int, each.values)
            if remaining == different:
                continue
            start = each.start
            verb = "creates in" if (start.op or "").startswith("arange") else "casts to"
            title = (
                f"{each.op}{_places([each])} rounds whole numbers that {start.op}{_in_words([start])} {verb} float32: "
                f"{different:,} different values become {remaining:,} in {each.dtype}."
            )
            rule, policy = self._rule_for_float32(each)
            do = cures.WHOLE_NUMBERS(op=each.op, rule=rule)
            yield self._finding(
                "rounded by a rule", title, [each], FindingCost(), do, policy=policy
            )

    def _rule_for_float32(self, cast: CastCosts) -> tuple[str, str | None]:
        """Return the rule that computes one operation in float32, in words, and its file; "" and None without one."""
        op, at = cast.op, cast.where
        places = [(r.device_type, r.source) for r in self.rows if r.op == op and r.rule]
        device = next((device for device, source in places if source == at.source), "cpu")
        key = op if op.isidentifier() else f'"{op}"'
        if not self._may_change(device):
            return "", None
        if at.module:
            policy = self.policies.get(device) or Policy.load("default")
            rule = {at.module: {"ops": {op: "fp32"}}}
            words = f'the rule "{at.module}" = {{ ops = {{ {key} = "fp32" }} }} in [modules], attached; or '
            return words, whole_file(policy, modules=rule)
        if any(source != at.source for _, source in places):
            return "", None  # a row would change other calls
        return f'the row {key} = "fp32"; or ', self._policy(op, "fp32", device)

    def limits(self) -> Iterator[Finding]:
        """Find values that `clamp` limits to a number that is 0, 1 or -1 in 16 bits."""
        for (at, limit, rounded, dtype), count in self.patterns.limits.items():
            reached = int(count)
            if not reached:
                continue
            title = (
                f"{at.op}{_in_words([at])} limits values to {limit!r}, which {dtype} rounds to {rounded}: "
                f"{plural(reached, 'result')} {be(reached)} {rounded}."
            )
            do = cures.LIMIT_IN_FLOAT32(op=at.op)
            yield Finding("rounded limit", title, FindingCost(), do, None, at)

    def in_16_bits(self) -> Iterator[Finding]:
        """Find operations that a rule would run in float32: in place, where no rule acts, or in a disabled region."""
        if not any(row.rule == "lower" for row in self.rows):
            return  # the program uses no mixed precision here
        for some in _alike(filter(self._is_narrow, self.rows), _of_row):
            row = some[0]
            reason = "it writes in place" if row.op.partition(".")[0].endswith("_") else row.reason
            title = (
                f"{row.op}{_places(some)} computed in {row.output[0]} {_times(sum(r.calls for r in some))}, as "
                f"{reason}: the policy computes {_ruled_name(row.op)} in float32."
            )
            yield self._finding("16-bit-op", title, some, FindingCost(), "")

    def _is_narrow(self, row: OperationRow) -> bool:
        if row.phase != "forward" or row.rule is not None or not _LOW.keys() & set(row.output):
            return False
        is_in_place = row.op.partition(".")[0].endswith("_") and row.region is not None
        if not is_in_place and not (row.reason or "").startswith("autocast is off"):
            return False
        policy = self.policies.get(row.device_type) or Policy.load("default")
        entries = policy.rules(row.device_type)
        names = (f"aten::{_ruled_name(row.op)}{overload}" for overload in ("", ".int"))
        return any(name in entries and entries[name].rule in FLOAT32_RULES for name in names)

    def islands(self) -> Iterator[Finding]:
        """Find operations that a rule runs in float32 between operations in 16 bits."""
        islands = self.patterns.islands.values()
        for some in _alike(islands, lambda island: (island.op, island.device, island.policy)):
            if not any(island.returned for island in some):
                continue  # the next operation uses float32, as at the end of a loss
            op, device = some[0].op, some[0].device
            title = (
                f"{op} is a float32 island in 16 bits: with the policy {some[0].policy!r} its inputs were cast to "
                f"float32 {_times(sum(island.calls for island in some))}, and its results were cast back "
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
        """Find weights that were cast more than once without a change."""
        for some in _alike((c for c in self.patterns.weights if c.again), lambda c: _site(c.where)):
            most = max(some, key=lambda cast: cast.casts)
            casts, again = sum(cast.casts for cast in some), sum(cast.again for cast in some)
            title = (
                f"{most.op}{_places(some)} casts {plural(len(some), 'weight')} repeatedly: {casts:,} casts, "
                f"{again:,} of them of a weight that had not changed (shape {list(most.shape)}, to {most.dtype})."
            )
            do = ""
            if any(cast.holdable for cast in some):
                do = cures.HOLD_THE_WEIGHTS()
            elif not any(cast.is_in_one_region for cast in some):
                do = cures.ONE_REGION()
            yield self._finding("weight-cast-again", title, some, self._measured(some), do)

    def in_float32(self) -> Iterator[Finding]:
        """Find operations that ran in float32 without a rule or cast for it, and that "default" runs in 16 bits."""
        lower = next(
            (_LOW[d] for row in self.rows if row.rule == "lower" for d in row.output if d in _LOW),
            None,
        )
        if lower is None:
            return
        for some in _alike(filter(self._is_unexpected, self.rows), _of_row):
            row = some[0]
            op, device = row.op, row.device_type
            cost, do, policy = self._of_rows(some), "", None
            calls = _times(sum(each.calls for each in some))
            title = f"{op}{_places(some)} ran in float32 {calls}: {row.reason}."
            saving = self._saving_in([(row, lower, None) for row in some])
            if saving is not None and row.region is None:
                cost = self._saved(saving, some)
                do = cures.REGION_AROUND(device=device, saved=_range(saving))
            elif saving is not None and row.rule is None and self._may_change(device):
                has_no_row = (row.reason or "").lower().startswith(("no row", "no rule"))
                policy = self._policy(op, "lower", device) if has_no_row else None
                if policy is not None:
                    cost = self._saved(saving, some)
                    do = cures.RULE_FOR_IT(op=op, device=device, saved=_range(saving))
            yield self._finding("float32-op", title, some, cost, do, policy=policy)

    def _is_unexpected(self, row: OperationRow) -> bool:
        if row.phase != "forward" or row.rule in ("lower", "lower_out_fp32"):
            return False
        if "float32" not in row.output or row.module_rule is not None:
            return False
        is_off = row.rule is None and (row.reason or "").startswith("autocast is off")
        if row.region is not None and is_off:
            return False  # the program switched it off
        return is_lowered(row.op)

    def spread(self) -> Iterator[Finding]:
        """Find operations without a rule on inputs of two dtypes, for which PyTorch returns the wider one.

        There is no advice: a rule would apply wherever the operation runs, and move the casts to the next operations.
        """
        spreading = filter(_is_spreading, self.rows)
        for some in _alike(spreading, lambda row: (_of_row(row), *row.inputs)):
            row = some[0]
            title = (
                f"{row.op}{_places(some)} mixes {' and '.join(dict.fromkeys(row.inputs))}, and returns float32: "
                f"{_times(sum(each.calls for each in some))}."
            )
            yield self._finding("float32-spread", title, some, self._of_rows(some), "")

    @staticmethod
    def _finding(
        kind: str,
        title: str,
        some: Sequence[CastCosts | OperationRow],
        cost: FindingCost,
        suggestion: str,
        *,
        policy: str | None = None,
    ) -> Finding:
        """Return a finding, at the place of the most expensive one of `some`."""
        worst = max(some, key=lambda each: each.seconds)
        return Finding(kind, title, cost, suggestion, policy, worst.where)

    # --- costs and savings ---

    def _measured(self, some: Sequence[CastCosts]) -> FindingCost:
        by_step: Counter[int] = Counter()
        for each in some:
            by_step.update(each.by_step)
        low, high = self.patterns.spread_of(by_step) or (None, None)
        seconds = sum(each.seconds for each in some)
        return FindingCost(
            seconds, sum(each.bytes for each in some), self._share(seconds), low, high
        )

    def _of_rows(self, some: Sequence[OperationRow]) -> FindingCost:
        seconds = sum(row.seconds for row in some)
        return FindingCost(seconds, None, self._share(seconds))

    def _saved(
        self, saving: TrialSaving, some: Sequence[Float32Island] | Sequence[OperationRow]
    ) -> FindingCost:
        calls = sum(each.calls for each in some)
        low, middle, high = (self._share(seconds * calls) for seconds in saving)
        sizes = [each.bytes for each in some if isinstance(each, CastCosts)]
        return FindingCost(saving.middle * calls, sum(sizes) or None, middle, low, high)

    def _share(self, seconds: float) -> float | None:
        return min(1.0, seconds / self.totals.seconds) if self.totals.seconds else None

    def _saving_of(self, some: Sequence[Float32Island]) -> TrialSaving | None:
        """Return the saving of a call of islands in 16 bits, if all results are cast back and the saving is certain."""
        are_cast_back = all(not island.used and island.returned >= island.calls for island in some)
        calls = sum(island.calls for island in some)
        if not are_cast_back or not self._are_all(some[0].op, calls):
            return None
        return self._saving_in([(each, each.returns, each.returns) for each in some])

    def _saving_in(self, some: Iterable[_Trial]) -> TrialSaving | None:
        """Return the mean saving of a call over sites with their numbers of calls; None if a site has none."""
        sums, total = [0.0, 0.0, 0.0], 0
        for each, dtype, returns in some:
            saving = self.patterns.measure_saving(each.where, dtype, returns)
            if saving is None:
                return None
            sums = [
                before + seconds * each.calls for before, seconds in zip(sums, saving, strict=True)
            ]
            total += each.calls
        return TrialSaving(*(seconds / total for seconds in sums)) if total else None

    # --- policies ---

    def _are_all(self, op: str, calls: int) -> bool:
        """Return True if an operation has no other calls with a rule in forward, which another rule would change."""
        return (
            sum(r.calls for r in self.rows if r.op == op and r.rule and r.phase == "forward")
            <= calls
        )

    def _may_change(self, device: str) -> bool:
        """Return False for a policy of `tune`, which has measured the cost of each rule in the whole step."""
        policy = self.policies.get(device)
        return policy is None or policy.name != TUNED

    def _policy(self, op: str, rule: str, device: str) -> str | None:
        return _file(self.policies.get(device) or Policy.load("default"), op, rule, device)


@functools.lru_cache(maxsize=256)
def _file(policy: Policy, op: str, rule: str, device: str) -> str | None:
    """Return the complete file of a policy with another rule for one operation; None if it cannot have that rule."""
    try:
        return whole_file(policy, ops={device: {op: rule}})
    except PolicyError:
        return None


def _ruled_name(op: str) -> str:
    """Return the name in a policy's row: `pow_.Scalar` -> `pow`, `_log_softmax` -> `log_softmax`."""
    return op.partition(".")[0].strip("_").removesuffix("_forward")


def _range(saving: TrialSaving) -> str:
    return f"{duration(saving.low)} to {duration(saving.high)}"


def _is_spreading(row: OperationRow) -> bool:
    mixed = "float32" in row.inputs and not _LOW.keys().isdisjoint(row.inputs)
    if row.phase != "forward" or not mixed or row.output != ["float32"] or row.op == "_to_copy":
        return False
    return row.rule is None and row.region is not None


def _alike(items: Iterable[_T], key: Callable[[_T], Any]) -> Iterable[list[_T]]:
    """Return lists of items with the same key, so that the blocks of a stack share one finding."""
    groups: defaultdict[Any, list[_T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def _site(at: FindingLocation) -> tuple[object, ...]:
    """Return a key of a site, the same for modules whose names differ only in their numbers."""
    return _pattern(at.module), at.source, at.op


def _of_row(row: OperationRow) -> tuple[object, ...]:
    return *_site(row.where), row.device_type, row.reason, row.region is None


def _pattern(module: str | None) -> str:
    """Return a module's name without its numbers: "layers.*.mlp"."""
    return re.sub(r"\d+", "*", module or "")


def _places(some: Sequence[CastCosts | OperationRow]) -> str:
    return _in_words([each.where for each in some])


def _in_words(some: Sequence[FindingLocation]) -> str:
    """Return the place in words: one module, or several whose names differ only in their numbers."""
    names = list(dict.fromkeys(each.module for each in some))
    name = names[0] if len(names) == 1 else f"{_pattern(names[0])} ({len(names)} modules)"
    source = some[0].source
    return (f" in {name}" if name else "") + (f" at {source}" if source else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
