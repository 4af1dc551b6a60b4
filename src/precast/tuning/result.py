"""What `tune` returns: a policy, why it is that one, and everything that was measured.

Invariants:
- `text` is a policy file that can be used as it is; loading it gives the policy;
- saving is atomic: the policy at the path, the evidence and the page beside it;
- printed, it fits into 80 columns.
"""

from __future__ import annotations

import math
import os
import statistics
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from precast._internal import atomic_write
from precast._internal.display import Card, Displayed, milliseconds, size
from precast.diagnostics.records import as_json
from precast.errors import MissingExtraError
from precast.policy import toml_file
from precast.policy.policy import Entry, Policy
from precast.policy.shortest_text import whole_file
from precast.policy.toml_file import PolicyContents
from precast.tuning import evidence as files
from precast.tuning.evidence import Between, Compared, Evidence, ProofEvidence, Search, Trial
from precast.tuning.words import words_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TuningResult", "figures", "is_a_result", "table"]

_WIDE: Final = 80
_HEAD: Final = 3  # lines of a rendered policy before its tables: name, summary, mixed
_BEGINS: Final = "# Found by precast.tune for "


@dataclass(frozen=True, repr=False, eq=False)
class TuningResult(Displayed):
    """A policy for a model on this machine, and the evidence for it.

    Attributes:
        policy: the policy. Attach it (`precast.attach(model, result.policy)`) and train in a region of `dtype`.
        dtype: the 16-bit dtype of the region; torch.float32 where no region is best.
        because: why the answer is this one, in one sentence.
        evidence: everything that was measured, as plain data.
        is_saved_here: whether `save` and `plot` write; in a distributed program, in the first process alone.
    """

    policy: Policy
    dtype: torch.dtype
    because: str
    evidence: Evidence
    is_saved_here: bool = True

    @property
    def name(self) -> str:
        """Which setup it is: "tuned", "default", "float32" and so on."""
        return self.evidence.answer

    @property
    def is_decided(self) -> bool:
        """Return False if some setup may be better than the answer, float32, or the search was interrupted."""
        return self.outcome == "proven"

    @property
    def outcome(self) -> Literal["proven", "undecided", "interrupted"]:
        """Return how the search ended."""
        return self.evidence.outcome

    @property
    def text(self) -> str:
        """The policy as a file: where it was measured, and a reason for each operation that is held back."""
        seen = self.evidence
        asked = seen.settings
        head = [
            f"{_BEGINS[2:]}{seen.model} ({seen.parameters:,} parameters): {_answer(seen)}",
            f"Objective {asked.objective} of {asked.task}, tolerance {asked.tolerance:g}, seed {asked.seed}; "
            f"{seen.date}",
            f"precast {seen.precast}, torch {seen.torch}, {seen.machine}",
            *([seen.command] if seen.command else ()),
            _use(seen)
            if self.dtype is not torch.float32
            else f"It casts nothing: {words_for(asked.task).does} without a region, or in one with this policy.",
        ]
        lines = [line for each in head for line in textwrap.wrap(each, 117)]
        comment = "\n".join(f"# {line}" for line in lines)
        mine = self.policy
        named = toml_file.render(PolicyContents(mine.name, mine.summary)).splitlines()[: _HEAD - 1]
        body = _short(mine, asked.base)
        return "\n".join([comment, "", *(line for line in named if line != 'summary = ""'), body])

    def save(
        self, path: str | os.PathLike[str], *, page: str | os.PathLike[str] | bool | None = None
    ) -> None:
        """Writes the policy to `path`, and beside it the evidence, with the ending `.json`, and the page, with `.html`.

        Args:
            path: the policy's file.
            page: another place for the page, or whether there is to be one. None leaves it out where the packages that
                make it, those of the extra `report`, are not installed.

        Raises:
            OutputError: a file could not be written; what was there before still is.
            MissingExtraError: a page is asked for, and jinja2 or plotly is not installed.
        """
        if not self.is_saved_here:
            return
        target = Path(path)
        drawn = self._page(is_needed=page is not None) if page is not False else None
        if drawn is not None:
            place = target.with_suffix(".html") if page in (None, True) else Path(str(page))
            atomic_write.replace_own(place, drawn.encode("utf-8", "replace"))
        atomic_write.replace(target.with_suffix(".json"), files.text(self.evidence).encode())
        atomic_write.replace(target, self.text.encode())

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws what was tried, by time or memory and loss, and the losses of all steps, as a figure of matplotlib.

        Args:
            path: where the figure is also written, as a PNG.

        Raises:
            MissingExtraError: matplotlib is not installed.
            OutputError: the file could not be written, or there is one that precast did not write.
        """
        from precast.tuning import picture

        figure = picture.figure_of(self.evidence)
        if path is not None and self.is_saved_here:
            atomic_write.replace_own(Path(path), picture.png_of(figure))
        return figure

    def _page(self, *, is_needed: bool) -> str | None:
        from precast.tuning.page import html

        try:
            return html(self.evidence, self.text)
        except MissingExtraError:
            if is_needed:
                raise
            return None

    def as_dict(self) -> dict[str, Any]:
        """The answer and what it was compared with, as plain values for JSON; `evidence` has everything."""
        proofs = self.evidence.proofs[-1:]
        return {
            "answer": self.name,
            "outcome": self.outcome,
            "undecided": self.evidence.undecided,
            "would_decide": self.evidence.would_decide,
            "dtype": self.evidence.dtype,
            "because": self.because,
            "seconds": round(self.evidence.seconds, 2),
            "interrupted": self.evidence.interrupted,
            "trials": [figures(trial) for proof in proofs for trial in proof.trials],
            "comparisons": [as_json(each) for proof in proofs for each in proof.comparisons],
        }

    def __str__(self) -> str:
        lines = textwrap.wrap(_answer(self.evidence), _WIDE)
        if self.evidence.would_decide:
            lines += ["", "It would be decided by:"]
        for condition in self.evidence.would_decide:
            lines += textwrap.wrap(condition, _WIDE, initial_indent="- ", subsequent_indent="  ")
        for proof in self.evidence.proofs[-1:]:
            lines += ["", *table(proof, self.evidence.settings.task)]
        for search in self.evidence.searches:
            barred = [site for site in search.sites if site.barred]
            lines += ["", *textwrap.wrap(_measured(search, len(barred)), _WIDE)]
            for site in barred[:10]:
                where = "outside of modules" if site.module is None else site.module or "the model"
                lines += textwrap.wrap(
                    f"{where}: {site.op}: {site.barred}",
                    _WIDE,
                    initial_indent="  ",
                    subsequent_indent="    ",
                )
        return "\n".join(lines)

    def _card(self) -> Card:
        facts = [self.name, f"dtype {str(self.dtype).removeprefix('torch.')}"]
        proofs = self.evidence.proofs[-1:]
        rows = [_row(proof, trial) for proof in proofs for trial in proof.trials]
        return Card("TuningResult", facts, _columns(self.evidence.settings.task), rows, "setups")


def _answer(evidence: Evidence) -> str:
    """Return the answer and the reasons for it, and what is undecided about it."""
    if evidence.outcome != "undecided":
        return f"{evidence.answer}: {evidence.because}"
    better = ", ".join(evidence.undecided)
    return f"undecided: {evidence.answer}, as nothing better is proven; {better} may be: {evidence.because}"


def _use(seen: Evidence) -> str:
    """How the policy is used."""
    region = f"Use it in a region with dtype=torch.{seen.dtype}"
    if seen.settings.task == "training":
        return f"{region}."
    return f"{region}, or as precast.convert(model, policy, torch.{seen.dtype}, example=...)."


def is_a_result(path: Path) -> bool:
    """Whether a file is a policy or evidence that was saved by a `TuningResult`."""
    with open(path, "rb") as file:
        head = file.read(200).decode("utf-8", "replace")
    return head.startswith(_BEGINS) or f'"schema": "{files.SCHEMA}"' in head


def figures(trial: Trial) -> dict[str, Any]:
    """A trial's figures in short."""
    return {
        "name": trial.name,
        "dtype": trial.dtype,
        "step_seconds": statistics.median(trial.seconds) if trial.seconds else None,
        "loss": math.fsum(trial.finals) / len(trial.finals) if trial.finals else None,
        "kept_bytes": trial.kept_bytes,
        "failure": trial.failure,
    }


