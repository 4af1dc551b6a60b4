"""The schema of a document, version 1, as typed dictionaries: `document.py` checks against these very classes.

Invariants: a key may be added without a new version, so readers pass over keys they do not know; a key is
never removed, and never gets another meaning, without one. Times are seconds, sizes bytes, shares between 0 and 1.
Numbers are finite: what is not is null. Dtypes are PyTorch's names without `torch.`.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

__all__ = [
    "VERSION",
    "Document",
    "Health",
    "HealthModule",
    "Level",
    "Merged",
    "Row",
    "Step",
    "Trace",
]

VERSION = 1
Level = Literal["good", "neutral", "warning", "bad"]
"""Of a verdict: "neutral" where nothing is wrong and no mixed precision was seen, so there is nothing to praise."""


class Cost(TypedDict):
    """What a finding costs in the steps that were traced; null where it is not known. `share` is of their time."""

    seconds: float | None
    bytes: float | None
    share: float | None


class Where(TypedDict):
    """The place that a finding is about."""

    module: str | None
    op: str | None
    source: str | None


_From = TypedDict("_From", {"from": str})


class Flow(_From):
    """All casts that were traced from one dtype to another."""

    to: str
    casts: int
    bytes: float
    seconds: float


class PolicyName(TypedDict):
    """Which policy a run was under; `file` is a whole policy file that says the same."""

    name: str
    fingerprint: NotRequired[str]
    file: NotRequired[str]


class ModuleRules(TypedDict):
    """What became of a policy's rules for modules: by a model's class, on how many modules they act; what does not."""

    models: dict[str, int]
    problems: list[str]


class Run(TypedDict):
    """One process: what was run, where, and how it ended; `traced` is the first step traced and the one after the last.

    `skipped` counts all skipped steps of the run, also those that `steps` has no room for; `nonfinite_losses` the other
    steps whose loss was infinite or NaN, the first of them `first_nonfinite_loss`; `elsewhere` those that ended in
    other threads than the one that loaded PyTorch, of which `counts` and `trace` have nothing. `compiled`: there are
    functions of `torch.compile`, in which nothing is counted.
    """

    command: list[str]
    ended: Literal["ended", "exit", "exception", "interrupted"]
    code: int | None
    message: str | None
    seconds: float
    rank: int | None
    world_size: int
    torch: str
    python: str
    machine: str
    devices: list[str]
    policy: PolicyName
    steps: int
    skipped: NotRequired[int]
    nonfinite_losses: NotRequired[int]
    first_nonfinite_loss: NotRequired[int | None]
    elsewhere: NotRequired[int]
    module_rules: NotRequired[ModuleRules]
    compiled: NotRequired[bool]
    traced: list[int] | None


class Range(TypedDict):
    """The numbers of one tensor that went into the first module to fail; `of` says where it came from.

    `maximum` and `minimum` are null where some were not finite, `rms` where it was not computed; `nonfinite` is 0, or 1
    where some were not finite: they are not counted.
    """

    of: NotRequired[str]
    dtype: str
    maximum: float | None
    minimum: float | None
    rms: float | None
    nonfinite: int


class NonfiniteOrigin(TypedDict):
    """The first tensor that was not finite in a step.

    `kind`: a module's output, an input of one that no module made, the gradient of an output, or of a parameter.
    """

    step: int
    kind: Literal["output", "input", "gradient", "parameter"]
    name: str
    what: Literal["inf", "nan"]
    inputs: list[Range]
    message: str


class Step(TypedDict):
    """One training step; `names` are the parameters whose gradients were not finite."""

    step: int
    loss: float | None
    scale: float | None
    skipped: bool
    names: list[str]
    seconds: float | None
    first: NonfiniteOrigin | None


class ScalerDiagnosis(TypedDict):
    """At this step neither a lower scale nor the next batch had helped; `reason` is that of a `GradScaler`'s verdict.

    "weights": parameters were not finite; "loss": the loss itself was not; "floor": the scale did not fall any more;
    "skips": a limit on skipped steps was passed. A run goes on all the same: `precast run` observes.
    """

    step: int
    reason: Literal["weights", "loss", "floor", "skips"]
    scale: float
    names: list[str]


class Count(TypedDict):
    """Calls of one operation in the whole run, traced or not."""

    op: str
    device: str
    rule: str | None
    calls: int
    casts: int


class Finding(TypedDict):
    """Something that could be better: what it costs and what to do; `policy` is a whole policy file that does it."""

    kind: str
    title: str
    cost: Cost
    suggestion: str
    policy: str | None
    where: Where


class Row(TypedDict):
    """One operation at one place; `module` is "" for the model itself, null outside of all modules.

    `seconds` has the casts in it. `order` is the row's place among all rows by the time of their first calls.
    """

    module: str | None
    op: str
    phase: Literal["forward", "backward", "optimizer", "other"]
    source: str | None
    inputs: list[str]
    output: list[str]
    rule: str | None
    reason: str | None
    region: str | None
    module_rule: str | None
    device: NotRequired[str]
    calls: int
    casts: int
    cast_bytes: float
    cached: int
    seconds: float
    cast_seconds: float
    order: NotRequired[int]


class Totals(TypedDict):
    """Sums over all that was traced; `steps` is how many steps of the run ended meanwhile, skipped or not."""

    seconds: float
    cast_seconds: float
    casts: int
    cast_bytes: float
    cached: int
    calls: int
    steps: int


class ModuleName(TypedDict):
    """A module of the model, and its class."""

    name: str
    type: str


class Trace(TypedDict):
    """What ran in which dtype, in the steps that were traced.

    `saved` has the bytes, by dtype, that forward had made and that were there when a backward pass began: those of the
    pass with the most, as memory does not add up over steps.
    """

    rows: list[Row]
    totals: Totals
    flow: list[Flow]
    saved: dict[str, float]
    modules: list[ModuleName]
    dropped: int
    findings: list[Finding]
    notes: NotRequired[list[str]]


class Histogram(TypedDict):
    """Counts of binary exponents: `counts[step][k]` numbers had the exponent `low + k`."""

    low: int
    counts: list[list[int]]


class Shares(TypedDict):
    """Which shares of the numbers a format would lose."""

    underflow: float
    overflow: float


class WhatIf(TypedDict):
    """What another format would make of a tensor in all its steps, as it is and with the best power of two as scale."""

    underflow: float
    overflow: float
    subnormal: float
    best_scale: float | None
    with_best: Shares | None


class HealthModule(TypedDict):
    """One tensor that was watched; every list has an entry a step of `steps`.

    `underflow_zeros` counts zeros that underflow made; where that is not known it is null, or `underflow_known` false.
    `maximum` and `rms` are of the finite numbers, null where there is none.
    """

    name: str
    kind: Literal["output", "gradient", "parameter"]
    steps: list[int]
    histogram: Histogram
    zeros: list[int]
    underflow_zeros: list[int | None]
    underflow_known: NotRequired[list[bool]]
    subnormal: list[int]
    overflow: list[int]
    saturated: list[int]
    nan: list[int]
    maximum: list[float | None]
    rms: list[float | None]
    elements: list[int]
    what_if: dict[str, WhatIf]


class Health(TypedDict):
    """Numeric health: `format` is the dtype that the run computed in, every `every`-th of `steps` steps was counted."""

    format: str
    every: NotRequired[int]
    steps: NotRequired[int]
    modules: list[HealthModule]
    first: NonfiniteOrigin | None
    ring: list[dict[str, Any]]


class Advice(TypedDict):
    """What to do first, and what it is expected to gain."""

    text: str
    gain: str
    policy: str | None


class RunSummary(TypedDict):
    """The run in sentences; text between backticks is a name. "neutral": no mixed precision was seen."""

    level: Literal["good", "neutral", "warning", "bad"]
    headline: str
    precision: list[str]
    problems: list[str]
    first: Advice | None
    notes: list[str]


class Document(TypedDict):
    """What one process leaves behind."""

    schema: int
    precast: str
    made: str
    run: Run
    steps: list[Step]
    verdicts: NotRequired[list[ScalerDiagnosis]]
    counts: list[Count]
    trace: Trace | None
    health: Health | None
    findings: list[Finding]
    verdict: NotRequired[RunSummary]


class Merged(TypedDict):
    """The documents of all processes of one run, by rank."""

    schema: int
    precast: str
    made: str
    ranks: list[Document]
    verdict: NotRequired[RunSummary]
