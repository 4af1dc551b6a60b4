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
from precast.tuning.float8_products import Float8Choice
from precast.tuning.proof import Proof
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.setups import Workload
from precast.tuning.sites import TunedProgram

__all__ = ["SCHEMA", "DtypeEvidence", "Float8Evidence", "SearchSettings", "SiteEvidence"]
__all__ += ["TuningEvidence", "as_values", "dtype_evidence", "float8_evidence", "json_text"]
__all__ += ["new_evidence", "where_measured"]

SCHEMA: Final = "precast.tuning/2"


@dataclass
class SearchSettings:
    """The arguments of `tune`."""

    objective: Literal["time", "memory"]
    tolerance: float
    budget: float
    candidates: list[str]
    base: str
    device_type: str
    seed: int
    task: Literal["training", "inference"]


@dataclass
class SiteEvidence:
    """An operation of a module, with its errors in 16 bits and its costs.

    Attributes:
        module: the module; None where no module runs it.
        op: the operation.
        loss: the square of the relative error that it adds to the loss; infinite where it overflows.
        gradient: the same of the gradient that changes most.
        barred: why it must not run in 16 bits; empty if it may.
        parameter: the parameter of that gradient, where the operation was measured alone.
        flushed: the share of that gradient that becomes zero.
        alone: True if it was measured alone, False if it has its share of a group's error.
        costs: the cost of all of its calls in a step, by dtype; empty where it was not measured.
    """

    module: str | None
    op: str
    loss: float
    gradient: float
    barred: str
    parameter: str
    flushed: float
    alone: bool
    costs: dict[str, CallCost]


@dataclass
class DtypeEvidence:
    """The measurements of all operations in one dtype.

    Attributes:
        dtype: the dtype.
        scale: the loss scale.
        runs: the number of groups that were measured.
        shared: the number of operations that share the error of a group although it is too large.
        skipped: the number of operations whose cost there was no time for.
        sites: the operations.
    """

    dtype: str
    scale: float
    runs: int
    shared: int
    skipped: int
    sites: list[SiteEvidence]


@dataclass
class Float8Evidence:
    """The products of matrices that were measured under a float8 rule."""

    rule: str
    because: str
    products: list[dict[str, Any]]


@dataclass
class TuningEvidence:
    """The whole file.

    Attributes:
        schema: the name and version of this format.
        precast: the version of precast.
        torch: the version of PyTorch.
        machine: the machine.
        date: the date and time.
        model: the name of the model's class.
        parameters: the number of its parameters.
        settings: the arguments.
        answer: the name of the answer's setup.
        dtype: the dtype of its region.
        because: the reasons.
        seconds: the time of the search.
        interrupted: True if Ctrl-C ended it.
        command: the command that started it; empty where a program did.
        untried: the setups that there was no time for.
        undecided: the setups that may be better than the answer, float32; empty where it is decided.
        would_decide: the changes that would decide it, a phrase for each.
        searches: the measurements in each dtype.
        eight_bits: the products under each float8 rule.
        proofs: the comparisons of setups.
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
    eight_bits: list[Float8Evidence] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    traced: list[TreeNode] = field(default_factory=list)

    @property
    def outcome(self) -> Literal["proven", "undecided", "interrupted"]:
        """The way the search ended."""
        if self.interrupted:
            return "interrupted"
        return "undecided" if self.undecided else "proven"


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


def dtype_evidence(
    program: TunedProgram, errors: Sensitivity, costs: ProgramCosts
) -> DtypeEvidence:
    """Return the measurements of a program in one dtype."""
    sites = []
    for site, each in errors.sites.items():
        alone = each.measured
        sites.append(
            SiteEvidence(
                site.module,
                site.op,
                each.loss,
                each.gradient,
                each.barred,
                alone.parameter if alone else "",
                alone.flushed if alone else 0.0,
                alone is not None,
                {dtype_name(dtype): cost for dtype, cost in costs.sites.get(site, {}).items()},
            )
        )
    low = dtype_name(program.low)
    return DtypeEvidence(low, errors.scale, errors.runs, errors.shared, costs.skipped, sites)


def float8_evidence(choice: Float8Choice) -> Float8Evidence:
    """Return the measurements of a float8 rule."""
    products = [
        {
            "module": product.site.module,
            "op": product.site.op,
            "seconds": product.in_16_bits.seconds,
            "seconds_in_8_bits": product.in_8_bits.seconds,
            "kept_bytes": product.in_16_bits.kept,
            "kept_bytes_in_8_bits": product.in_8_bits.kept,
            "loss": product.loss,
            "gradient": product.gradient,
            "chosen": product.is_chosen,
        }
        for product in choice.products
    ]
    return Float8Evidence(choice.rule, choice.because, products)


def where_measured(evidence: TuningEvidence) -> dict[str, Value]:
    """Return the table `[measured]` of a policy: where and for which question it was measured."""
    settings = evidence.settings
    return {
        **here(settings.device_type),
        "precast": evidence.precast,
        "model": evidence.model,
        "task": settings.task,
        "dtype": evidence.dtype,
        "base": settings.base,
        "objective": settings.objective,
        "tolerance": settings.tolerance,
        "seed": settings.seed,
    }


def as_values(value: object) -> Any:
    """Return dataclasses as plain values for JSON; a number that is not finite becomes None."""
    return _without_infinity(as_json(value))


def _without_infinity(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_infinity(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return value


def json_text(evidence: TuningEvidence) -> str:
    """Return the content of the file."""
    return json.dumps(as_values(evidence), indent=1, allow_nan=False) + "\n"
