"""The answer of `precast try` for a terminal: the table, the sentence and the lines to add, as wide as the terminal.

Invariant: nothing here imports torch. A table that is wider than the terminal becomes one block for each setting.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from precast._internal.display import aligned, plural, terminal_width, wrapped
from precast.report.words import size
from precast.running.trial.answer import TryAnswer, rows_of
from precast.running.trial.comparison import Comparison, TrialSetting
from precast.running.trial.experiment import ExperimentResult

__all__ = ["cells", "memory_note", "render"]

_MOST_WRITES = 10


def render(answer: TryAnswer, result: ExperimentResult) -> str:
    """Return the text to print."""
    width = terminal_width(sys.__stdout__) - 1
    parts = []
    if result.base.steps:
        parts += [[*_table(cells(result), width)], wrapped(memory_note(result), width)]
    parts.append(wrapped(answer.sentence, width))
    parts += [wrapped(each, width, "- ", "  ") for each in answer.reasons]
    if answer.edit.lines:
        parts.append(["Add these lines:", *(f"    {line}" for line in answer.edit.lines)])
    paths = result.withheld
    if paths:
        text = f"The trials wrote {plural(len(paths), 'file')} to a temporary folder, which is removed:"
        more = [f"and {len(paths) - _MOST_WRITES} more"] if len(paths) > _MOST_WRITES else []
        lines = [f"    {line}" for line in (*paths[:_MOST_WRITES], *more)]
        parts.append([*wrapped(text, width), *lines])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def cells(result: ExperimentResult) -> list[list[str]]:
    """Return the rows of the table, the heading first."""
    after = f"loss after {plural(result.base.steps, 'step')}"
    value = after if result.first.trains else "mean of outputs"
    heading = ["setting", "step", "memory", value, "non-finite"]
    base, *others = rows_of(result)
    return [heading, _row(base, ""), *(_row(each, _equality(each)) for each in others)]


def _row(comparison: Comparison, equality: str) -> list[str]:
    setting, memory = comparison.setting, comparison.setting.peak_memory
    return [
        setting.name,
        _time(comparison.seconds, comparison.spread or 0.0),
        "-" if memory is None else size(memory),
        f"{_loss(setting)} {equality}".strip(),
        _nonfinite(setting),
    ]


def _table(rows: list[list[str]], width: int) -> Iterator[str]:
    short = [[cell.replace(" within noise", "") for cell in row] for row in rows]
    for each in (rows, short):
        lines = aligned(each)
        if max(map(len, lines)) <= width + 1:
            yield from lines
            return
    heading, *settings = short
    for row in settings:
        yield from wrapped(row[0], width)
        for name, cell in zip(heading[1:], row[1:], strict=True):
            if cell:
                yield from wrapped(f"{name}: {cell}", width, "    ", "        ")


def _time(seconds: float | None, spread: float) -> str:
    if seconds is None:
        return "-"
    factor, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
    digits = 1 if seconds * factor >= 10 else 2
    return f"{seconds * factor:.{digits}f} {unit} +- {spread * factor:.{digits}f}"


def _loss(setting: TrialSetting) -> str:
    value = setting.loss()
    return "failed" if setting.error else "-" if value is None else f"{value:.4g}"


def _equality(comparison: Comparison) -> str:
    if comparison.setting.error or comparison.difference is None:
        return ""
    words = {True: "equal within noise", False: "differs", None: "undecided"}
    return f"({words[comparison.is_equal]})"


def _nonfinite(setting: TrialSetting) -> str:
    """Return the number of steps with a loss that was not finite, or that were skipped."""
    if not setting.outcomes:
        return ""
    parts = []
    if setting.nonfinite:
        parts.append(plural(setting.nonfinite, "loss", "losses"))
    if setting.skipped:
        steps = len(setting.outcomes[0].seconds)
        parts.append(f"{setting.skipped} of {plural(steps, 'step')} skipped")
    return ", ".join(parts) or "0"


def memory_note(result: ExperimentResult) -> str:
    """Return a sentence on how memory was counted."""
    if result.first.device == "cuda":
        return "Memory is the peak of PyTorch's allocator on the GPU."
    return "Memory is the peak of live tensors in one of the first steps, on the CPU."
