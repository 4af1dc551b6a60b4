"""Targets of precast, and their comparison with the rows of `python -m benchmarks`.

Invariants:
    - A target is about one figure of one measured row: a ratio to torch.autocast or to what is written by hand, or the
      microseconds or bytes that are added. It is met when the median is at most the limit.
    - A target that cannot be judged says why: nothing was measured, or the machine cannot show it. What calls and
      regions cost, and what a drop-in takes beside torch.autocast, counts on every machine. What 16-bit copies save
      shows only where the processor computes in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.models import CASES, SHAPES, WIDTHS
from benchmarks.overhead import MANY_REGIONS, POLICIES
from benchmarks.shared_process import ATTACHED, EVENTS, WEIGHTS
from benchmarks.variants import BASELINE, BY_HAND, GENERATION, INFERENCE, TRAINING

__all__ = ["MET", "NOT_JUDGED", "NOT_MET", "TARGETS", "Target", "judged", "summary"]
__all__ += ["written"]

MET, NOT_MET, NOT_JUDGED = "met", "not met", "not judged"
_NO_UNITS = "this machine has no bfloat16 units"
_NOT_TOLD = "this system does not tell"
_DROP_IN, _ATTACHED = "precast", "attached"
_FIGURES = {
    "ratio": f"of {BASELINE}",
    "by_hand": f"of {BY_HAND}",
    "difference_us": f"us more than {BASELINE}",
    "ratio_to_first": "of the first size",
    "of_next": "of the next call",
    "grown_bytes": "bytes more",
}
"""The description of each figure of a row, for the tables."""


@dataclass(frozen=True)
class Target:
    """The most that a figure may be.

    Attributes:
        work: what it is about, as the tables say it.
        row: what the measured row has in its fields.
        figure: the field that is judged, one of `_FIGURES`.
        limit: the most that it may be.
        needs_units: whether only a machine with bfloat16 units can show it.
        as_by_hand: whether it is judged only where what is written by hand reaches it.
        within: the key in the figure, where that has several.
    """

    work: str
    row: Mapping[str, str]
    figure: str
    limit: float
    needs_units: bool = False
    as_by_hand: bool = False
    within: str | None = None

    @property
    def case(self) -> str:
        """The exact case."""
        fields = ("size", "case", "policy", "work")
        named = [
            self.row[name]
            for name in fields
            if name in self.row and self.row[name] not in self.work
        ]
        return ", ".join([*named, *([self.within] if self.within else [])])

    def of(self, row: Mapping[str, Any]) -> tuple[float, float] | None:
        """The figure and its spread in a row; None where it was not measured."""
        value, spread = row.get(self.figure), row.get(f"{self.figure}_iqr", 0.0)
        if self.within is not None and isinstance(value, Mapping):
            value, spread = value.get(self.within), spread[self.within] if spread else 0.0
        return None if value is None else (value, spread)


def _calls() -> Iterator[Target]:
    def call(work: str, kind: str, case: str, policy: str, limit: float) -> Target:
        row = {"benchmark": "overhead", "kind": kind, "case": case, "policy": policy}
        return Target(work, row, "difference_us", limit)

    for policy in POLICIES:
        yield call("F.linear 8x8, cached weight", "with a weight", "linear", policy, 0.4)
    without = "takes no weight"
    for policy in POLICIES:
        yield call(without, "takes weights, has none", "matmul", policy, 0.3)
        yield call(without, "rule, no weight", "mse_loss", policy, 0.3)
    yield call(without, "promoted by default", "index_add", "default", 0.3)
    for case in ("cat", "index_add"):
        yield call("takes no weight, promotes", "dtypes mixed", case, "default", 1.0)
    entry = {"benchmark": "overhead", "kind": "region", "case": "enter and leave, kept"}
    yield Target("a region", entry, "ratio", 1.1)


def _networks() -> Iterator[Target]:
    for work in (INFERENCE, TRAINING):
        yield Target(
            f"tiny layers, {work}", _network(_DROP_IN, work, "MLP 32 x 16, 8"), "ratio", 1.02
        )
    for work in (INFERENCE, TRAINING):
        for case in _decoders(*SHAPES):
            if work in CASES[case].works:
                yield Target(f"drop-in, {work}", _network(_DROP_IN, work, case), "ratio", 1.01)
    for case in _decoders((1, 1)):
        yield Target(
            "drop-in, one region, many forwards",
            _network(_DROP_IN, GENERATION, case),
            "ratio",
            0.75,
        )
    for shape, limit in (((1, 1), 0.45), ((1, 16), 0.65)):
        for case in _decoders(shape):
            row = _network(_ATTACHED, INFERENCE, case)
            yield Target(
                f"attached, {INFERENCE}", row, "ratio", limit, needs_units=True, as_by_hand=True
            )
            yield Target(f"attached, {INFERENCE}", row, "by_hand", 1.08, needs_units=True)
    for case in _decoders((1, 1), (1, 16)):
        row = _network(_ATTACHED, TRAINING, case)
        yield Target(f"attached, {TRAINING}", row, "ratio", 0.90, needs_units=True)
        yield Target(f"attached, {TRAINING}", row, "by_hand", 1.00, needs_units=True)


def _clients() -> Iterator[Target]:
    for size in ("small", "medium"):
        for case in ("GPT-2", "Llama"):
            for work in (TRAINING, INFERENCE):
                row = {
                    "benchmark": "clients",
                    "size": size,
                    "case": case,
                    "work": work,
                    "kind": "precast.install",
                }
                yield Target("transformers under install()", row, "ratio", 1.01)


def _growth() -> Iterator[Target]:
    for way in ("a kept object", "a new object each"):
        row = {"benchmark": "memory", "kind": "regions", "case": way}
        yield Target(f"memory after {MANY_REGIONS:,} regions", row, "grown_bytes", _NO_GROWTH)
    for kind, sizes, limit in (
        ("nested regions", ("10 regions", "100 regions"), _CONSTANT),
        ("size of the policy", ("1000 more rows",), _CONSTANT),
        ("rule of the operation", ("lower_out_fp32",), 1.0),  # beside "fp32"
        ("attached weights", (f"{max(WEIGHTS)} weights",), 1.05),
    ):
        for size in sizes:
            row = {"benchmark": "growth", "kind": kind}
            yield Target(f"a call's growth: {kind}", row, "ratio_to_first", limit, within=size)


def _shared_process() -> Iterator[Target]:
    for case in EVENTS:
        for weights in WEIGHTS:
            for attached in ATTACHED:
                kind = f"{weights} weights, {attached} attached"
                row = {"benchmark": "shared process", "kind": kind, "case": case}
                yield Target(f"first call after other work, {kind}", row, "of_next", 1.10)


_NO_GROWTH = 10 * MANY_REGIONS
"""Bytes: 10 for each region, which is less than the smallest thing that could stay behind."""
_CONSTANT = 1.005
"""1.00, as it is written."""


def _decoders(*shapes: tuple[int, int]) -> Iterator[str]:
    return (f"decoder {width}, {batch}x{length}" for batch, length in shapes for width in WIDTHS)


def _network(kind: str, work: str, case: str) -> dict[str, str]:
    """Eager, on the CPU: the targets are for it."""
    return {"benchmark": "models", "kind": kind, "work": work, "case": case, "device": "cpu"}


TARGETS = (*_calls(), *_networks(), *_clients(), *_growth(), *_shared_process())


def judged(machine: Mapping[str, Any], rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each target that was measured or skipped: the figure, its spread, the limit and the verdict.

    Where there is no verdict it has the reason.
    """
    rows = list(rows)
    for target in TARGETS:
        rows_of_target = [row for row in rows if _is(row, target.row)]
        rows_of_target.sort(key=lambda row: not _is_of_its_engine(row, machine))
        measured = target.of(rows_of_target[0]) if rows_of_target else None
        value, spread = measured or (None, None)
        if measured:
            reason = _why_not(target, machine, rows, rows_of_target[0])
        elif rows_of_target:
            reason = rows_of_target[0].get("skipped", _NOT_TOLD)
        else:
            reason = _skipped(target, rows)
            if not reason:
                continue
        is_met = value is not None and value <= target.limit
        verdict = NOT_JUDGED if reason else MET if is_met else NOT_MET
        yield {
            "benchmark": "targets",
            "work": target.work,
            "case": target.case,
            "figure": _FIGURES[target.figure],
            "value": value,
            "spread": spread,
            "limit": target.limit,
            "verdict": verdict,
            "reason": reason,
        }


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the numbers of targets that are met, not met and not judged."""
    verdicts = [row["verdict"] for row in rows]
    return ", ".join(f"{verdicts.count(one)} {one}" for one in (MET, NOT_MET, NOT_JUDGED))


def _is(row: Mapping[str, Any], fields: Mapping[str, str]) -> bool:
    return all(row.get(name) == value for name, value in fields.items())


def _is_of_its_engine(row: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    return bool(row.get("engine", machine.get("engine")) == machine.get("engine"))


def _skipped(target: Target, rows: list[dict[str, Any]]) -> str:
    """Return the reason for which all measurements of its kind, or all variants of its work, were skipped, or ""."""
    suite = {"benchmark": target.row["benchmark"], "case": "all"}
    return next((str(row["skipped"]) for row in rows if _is(row, suite)), "")


def _why_not(
    target: Target,
    machine: Mapping[str, Any],
    rows: list[dict[str, Any]],
    rows_of_target: Mapping[str, Any],
) -> str:
    """Return the reason for which a measured figure is not judged, or ""."""
    if not _is_of_its_engine(rows_of_target, machine):
        return f"the {rows_of_target['engine']} engine ran it, and the {machine['engine']} one the rest"
    if target.needs_units and not machine.get("bfloat16_units"):
        return _NO_UNITS
    if target.as_by_hand:
        by_hand = next((row for row in rows if _is(row, {**target.row, "kind": BY_HAND})), None)
        if by_hand is not None and by_hand["ratio"] > target.limit:
            return f"{BY_HAND} takes {by_hand['ratio']:.2f} here"
    return ""


def written(row: Mapping[str, Any], name: str) -> str:
    """The value of a target's row, with its spread, or its limit: microseconds with a sign, ratios without."""
    value = row[name]
    if value is None:
        return ""
    text = _FORMATS.get(row["figure"], "{:.3f}" if name == "value" else "{:.2f}").format(value)
    return f"{text} ({row['spread']:.3f})" if name == "value" and row["spread"] else text


_FORMATS = {_FIGURES["difference_us"]: "{:+.2f}", _FIGURES["grown_bytes"]: "{:+,.0f}"}
