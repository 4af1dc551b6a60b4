"""The data of a trace and of a run, schema version 1: one definition writes, reads, validates and documents them.

Invariants:

- nothing here needs PyTorch: dtypes are PyTorch's names without `torch.`, times are in seconds, sizes in bytes, and
  shares are between 0 and 1;
- numbers are finite: others are null in a file, and None here;
- a key that may be missing can be added without a new version; removing a key, or changing its meaning, needs one;
- the lists of keys on the page `docs/report-data.md` are made from these classes and docstrings.
"""

# ruff: noqa: RUF009 -- `may_be_missing` and `written_as` are `dataclasses.field`

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from precast._internal.events import NonfiniteOrigin, ScalerDiagnosis
from precast._internal.records import may_be_missing, written_as

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
    """The path of its module, "" for the model; null outside of all modules."""
    op: str
    """The operation, as a policy spells it."""
    phase: Phase
    """The phase of a training step."""
    source: str | None
    """The innermost line of the program, as "train.py:12 in loss"; in backward, that of the forward operation."""
    inputs: list[str]
    """The dtypes of its tensor arguments."""
    output: list[str]
    """The dtypes of its results."""
    rule: str | None
    """Its rule."""
    reason: str | None
    """The line of the policy with the rule, or why there is none."""
    region: str | None
    """The line that opened the region."""
    module_rule: str | None
    """The rule for modules, as `encoder.** = float16`."""
    device_type: str = may_be_missing("cpu")
    """The device type that it ran on."""
    calls: int = 0
    """The number of calls."""
    casts: int = 0
    """The casts of its arguments; explicit casts of the program have their own rows."""
    cast_bytes: int = 0
    """The bytes that these casts wrote."""
    cached: int = 0
    """The casts that the weight cache, or held weights, saved."""
    seconds: float = 0.0
    """Time in its kernels, casts included, on the host."""
    cast_seconds: float = 0.0
    """Time in these casts."""
    order: int | None = may_be_missing(is_left_out=True)
    """Its place in the order of first calls, from 0."""

    @property
    def where(self) -> FindingLocation:
        """The operation and its place."""
        return FindingLocation(self.module, self.op, self.source)


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
    """The casts that the weight cache, or held weights, saved."""
    calls: int = 0
    """The number of operations."""
    steps: int = 0
    """Steps of optimizers; in a document, the steps of the run that ended during the trace."""


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
    """The applications of one rule to one operation."""

    op: str
    """The operation, as a policy spells it."""
    device_type: str
    """The device type."""
    rule: str | None
    """The rule."""
    calls: int = 0
    """The number of calls."""
    casts: int = 0
    """The number of casts."""


@dataclass(slots=True)
class FindingCost:
    """The cost of a finding, or the saving of its advice."""

    seconds: float | None = None
    """The time."""
    bytes: int | None = None
    """The bytes that casts wrote."""
    share: float | None = None
    """The share of the traced time."""
    low: float | None = may_be_missing(is_left_out=True)
    """The smallest share in one step, or in one run of a trial."""
    high: float | None = may_be_missing(is_left_out=True)
    """The largest share."""


@dataclass(frozen=True, slots=True)
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
    """"round-trip", "float32-island", "weight-cast-again", "float32-op", "float32-spread", "16-bit-op"; of values
    "overflow", "nan", "underflow", "rounded away", "state rounded away", "average rounded away", "rounded by a rule",
    "rounded limit"; of the training step "scaled gradients clipped", "backward in region"; of `precast-lint` the code
    of its rule, as "AMP203"."""
    title: str
    """The finding in a sentence."""
    cost: FindingCost
    """Its cost."""
    suggestion: str
    """The advice; empty if no change is known to help."""
    policy: str | None
    """A complete policy file that follows the advice, if one can."""
    where: FindingLocation
    """Its place."""
    severity: Literal["error", "warning", "information"] | None = may_be_missing(is_left_out=True)
    """The severity of a mistake in the program's code."""


