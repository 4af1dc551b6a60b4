"""The answer of `precast try`: the verdict on the settings in one sentence, with the reasons, as text, page and JSON.

Invariants: nothing here imports torch. A sentence says no more than the trials showed: it names the number of steps,
and a setting that was not decided is "undecided". A table that is wider than the terminal becomes one block for each
setting. In the page all text of the program is escaped, and the answer and the table are readable without a script.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from precast._internal.display import aligned, plural, terminal_width, wrapped
from precast.report.page import PagePart, page_of_parts
from precast.report.words import duration, joined, sentence, size
from precast.running.trial.comparison import Comparison, TrialSetting, compare
from precast.running.trial.experiment import Experiment

__all__ = ["TryAnswer", "answer_of"]

_MOST_WRITES: Final = 10
_EQUALITY: Final = {True: " (equal)", False: " (not equal)", None: " (undecided)"}


@dataclass
class TryAnswer:
    """The answer in a sentence, with reasons, and the setting that is better than float32, if there is one."""

    experiment: Experiment
    verdict: Literal["use", "keep", "undecided", "failed"]
    """"use": a setting is better; "keep": none is; "failed": the program failed in float32."""
    sentence: str
    reasons: list[str] = field(default_factory=list)
    chosen: TrialSetting | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        base, steps = self.experiment.base, self.experiment.steps
        comparisons = [compare(base, base), *self.experiment.comparisons()]
        return {
            "settings": [_row(each, min(steps, each.setting.steps)) for each in comparisons],
            "verdict": "undecided" if self.verdict == "failed" else self.verdict,
            "chosen": self.chosen and self.chosen.name,
            "reasons": [self.sentence, *self.reasons],
            "lines": self.chosen.edit.lines if self.chosen else [],
            "withheld_writes": self.experiment.withheld,
        }

    def text(self) -> str:
        """Return the text to print."""
        width, sections = terminal_width(sys.__stdout__) - 1, []
        if self.experiment.steps:
            sections = [aligned(self._table(), width), wrapped(self._note(), width)]
        sections.append(wrapped(self.sentence, width))
        for heading, kind, content in (each for each in self._parts() if each[2]):
            lines = [f"    {each}" for each in content.splitlines()] if kind == "code" else []
            for each in content if kind == "list" else ():
                lines += wrapped(each, width, "- ", "  ")
            sections.append([*wrapped(f"{heading}:", width), *lines])
        return "\n\n".join("\n".join(lines) for lines in sections) + "\n"

    def page(self, command: list[str]) -> str:
        """Return the page, with the curve of the loss of each setting's first trial."""
        settings = [self.experiment.base, *self.experiment.settings]
        losses = [{"name": each.name, "x0": 1, "y": each.first.losses} for each in settings]
        parts: list[PagePart] = [
            ("", "table", self._table()),
            ("", "text", self._note()),
            ("Loss by step", "chart", (losses, {"xaxis": {"title": {"text": "step"}}})),
        ]
        patch = ("Patch", "code", self.chosen.edit.patch if self.chosen else "")
        parts = [*(parts if self.experiment.steps else []), *self._parts(), patch]
        return page_of_parts(" ".join(["precast try", *command]), self.sentence, parts)

    def _parts(self) -> list[PagePart]:
        """Return what follows the answer, as parts of a page."""
        lines, paths = self.chosen.edit.lines if self.chosen else [], self.experiment.withheld
        rest = [f"and {len(paths) - _MOST_WRITES} more"] if len(paths) > _MOST_WRITES else []
        files = "\n".join([*paths[:_MOST_WRITES], *rest])
        return [
            ("Reasons and remarks", "list", self.reasons),
            ("Add these lines", "code", "\n".join(lines)),
            ("Written to a temporary folder, which is removed", "code", files),
        ]

    def patch(self) -> tuple[str, str]:
        """Return the patch for the chosen setting or the best other, and a sentence if it is empty or not chosen."""
        fitting = [each for each in self.experiment.comparisons() if each.learns is not False]
        fitting.sort(key=lambda x: (bool(x.setting.edit.patch), _preference(x)))
        setting = self.chosen or (fitting[-1].setting if fitting else None)
        if setting is not None and setting.edit.patch:
            note = f"The patch is for {setting.name}, which was not better here."
            return setting.edit.patch, "" if self.chosen else note
        reason = (
            "no setting learned as float32."
            if self.experiment.settings
            else "nothing was compared."
        )
        if setting is not None:
            by_hand = f"add the lines for {setting.name} by hand:"
            reason = "\n    ".join([by_hand, *setting.edit.lines])
        if self.experiment.has_own_precision:
            reason = "the script has mixed precision already."
        return "", f"There is no patch: {reason}"

    def _table(self) -> list[list[str]]:
        """Return the rows of the table, the heading first."""
        first, steps = self.experiment.first, self.experiment.steps
        loss = f"loss, steps {steps - first.last(steps) + 1}-{steps}"
        base, *rows = (_cells(each, steps) for each in self.to_dict()["settings"])
        base[3] = base[3].partition(" (")[0]  # float32 is not compared with itself
        value = loss if first.trains else "mean of outputs"
        return [["setting", "step", "memory", value, "non-finite"], base, *rows]

    def _note(self) -> str:
        """Return a sentence on the steps and on how memory was counted."""
        measured, is_on_gpu = self.experiment.measured, self.experiment.first.device == "cuda"
        steps = f"{plural(measured, 'step')} after {self.experiment.steps - measured} of warm-up"
        memory = "of live tensors in the second step, on the CPU"
        memory = "of PyTorch's allocator on the GPU" if is_on_gpu else memory
        return f"Measured: {steps}. Memory: the peak {memory}. Equal: within noise."


