"""The result of `tune`: a policy, the reasons for it, and everything that was measured.

Invariants:
- `text` is a complete policy file; loading it gives the policy;
- saving is atomic: the policy at the path, the evidence and the page beside it;
- printed, it fits into the width of the terminal.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from precast._internal import atomic_write
from precast._internal.display import (
    Card,
    Displayed,
    dtype_name,
    milliseconds,
    size,
    terminal_width,
)
from precast.errors import MissingExtraError
from precast.policy import toml_file
from precast.policy.policy import Entry, Policy
from precast.policy.shortest_text import whole_file
from precast.policy.toml_file import PolicyContents
from precast.tuning.evidence import SCHEMA, DtypeEvidence, TuningEvidence, as_values, json_text
from precast.tuning.intervals import Interval
from precast.tuning.proof import Proof, SetupFigures
from precast.tuning.words import words_for

__all__ = ["TuningResult", "figures_of", "is_a_result", "table_lines", "wrapped"]

_HEAD: Final = 3
"""The lines of a rendered policy before its tables: name, summary, mixed."""
_FIRST_LINE: Final = "# Found by precast.tune for "


@dataclass(frozen=True, repr=False, eq=False)
class TuningResult(Displayed):
    """A policy for a model on this machine, and the evidence for it.

    Attributes:
        policy: the policy. Attach it (`precast.attach(model, result.policy)`) and train in a region of `dtype`.
        dtype: the 16-bit dtype of the region; torch.float32 where no region is best.
        because: the reasons for the answer, in one sentence.
        evidence: everything that was measured, as plain data.
    """

    policy: Policy
    dtype: torch.dtype
    because: str
    evidence: TuningEvidence

    @property
    def name(self) -> str:
        """The setup of the answer: "tuned", "default", "float32" and so on."""
        return self.evidence.answer

    @property
    def is_decided(self) -> bool:
        """False if some setup may be better than the answer, float32, or the search was interrupted."""
        return self.outcome == "proven"

    @property
    def outcome(self) -> Literal["proven", "undecided", "interrupted"]:
        """The way the search ended."""
        return self.evidence.outcome

    @property
    def text(self) -> str:
        """The policy as a file, with where it was measured and a reason for each of its rows."""
        evidence, settings = self.evidence, self.evidence.settings
        if self.dtype is torch.float32:
            does = words_for(settings.task).does
            usage = f"It casts nothing: {does} without a region, or in one with this policy."
        else:
            usage = f"Use it in a region with dtype=torch.{evidence.dtype}"
            if settings.task == "inference":
                usage += (
                    f", or as precast.convert(model, policy, torch.{evidence.dtype}, example=...)"
                )
            usage += "."
        head = [
            f"{_FIRST_LINE[2:]}{evidence.model} ({evidence.parameters:,} parameters): {_answer(evidence)}",
            f"Objective {settings.objective} of {settings.task}, tolerance {settings.tolerance:g}, seed "
            f"{settings.seed}; {evidence.date}",
            f"precast {evidence.precast}, torch {evidence.torch}, {evidence.machine}",
            *([evidence.command] if evidence.command else ()),
            usage,
        ]
        comment = "\n".join(f"# {line}" for each in head for line in textwrap.wrap(each, 117))
        policy = self.policy
        names = toml_file.render(PolicyContents(policy.name, policy.summary)).splitlines()[
            : _HEAD - 1
        ]
        names = [line for line in names if line != 'summary = ""']
        return "\n".join([comment, "", *names, _shortest_file(policy, settings.base)])

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
        target = Path(path)
        html = self._page(is_needed=page is not None) if page is not False else None
        if html is not None:
            place = target.with_suffix(".html") if page in (None, True) else Path(str(page))
            atomic_write.replace_own(place, html.encode("utf-8", "replace"))
        atomic_write.replace(target.with_suffix(".json"), json_text(self.evidence).encode())
        atomic_write.replace(target, self.text.encode())

    def _page(self, *, is_needed: bool) -> str | None:
        from precast.tuning.page import html

        try:
            return html(self.evidence, self.text)
        except MissingExtraError:
            if is_needed:
                raise
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer and its comparisons as plain values for JSON; `evidence` has everything."""
        evidence, proofs = self.evidence, self.evidence.proofs[-1:]
        return {
            "answer": self.name,
            "outcome": self.outcome,
            "undecided": evidence.undecided,
            "would_decide": evidence.would_decide,
            "dtype": evidence.dtype,
            "because": self.because,
            "seconds": round(evidence.seconds, 2),
            "interrupted": evidence.interrupted,
            "trials": [each for proof in proofs for each in figures_of(proof)],
            "comparisons": [as_values(each) for proof in proofs for each in proof.comparisons],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines(terminal_width(sys.__stdout__)))

    def _lines(self, width: int) -> Iterator[str]:
        yield from wrapped(_answer(self.evidence), width)
        if self.evidence.would_decide:
            yield from ("", "It would be decided by:")
        for change in self.evidence.would_decide:
            yield from wrapped(change, width, "- ", "  ")
        for proof in self.evidence.proofs[-1:]:
            yield from ("", *table_lines(proof, self.evidence.settings.task, width))
        for search in self.evidence.searches:
            excluded = [site for site in search.sites if site.barred]
            yield from ("", *wrapped(_extent(search, len(excluded)), width))
            for site in excluded[:10]:
                where = "outside of modules" if site.module is None else site.module or "the model"
                yield from wrapped(f"{where}: {site.op}: {site.barred}", width, "  ", "    ")

    def _card(self) -> Card:
        columns = _columns(self.evidence.settings.task)
        rows = [
            _row(proof, figures)
            for proof in self.evidence.proofs[-1:]
            for figures in proof.figures.values()
        ]
        facts = [self.name, f"dtype {dtype_name(self.dtype)}"]
        return Card("TuningResult", facts, columns, rows, "setups")


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text in lines of at most a width; longer words, such as paths, are not broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _answer(evidence: TuningEvidence) -> str:
    """Return the answer with its reasons and what is undecided about it."""
    if evidence.outcome != "undecided":
        return f"{evidence.answer}: {evidence.because}"
    better = ", ".join(evidence.undecided)
    return f"undecided: {evidence.answer}, because nothing better is proven; {better} may be better: {evidence.because}"


