"""The measurements of a search, as they are saved beside its policy, and their table.

Invariant: as plain values they are strict JSON; a number that is not finite is null in it.
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
from precast.policy.measured import this_machine
from precast.policy.policy import Policy
from precast.report.tree import TreeNode
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.options import Objective
from precast.tuning.products import ProductChoice
from precast.tuning.proof import UNKNOWN, Interval, Proof
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.sites import TunedProgram
from precast.tuning.tasks import PrecisionErrors
from precast.tuning.words import words_for

__all__ = ["Outcome", "SearchSettings", "TuningEvidence", "as_values", "figures_of"]
__all__ += ["setup_cells", "setup_table", "table_lines"]

SCHEMA: Final = "precast.tuning/3"
Outcome = Literal["proven", "undecided", "interrupted"]


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
        command: the command that started it; empty where a program did.
        untried: the setups that there was no time for.
        undecided: the setups that may be better than the answer, float32; empty where it is decided.
        would_decide: the changes that would decide it, a phrase for each.
        traced: one step of the model under the answer, by module.
    """

    schema: str = SCHEMA
    precast: str = __version__
    torch: str = torch.__version__
    machine: str = field(
        default_factory=lambda: (
            f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"
        )
    )
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )
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
    def outcome(self) -> Outcome:
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

    def measured_policy(self, policy: Policy) -> Policy:
        """Return a policy with the table `[measured]`: where and for which question it was measured."""
        settings = self.settings
        names = ("task", "base", "objective", "tolerance", "seed")
        table = {
            **this_machine(settings.device_type),
            "precast": self.precast,
            "model": self.model,
            "dtype": self.dtype,
            **{name: getattr(settings, name) for name in names},
        }
        return policy.replace(measured=table)

    @property
    def headline(self) -> str:
        """The answer with its reasons and what is undecided about it."""
        if self.outcome != "undecided":
            return f"{self.answer}: {self.because}"
        better = ", ".join(self.undecided)
        return f"undecided: {self.answer}, because nothing better is proven; {better} may be better: {self.because}"


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


def setup_cells(proof: Proof) -> list[dict[str, str]]:
    """Return the figures of each setup, and its comparison with float32, as texts; "" where one is unknown."""
    cells = []
    for figures in proof.figures.values():
        median, final, memory = figures.median_seconds, figures.mean_final, figures.kept_bytes
        difference, ratio, outcome = UNKNOWN, UNKNOWN, ""
        if figures.name != "float32":
            compared = proof.comparison(figures.name)
            difference, ratio, outcome = compared.difference, compared.ratio, compared.loss
        cells.append(
            {
                "name": figures.name,
                "dtype": figures.dtype,
                "step": "-" if median is None else milliseconds(median),
                "loss": "-" if final is None else f"{final:.4g}",
                "difference": _ends(difference, "{:+.2%}"),
                "outcome": outcome,
                "failure": figures.failure,
                "ratio": _ends(ratio, "{:.2f}"),
                "kept": f"{memory / 2**20:.3g} MiB"
                if memory >= 2**20
                else f"{memory / 2**10:.3g} KiB",
            }
        )
    return cells


def _ends(interval: Interval, form: str) -> str:
    """Return the ends of an interval; "" where they are infinite."""
    if not math.isfinite(interval.high):
        return ""
    return f"{form.format(interval.low)} to {form.format(interval.high)}"


def setup_table(proof: Proof | None, task: str) -> list[tuple[str, ...]]:
    """Return the titles and the cells of the setups."""
    words = words_for(task)
    rows: list[tuple[str, ...]] = [
        ("setup", words.run, words.value, "against float32", "time", "memory")
    ]
    for cell in setup_cells(proof) if proof is not None else ():
        against = f"{cell['difference']} {cell['outcome']}".strip()
        rows.append(
            (cell["name"], cell["step"], cell["loss"], against, cell["ratio"], cell["kept"])
        )
    return rows


def table_lines(proof: Proof, task: str, width: int) -> list[str]:
    """Return the figures of a proof, a line for each setup, or a paragraph where the width is too small for that."""
    titles, *rows = setup_table(proof, task)
    lines = aligned([titles, *rows])
    if max(map(len, lines)) > width:
        lines = []
        for row in rows:
            cells = [f"{title} {cell}" for title, cell in zip(titles, row, strict=True) if cell]
            lines += wrapped(", ".join([row[0], *cells[1:]]), width, "", "  ")
    extent = words_for(task).extent(proof.seeds, proof.steps)
    return [*lines, *wrapped(f"{extent}; ended: {proof.ended}", width)]
