"""The measurements of a search, as they are saved beside its policy.

Invariant: the file is strict JSON; a number that is not finite is null in it.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from precast._internal.display import dtype_name
from precast._internal.records import as_json
from precast._internal.version import __version__
from precast.policy.measured import Value, here
from precast.report.tree import TreeNode
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.error_meter import PrecisionErrors
from precast.tuning.float8_products import Float8Choice
from precast.tuning.options import Objective
from precast.tuning.proof import Proof
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.setups import Workload
from precast.tuning.sites import TunedProgram

__all__ = ["SCHEMA", "DtypeEvidence", "SearchSettings", "SiteEvidence", "TuningEvidence"]
__all__ += ["as_values", "new_evidence"]

SCHEMA: Final = "precast.tuning/3"


@dataclass
class SearchSettings:
    """The arguments of `tune`."""

    objective: Objective
    tolerance: float
    budget: float
    candidates: list[str]
    base: str
    device_type: str
    seed: int
    task: Literal["training", "inference"]


@dataclass(frozen=True, kw_only=True)
class SiteEvidence(PrecisionErrors):
    """An operation of a module with its errors, and the measured cost of all of its calls in a step, by dtype."""

    module: str | None
    op: str
    costs: dict[str, CallCost]


@dataclass
class DtypeEvidence:
    """The measurements of all operations in one dtype, with the counts of `Sensitivity` and `ProgramCosts`."""

    dtype: str
    scale: float
    runs: int
    shared: int
    skipped: int
    sites: list[SiteEvidence]


@dataclass
class TuningEvidence:
    """The whole file.

    Attributes:
        model: the name of the model's class.
        answer: the name of the answer's setup.
        dtype: the dtype of its region.
        command: the command that started it; empty where a program did.
        untried: the setups that there was no time for.
        undecided: the setups that may be better than the answer, float32; empty where it is decided.
        would_decide: the changes that would decide it, a phrase for each.
        eight_bits: the products under each float8 rule.
        traced: one step of the model under the answer, by module.
    """

    schema: str
    precast: str
    torch: str
    machine: str
    date: str
    model: str
    parameters: int
    settings: SearchSettings
    answer: str = "float32"
    dtype: str = "float32"
    because: str = ""
    seconds: float = 0.0
    interrupted: bool = False
    command: str = ""
    untried: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    would_decide: list[str] = field(default_factory=list)
    searches: list[DtypeEvidence] = field(default_factory=list)
    eight_bits: list[Float8Choice] = field(default_factory=list)
    proof: Proof | None = None
    traced: list[TreeNode] = field(default_factory=list)

    @property
    def outcome(self) -> Literal["proven", "undecided", "interrupted"]:
        """The way the search ended."""
        if self.interrupted:
            return "interrupted"
        return "undecided" if self.undecided else "proven"

    def add_search(self, program: TunedProgram, errors: Sensitivity, costs: ProgramCosts) -> None:
        """Add the measurements of a program in one dtype."""
        sites = []
        for site, each in errors.sites.items():
            by_dtype = {dtype_name(key): cost for key, cost in costs.sites.get(site, {}).items()}
            sites.append(SiteEvidence(**vars(each), module=site.module, op=site.op, costs=by_dtype))
        counts = errors.scale, errors.runs, errors.shared, costs.skipped
        self.searches.append(DtypeEvidence(dtype_name(program.low), *counts, sites))

    def where_measured(self) -> dict[str, Value]:
        """Return the table `[measured]` of a policy: where and for which question it was measured."""
        settings = self.settings
        return {
            **here(settings.device_type),
            "precast": self.precast,
            "model": self.model,
            "task": settings.task,
            "dtype": self.dtype,
            "base": settings.base,
            "objective": settings.objective,
            "tolerance": settings.tolerance,
            "seed": settings.seed,
        }

    def json_text(self) -> str:
        """Return the content of the file."""
        return json.dumps(as_values(self), indent=1, allow_nan=False) + "\n"


def new_evidence(workload: Workload, settings: SearchSettings) -> TuningEvidence:
    """Return the evidence of a search that starts now."""
    model = workload.model
    return TuningEvidence(
        SCHEMA,
        __version__,
        torch.__version__,
        f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        settings,
    )


def as_values(value: object) -> Any:
    """Return dataclasses as plain values for JSON; a number that is not finite becomes None."""
    return _without_infinity(as_json(value))


def _without_infinity(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_infinity(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_infinity(each) for each in value]
    return value