def _measured(search: Search, barred: int) -> str:
    """What was measured of the operations in one dtype, and what was not."""
    excluded = f"{barred} excluded" if barred else "none excluded"
    said = [f"{search.dtype}: {size(len(search.sites), 'operation')} measured, {excluded}"]
    if search.shared:
        said.append(f"{search.shared} measured only in groups")
    estimated = sum(any(cost.estimated for cost in site.costs) for site in search.sites)
    if estimated:
        said.append(f"the costs of {estimated} are estimated from other sizes")
    return "; ".join(said)


def _short(policy: Policy, base_name: str) -> str:
    """The policy's file without its name: what differs from a preset that it was made from, with the reasons."""
    presets = Policy.presets()
    if policy.name in presets and Policy.load(policy.name).fingerprint == policy.fingerprint:
        base_name = policy.name
    if base_name not in Policy.presets() or not policy.tables:
        return whole_file(policy)
    base = Policy.load(base_name)
    tables: dict[str, dict[str, Entry]] = {}
    for device, rows in policy.tables.items():
        known = base.entries(device)
        changed = {key: row for key, row in rows.items() if known.get(key) != row}
        if changed:
            tables[device] = changed
    lines = toml_file.render(
        PolicyContents(tables=tables, modules=policy.modules, measured=policy.measured)
    ).splitlines()
    head = f'base = "{base_name}"'
    return "\n".join([head, *lines[_HEAD:]]).strip() + "\n"


