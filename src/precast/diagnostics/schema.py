"""What the data of a trace and of a run contain, version 1: one definition writes, reads, checks and documents them.

Invariants:

- nothing here needs PyTorch: dtypes are PyTorch's names without `torch.`, times are in seconds, sizes in bytes, and
  shares are between 0 and 1;
- numbers are finite: a number that is not is null in a file, and None here;
- a key that may be missing can be added without a new version; removing a key, or changing its meaning, needs one;
- `python -m tools.report_schema` makes the tables of `docs/report-data.md` from these classes and their docstrings.
"""

# ruff: noqa: RUF009 -- `may_be_missing` and `written_as` are `dataclasses.field`

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from precast.diagnostics.health_schema import (
    BrokenState,
    Health,
    HealthModule,
    Histogram,
    NonfiniteOrigin,
    Range,
    Shares,
    WhatIf,
)
from precast.diagnostics.records import (
    MismatchError,
    as_json,
    from_json,
    may_be_missing,
    written_as,
)
from precast.errors import PrecastError

__all__ = ["VERSION", "Cost", "Count", "Finding", "Flow", "Level"]
__all__ += ["Module", "Phase", "Row", "Totals", "TraceData", "Where"]
__all__ += ["BrokenState", "Health", "HealthModule", "Histogram"]
__all__ += ["NonfiniteOrigin", "NonfiniteState", "Range", "Shares", "WhatIf"]
__all__ += ["Advice", "Document", "Merged", "ModuleRules"]
__all__ += ["PolicyName", "Run", "RunSummary", "ScalerDiagnosis", "Step"]

VERSION = 1

Level = Literal["good", "neutral", "warning", "bad"]
Phase = Literal["forward", "backward", "optimizer", "other"]


# --- a trace ---


@dataclass(slots=True)
class Row:
    """All that one operation did in one place with inputs of one kind."""

    module: str | None
    """The path of the module that it ran in, "" for the model itself; null outside of all modules."""
    op: str
    """The operation, as a policy spells it, without "aten::"."""
    phase: Phase
    """Where in a training step; "other" is outside of modules, backward and optimizers."""
    source: str | None
    """The innermost line of the program, as "train.py:12 in loss"; for backward, that of the forward operation."""
    inputs: list[str]
    """The dtypes of its tensors, in the order of the arguments."""
    output: list[str]
    """The dtypes of the tensors that it returned."""
    rule: str | None
    """The rule that held for it; null if none did."""
    reason: str | None
    """The line of the policy that has the rule, or why there was no rule."""
    region: str | None
    """Where the region around it was opened; null outside of all regions."""
    module_rule: str | None
    """The rule for modules that held, as "encoder.** = float16"."""
    device: str = may_be_missing("cpu")
    """The device type that it ran on."""
    calls: int = 0
    """How often it ran."""
    casts: int = 0
    """How many casts were made for it; a cast that the program asked for has a row of its own, and counts there."""
    cast_bytes: int = 0
    """How many bytes these casts wrote."""
    cached: int = 0
    """How many casts the weight cache, or held weights, saved."""
    seconds: float = 0.0
    """Time in its kernels, casts included, as the host sees it."""
    cast_seconds: float = 0.0
    """Time in these casts."""
    order: int | None = may_be_missing(is_left_out=True)
    """Its place among all rows in the order of their first calls, from 0."""


@dataclass(slots=True)
class Totals:
    """The sums over all that was traced, rows that were dropped included."""

    seconds: float = 0.0
    """Time in kernels, casts included."""
    cast_seconds: float = 0.0
    """Time in casts."""
    casts: int = 0
    """How many casts were made."""
    cast_bytes: int = 0
    """How many bytes they wrote."""
    cached: int = 0
    """How many casts the weight cache, or held weights, saved."""
    calls: int = 0
    """How many operations ran."""
    steps: int = 0
    """In a trace, steps of optimizers; in a document, how many steps of the run ended meanwhile, skipped or not."""


@dataclass(slots=True)
class Flow:
    """All casts that were traced from one dtype to another."""

    source: str = written_as("from")
    """The dtype that was cast."""
    target: str = written_as("to")
    """The dtype that it was cast to."""
    casts: int = 0
    """How many casts there were."""
    bytes: int = 0
    """How many bytes they wrote."""
    seconds: float = 0.0
    """How long they took."""


@dataclass(slots=True)
class Module:
    """A module that was called, and its class."""

    name: str
    """Its path, "" for the model itself."""
    type: str
    """The name of its class."""


@dataclass(slots=True)
class Count:
    """How often one rule was carried out for one operation, in full trace and in counting mode."""

    op: str
    """The operation, as a policy spells it."""
    device: str
    """The device type."""
    rule: str | None
    """The rule."""
    calls: int = 0
    """How often the operation ran under it."""
    casts: int = 0
    """How many casts were made for that."""


