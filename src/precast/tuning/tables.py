"""The figures of a proof as plain values and as lines of text."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from precast._internal.display import milliseconds
from precast.tuning.intervals import UNKNOWN, Interval
from precast.tuning.proof import Proof, SetupFigures
from precast.tuning.words import words_for

__all__ = ["columns_of", "figures_of", "rows_of_setups", "setup_cells", "table_lines", "wrapped"]


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text in lines of at most a width; longer words, such as paths, are not broken."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = first, rest
    return wrapper.wrap(text)


def figures_of(proof: Proof | None) -> list[dict[str, Any]]:
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
        for figures in (proof.figures.values() if proof is not None else ())
    ]


def setup_cells(proof: Proof, figures: SetupFigures) -> dict[str, str]:
    """Return the figures of a setup, and its comparison with float32, as texts; "" where one is unknown."""
    median, final, memory = figures.median_seconds, figures.mean_final, figures.kept_bytes
    difference, ratio, outcome = UNKNOWN, UNKNOWN, ""
    if figures.name != "float32":
        compared = proof.comparison(figures.name)
        difference, ratio, outcome = compared.difference, compared.ratio, compared.loss
    return {
        "name": figures.name,
        "dtype": figures.dtype,
        "step": "-" if median is None else milliseconds(median),
        "loss": "-" if final is None else f"{final:.4g}",
        "difference": _ends(difference, "{:+.2%}"),
        "outcome": outcome,
        "failure": figures.failure,
        "ratio": _ends(ratio, "{:.2f}"),
        "kept": f"{memory / 2**20:.3g} MiB" if memory >= 2**20 else f"{memory / 2**10:.3g} KiB",
    }


def _ends(interval: Interval, form: str) -> str:
    """Return the ends of an interval; "" where they are infinite."""
    if not math.isfinite(interval.high):
        return ""
    return f"{form.format(interval.low)} to {form.format(interval.high)}"


def columns_of(task: str) -> tuple[str, ...]:
    """Return the titles of `rows_of_setups`."""
    words = words_for(task)
    return "setup", words.run, words.value, "against float32", "time", "memory"


def rows_of_setups(proof: Proof) -> list[tuple[str, ...]]:
    """Return the cells of each setup."""
    cells = [setup_cells(proof, figures) for figures in proof.figures.values()]
    for cell in cells:
        cell["against"] = f"{cell['difference']} {cell['outcome']}".strip()
    names = ("name", "step", "loss", "against", "ratio", "kept")
    return [tuple(cell[name] for name in names) for cell in cells]


def table_lines(proof: Proof, task: str, width: int) -> list[str]:
    """Return the figures of a proof, a line for each setup, or a paragraph where the width is too small for that."""
    columns, rows = columns_of(task), rows_of_setups(proof)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows)]
    if max(map(len, lines)) > width:
        lines = []
        for row in rows:
            cells = [f"{title} {cell}" for title, cell in zip(columns, row, strict=True) if cell]
            lines += wrapped(", ".join([row[0], *cells[1:]]), width, "", "  ")
    extent = words_for(task).extent(proof.seeds, proof.steps)
    return [*lines, *wrapped(f"{extent}; ended: {proof.ended}", width)]
