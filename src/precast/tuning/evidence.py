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

from precast._internal.display import aligned, dtype_name, milliseconds, wrapped
from precast._internal.records import as_json
from precast._internal.version import __version__
from precast.policy.measured import Value, here
from precast.report.tree import TreeNode
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.float8_products import ProductChoice
from precast.tuning.options import Objective
from precast.tuning.proof import UNKNOWN, Interval, Proof, SetupFigures
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.sites import TunedProgram
from precast.tuning.tasks import PrecisionErrors
from precast.tuning.words import words_for

__all__ = ["SCHEMA", "DtypeEvidence", "SearchSettings", "SiteEvidence", "TuningEvidence"]
__all__ += ["as_values", "columns_of", "figures_of", "rows_of_setups"]
__all__ += ["setup_cells", "table_lines"]

SCHEMA: Final = "precast.tuning/3"


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


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


@dataclass(kw_only=True)
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
        products: the products under each rule for products among the candidates.
        traced: one step of the model under the answer, by module.
    """

    schema: str = SCHEMA
    precast: str = __version__
    torch: str = torch.__version__
    machine: str = field(default_factory=_machine)
    date: str = field(default_factory=_now)
    model: str
    parameters: int
    settings: SearchSettings
    answer: str = "float32"
    dtype: str = "float32"
    because: str = "the search was interrupted before anything was proven"
    seconds: float = 0.0
    interrupted: bool = False
    command: str = ""
    untried: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    would_decide: list[str] = field(default_factory=list)
    searches: list[DtypeEvidence] = field(default_factory=list)
    products: list[ProductChoice] = field(default_factory=list)
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


def as_values(value: object) -> Any:
    """Return dataclasses as plain values for JSON; a number that is not finite becomes None."""
    return json.loads(json.dumps(as_json(value)), parse_constant=lambda _: None)


def figures_of(proof: Proof | None) -> list[dict[str, Any]]:
    """Return the figures of each setup as plain values."""
    return [
        {
            "name": figures.name,
            "dtype": figures.dtype,
            "step_seconds": figures.median_seconds,
            "loss": figures.mean_final,
            "kept_bytes": figures.kept_bytes,
            "failure": figures.failure,
        }
        for figures in (proof.figures.values() if proof is not None else ())
    ]


def setup_cells(proof: Proof, figures: SetupFigures) -> dict[str, str]:
    """Return the figures of a setup, and its comparison with float32, as texts; "" where one is unknown."""
    median, final, memory = figures.median_seconds, figures.mean_final, figures.kept_bytes
    difference, ratio, outcome = UNKNOWN, UNKNOWN, ""
    if figures.name != "float32":
        compared = proof.comparison(figures.name)
        difference, ratio, outcome = compared.difference, compared.ratio, compared.loss
    return {
        "name": figures.name,
        "dtype": figures.dtype,
        "step": "-" if median is None else milliseconds(median),
        "loss": "-" if final is None else f"{final:.4g}",
        "difference": _ends(difference, "{:+.2%}"),
        "outcome": outcome,
        "failure": figures.failure,
        "ratio": _ends(ratio, "{:.2f}"),
        "kept": f"{memory / 2**20:.3g} MiB" if memory >= 2**20 else f"{memory / 2**10:.3g} KiB",
    }


def _ends(interval: Interval, form: str) -> str:
    """Return the ends of an interval; "" where they are infinite."""
    if not math.isfinite(interval.high):
        return ""
    return f"{form.format(interval.low)} to {form.format(interval.high)}"


def columns_of(task: str) -> tuple[str, ...]:
    """Return the titles of `rows_of_setups`."""
    words = words_for(task)
    return "setup", words.run, words.value, "against float32", "time", "memory"


def rows_of_setups(proof: Proof) -> list[tuple[str, ...]]:
    """Return the cells of each setup."""
    cells = [setup_cells(proof, figures) for figures in proof.figures.values()]
    for cell in cells:
        cell["against"] = f"{cell['difference']} {cell['outcome']}".strip()
    names = ("name", "step", "loss", "against", "ratio", "kept")
    return [tuple(cell[name] for name in names) for cell in cells]


def table_lines(proof: Proof, task: str, width: int) -> list[str]:
    """Return the figures of a proof, a line for each setup, or a paragraph where the width is too small for that."""
    columns, rows = columns_of(task), rows_of_setups(proof)
    lines = aligned([columns, *rows])
    if max(map(len, lines)) > width:
        lines = []
        for row in rows:
            cells = [f"{title} {cell}" for title, cell in zip(columns, row, strict=True) if cell]
            lines += wrapped(", ".join([row[0], *cells[1:]]), width, "", "  ")
    extent = words_for(task).extent(proof.seeds, proof.steps)
    return [*lines, *wrapped(f"{extent}; ended: {proof.ended}", width)]