@dataclass(slots=True)
class Cost:
    """What a finding costs, or what following it saves, in everything that was traced; null where not known."""

    seconds: float | None = None
    """How long it took."""
    bytes: int | None = None
    """How many bytes casts wrote."""
    share: float | None = None
    """The share of the traced time."""
    low: float | None = may_be_missing(is_left_out=True)
    """The smallest share of the time of one traced step, or in one run of a trial."""
    high: float | None = may_be_missing(is_left_out=True)
    """The largest such share."""


@dataclass(slots=True)
class Where:
    """The place that a finding is about."""

    module: str | None = None
    """The path of the module."""
    op: str | None = None
    """The operation."""
    source: str | None = None
    """The line of the program."""


@dataclass(slots=True)
class Finding:
    """Something that could be better, what it costs, and how to improve it."""

    kind: str
    """"round-trip", "float32-island", "weight-cast-again", "float32-op", "float32-spread"; of numbers "overflow",
    "nan", "underflow", "rounded away", "state rounded away", "average rounded away", "rounded by a rule"; of the
    training step "scaled gradients clipped", "backward in region"; of `precast-lint` the code of its rule, as
    "AMP203"."""
    title: str
    """What was found, in a sentence."""
    cost: Cost
    """What it costs."""
    suggestion: str
    """What to do; empty for an observation, of which no change is known to save time."""
    policy: str | None
    """A whole policy file that does this, to be saved and named as the policy; null if no policy can."""
    where: Where
    """Where it was found."""
    severity: Literal["error", "warning", "information"] | None = may_be_missing(is_left_out=True)
    """How bad a mistake in the program's code is; missing for findings on numbers and costs."""


@dataclass(slots=True)
class TraceData:
    """What ran in which dtype while a trace was open."""

    rows: list[Row] = field(default_factory=list)
    """One for each operation, place and kind of inputs; those that took the most time come first."""
    totals: Totals = field(default_factory=Totals)
    """The sums."""
    flow: list[Flow] = field(default_factory=list)
    """Casts from each dtype to each other."""
    saved: dict[str, int] = field(default_factory=dict)
    """Dtype to bytes that forward made and that still existed when backward began, of the pass with the most: memory
    does not add up over steps."""
    modules: list[Module] = field(default_factory=list)
    """The modules in which something ran, and those around them."""
    dropped: int = 0
    """How many calls have no row, as there were too many kinds of calls; the totals have them."""
    findings: list[Finding] = field(default_factory=list)
    """What could be better; what costs most comes first."""
    counts: list[Count] = may_be_missing(factory=list)
    """How often each rule was carried out."""
    notes: list[str] = may_be_missing(factory=list)
    """What could not be seen, one sentence each."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        plain: dict[str, Any] = as_json(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TraceData:
        """Reads what `as_dict` returned.

        Raises:
            PrecastError: something is missing, or of another type; the message says where.
        """
        try:
            return from_json(cls, dict(plain), "trace")
        except MismatchError as error:
            raise PrecastError(f"this is no trace of precast, at {error}") from error


# --- a run ---


@dataclass(slots=True)
class PolicyName:
    """Which policy a run was under."""

    name: str
    """Its name."""
    fingerprint: str | None = may_be_missing(is_left_out=True)
    """The fingerprint of its rules."""
    file: str | None = may_be_missing(is_left_out=True)
    """A whole policy file with the same rules."""


@dataclass(slots=True)
class ModuleRules:
    """What effect a policy's rules for modules have."""

    models: dict[str, int]
    """How many modules they act on, by the class of the model."""
    problems: list[str]
    """The rules without effect, one sentence each."""


@dataclass(slots=True)
class NonfiniteState:
    """A parameter or a buffer that holds infinity or NaN."""

    name: str
    """Its name in the model."""
    kind: Literal["parameter", "buffer"]
    """A parameter or a buffer."""
    what: Literal["inf", "nan"]
    """Whether it is infinite or NaN."""


