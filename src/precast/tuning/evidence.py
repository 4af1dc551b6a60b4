"""What was tried and measured before a policy was handed out: the types of the file that is saved beside it.

Invariants:
- the file is strict JSON, and reading it gives an equal value; a number that is not finite is null in it;
- it is enough to go on with the search: with the errors of all sites and the trainings of all seeds.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from precast._internal.display import dtype_name
from precast.diagnostics.records import MismatchError, as_json, from_json, may_be_missing
from precast.diagnostics.report.tree import Node
from precast.errors import TuningError
from precast.policy.measured import Value, here
from precast.tuning.costs import Costs
from precast.tuning.eight_bits import Found
from precast.tuning.intervals import Interval
from precast.tuning.proof import Figures, Proof, Verdict
from precast.tuning.sensitivity import Errors, Sensitivity, SiteErrors
from precast.tuning.sites import Program, Site
from precast.tuning.training import Setup

__all__ = [
    "CostEvidence",
    "EightBits",
    "Evidence",
    "ProductEvidence",
    "ProofEvidence",
    "Search",
    "Settings",
    "SiteEvidence",
    "Trial",
    "add_costs",
    "eight_bits_of",
    "read",
    "text",
    "where_measured",
]

SCHEMA: Final = "precast.tuning/1"


@dataclass
class Settings:
    """What `tune` was asked."""

    objective: Literal["time", "memory"]
    tolerance: float
    budget: float
    candidates: list[str]
    base: str
    device_type: str
    seed: int
    task: Literal["training", "inference"] = may_be_missing("training")
    """Whether copies were trained, or run."""


@dataclass
class CostEvidence:
    """What an operation of a module costs in one dtype, for all of its calls in a step."""

    dtype: str
    seconds: float
    """Of both passes."""
    spread: float
    """Half of the distance between the quartiles, in seconds."""
    kept_bytes: int
    estimated: bool = False
    """Whether there was no time to measure all of it, and the rest is what the same operation costs at other sizes."""


@dataclass
class SiteEvidence:
    """An operation of a module, and what 16 bits do to it."""

    module: str | None
    """Null where no module runs it."""
    op: str
    loss: float | None
    """The square of the relative error that it adds to the loss; null where that is infinite."""
    gradient: float | None
    """The same of the gradient that changes most."""
    barred: str
    """Why it must not run in 16 bits; empty if it may."""
    parameter: str = ""
    """Whose gradient changes most, where the operation was measured alone."""
    flushed: float = 0.0
    """Which share of that gradient becomes zero."""
    alone: bool = False
    """Whether it was measured alone, or has its share of a group's error."""
    costs: list[CostEvidence] = field(default_factory=list)
    """Empty where they are not known."""


@dataclass
class Search:
    """What was measured of all operations in one dtype."""

    dtype: str
    scale: float
    """The loss scale."""
    runs: int
    complete: bool
    """Whether there was time for all groups."""
    sites: list[SiteEvidence]
    shared: int = 0
    """How many operations share the error of a group although it is too large, as no more groups were measured."""


@dataclass
class ProductEvidence:
    """A product of matrices, in 16 bits and under a float8 rule."""

    module: str
    op: str
    seconds: float
    """Of both passes of all its calls in a step, in 16 bits, with the cast of its weight."""
    seconds_in_8_bits: float
    """The same under the rule."""
    kept_bytes: int
    kept_bytes_in_8_bits: int
    loss: float | None
    """The square of the relative error that 8 bits add to the loss; null where it was not measured alone."""
    gradient: float | None
    """The same of the gradient that changes most."""
    chosen: bool


@dataclass
class EightBits:
    """What a float8 rule was found to be worth."""

    rule: str
    because: str
    products: list[ProductEvidence]


@dataclass
class Between:
    """An interval; null is an infinite end, or a middle that is not known."""

    low: float | None
    middle: float | None
    high: float | None


