"""The data of a trace and of a run, schema version 1: one definition writes, reads, validates and documents them.

Invariants:

- nothing here needs PyTorch: dtypes are PyTorch's names without `torch.`, times are in seconds, sizes in bytes, and
  shares are between 0 and 1;
- numbers are finite: others are null in a file, and None here;
- a key that may be missing can be added without a new version; removing a key, or changing its meaning, needs one;
- `python -m tools.report_schema` generates the tables of `docs/report-data.md` from these classes and docstrings.
"""

# ruff: noqa: RUF009 -- `may_be_missing` and `written_as` are `dataclasses.field`

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from precast._internal.events import NonfiniteOrigin, ScalerDiagnosis
from precast._internal.records import (
    MismatchError,
    as_json,
    from_json,
    may_be_missing,
    written_as,
)
from precast.errors import PrecastError
from precast.report.health_schema import (
    FormatLoss,
    Health,
    HealthModule,
    Histogram,
    LossShares,
)

__all__ = ["VERSION", "CastFlow", "Finding", "FindingCost", "RuleCount", "SummaryLevel"]
__all__ += ["FindingLocation", "OperationRow", "Phase", "TraceData", "TraceTotals", "TracedModule"]
__all__ += ["FormatLoss", "Health", "HealthModule", "Histogram", "LossShares", "NonfiniteState"]
__all__ += ["Advice", "MergedDocument", "ModuleRuleEffects", "RunDocument"]
__all__ += ["PolicyName", "RunInfo", "RunSummary", "StepData"]

VERSION = 1

SummaryLevel = Literal["good", "neutral", "warning", "bad"]
Phase = Literal["forward", "backward", "optimizer", "other"]


# --- a trace ---


@dataclass(slots=True)
class OperationRow:
    """The calls of one operation in one place with inputs of one kind."""

    module: str | None
    """The path of the module that it ran in, "" for the model itself; null outside of all modules."""
    op: str
    """The operation, as a policy spells it, without "aten::"."""
    phase: Phase
    """The phase of a training step; "other" is outside of modules, backward and optimizers."""
    source: str | None
    """The innermost line of the program, as "train.py:12 in loss"; for backward, that of the forward operation."""
    inputs: list[str]
    """The dtypes of its tensors, in the order of the arguments."""
    output: list[str]
    """The dtypes of the tensors that it returned."""
    rule: str | None
    """Its rule; null without one."""
    reason: str | None
    """The line of the policy with the rule, or the reason why there is no rule."""
    region: str | None
    """The line that opened the region around it; null outside of all regions."""
    module_rule: str | None
    """The rule for modules that applied, as `encoder.** = float16`."""
    device_type: str = may_be_missing("cpu")
    """The device type that it ran on."""
    calls: int = 0
    """The number of calls."""
    casts: int = 0
    """The number of casts for it; explicit casts of the program have their own rows."""
    cast_bytes: int = 0
    """The bytes that these casts wrote."""
    cached: int = 0
    """The number of casts that the weight cache, or held weights, saved."""
    seconds: float = 0.0
    """Time in its kernels, casts included, as the host sees it."""
    cast_seconds: float = 0.0
    """Time in these casts."""
    order: int | None = may_be_missing(is_left_out=True)
    """Its place among all rows in the order of their first calls, from 0."""


@dataclass(slots=True)
class TraceTotals:
    """The sums over all traced operations, including dropped rows."""

    seconds: float = 0.0
    """Time in kernels, casts included."""
    cast_seconds: float = 0.0
    """Time in casts."""
    casts: int = 0
    """The number of casts."""
    cast_bytes: int = 0
    """The bytes that they wrote."""
    cached: int = 0
    """The number of casts that the weight cache, or held weights, saved."""
    calls: int = 0
    """The number of operations."""
    steps: int = 0
    """In a trace, steps of optimizers; in a document, steps of the run that ended during the trace, skipped or not."""


@dataclass(slots=True)
class CastFlow:
    """All traced casts from one dtype to another."""

    source: str = written_as("from")
    """The source dtype."""
    target: str = written_as("to")
    """The target dtype."""
    casts: int = 0
    """The number of casts."""
    bytes: int = 0
    """The bytes that they wrote."""
    seconds: float = 0.0
    """Their time."""


@dataclass(slots=True)
class TracedModule:
    """A module that was called, and its class."""

    name: str
    """Its path, "" for the model itself."""
    type: str
    """The name of its class."""