@dataclass(slots=True)
class TraceData:
    """The operations that ran while a trace was open."""

    rows: list[OperationRow] = field(default_factory=list)
    """A row for each operation, place and kind of inputs; the slowest first."""
    totals: TraceTotals = field(default_factory=TraceTotals)
    """The sums."""
    flow: list[CastFlow] = field(default_factory=list)
    """Casts from each dtype to each other."""
    saved: dict[str, int] = field(default_factory=dict)
    """The bytes of forward's results by dtype at the start of backward, in the largest pass."""
    modules: list[TracedModule] = field(default_factory=list)
    """The modules that ran, and those around them."""
    dropped: int = 0
    """The calls without a row, because there were too many kinds; the totals include them."""
    findings: list[Finding] = field(default_factory=list)
    """Possible improvements, the most expensive first."""
    counts: list[RuleCount] = may_be_missing(factory=list)
    """The applications of each rule."""
    notes: list[str] = may_be_missing(factory=list)
    """The limits of the trace, one sentence each."""


# --- a monitor ---


@dataclass(slots=True)
class Histogram:
    """Counts of binary exponents."""

    low: int
    """The lowest exponent that is counted."""
    counts: list[list[int]]
    """`counts[step][k]` values had the exponent `low + k`."""


@dataclass(slots=True)
class LossShares:
    """The shares of the values that a format would lose."""

    underflow: float
    """The share that would become zero."""
    overflow: float
    """The share that would become infinite."""


@dataclass(slots=True)
class FormatLoss:
    """The loss of a tensor's values in another format, without a scale and with the best power of two."""

    underflow: float
    """The share of values that would become zero."""
    overflow: float
    """The share that would become infinite."""
    subnormal: float
    """The share that would have fewer digits."""
    best_scale: float | None
    """The power of two with the smallest loss."""
    with_best: LossShares | None
    """The loss with that scale."""
    error: float | None = may_be_missing()
    """The relative error of rounding, with the scale of the float8 rules."""


@dataclass(slots=True)
class HealthModule:
    """One watched tensor; every list has an entry for each step of `steps`."""

    name: str
    """The name of the module or parameter in the model."""
    kind: Literal["output", "gradient", "parameter"]
    """A module's output, the gradient of one, or a parameter's gradient."""
    steps: list[int]
    """The counted steps."""
    histogram: Histogram
    """The exponents."""
    zeros: list[int]
    """The number of zeros."""
    underflow_zeros: list[int | None]
    """The number of zeros caused by underflow."""
    subnormal: list[int]
    """The number of values below the format's smallest normal value."""
    overflow: list[int]
    """The number of infinite values."""
    saturated: list[int]
    """The number of values equal to the format's largest value."""
    nan: list[int]
    """The number of NaNs."""
    maximum: list[float | None]
    """The largest magnitude of the finite values, null without any."""
    rms: list[float | None]
    """The root mean square of the finite values, null without any."""
    elements: list[int]
    """The number of values."""
    what_if: dict[str, FormatLoss]
    """The loss in other formats."""
    underflow_known: list[bool] | None = may_be_missing(is_left_out=True)
    """False where `underflow_zeros` is unknown."""
    updates_rounded_away: list[float | None] | None = may_be_missing(is_left_out=True)
    """For a parameter, the share of values that the step should change and did not; null if unknown."""
    updates_lost: list[float | None] | None = may_be_missing(is_left_out=True)
    """The share of the update's size that falls on these values."""
    updates_rounded_away_with_kahan: list[float | None] | None = may_be_missing(is_left_out=True)
    """The share with `precast.optim.bfloat16_weights`."""
    states_rounded_away: list[dict[str, float]] | None = may_be_missing(is_left_out=True)
    """The same share for each 16-bit optimizer state of a parameter."""
    average_rounded_away: list[float | None] | None = may_be_missing(is_left_out=True)
    """The share of differing values that an update of a 16-bit average of the parameter did not change."""