def is_a_result(path: Path) -> bool:
    """Return True if a file is a policy or evidence that a `TuningResult` saved."""
    with open(path, "rb") as file:
        head = file.read(200).decode("utf-8", "replace")
    return head.startswith(_FIRST_LINE) or f'"schema": "{SCHEMA}"' in head


def figures_of(proof: Proof) -> list[dict[str, Any]]:
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
        for figures in proof.figures.values()
    ]


def _extent(search: DtypeEvidence, excluded: int) -> str:
    """Return the number of operations that were measured in one dtype, and how completely."""
    count = f"{excluded} excluded" if excluded else "none excluded"
    parts = [f"{search.dtype}: {size(len(search.sites), 'operation')} measured, {count}"]
    if search.shared:
        parts.append(f"{search.shared} measured only in groups")
    if search.skipped:
        parts.append(f"no time to measure the cost of {search.skipped}")
    return "; ".join(parts)


def _shortest_file(policy: Policy, base_name: str) -> str:
    """Return the policy's file without its name: the rows that differ from a preset, with the reasons."""
    presets = Policy.presets()
    if policy.name in presets and Policy.load(policy.name).fingerprint == policy.fingerprint:
        base_name = policy.name
    if base_name not in presets or not policy.tables:
        return whole_file(policy)
    base = Policy.load(base_name)
    tables: dict[str, dict[str, Entry]] = {}
    for device, rows in policy.tables.items():
        base_rows = base.entries(device)
        changed = {key: row for key, row in rows.items() if base_rows.get(key) != row}
        if changed:
            tables[device] = changed
    contents = PolicyContents(tables=tables, modules=policy.modules, measured=policy.measured)
    lines = toml_file.render(contents).splitlines()
    return "\n".join([f'base = "{base_name}"', *lines[_HEAD:]]).strip() + "\n"


def _columns(task: str) -> tuple[str, ...]:
    words = words_for(task)
    memory = "kept" if task == "training" else "memory"
    return "setup", words.run, words.value, "against float32", "time", memory


def table_lines(proof: Proof, task: str, width: int) -> list[str]:
    """Return the figures of a proof, a line for each setup, or a paragraph where the width is too small for that."""
    columns = _columns(task)
    rows = [_row(proof, figures) for figures in proof.figures.values()]
    widths = [max(len(row[k]) for row in (columns, *rows)) for k in range(len(columns))]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        lines = [_table_line(row, widths) for row in (columns, *rows)]
    else:
        lines = []
        for row in rows:
            cells = [f"{title} {cell}" for title, cell in zip(columns, row, strict=True) if cell]
            lines += wrapped(", ".join([row[0], *cells[1:]]), width, "", "  ")
    extent = words_for(task).extent(proof.seeds, proof.steps)
    return [*lines, *wrapped(f"{extent}; ended: {proof.ended}", width)]


def _table_line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()


def _row(proof: Proof, figures: SetupFigures) -> tuple[str, ...]:
    step = "-" if figures.median_seconds is None else milliseconds(figures.median_seconds)
    loss = "-" if figures.mean_final is None else f"{figures.mean_final:.4g}"
    difference = ratio = ""
    for compared in proof.comparisons:
        if (compared.name, compared.against) == (figures.name, "float32"):
            difference = f"{_ends(compared.difference, '{:+.2%}')} {compared.loss}".strip()
            ratio = _ends(compared.ratio, "{:.2f}")
    return figures.name, step, loss, difference, ratio, _bytes(figures.kept_bytes)


def _ends(interval: Interval, form: str) -> str:
    """Return the ends of an interval; "" where they are infinite."""
    ends = (interval.low, interval.high)
    return "" if float("inf") in map(abs, ends) else " to ".join(map(form.format, ends))


def _bytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"
