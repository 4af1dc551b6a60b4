"""The result of `tune`: a policy, the reasons for it, and everything that was measured.

Invariants:
- `text` is a complete policy file, which loads as the policy;
- each file is saved completely or not at all;
- printed lines are not longer than the width of the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from precast._internal import atomic_write
from precast._internal.display import Card, Displayed, dtype_name, plural, terminal_width, wrapped
from precast.errors import MissingExtraError
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file
from precast.tuning.evidence import (
    Outcome,
    TuningEvidence,
    as_values,
    figures_of,
    setup_table,
    table_lines,
)
from precast.tuning.page import html
from precast.tuning.words import words_for

__all__ = ["TuningResult", "evidence_of"]


@dataclass(frozen=True, repr=False, eq=False)
class TuningResult(Displayed):
    """A policy for a model on this machine, and the evidence for it.

    Attributes:
        policy: the policy. Attach it (`precast.attach(model, result.policy)`) and train in a region of `dtype`.
        dtype: the 16-bit dtype of the region; torch.float32 if training or running without a region is best.
        because: the reasons for this result, in one sentence.
    """

    policy: Policy
    dtype: torch.dtype
    because: str
    _evidence: TuningEvidence

    @property
    def evidence(self) -> dict[str, Any]:
        """Everything that was measured, as plain values for JSON; `save` writes it next to the policy file."""
        return dict(as_values(self._evidence))

    @property
    def name(self) -> str:
        """The name of the best setup: "tuned", "default", "float32" and so on."""
        return self._evidence.answer

    @property
    def is_decided(self) -> bool:
        """False if the search was interrupted, or if the result is float32 and another setup may be better."""
        return self.outcome == "proven"

    @property
    def outcome(self) -> Outcome:
        """The end of the search: "proven", "undecided" or "interrupted"."""
        return self._evidence.outcome

    @property
    def text(self) -> str:
        """The policy as the text of a file, with the place of the measurements and a reason for each row."""
        evidence, settings, policy = self._evidence, self._evidence.settings, self.policy
        if self.dtype is torch.float32:
            verb = words_for(settings.task).does
            usage = f"It casts nothing: {verb} without a region, or in one with this policy."
        else:
            usage = f"Use it in a region with dtype=torch.{evidence.dtype}"
            if settings.task == "inference":
                call = f"precast.convert(model, policy, torch.{evidence.dtype}, example=...)"
                usage += f", or as {call}"
            usage += "."
        comments = [
            f"Found by precast.tune for {evidence.model} ({evidence.parameters:,} parameters): {evidence.headline}",
            f"Objective {settings.objective} of {settings.task}, tolerance {settings.tolerance:g}, seed "
            f"{settings.seed}; {evidence.date}",
            f"precast {evidence.precast}, torch {evidence.torch}, {evidence.machine}",
            evidence.command,
            usage,
        ]
        lines = [f"# {line}" for each in comments for line in textwrap.wrap(each, 117)]
        texts = {"name": policy.name, "summary": policy.summary}
        lines += ["", *(f"{key} = {json.dumps(text)}" for key, text in texts.items() if text)]
        return "\n".join([*lines, whole_file(policy, with_reasons=True)])

    def save(
        self, path: str | os.PathLike[str], *, page: str | os.PathLike[str] | bool | None = None
    ) -> None:
        """Write the policy to `path`, and next to it the evidence (`.json`) and the page (`.html`).

        Args:
            path: the policy's file.
            page: another path for the page, or False for no page. None writes a page if the packages of the extra
                `report` are installed.

        Raises:
            OutputError: a file cannot be written; an existing file is then unchanged.
            MissingExtraError: a page is requested, and jinja2 or plotly is not installed.
        """
        target = Path(path)
        page_path = target.with_suffix(".html") if page in (None, True) else Path(str(page))
        try:
            if page is not False:
                text = html(self._evidence, self.text)
                atomic_write.replace_own(page_path, text.encode("utf-8", "replace"))
        except MissingExtraError:
            if page is not None:
                raise
        evidence = json.dumps(self.evidence, indent=1, allow_nan=False) + "\n"
        atomic_write.replace(target.with_suffix(".json"), evidence.encode())
        atomic_write.replace(target, self.text.encode())

    def to_dict(self) -> dict[str, Any]:
        """Return the result and its comparisons as plain values for JSON. `evidence` has all measurements."""
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
        columns, *rows = setup_table(self._evidence.proof, self._evidence.settings.task)
        return Card("TuningResult", facts, columns, rows, "setups")


def evidence_of(result: TuningResult) -> TuningEvidence:
    """Return the measurements of a result."""
    return result._evidence
