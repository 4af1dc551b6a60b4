"""The chart of whole networks: each variant's time as a ratio to torch.autocast, a panel for each work.

matplotlib is imported when something is drawn, and its global state is left alone.
"""

from __future__ import annotations

import io
from typing import Any

from benchmarks.models import title
from benchmarks.variants import BASELINE, WORKS

__all__ = ["png"]

_COLORS = {
    "float32": "#8c959f",
    "precast": "#d1570a",
    "attached": "#1f6feb",
    "attached + lean": "#1a7f37",
    "by hand": "#1f2328",
}
_MARKS = dict.fromkeys(_COLORS, "o") | {"float32": "s", "by hand": "|"}
_AXIS = f"time, as a ratio to {BASELINE}: left of 1 is faster, right of it slower"
_INK, _GRID = "#1f2328", "#d0d7de"


def _measured_on(machine: dict[str, Any]) -> str:
    """Return the machine of the measurements, for readers of the chart without its page."""
    units = ", AMX" if machine.get("amx_bf16") else ""
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    threads = machine["threads"]
    return (
        f"{machine['cpu']} ({machine['cpu_capability']}{units}){gpu}, {threads} thread{'' if threads == 1 else 's'}, "
        f"PyTorch {machine['torch']}, {machine['date']}"
    )


def png(rows: list[dict[str, Any]], machine: dict[str, Any]) -> bytes:
    """Draws the measured rows; a mark is a median, the line through it as long as the interquartile range."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    works = [w for w in WORKS if any(r["work"] == w for r in rows)]
    names = {work: _names(rows, work) for work in works}
    heights = [len(names[work]) + 2 for work in works]
    figure = Figure((8, 0.24 * sum(heights) + 0.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(works), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, work in zip(panels[:, 0], works, strict=True):
        _draw(axes, work, names[work], [row for row in rows if row["work"] == work])
    panels[-1, 0].set_xlabel(
        f"{_AXIS}\n{_measured_on(machine)}", fontsize=9, color=_INK, linespacing=1.5
    )
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _names(rows: list[dict[str, Any]], work: str) -> list[str]:
    return list(dict.fromkeys(title(row) for row in rows if row["work"] == work))


def _draw(axes: Any, work: str, names: list[str], rows: list[dict[str, Any]]) -> None:
    axes.axvline(1, color=_INK, linewidth=0.8)
    for kind, color in _COLORS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        axes.errorbar(
            [row["ratio"] for row in chosen],
            [names.index(title(row)) for row in chosen],
            xerr=[row["ratio_iqr"] / 2 for row in chosen],
            fmt=_MARKS[kind],
            color=color,
            label=kind,
            markersize=9 if kind == "by hand" else 4.5,
            markeredgewidth=2 if kind == "by hand" else 0.5,
            elinewidth=0.8,
            alpha=0.9,
        )
    _dress(axes, work, names)


def _dress(axes: Any, work: str, names: list[str]) -> None:
    axes.set_title(work, fontsize=9, color=_INK, loc="left")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.tick_params(labelsize=8, colors=_INK)
    axes.grid(color=_GRID, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(_GRID)