def answer_of(experiment: Experiment) -> TryAnswer:
    """Return the answer that the trials give."""
    if failed := [each for each in experiment.base.outcomes if each.ended == "error"]:
        after = plural(len(failed[0].seconds), "step")
        text = sentence(f"The script failed in float32, after {after}: {failed[0].error}")
        return TryAnswer(experiment, "failed", text)
    if not experiment.first.seconds:
        return TryAnswer(experiment, "undecided", f"Undecided: {_missing_steps(experiment)}")
    comparisons, steps = experiment.comparisons(), plural(experiment.measured, "step")
    reasons = [*experiment.reasons, *_notes(experiment)]
    if better := [each for each in comparisons if each.is_better]:
        best = max(better, key=_preference)
        text = f"In {steps} {_effect(best)}; {_learning(best)}."
        return TryAnswer(experiment, "use", text, reasons, best.setting)
    effects = joined(f"{_effect(each)}, and {_learning(each)}" for each in comparisons)
    if any(each.is_open for each in comparisons):
        text = f"Undecided after {steps}: {effects}. {_remedy(experiment)}"
        return TryAnswer(experiment, "undecided", text, reasons)
    if experiment.missing_seconds:
        reasons.append(f"No time was left to try causes and remedies. {_remedy(experiment)}")
    text = f"In {steps} no setting was better here than float32: {effects}."
    return TryAnswer(experiment, "keep", text, reasons)


def _preference(comparison: Comparison) -> float:
    """Return the speedup; bfloat16, which needs no scaler, may be 5% slower than float16."""
    return (comparison.speedup or 0.0) * (1.05 if comparison.setting.dtype == "bfloat16" else 1)


def _remedy(experiment: Experiment) -> str:
    """Return a sentence on how to decide what the trials left open."""
    if experiment.base.first.loss(experiment.steps) is None:
        return "No loss of float32 was seen or it was not finite, so compare the results of the script yourself."
    missing = 1.2 * experiment.missing_seconds or experiment.plan.seconds
    return (
        f"`--seconds {10 * round((experiment.plan.seconds + missing) / 10 + 0.5)}` may be enough."
    )


def _missing_steps(experiment: Experiment) -> str:
    """Return the reason for which no step was seen."""
    first, seconds = experiment.first, experiment.plan.seconds
    function = "a function each of whose calls is a step: `--step MODULE:NAME`."
    if first.starts_processes:
        return (
            "the script starts processes of its own, and no step ran in the process that `precast try` started. "
            "Start it with `--nproc N`, or name the script that the processes run."
        )
    if first.ended == "itself":
        what = "no optimizer stepped" + ("" if first.trains else " and no model was called")
        return f"the script ended, and no step was seen: {what}. Name {function}"
    return (
        f"no step ended in the time for the first trial, of {duration(seconds)} for all. Give more with "
        f"`--seconds {round(4 * seconds)}`, or name {function}"
    )


