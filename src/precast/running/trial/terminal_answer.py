"""The answer of `precast try` for a terminal: the table, the sentence and the lines to add, as wide as the terminal.

Invariant: nothing here imports torch. A table that is wider than the terminal becomes one block for each setting.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from precast._internal.display import plural, terminal_width
from precast.report.words import size
from precast.running.trial.answer import TryAnswer
from precast.running.trial.comparison import Comparison, Setting
from precast.running.trial.experiment import ExperimentResult

__all__ = ["cells", "memory_note", "render"]

_MOST_WRITES = 10


def render(answer: TryAnswer, result: ExperimentResult) -> str:
    """Return the text to print."""
    parts: list[str] = []
    if result.base.steps:
        parts.append("\n".join(_table(cells(result))))
        parts.append("\n".join(_wrapped(memory_note(result))))
    parts.append("\n".join(_wrapped(answer.sentence)))
    parts += ["\n".join(_wrapped(each, "- ")) for each in answer.reasons]
    if answer.lines:
        parts.append(
            "\n".join([*_wrapped("Add these lines:"), *(f"    {x}" for x in answer.lines)])
        )
    if result.withheld:
        parts.append("\n".join(_writes(result.withheld)))
    return "\n\n".join(parts) + "\n"


def cells(result: ExperimentResult) -> list[list[str]]:
    """Return the rows of the table, the heading first."""
    steps = result.base.steps
    value = f"loss after {plural(steps, 'step')}" if result.first.trains else "mean of outputs"
    heading = ["setting", "step", "memory", value, "non-finite"]
    base = result.base
    time = base.seconds(result.options.warm_up)
    rows = [[base.name, _time(time), _memory(base.peak_memory), _loss(base), _nonfinite(base)]]
    for each in result.comparisons():
        setting = each.setting
        time = None if each.seconds is None else (each.seconds, each.spread or 0.0)
        loss = f"{_loss(setting)} {_equality(each)}".strip()
        rows.append(
            [setting.name, _time(time), _memory(setting.peak_memory), loss, _nonfinite(setting)]
        )
    return [heading, *rows]


def _wrapped(text: str, mark: str = "") -> list[str]:
    """Return a text in lines as wide as the terminal; names and commands are not broken."""
    return textwrap.wrap(
        text,
        terminal_width(sys.__stdout__) - 1,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(rows: list[list[str]]) -> Iterator[str]:
    if _width(rows) > terminal_width(sys.__stdout__):
        rows = [[cell.replace(" within noise", "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if _width(rows) <= terminal_width(sys.__stdout__):
        for row in rows:
            yield "  ".join(f"{x:<{w}}" for x, w in zip(row, widths, strict=True)).rstrip()
        return
    heading, *settings = rows
    for row in settings:
        yield from _wrapped(row[0])
        for name, cell in zip(heading[1:], row[1:], strict=True):
            if cell:
                yield from _wrapped(f"{name}: {cell}", "    ")


def _width(rows: list[list[str]]) -> int:
    """Return the width of a table with two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + 2 * (len(widths) - 1)


def _time(time: tuple[float, float] | None) -> str:
    if time is None:
        return "-"
    seconds, spread = time
    factor, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
    digits = 1 if seconds * factor >= 10 else 2
    return f"{seconds * factor:.{digits}f} {unit} +- {spread * factor:.{digits}f}"


def _memory(number: int | None) -> str:
    return "-" if number is None else size(number)


def _loss(setting: Setting) -> str:
    if setting.error:
        return "failed"
    number = setting.loss() if setting.steps else None
    return "-" if number is None else f"{number:.4g}"


def _equality(comparison: Comparison) -> str:
    loss = comparison.loss
    if comparison.setting.error or loss.difference is None:
        return ""
    words = {True: "equal within noise", False: "differs", None: "undecided"}
    return f"({words[loss.is_equal]})"


def _nonfinite(setting: Setting) -> str:
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


def _writes(paths: list[str]) -> Iterator[str]:
    """Yield the lines that list the files that were not written."""
    files = plural(len(paths), "file")
    yield from _wrapped(f"The trials wrote {files} to a temporary folder, which is removed:")
    for path in paths[:_MOST_WRITES]:
        yield f"    {path}"
    if len(paths) > _MOST_WRITES:
        yield f"    and {len(paths) - _MOST_WRITES} more"
