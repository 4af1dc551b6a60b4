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
from precast.running.trial.comparison import Comparison, Setting, unmeasured
from precast.running.trial.experiment import ExperimentResult
from precast.running.trial.program_edit import ProgramEdit

__all__ = ["TryAnswer", "answer_of"]


@dataclass
class TryAnswer:
    """The answer.

    Attributes:
        verdict: "use": a setting is better; "keep": none is; "undecided"; "failed": the program failed in float32.
        chosen: the name of the better setting.
        sentence: the answer in one or two sentences.
        reasons: sentences on the reasons, and on what to know about the trials.
        lines: the lines to add to the program.
        patch: the same as a patch; empty if the program is not plain enough for one.
    """

    verdict: Literal["use", "keep", "undecided", "failed"]
    chosen: str | None
    sentence: str
    reasons: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    patch: str = ""

    def to_dict(self, result: ExperimentResult) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "settings": [_base_row(result), *map(_compared_row, result.comparisons())],
            "verdict": "undecided" if self.verdict == "failed" else self.verdict,
            "chosen": self.chosen,
            "reasons": [self.sentence, *self.reasons],
            "lines": self.lines,
            "withheld_writes": result.withheld,
        }


def answer_of(result: ExperimentResult) -> TryAnswer:
    """Return the answer that the trials give."""
    failure = _failure(result)
    if failure is not None:
        return failure
    comparisons = result.comparisons()
    steps = _steps(result)
    better = sorted(
        (each for each in comparisons if each.is_better),
        key=lambda each: (each.setting.dtype != "bfloat16", -(each.speedup or 0.0)),
    )
    reasons = [*dict.fromkeys([*result.reasons, *_notes(result)])]
    if better:
        best = better[0]
        rival = max(better, key=lambda each: each.speedup or 0.0)
        if (rival.speedup or 0.0) > 1.05 * (best.speedup or 0.0):
            best = rival
        text = f"In {plural(steps, 'step')} {_effect(best)}; {_learning(best)}."
        edit = best.setting.edit or ProgramEdit([])
        return TryAnswer("use", best.setting.name, text, reasons, edit.lines, edit.patch)
    effects = joined(f"{_effect(each)}, and {_learning(each)}" for each in comparisons)
    if any(each.is_open for each in comparisons):
        text = f"Undecided after {plural(steps, 'step')}: {effects}. {_remedy(result)}"
        return TryAnswer("undecided", None, text, reasons)
    if result.seconds_needed:
        reasons.append(f"No time was left to try causes and remedies. {_remedy(result)}")
    text = f"In {plural(steps, 'step')} no setting was better here than float32: {effects}."
    return TryAnswer("keep", None, text, reasons)


def _remedy(result: ExperimentResult) -> str:
    """Return a sentence on how to decide what the trials left open."""
    if result.base.loss(result.base.steps) is None:
        return "No loss of float32 was seen or it was not finite, so compare the results of the script yourself."
    time = result.seconds_needed or 2 * result.options.seconds
    return f"`--seconds {10 * round(time / 10 + 0.5)}` may be enough."


def _steps(result: ExperimentResult) -> int:
    """Return the number of measured steps."""
    settings = [result.base, *result.settings]
    steps = min((each.steps for each in settings if each.steps and not each.error), default=0)
    return steps - unmeasured(steps, result.options.warm_up)


def _failure(result: ExperimentResult) -> TryAnswer | None:
    """Return the answer where float32 gave nothing to compare with."""
    first, base = result.base.outcomes[0], result.base
    error = base.error or (first.error if first.ended == "error" else None)
    if error:
        after = plural(len(first.seconds), "step")
        return TryAnswer(
            "failed", None, sentence(f"The script failed in float32, after {after}: {error}")
        )
    if first.seconds:
        return None
    if first.started_processes:
        text = (
            "Undecided: the script starts processes of its own, and no step ran in the process that `precast try` "
            "started. Start it with `--nproc N`, or name the script that the processes run."
        )
    elif first.ended == "itself":
        text = (
            "Undecided: the script ended, and no step was seen: no optimizer stepped and no model was called. Name a "
            "function each of whose calls is a step: `--step MODULE:NAME`."
        )
    else:
        limit = duration(result.options.seconds)
        text = (
            f"Undecided: no step ended in the time for the first trial, of {limit} for all. Give more with "
            f"`--seconds {round(4 * result.options.seconds)}`, or name a function each of whose calls is a step: "
            "`--step MODULE:NAME`."
        )
    return TryAnswer("undecided", None, text)


def _effect(comparison: Comparison) -> str:
    """Return "bfloat16 was 1.66 times as fast and needed 0.63 of the memory"."""
    setting = comparison.setting
    if setting.error:
        return f"{setting.name} failed ({setting.error.rstrip('.')})"
    speedup = comparison.speedup
    if speedup is None:
        return f"{setting.name} made no measured step"
    if comparison.speed == "unclear":
        speed = f"was {speedup:.2f} times as fast (within the noise)"
    elif comparison.speed == "same":
        speed = "was as fast"
    elif speedup > 1:
        speed = f"was {speedup:.2f} times as fast"
    else:
        speed = f"took {1 / speedup:.2f} times as long"
    memory = comparison.memory
    if memory is None or abs(memory - 1) < 0.05:
        return f"{setting.name} {speed}"
    return f"{setting.name} {speed} and needed {memory:.2f} of the memory"


def _learning(comparison: Comparison) -> str:
    setting, loss = comparison.setting, comparison.loss
    if setting.error:
        return "its loss is not known"
    if loss.is_equal:
        return "its loss was that of float32"
    if loss.is_equal is None and loss.difference is None:
        return "its loss could not be compared"
    if loss.difference is None:
        skips = setting.skipped
        return f"it skipped {plural(skips, 'step')}" if skips else "its loss was not finite"
    share = f"its loss differed by {loss.difference:.1%}"
    if loss.is_equal is None:
        return f"{share}, which may be noise"
    return f"{share}, more than with other seeds ({loss.noise or 0.0:.1%})"


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


def _base_row(result: ExperimentResult) -> dict[str, Any]:
    base = result.base
    seconds, spread = base.seconds(result.options.warm_up) or (None, None)
    is_measured = seconds is not None
    return _row(base, seconds, spread, 1.0 if is_measured else None, is_measured or None)


def _compared_row(comparison: Comparison) -> dict[str, Any]:
    times = comparison.seconds, comparison.spread, comparison.speedup
    return _row(comparison.setting, *times, comparison.learns)


def _row(
    setting: Setting,
    seconds: float | None,
    spread: float | None,
    speedup: float | None,
    is_equal: bool | None,
) -> dict[str, Any]:
    return {
        "name": setting.name,
        "dtype": setting.dtype,
        "seconds_per_step": seconds,
        "spread": spread,
        "speedup": speedup,
        "peak_memory_bytes": setting.peak_memory,
        "loss": setting.loss() if setting.steps else None,
        "loss_equal": is_equal,
        "skipped_steps": setting.skipped,
        "nonfinite_steps": setting.nonfinite,
        "error": setting.error,
    }