@dataclass
class Trial:
    """The trainings of one setup."""

    name: str
    dtype: str
    policy: str
    """The policy as a TOML file; empty for float32 without a region."""
    finals: list[float]
    curves: list[list[float | None]]
    seconds: list[float]
    kept_bytes: int
    """That autograd keeps for backward; of a model that is only run, those of weights and results."""
    failure: str


@dataclass
class Compared:
    """Two setups beside each other."""

    name: str
    against: str
    loss: Verdict
    difference: Between
    time: Verdict
    ratio: Between
    seeds: int
    because: str


@dataclass
class ProofEvidence:
    """Trainings side by side."""

    steps: int
    seeds: int
    ended: Literal["proven", "time", "seeds", "interrupted"]
    trials: list[Trial]
    comparisons: list[Compared]


@dataclass
class Evidence:
    """The whole file."""

    schema: Literal["precast.tuning/1"]
    precast: str
    torch: str
    machine: str
    date: str
    model: str
    """The name of its class."""
    parameters: int
    settings: Settings
    answer: str = ""
    """The name of the trial that is handed out."""
    dtype: str = "float32"
    because: str = ""
    seconds: float = 0.0
    """How long the search took."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""
    command: str = ""
    """The command that began it; empty where a program did."""
    untried: list[str] = field(default_factory=list)
    """The setups for which there was no time."""
    searches: list[Search] = field(default_factory=list)
    proofs: list[ProofEvidence] = field(default_factory=list)
    traced: list[Node] = field(default_factory=list)
    """One step of the model under the answer, by module."""
    undecided: list[str] = may_be_missing(factory=list)  # noqa: RUF009
    """The setups that may be better than the answer, float32; empty where the answer is decided."""
    would_decide: list[str] = may_be_missing(factory=list)  # noqa: RUF009
    """The conditions that would decide it, a phrase for each."""
    eight_bits: list[EightBits] = may_be_missing(factory=list)  # noqa: RUF009
    """One for each float8 rule that was tried."""

    @property
    def outcome(self) -> Literal["proven", "undecided", "interrupted"]:
        """Return how the search ended."""
        if self.interrupted:
            return "interrupted"
        return "undecided" if self.undecided else "proven"


def eight_bits_of(found: Found) -> EightBits:
    """What was measured of a float8 rule, as it is saved."""
    return EightBits(
        found.rule,
        found.because,
        [
            ProductEvidence(
                str(each.site.module),
                each.site.op,
                each.in_16_bits.seconds,
                each.in_8_bits.seconds,
                each.in_16_bits.kept,
                each.in_8_bits.kept,
                None if each.loss is None else _finite(each.loss),
                None if each.gradient is None else _finite(each.gradient),
                each.is_chosen,
            )
            for each in found.products
        ],
    )


def search_of(program: Program, found: Sensitivity) -> Search:
    """What was measured, as it is saved."""
    return Search(
        dtype_name(program.low),
        found.scale,
        found.runs,
        found.complete,
        [_site(site, errors) for site, errors in found.sites.items()],
        found.shared,
    )


def add_costs(search: Search, costs: Costs) -> None:
    """Adds to what was measured in one dtype what its operations cost."""
    known = {(site.module, site.op): site for site in costs.sites}
    for saved in search.sites:
        site = known.get((saved.module, saved.op))
        if site is not None:
            saved.costs = [
                CostEvidence(
                    dtype_name(dtype),
                    cost.seconds,
                    cost.spread,
                    cost.kept,
                    site in costs.estimated,
                )
                for dtype, cost in costs.sites[site].items()
            ]


def sensitivity_of(search: Search, program: Program) -> Sensitivity | None:
    """What was saved, for the sites of a program; None where it is of another program."""
    known = {(site.module, site.op): site for site in search.sites}
    open_sites = [site for site in program.sites if not site.barred]
    if {(site.module, site.op) for site in open_sites} != known.keys() or not search.complete:
        return None
    found = Sensitivity(scale=search.scale, runs=search.runs, shared=search.shared)
    for site in open_sites:
        saved = known[site.module, site.op]
        loss, gradient = _infinite(saved.loss), _infinite(saved.gradient)
        measured = Errors(loss, gradient, saved.parameter, saved.flushed) if saved.alone else None
        found.sites[site] = SiteErrors(
            loss, gradient, saved.barred, measured, is_inference=program.is_inference
        )
    return found


def proof_of(proof: Proof, setups: Iterable[Setup], kept: dict[str, int]) -> ProofEvidence:
    """A proof, as it is saved."""
    by_name = {setup.name: setup for setup in setups}
    trials = [
        Trial(
            name,
            dtype_name(by_name[name].dtype),
            _policy_text(by_name[name]),
            list(found.finals),
            [[_finite(loss) for loss in curve] for curve in found.curves],
            list(found.seconds),
            kept.get(name, 0),
            found.failure,
        )
        for name, found in proof.figures.items()
    ]
    comparisons = [
        Compared(
            each.name,
            each.against,
            each.loss,
            _between(each.difference),
            each.time,
            _between(each.ratio),
            each.seeds,
            each.because,
        )
        for each in proof.comparisons
    ]
    return ProofEvidence(proof.steps, proof.seeds, proof.ended, trials, comparisons)


def figures_of(saved: ProofEvidence, setups: Iterable[Setup]) -> dict[str, Figures] | None:
    """The trainings that were saved of these setups; None where they were of others."""
    known = {trial.name: trial for trial in saved.trials}
    found = {}
    for setup in setups:
        trial = known.get(setup.name)
        if trial is None or not _is_of(trial, setup):
            return None
        curves = [[_nan(loss) for loss in curve] for curve in trial.curves]
        found[setup.name] = Figures(
            setup.name, list(trial.finals), curves, list(trial.seconds), trial.failure
        )
    return found


def where_measured(seen: Evidence) -> dict[str, Value]:
    """What a policy says of where it was measured, and for what question; one that is found again says the same."""
    asked = seen.settings
    return {
        **here(asked.device_type),
        "precast": seen.precast,
        "model": seen.model,
        "task": asked.task,
        "dtype": seen.dtype,
        "base": asked.base,
        "objective": asked.objective,
        "tolerance": asked.tolerance,
        "seed": asked.seed,
    }


def text(evidence: Evidence) -> str:
    """The file's content."""
    return json.dumps(as_json(evidence), indent=1, allow_nan=False) + "\n"