@dataclass(slots=True)
class Run:
    """One process: what was run, where, and how it ended."""

    command: list[str]
    """The arguments of `python` that would run the same."""
    ended: Literal["ended", "exit", "exception", "interrupted"]
    """How it ended."""
    code: int | None
    """The exit code."""
    message: str | None
    """What an exception said."""
    seconds: float
    """How long it ran."""
    rank: int | None
    """The rank of the process; null if there is only one process."""
    world_size: int
    """How many processes there were."""
    torch: str
    """The version of PyTorch."""
    python: str
    """The version of Python."""
    machine: str
    """The system, the kind of processor and how many there are."""
    devices: list[str]
    """The device types that were computed on."""
    policy: PolicyName
    """The policy."""
    steps: int
    """How many steps ended."""
    traced: list[int] | None
    """The first step that was traced, and the first after it that was not."""
    to_trace: list[int] | None = may_be_missing(is_left_out=True)
    """The steps that `--steps` names: the first, and the first after the last."""
    skipped: int | None = may_be_missing(is_left_out=True)
    """All skipped steps of the run, also those that `steps` of the document has no room for."""
    nonfinite_losses: int = may_be_missing(0)
    """The other steps whose loss was infinite or NaN."""
    first_nonfinite_loss: int | None = may_be_missing()
    """The first of these."""
    skipped_losses: int = may_be_missing(0)
    """The skipped steps whose loss was infinite or NaN before it was scaled."""
    elsewhere: int = may_be_missing(0)
    """Steps that ended in other threads than the one that loaded PyTorch: `counts` and `trace` have nothing of them."""
    module_rules: ModuleRules | None = may_be_missing(is_left_out=True)
    """What effect the policy's rules for modules had, if it has some."""
    compiled: bool = may_be_missing(default=False)
    """Whether there are functions of `torch.compile`, in which nothing is counted."""
    nonfinite: list[NonfiniteState] = may_be_missing(factory=list)
    """The parameters and buffers of the called models that held infinity or NaN at the end, and did not at the first
    call."""
    evaluations: int = may_be_missing(0)
    """Calls without gradients from outside of all modules, as those of a validation or of inference."""
    nonfinite_outputs: int = may_be_missing(0)
    """How many of these calls returned infinity or NaN."""
    first_nonfinite_output: str | None = may_be_missing()
    """The class of the module whose call was the first of these."""
    speeds: dict[str, float] = may_be_missing(factory=dict)
    """Maps the 16-bit dtypes that ran on the CPU, and those that could replace them, to how many times as fast as
    float32 the CPU computes in them."""


@dataclass(slots=True)
class Step:
    """One training step."""

    step: int
    """Its number, from 0."""
    loss: float | None = None
    """The sum of the losses of its backward passes."""
    scale: float | None = None
    """The scale of the gradient scaler."""
    skipped: bool = False
    """Whether a scaler skipped it."""
    names: list[str] = field(default_factory=list)
    """The parameters whose gradients were not finite."""
    seconds: float | None = None
    """How long it took."""
    first: NonfiniteOrigin | None = None
    """Where numbers first became infinite or NaN, if a monitor watched the step."""


@dataclass(slots=True)
class ScalerDiagnosis:
    """At this step neither a lower scale nor the next batch had helped.

    A run goes on all the same: `precast run` observes.
    """

    step: int
    """The number of the step."""
    reason: Literal["weights", "loss", "floor", "skips"]
    """Parameters or buffers were not finite; the loss itself was not; the scale did not fall any more; a limit on
    skipped steps was passed: as a `GradScaler` says it."""
    scale: float
    """The scale."""
    names: list[str]
    """The parameters whose gradients were not finite."""


@dataclass(slots=True)
class Advice:
    """What to do first."""

    text: str
    """What to do."""
    gain: str
    """What it is expected to gain."""
    policy: str | None
    """A whole policy file that does it."""


@dataclass(slots=True)
class RunSummary:
    """The run in sentences; text between backticks is a name."""

    level: Level
    """"neutral" where nothing is wrong and no mixed precision was seen, so that there is nothing to praise."""
    headline: str
    """The most important of these sentences."""
    precision: list[str]
    """What precision does for the run."""
    problems: list[str]
    """What is wrong."""
    first: Advice | None
    """What to do first."""
    notes: list[str]
    """What was not seen."""


@dataclass(slots=True)
class Document:
    """What is saved about one process."""

    schema: int
    """The version of this schema."""
    precast: str
    """The version of precast."""
    made: str
    """When it was written, in UTC."""
    run: Run
    """The process."""
    steps: list[Step]
    """Its steps; of a long run, some of them."""
    counts: list[Count]
    """Calls of each operation with a rule in the whole run, traced or not."""
    trace: TraceData | None
    """What was traced."""
    health: Health | None
    """What a monitor saw of the numbers."""
    findings: list[Finding]
    """All findings, those of `trace` and of `precast-lint` included. In files of earlier versions, those on numbers."""
    verdicts: list[ScalerDiagnosis] = may_be_missing(factory=list)
    """The steps at which neither a lower scale nor the next batch had helped."""
    verdict: RunSummary | None = may_be_missing(is_left_out=True)
    """The run in sentences, written anew whenever the document is saved."""


@dataclass(slots=True)
class Merged:
    """The documents of all processes of one run."""

    schema: int
    """The version of this schema."""
    precast: str
    """The version of precast."""
    made: str
    """When it was merged, in UTC."""
    ranks: list[Document]
    """The documents, by rank."""
    verdict: RunSummary | None = may_be_missing(is_left_out=True)
    """The whole run in sentences."""