@dataclass(slots=True)
class Health:
    """The results of a monitor."""

    format: str
    """The narrowest dtype of the watched tensors."""
    modules: list[HealthModule]
    """The watched tensors."""
    first: NonfiniteOrigin | None
    """The first tensor of the run that was not finite."""
    ring: list[dict[str, Any]]
    """The latest steps, as `StepData`; "worst" has the tensors nearest to the limit of their format."""
    every: int | None = may_be_missing(is_left_out=True)
    """The number of steps from one count of the values to the next."""
    steps: int | None = may_be_missing(is_left_out=True)
    """The number of watched steps."""
    notes: list[str] | None = may_be_missing(is_left_out=True)
    """The limits of the monitor, one sentence each."""
    low_modules: list[str] | None = may_be_missing(is_left_out=True)
    """The modules that have parameters in 16 bits."""


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
    """A parameter or buffer that holds infinity or NaN."""

    name: str
    """Its name in the model."""
    kind: Literal["parameter", "buffer"]
    """The kind of state."""
    what: Literal["inf", "nan"]
    """Infinity or NaN."""


@dataclass(slots=True, kw_only=True)
class RunInfo:
    """One process: its command, its environment, and its end."""

    command: list[str]
    """The arguments for `python` that run the same program."""
    ended: Literal["ended", "exit", "exception", "interrupted"] = "ended"
    """How the process ended."""
    code: int | None = 0
    """The exit code."""
    message: str | None = None
    """The message of an exception."""
    seconds: float = 0.0
    """Its duration."""
    rank: int | None = None
    """The rank; null if there is only one process."""
    world_size: int = 1
    """The number of processes."""
    torch: str
    """The version of PyTorch."""
    python: str
    """The version of Python."""
    machine: str
    """The system, and the type and number of processors."""
    devices: list[str] = field(default_factory=list)
    """The device types that the program used."""
    policy: PolicyName
    """The policy."""
    steps: int = 0
    """The number of finished steps."""
    traced: list[int] | None = None
    """The first traced step, and the one after the last."""
    to_trace: list[int] | None = may_be_missing(is_left_out=True)
    """The range of `--steps`: the first step, and the one after the last."""
    skipped: int | None = may_be_missing(is_left_out=True)
    """The number of skipped steps, in the document or not."""
    nonfinite_losses: int = may_be_missing(0)
    """The number of steps with an infinite or NaN loss that were not skipped."""
    first_nonfinite_loss: int | None = may_be_missing()
    """The first of these steps."""
    skipped_losses: int = may_be_missing(0)
    """The number of skipped steps whose unscaled loss was infinite or NaN."""
    elsewhere: int = may_be_missing(0)
    """Steps in other threads than the one that loaded PyTorch, which `counts` and `trace` do not include."""
    module_rules: ModuleRuleEffects | None = may_be_missing(is_left_out=True)
    """The effect of the policy's rules for modules."""
    compiled: bool = may_be_missing(default=False)
    """True if functions were compiled; nothing is counted in them."""
    nonfinite: list[NonfiniteState] = may_be_missing(factory=list)
    """The parameters and buffers that held infinity or NaN at the end, but not at the first call."""
    evaluations: int = may_be_missing(0)
    """Calls of models without gradients."""
    nonfinite_outputs: int = may_be_missing(0)
    """The number of these that returned infinity or NaN."""
    first_nonfinite_output: str | None = may_be_missing()
    """The class of the module in the first of these calls."""
    speeds: dict[str, float] = may_be_missing(factory=dict)
    """The CPU's speed in 16-bit dtypes relative to float32."""


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
    """The first tensor that became infinite or NaN, if a monitor ran."""


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
    """Calls of each operation with a rule, traced or not."""
    trace: TraceData | None
    """The trace."""
    health: Health | None
    """The results of a monitor."""
    findings: list[Finding]
    """All findings, those of `trace` and `precast-lint` included."""
    diagnoses: list[ScalerDiagnosis] = may_be_missing(factory=list)
    """The steps at which a lower scale could not help."""
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