def read(path: str | os.PathLike[str]) -> Evidence:
    """The evidence in a file.

    Raises:
        TuningError: there is no such file, or it is none of evidence.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        return from_json(Evidence, content)
    except (OSError, ValueError, MismatchError) as error:
        raise TuningError(
            f"{os.fspath(path)} cannot be read as the evidence of a search: {error}"
        ) from error


def _is_of(trial: Trial, setup: Setup) -> bool:
    """Whether a trial was of the rules of a setup; the figures in their reasons are measured again, and differ."""
    if setup.policy is None or not trial.policy:
        return setup.policy is None and not trial.policy
    return bool(_rules_of(trial.policy) == _rules_of(_policy_text(setup)))


def _rules_of(text: str) -> Any:
    """A policy file without its reasons."""

    def bare(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: bare(inner) for key, inner in value.items() if key != "reason"}

    return bare(tomllib.loads(text))


def _policy_text(setup: Setup) -> str:
    return "" if setup.policy is None else setup.policy.dump()


def _site(site: Site, errors: SiteErrors) -> SiteEvidence:
    alone = errors.measured
    return SiteEvidence(
        site.module,
        site.op,
        _finite(errors.loss),
        _finite(errors.gradient),
        errors.barred,
        alone.parameter if alone else "",
        alone.flushed if alone else 0.0,
        alone is not None,
    )


def _between(interval: Interval) -> Between:
    return Between(_finite(interval.low), _finite(interval.middle), _finite(interval.high))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _infinite(number: float | None) -> float:
    return math.inf if number is None else number


def _nan(number: float | None) -> float:
    return math.nan if number is None else number
