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
    """The answer.

    Attributes:
        verdict: "use": a setting is better; "keep": none is; "undecided"; "failed": the program failed in float32.
        sentence: the answer in one or two sentences.
        reasons: sentences on the reasons, and on what to know about the trials.
        chosen: the name of the better setting.
        edit: the lines to add to the program.
    """

    verdict: Literal["use", "keep", "undecided", "failed"]
    sentence: str
    reasons: list[str] = field(default_factory=list)
    chosen: str | None = None
    edit: ProgramEdit = field(default_factory=ProgramEdit)

    def to_dict(self, result: ExperimentResult) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": [_row(each) for each in rows_of(result)],
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
    failure = _failure(result)
    if failure is not None:
        return failure
    comparisons, steps = result.comparisons(), plural(_steps(result), "step")
    reasons = [*dict.fromkeys([*result.reasons, *_notes(result)])]
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
    if result.base.loss() is None:
        return "No loss of float32 was seen or it was not finite, so compare the results of the script yourself."
    time = result.seconds_needed or 2 * result.plan.seconds
    return f"`--seconds {10 * round(time / 10 + 0.5)}` may be enough."


def _steps(result: ExperimentResult) -> int:
    """Return the number of measured steps."""
    settings = [result.base, *result.settings]
    steps = min((each.steps for each in settings if each.steps and not each.error), default=0)
    return steps - unmeasured(steps, result.plan.warm_up)


def _failure(result: ExperimentResult) -> TryAnswer | None:
    """Return the answer where float32 gave nothing to compare with."""
    first = result.first
    if result.base.error is not None:
        after = f"The script failed in float32, after {plural(len(first.seconds), 'step')}"
        return TryAnswer("failed", sentence(f"{after}: {result.base.error}"))
    if first.seconds:
        return None
    if first.started_processes:
        text = (
            "the script starts processes of its own, and no step ran in the process that `precast try` started. "
            "Start it with `--nproc N`, or name the script that the processes run."
        )
    elif first.ended == "itself":
        rest = "" if first.trains else " and no model was called"
        text = (
            f"the script ended, and no step was seen: no optimizer stepped{rest}. Name {_FUNCTION}"
        )
    else:
        seconds = result.plan.seconds
        text = (
            f"no step ended in the time for the first trial, of {duration(seconds)} for all. Give more with "
            f"`--seconds {round(4 * seconds)}`, or name {_FUNCTION}"
        )
    return TryAnswer("undecided", f"Undecided: {text}")


def _effect(comparison: Comparison) -> str:
    """Return "bfloat16 was 1.66 times as fast and needed 0.63 of the memory"."""
    setting, speedup = comparison.setting, comparison.speedup
    if setting.error:
        return f"{setting.name} failed ({setting.error.rstrip('.')})"
    if speedup is None:
        return f"{setting.name} made no measured step"
    if comparison.speed == "same":
        speed = "was as fast"
    elif comparison.speed == "slower":
        speed = f"took {1 / speedup:.2f} times as long"
    else:
        noise = " (within the noise)" if comparison.speed == "unclear" else ""
        speed = f"was {speedup:.2f} times as fast{noise}"
    memory = comparison.memory
    if memory is None or abs(memory - 1) < 0.05:
        return f"{setting.name} {speed}"
    return f"{setting.name} {speed} and needed {memory:.2f} of the memory"


def _learning(comparison: Comparison) -> str:
    """Return "its loss was that of float32"."""
    setting, difference = comparison.setting, comparison.difference
    if setting.error:
        return "its loss is not known"
    if comparison.is_equal:
        return "its loss was that of float32"
    if difference is None:
        if comparison.is_equal is None:
            return "its loss could not be compared"
        skips = setting.skipped
        return f"it skipped {plural(skips, 'step')}" if skips else "its loss was not finite"
    if comparison.is_equal is None:
        return f"its loss differed by {difference:.1%}, which may be noise"
    noise = comparison.noise or 0.0
    return f"its loss differed by {difference:.1%}, more than with other seeds ({noise:.1%})"


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
    for each in result.settings:
        speed = first.speeds.get(each.dtype)
        if speed is not None and speed < 1:
            yield (
                f"This processor emulates {each.dtype}: it multiplies matrices at {speed:.2g} times its speed in "
                "float32. A processor or a GPU with instructions for it gives another answer."
            )


def _row(comparison: Comparison) -> dict[str, Any]:
    setting = comparison.setting
    return {
        "name": setting.name,
        "dtype": setting.dtype,
        "seconds_per_step": comparison.seconds,
        "spread": comparison.spread,
        "speedup": comparison.speedup,
        "peak_memory_bytes": setting.peak_memory,
        "loss": setting.loss(),
        "loss_equal": comparison.learns,
        "skipped_steps": setting.skipped,
        "nonfinite_steps": setting.nonfinite,
        "error": setting.error,
    }
