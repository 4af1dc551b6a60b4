"""The answer of `precast try` as text, as wide as the terminal, and as one HTML file.

Invariants: nothing here imports torch. A table that is wider than the terminal becomes one block for each setting. In
the page all text of the program is escaped, and the answer and the table are readable without a script.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import resources
from typing import Final

from precast._internal.display import aligned, plural, terminal_width, wrapped
from precast._internal.version import __version__
from precast.report.page import page_of
from precast.report.words import size
from precast.running.trial.answer import TryAnswer, rows_of
from precast.running.trial.comparison import Comparison
from precast.running.trial.experiment import ExperimentResult

__all__ = ["page", "render"]

_MOST_WRITES: Final = 10
_EQUALITY: Final = {True: " (equal within noise)", False: " (differs)", None: " (undecided)"}


def render(answer: TryAnswer, result: ExperimentResult) -> str:
    """Return the text to print."""
    width = terminal_width(sys.__stdout__) - 1
    parts = []
    if result.base.steps:
        parts += [[*_table(_cells(result), width)], wrapped(_memory_note(result), width)]
    parts.append(wrapped(answer.sentence, width))
    parts += [wrapped(each, width, "- ", "  ") for each in answer.reasons]
    if answer.edit.lines:
        parts.append(["Add these lines:", *(f"    {line}" for line in answer.edit.lines)])
    paths = result.withheld
    if paths:
        text = "The trials wrote these files to a temporary folder, which is removed:"
        more = [f"and {len(paths) - _MOST_WRITES} more"] if len(paths) > _MOST_WRITES else []
        lines = [f"    {line}" for line in (*paths[:_MOST_WRITES], *more)]
        parts.append([*wrapped(text, width), *lines])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def page(answer: TryAnswer, result: ExperimentResult, command: list[str]) -> str:
    """Return the page, with the curve of the loss of each setting's first trial."""
    heading, *rows = _cells(result) if result.base.steps else [[]]
    return page_of(
        resources.files("precast.running.trial").joinpath("try.html.jinja").read_text(),
        [
            {"name": each.name, "mode": "lines", "x0": 1, "y": each.first.losses}
            for each in [result.base, *result.settings]
        ],
        script="",  # that of the chart is in the template
        title=" ".join(["precast try", *command]),
        version=__version__,
        answer=answer,
        heading=heading,
        rows=rows,
        memory=_memory_note(result),
        withheld=result.withheld,
    )


def _cells(result: ExperimentResult) -> list[list[str]]:
    """Return the rows of the table, the heading first."""
    after = f"loss after {plural(result.base.steps, 'step')}"
    value = after if result.first.trains else "mean of outputs"
    rows = [_row(each, result.plan.warm_up) for each in rows_of(result)]
    rows[0][3] = rows[0][3].partition(" (")[0]  # float32 is not compared with itself
    return [["setting", "step", "memory", value, "non-finite"], *rows]


def _row(comparison: Comparison, warm_up: int) -> list[str]:
    setting, first = comparison.setting, comparison.setting.first
    time, loss = setting.seconds(warm_up), "-"
    if time is not None:
        factor, unit = (1e3, "ms") if time[0] < 1 else (1.0, "s")
        digits = 1 if time[0] * factor >= 10 else 2
    if setting.loss is not None:
        equality = "" if comparison.difference is None else _EQUALITY[comparison.is_equal]
        loss = f"{setting.loss:.4g}{equality}"
    bad = [plural(len(first.nonfinite), "loss", "losses")] if first.nonfinite else []
    skips = [f"{first.skipped} of {plural(len(first.seconds), 'step')} skipped"]
    return [
        setting.name,
        "-"
        if time is None
        else f"{time[0] * factor:.{digits}f} {unit} +- {time[1] * factor:.{digits}f}",
        "-" if setting.peak_memory is None else size(setting.peak_memory),
        "failed" if setting.error else loss,
        ", ".join([*bad, *(skips if first.skipped else [])]) or "0",
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
            yield from wrapped(f"{name}: {cell}", width, "    ", "        ")


def _memory_note(result: ExperimentResult) -> str:
    """Return a sentence on how memory was counted."""
    if result.first.device == "cuda":
        return "Memory is the peak of PyTorch's allocator on the GPU."
    return "Memory is the peak of live tensors in the second step, on the CPU."