def _effect(comparison: Comparison) -> str:
    """Return "bfloat16 was 1.66 times as fast and needed 0.63 of the memory"."""
    setting, speedup, memory = comparison.setting, comparison.speedup, comparison.memory
    if setting.error:
        return f"{setting.name} failed ({setting.error.rstrip('.')})"
    if speedup is None:
        return f"{setting.name} made no measured step"
    speed = {
        "same": "was as fast",
        "slower": f"took {1 / speedup:.2f} times as long",
        "faster": f"was {speedup:.2f} times as fast",
        "unclear": f"was {speedup:.2f} times as fast (within the noise)",
    }[comparison.speed]
    is_telling = memory is not None and abs(memory - 1) >= 0.05
    return f"{setting.name} {speed}" + f" and needed {memory:.2f} of the memory" * is_telling


def _learning(comparison: Comparison) -> str:
    """Return "its loss was that of float32"."""
    first, difference, noise = comparison.setting.first, comparison.difference, comparison.noise
    loss = "its loss" if first.trains else "the mean of its outputs"
    if comparison.setting.error:
        return f"{loss} is not known"
    if comparison.is_equal:
        return f"{loss} was that of float32"
    if difference is not None:
        more = f"more than with other seeds ({noise or 0.0:.1%})"
        more = "which may be noise" if comparison.is_equal is None else more
        return f"{loss} differed by {difference:.1%}, {more}"
    if comparison.is_equal is None:
        return f"{loss} could not be compared"
    return (
        f"it skipped {plural(first.skipped, 'step')}" if first.skipped else f"{loss} was not finite"
    )


def _notes(experiment: Experiment) -> Iterator[str]:
    """Yield sentences on what to know about the trials."""
    first = experiment.first
    if not experiment.is_repeatable:
        yield (
            "The script is not reproducible: with the same seeds, the first loss in float32 differed between two "
            "trials. Losses are compared all the same."
        )
    if first.stored_dtypes:
        yield (
            f"The script stores parameters in {joined(first.stored_dtypes)}; no trial changes that, so the row of "
            "float32 is not in float32 alone."
        )
    for dtype in dict.fromkeys(each.dtype for each in experiment.settings):
        if (speed := first.speeds.get(dtype, 1.0)) < 1:
            yield (
                f"This processor emulates {dtype}: it multiplies matrices at {speed:.2g} times its speed in "
                "float32. A processor or a GPU with instructions for it gives another answer."
            )


def _row(comparison: Comparison, steps: int) -> dict[str, Any]:
    setting = comparison.setting
    seconds, spread = setting.seconds(steps) or (None, None)
    return {
        "name": setting.name,
        "dtype": setting.dtype,
        "seconds_per_step": seconds,
        "spread": spread,
        "speedup": comparison.speedup,
        "peak_memory_bytes": setting.peak_memory,
        "loss": setting.first.loss(steps),
        "loss_equal": comparison.learns,
        "skipped_steps": setting.first.skipped,
        "nonfinite_steps": len(setting.first.nonfinite),
        "error": setting.error,
    }


def _cells(row: dict[str, Any], steps: int) -> list[str]:
    """Return the cells of a row; empty ones are "-"."""
    seconds, memory, loss = row["seconds_per_step"], row["peak_memory_bytes"], row["loss"]
    time = shown_loss = "-"
    if seconds is not None:
        factor, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
        digits = 1 if seconds * factor >= 10 else 2
        time = f"{seconds * factor:.{digits}f} {unit} +- {row['spread'] * factor:.{digits}f}"
    if loss is not None:
        shown_loss = f"{loss:.4g}{_EQUALITY[row['loss_equal']]}"
    bad, skipped = row["nonfinite_steps"], row["skipped_steps"]
    counts = [plural(bad, "loss", "losses")] if bad else []
    counts += [f"{skipped} of {plural(steps, 'step')} skipped"] if skipped else []
    shown_loss = "failed" if row["error"] else shown_loss
    memory = "-" if memory is None else size(memory)
    return [row["name"], time, memory, shown_loss, ", ".join(counts) or "0"]