@dataclass(slots=True)
class RuleCount:
    """The applications of one rule to one operation, in full trace and in counting mode."""

    op: str
    """The operation, as a policy spells it."""
    device_type: str
    """The device type."""
    rule: str | None
    """The rule."""
    calls: int = 0
    """The number of calls under it."""
    casts: int = 0
    """The number of casts for these calls."""


@dataclass(slots=True)
class FindingCost:
    """The cost of a finding, or the saving of its advice, in all traced operations; null if unknown."""

    seconds: float | None = None
    """The time."""
    bytes: int | None = None
    """The bytes that casts wrote."""
    share: float | None = None
    """The share of the traced time."""
    low: float | None = may_be_missing(is_left_out=True)
    """The smallest share of the time of one traced step, or in one run of a trial that was not interrupted."""
    high: float | None = may_be_missing(is_left_out=True)
    """The largest such share."""


@dataclass(slots=True)
class FindingLocation:
    """The place of a finding."""

    module: str | None = None
    """The path of the module."""
    op: str | None = None
    """The operation."""
    source: str | None = None
    """The line of the program."""


@dataclass(slots=True)
class Finding:
    """A possible improvement, with its cost and advice."""

    kind: str
    """"round-trip", "float32-island", "weight-cast-again", "float32-op", "float32-spread"; of values "overflow",
    "nan", "underflow", "rounded away", "state rounded away", "average rounded away", "rounded by a rule"; of the
    training step "scaled gradients clipped", "backward in region"; of `precast-lint` the code of its rule, as
    "AMP203"."""
    title: str
    """The finding in a sentence."""
    cost: FindingCost
    """Its cost."""
    suggestion: str
    """The advice; empty for an observation, for which no change is known to save time."""
    policy: str | None
    """A complete policy file that follows the advice; null if no policy can."""
    where: FindingLocation
    """Its place."""
    severity: Literal["error", "warning", "information"] | None = may_be_missing(is_left_out=True)
    """The severity of a mistake in the program's code; missing for findings on values and costs."""


@dataclass(slots=True)
class TraceData:
    """The operations that ran while a trace was open."""

    rows: list[OperationRow] = field(default_factory=list)
    """One for each operation, place and kind of inputs; the slowest come first."""
    totals: TraceTotals = field(default_factory=TraceTotals)
    """The sums."""
    flow: list[CastFlow] = field(default_factory=list)
    """Casts from each dtype to each other."""
    saved: dict[str, int] = field(default_factory=dict)
    """Bytes of forward's results, by dtype, that existed when backward began, in the largest pass: memory does not
    add up over steps."""
    modules: list[TracedModule] = field(default_factory=list)
    """The modules in which something ran, and those around them."""
    dropped: int = 0
    """The number of calls without a row, because there were too many kinds of calls; the totals include them."""
    findings: list[Finding] = field(default_factory=list)
    """Possible improvements, the most expensive first."""
    counts: list[RuleCount] = may_be_missing(factory=list)
    """The applications of each rule."""
    notes: list[str] = may_be_missing(factory=list)
    """The limits of the trace, one sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain: dict[str, Any] = as_json(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TraceData:
        """Build the data from the output of `to_dict`.

        Raises:
            PrecastError: a key is missing, or a value has another type; the message has the path.
        """
        try:
            return from_json(cls, dict(plain), "trace")
        except MismatchError as error:
            raise PrecastError(f"this is not a trace of precast, at {error}") from error


# --- a run ---


@dataclass(slots=True)
class PolicyName:
    """The policy of a run."""

    name: str
    """Its name."""
    fingerprint: str | None = may_be_missing(is_left_out=True)
    """The fingerprint of its rules."""
    file: str | None = may_be_missing(is_left_out=True)
    """A complete policy file with the same rules."""


@dataclass(slots=True)
class ModuleRuleEffects:
    """The effect of a policy's rules for modules."""

    models: dict[str, int]
    """The number of modules that they apply to, by the class of the model."""
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
    """Infinity or NaN."""


