"""The result of `tune`: a policy, the reasons for it, and everything that was measured.

Invariants:
- `text` is a complete policy file; loading it gives the policy;
- the evidence is strict JSON; a number that is not finite is null in it;
- saving is atomic: the policy at the path, the evidence and the page beside it;
- printed, it fits into the width of the terminal.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch

from precast._internal import atomic_write
from precast._internal.display import (
    Card,
    Displayed,
    aligned,
    dtype_name,
    milliseconds,
    plural,
    terminal_width,
    wrapped,
)
from precast._internal.records import as_json
from precast._internal.version import __version__
from precast.errors import MissingExtraError
from precast.policy.measured import here
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file
from precast.report.tree import TreeNode
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.options import Objective
from precast.tuning.products import ProductChoice
from precast.tuning.proof import UNKNOWN, Interval, Proof
from precast.tuning.sensitivity import Sensitivity
from precast.tuning.sites import TunedProgram
from precast.tuning.tasks import PrecisionErrors
from precast.tuning.words import words_for

__all__ = ["SearchSettings", "TuningEvidence", "TuningResult", "as_values", "evidence_of"]
__all__ += ["figures_of", "setup_cells", "table_lines"]

SCHEMA: Final = "precast.tuning/3"
_FIRST_LINE: Final = "# Found by precast.tune for "
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
        measured = {
            **here(settings.device_type),
            "precast": self.precast,
            "model": self.model,
            "dtype": self.dtype,
            **{name: getattr(settings, name) for name in names},
        }
        return policy.replace(measured=measured)

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


def _table(proof: Proof | None, task: str) -> list[tuple[str, ...]]:
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
    titles, *rows = _table(proof, task)
    lines = aligned([titles, *rows])
    if max(map(len, lines)) > width:
        lines = []
        for row in rows:
            cells = [f"{title} {cell}" for title, cell in zip(titles, row, strict=True) if cell]
            lines += wrapped(", ".join([row[0], *cells[1:]]), width, "", "  ")
    extent = words_for(task).extent(proof.seeds, proof.steps)
    return [*lines, *wrapped(f"{extent}; ended: {proof.ended}", width)]


@dataclass(frozen=True, repr=False, eq=False)
class TuningResult(Displayed):
    """A policy for a model on this machine, and the evidence for it.

    Attributes:
        policy: the policy. Attach it (`precast.attach(model, result.policy)`) and train in a region of `dtype`.
        dtype: the 16-bit dtype of the region; torch.float32 where no region is best.
        because: the reasons for the answer, in one sentence.
    """

    policy: Policy
    dtype: torch.dtype
    because: str
    _evidence: TuningEvidence

    @property
    def evidence(self) -> dict[str, Any]:
        """Everything that was measured, as plain values for JSON: the content of the file next to the policy's."""
        return dict(as_values(self._evidence))

    @property
    def name(self) -> str:
        """The setup of the answer: "tuned", "default", "float32" and so on."""
        return self._evidence.answer

    @property
    def is_decided(self) -> bool:
        """False if some setup may be better than the answer, float32, or the search was interrupted."""
        return self.outcome == "proven"

    @property
    def outcome(self) -> Outcome:
        """The way the search ended."""
        return self._evidence.outcome

    @property
    def text(self) -> str:
        """The policy as a file, with where it was measured and a reason for each of its rows."""
        evidence, settings, policy = self._evidence, self._evidence.settings, self.policy
        if self.dtype is torch.float32:
            does = words_for(settings.task).does
            usage = f"It casts nothing: {does} without a region, or in one with this policy."
        else:
            usage = f"Use it in a region with dtype=torch.{evidence.dtype}"
            if settings.task == "inference":
                call = f"precast.convert(model, policy, torch.{evidence.dtype}, example=...)"
                usage += f", or as {call}"
            usage += "."
        head = [
            f"{_FIRST_LINE[2:]}{evidence.model} ({evidence.parameters:,} parameters): {evidence.headline}",
            f"Objective {settings.objective} of {settings.task}, tolerance {settings.tolerance:g}, seed "
            f"{settings.seed}; {evidence.date}",
            f"precast {evidence.precast}, torch {evidence.torch}, {evidence.machine}",
            evidence.command,
            usage,
        ]
        lines = [f"# {line}" for each in head for line in textwrap.wrap(each, 117)]
        texts = {"name": policy.name, "summary": policy.summary}
        lines += ["", *(f"{key} = {json.dumps(text)}" for key, text in texts.items() if text)]
        return "\n".join([*lines, whole_file(policy, with_reasons=True)])

    def save(
        self, path: str | os.PathLike[str], *, page: str | os.PathLike[str] | bool | None = None
    ) -> None:
        """Write the policy to `path`, and beside it the evidence, with the ending `.json`, and the page, with `.html`.

        Args:
            path: the policy's file.
            page: another place for the page, or whether there is to be one. None leaves it out where the packages of
                the extra `report` are not installed.

        Raises:
            OutputError: a file could not be written; an earlier one is unchanged.
            MissingExtraError: a page is requested, and jinja2 or plotly is not installed.
        """
        from precast.tuning.page import html

        target = Path(path)
        place = target.with_suffix(".html") if page in (None, True) else Path(str(page))
        try:
            if page is not False:
                text = html(self._evidence, self.text)
                atomic_write.replace_own(place, text.encode("utf-8", "replace"))
        except MissingExtraError:
            if page is not None:
                raise
        evidence = json.dumps(self.evidence, indent=1, allow_nan=False) + "\n"
        atomic_write.replace(target.with_suffix(".json"), evidence.encode())
        atomic_write.replace(target, self.text.encode())

    def to_dict(self) -> dict[str, Any]:
        """Return the answer and its comparisons as plain values for JSON; `evidence` has everything."""
        evidence = self._evidence
        names = ("answer", "outcome", "undecided", "would_decide", "dtype", "because")
        return {
            **{name: getattr(evidence, name) for name in names},
            "seconds": round(evidence.seconds, 2),
            "interrupted": evidence.interrupted,
            "trials": figures_of(evidence.proof),
            "comparisons": [] if evidence.proof is None else as_values(evidence.proof.comparisons),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines(terminal_width(sys.__stdout__)))

    def _lines(self, width: int) -> Iterator[str]:
        evidence = self._evidence
        yield from wrapped(evidence.headline, width)
        if evidence.would_decide:
            yield from ("", "It would be decided by:")
        for change in evidence.would_decide:
            yield from wrapped(change, width, "- ", "  ")
        if evidence.proof is not None:
            yield from ("", *table_lines(evidence.proof, evidence.settings.task, width))
        for search in evidence.searches:
            excluded = [site for site in search.sites if site.barred]
            count = f"{len(excluded) or 'none'} excluded"
            parts = [f"{search.dtype}: {plural(len(search.sites), 'operation')} measured, {count}"]
            if search.shared:
                parts.append(f"{search.shared} measured only in groups")
            if search.skipped:
                parts.append(f"no time to measure the cost of {search.skipped}")
            yield from ("", *wrapped("; ".join(parts), width))
            for site in excluded[:10]:
                where = "outside of modules" if site.module is None else site.module or "the model"
                yield from wrapped(f"{where}: {site.op}: {site.barred}", width, "  ", "    ")

    def _card(self) -> Card:
        facts = [self.name, f"dtype {dtype_name(self.dtype)}"]
        columns, *rows = _table(self._evidence.proof, self._evidence.settings.task)
        return Card("TuningResult", facts, columns, rows, "setups")


def evidence_of(result: TuningResult) -> TuningEvidence:
    """Return the measurements of a result."""
    return result._evidence