def _columns(task: str) -> tuple[str, ...]:
    words = words_for(task)
    memory = "kept" if task == "training" else "memory"
    return "setup", words.run, words.value, "against float32", "time", memory


def table(proof: ProofEvidence, task: str = "training") -> list[str]:
    """The trials of a proof, a line for each."""
    rows = [_columns(task), *(_row(proof, trial) for trial in proof.trials)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    widths[0] = min(widths[0], 16)
    said = [
        "  ".join(cell[:w].ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    ]
    return [
        *(line.rstrip()[:_WIDE] for line in said),
        f"{words_for(task).extent(proof.seeds, proof.steps)}; ended: {proof.ended}",
    ]


def _row(proof: ProofEvidence, trial: Trial) -> tuple[str, ...]:
    seconds = sorted(trial.seconds)
    step = milliseconds(seconds[len(seconds) // 2]) if seconds else "-"
    loss = f"{math.fsum(trial.finals) / len(trial.finals):.4g}" if trial.finals else "-"
    compared = [c for c in proof.comparisons if (c.name, c.against) == (trial.name, "float32")]
    found: Compared | None = compared[0] if compared else None
    difference = "" if found is None else f"{_percent(found.difference)} {found.loss}"
    ratio = "" if found is None else _ratio(found.ratio)
    return trial.name, step, loss, difference, ratio, _bytes(trial.kept_bytes)


def _percent(between: Between) -> str:
    if between.low is None or between.high is None:
        return ""
    return f"{between.low:+.2%}..{between.high:+.2%}"


def _ratio(between: Between) -> str:
    if between.low is None or between.high is None:
        return ""
    return f"x{between.low:.2f}..{between.high:.2f}"


def _bytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count / 2**10:.3g} KiB"