@dataclass(slots=True)
class RunInfo:
    """One process: its command, its environment, and its end."""

    command: list[str]
    """The arguments for `python` that run the same program."""
    ended: Literal["ended", "exit", "exception", "interrupted"]
    """The way in which it ended."""
    code: int | None
    """The exit code."""
    message: str | None
    """The message of an exception."""
    seconds: float
    """Its duration."""
    rank: int | None
    """The rank of the process; null if there is only one process."""
    world_size: int
    """The number of processes."""
    torch: str
    """The version of PyTorch."""
    python: str
    """The version of Python."""
    machine: str
    """The system, and the type and number of processors."""
    devices: list[str]
    """The device types that the program used."""
    policy: PolicyName
    """The policy."""
    steps: int
    """The number of finished steps."""
    traced: list[int] | None
    """The first traced step, and the first one after the trace."""
    to_trace: list[int] | None = may_be_missing(is_left_out=True)
    """The range of `--steps`: the first step, and the first one after the last."""
    skipped: int | None = may_be_missing(is_left_out=True)
    """The number of skipped steps, including those that are not in `steps` of the document."""
    nonfinite_losses: int = may_be_missing(0)
    """The steps that were not skipped and whose loss was infinite or NaN."""
    first_nonfinite_loss: int | None = may_be_missing()
    """The first of these."""
    skipped_losses: int = may_be_missing(0)
    """The skipped steps whose loss was infinite or NaN before it was scaled."""
    elsewhere: int = may_be_missing(0)
    """Steps that ended in other threads than the one that loaded PyTorch: `counts` and `trace` do not include them."""
    module_rules: ModuleRuleEffects | None = may_be_missing(is_left_out=True)
    """The effect of the policy's rules for modules, if it has some."""
    compiled: bool = may_be_missing(default=False)
    """True if there are functions of `torch.compile`, in which nothing is counted."""
    nonfinite: list[NonfiniteState] = may_be_missing(factory=list)
    """The parameters and buffers of the called models that held infinity or NaN at the end, and did not at the first
    call."""
    evaluations: int = may_be_missing(0)
    """Calls of models without gradients, as in validation and inference."""
    nonfinite_outputs: int = may_be_missing(0)
    """The number of these calls that returned infinity or NaN."""
    first_nonfinite_output: str | None = may_be_missing()
    """The class of the module of the first such call."""
    speeds: dict[str, float] = may_be_missing(factory=dict)
    """The CPU's speed relative to float32 in the 16-bit dtypes that ran on it, and in those that could replace them."""


@dataclass(slots=True)
class StepData:
    """One training step."""

    step: int
    """Its number, from 0."""
    loss: float | None = None
    """The sum of the losses of its backward passes."""
    scale: float | None = None
    """The scale of the gradient scaler."""
    skipped: bool = False
    """True if a scaler skipped it."""
    names: list[str] = field(default_factory=list)
    """The parameters whose gradients were not finite."""
    seconds: float | None = None
    """Its duration."""
    first: NonfiniteOrigin | None = None
    """The first tensor that became infinite or NaN, if a monitor watched the step."""


@dataclass(slots=True)
class Advice:
    """The most important advice."""

    text: str
    """The advice."""
    gain: str
    """The expected gain."""
    policy: str | None
    """A complete policy file that follows it."""


@dataclass(slots=True)
class RunSummary:
    """The run in sentences; text between backticks is a name."""

    level: SummaryLevel
    """"neutral" if there is no problem and no mixed precision."""
    headline: str
    """The most important of these sentences."""
    precision: list[str]
    """The effect of precision on the run."""
    problems: list[str]
    """The problems."""
    first: Advice | None
    """The most important advice."""
    notes: list[str]
    """The limits of the observation."""


@dataclass(slots=True)
class RunDocument:
    """The data of one process."""

    schema: int
    """The version of this schema."""
    precast: str
    """The version of precast."""
    made: str
    """The time at which it was written, in UTC."""
    run: RunInfo
    """The process."""
    steps: list[StepData]
    """Its steps; of a long run, some of them."""
    counts: list[RuleCount]
    """Calls of each operation with a rule in the whole run, traced or not."""
    trace: TraceData | None
    """The trace."""
    health: Health | None
    """The results of a monitor."""
    findings: list[Finding]
    """All findings, those of `trace` and of `precast-lint` included. In files of earlier versions, those on numbers."""
    diagnoses: list[ScalerDiagnosis] = may_be_missing(factory=list)
    """The steps at which neither a lower scale nor the next batch helped."""
    summary: RunSummary | None = may_be_missing(is_left_out=True)
    """The run in sentences, written anew whenever the document is saved."""


@dataclass(slots=True)
class MergedDocument:
    """The documents of all processes of one run."""

    schema: int
    """The version of this schema."""
    precast: str
    """The version of precast."""
    made: str
    """The time at which it was merged, in UTC."""
    ranks: list[RunDocument]
    """The documents, by rank."""
    summary: RunSummary | None = may_be_missing(is_left_out=True)
    """The whole run in sentences."""
