"""The answer of `precast try`: the verdict on the settings, one sentence, and the reasons.

Invariants: nothing here imports torch. A sentence says no more than the trials showed: it names the number of steps,
and a setting that was not decided is "undecided".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from precast._internal.display import plural
from precast.report.words import duration, joined, sentence
from precast.running.trial.comparison import Comparison, compare, unmeasured
from precast.running.trial.experiment import ExperimentResult
from precast.running.trial.program_edit import ProgramEdit

__all__ = ["TryAnswer", "answer_of", "rows_of"]

_FUNCTION = "a function each of whose calls is a step: `--step MODULE:NAME`."


@dataclass
class TryAnswer:
    """The answer in a sentence, with reasons; if a setting is better, its name and the lines to add."""

    verdict: Literal["use", "keep", "undecided", "failed"]
    """"use": a setting is better; "keep": none is; "failed": the program failed in float32."""
    sentence: str
    reasons: list[str] = field(default_factory=list)
    chosen: str | None = None
    edit: ProgramEdit = field(default_factory=ProgramEdit)

    def to_dict(self, result: ExperimentResult) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": [_row(each, result.plan.warm_up) for each in rows_of(result)],
            "verdict": "undecided" if self.verdict == "failed" else self.verdict,
            "chosen": self.chosen,
            "reasons": [self.sentence, *self.reasons],
            "lines": self.edit.lines,
            "withheld_writes": result.withheld,
        }


def rows_of(result: ExperimentResult) -> list[Comparison]:
    """Return the comparisons, the first one of float32 with itself."""
    return [compare(result.base, result.base, result.plan.warm_up), *result.comparisons()]


def answer_of(result: ExperimentResult) -> TryAnswer:
    """Return the answer that the trials give."""
    if result.base.error is not None:
        after = plural(len(result.first.seconds), "step")
        text = sentence(f"The script failed in float32, after {after}: {result.base.error}")
        return TryAnswer("failed", text)
    if not result.first.seconds:
        return TryAnswer("undecided", f"Undecided: {_missing_steps(result)}")
    settings = [result.base, *result.settings]
    count = min((each.steps for each in settings if each.steps and not each.error), default=0)
    steps = plural(count - unmeasured(count, result.plan.warm_up), "step")
    comparisons, reasons = result.comparisons(), [*result.reasons, *_notes(result)]
    better = [each for each in comparisons if each.is_better]
    if better:
        best = max(better, key=_preference)
        text = f"In {steps} {_effect(best)}; {_learning(best)}."
        return TryAnswer("use", text, reasons, best.setting.name, best.setting.edit)
    effects = joined(f"{_effect(each)}, and {_learning(each)}" for each in comparisons)
    if any(each.is_open for each in comparisons):
        text = f"Undecided after {steps}: {effects}. {_remedy(result)}"
        return TryAnswer("undecided", text, reasons)
    if result.seconds_needed:
        reasons.append(f"No time was left to try causes and remedies. {_remedy(result)}")
    text = f"In {steps} no setting was better here than float32: {effects}."
    return TryAnswer("keep", text, reasons)


def _preference(comparison: Comparison) -> float:
    """Return the speedup; bfloat16, which needs no scaler, may be 5% slower than float16."""
    return (comparison.speedup or 0.0) * (1.05 if comparison.setting.dtype == "bfloat16" else 1)


def _remedy(result: ExperimentResult) -> str:
    """Return a sentence on how to decide what the trials left open."""
    if result.base.loss is None:
        return "No loss of float32 was seen or it was not finite, so compare the results of the script yourself."
    time = result.seconds_needed or 2 * result.plan.seconds
    return f"`--seconds {10 * round(time / 10 + 0.5)}` may be enough."


def _missing_steps(result: ExperimentResult) -> str:
    """Return the reason for which no step was seen."""
    first, seconds = result.first, result.plan.seconds
    if first.started_processes:
        return (
            "the script starts processes of its own, and no step ran in the process that `precast try` started. "
            "Start it with `--nproc N`, or name the script that the processes run."
        )
    if first.ended == "itself":
        rest = "" if first.trains else " and no model was called"
        return (
            f"the script ended, and no step was seen: no optimizer stepped{rest}. Name {_FUNCTION}"
        )
    return (
        f"no step ended in the time for the first trial, of {duration(seconds)} for all. Give more with "
        f"`--seconds {round(4 * seconds)}`, or name {_FUNCTION}"
    )


def _effect(comparison: Comparison) -> str:
    """Return "bfloat16 was 1.66 times as fast and needed 0.63 of the memory"."""
    setting, speedup = comparison.setting, comparison.speedup
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
    memory = comparison.memory
    needs = (
        ""
        if memory is None or abs(memory - 1) < 0.05
        else f" and needed {memory:.2f} of the memory"
    )
    return f"{setting.name} {speed}{needs}"


def _learning(comparison: Comparison) -> str:
    """Return "its loss was that of float32"."""
    setting, difference, noise = comparison.setting, comparison.difference, comparison.noise or 0.0
    loss = "its loss" if setting.first.trains else "the mean of its outputs"
    if setting.error:
        return f"{loss} is not known"
    if comparison.is_equal:
        return f"{loss} was that of float32"
    if difference is not None:
        more = f"more than with other seeds ({noise:.1%})"
        more = "which may be noise" if comparison.is_equal is None else more
        return f"{loss} differed by {difference:.1%}, {more}"
    if comparison.is_equal is None:
        return f"{loss} could not be compared"
    skips = setting.first.skipped
    return f"it skipped {plural(skips, 'step')}" if skips else f"{loss} was not finite"


def _notes(result: ExperimentResult) -> Iterator[str]:
    """Yield sentences on what to know about the trials."""
    first = result.first
    if result.is_repeatable is False:
        yield (
            "The script is not reproducible: with the same seeds, the first loss in float32 differed between two "
            "trials. Losses are compared all the same."
        )
    if first.stored_dtypes:
        yield (
            f"The script stores parameters in {joined(first.stored_dtypes)}; no trial changes that, so the row of "
            "float32 is not in float32 alone."
        )
    for dtype in dict.fromkeys(each.dtype for each in result.settings):
        speed = first.speeds.get(dtype)
        if speed is not None and speed < 1:
            yield (
                f"This processor emulates {dtype}: it multiplies matrices at {speed:.2g} times its speed in "
                "float32. A processor or a GPU with instructions for it gives another answer."
            )


def _row(comparison: Comparison, warm_up: int) -> dict[str, Any]:
    setting = comparison.setting
    seconds, spread = setting.seconds(warm_up) or (None, None)
    return {
        "name": setting.name,
        "dtype": setting.dtype,
        "seconds_per_step": seconds,
        "spread": spread,
        "speedup": comparison.speedup,
        "peak_memory_bytes": setting.peak_memory,
        "loss": setting.loss,
        "loss_equal": comparison.learns,
        "skipped_steps": setting.first.skipped,
        "nonfinite_steps": len(setting.first.nonfinite),
        "error": setting.error,
    }
