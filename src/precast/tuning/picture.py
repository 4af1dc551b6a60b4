"""Draws what a search has tried with matplotlib: time or memory against loss, and the losses of all steps.

Invariants: matplotlib is imported when something is drawn; neither is its global state used nor changed.
"""

from __future__ import annotations

import io
import math
import statistics
from typing import TYPE_CHECKING, Any, Final

from precast._internal.missing import missing_extra
from precast.tuning.evidence import Evidence, ProofEvidence
from precast.tuning.page import points
from precast.tuning.words import TRAINING, Words, words_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_of", "png_of"]

_COLORS: Final = ("#3b82c4", "#e69f00", "#12a37f", "#cc79a7", "#8c6bb1", "#d55e00", "#8b949e")


def figure_of(evidence: Evidence) -> Figure:
    """The chart of what was tried, and the losses beside it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("TuningResult.plot", "matplotlib", "demo") from error
    figure = Figure((9, 3.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{evidence.model}: {evidence.answer}", fontsize=11)
    names: dict[str, None] = {}
    for proof in evidence.proofs:
        names |= dict.fromkeys(trial.name for trial in proof.trials)
    colors = {name: _COLORS[place % len(_COLORS)] for place, name in enumerate(names)}
    tried, losses = figure.subplots(1, 2)
    _draw_tried(tried, evidence, colors)
    if evidence.proofs:
        _draw_losses(losses, evidence.proofs[-1], colors, words_for(evidence.settings.task))
    else:
        losses.text(0.5, 0.5, "nothing was proven", ha="center", transform=losses.transAxes)
    return figure


def png_of(figure: Figure) -> bytes:
    """The figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": "precast"})
    return buffer.getvalue()


def _draw_tried(axes: Any, evidence: Evidence, colors: dict[str, str]) -> None:
    words = words_for(evidence.settings.task)
    is_time = evidence.settings.objective == "time"
    label = f"time of a {words.run} (ms)" if is_time else f"{words.memory} (MiB)"
    unit = 1e-3 if is_time else 2.0**20
    for point in points(evidence):
        low, cost, high = (each / unit for each in point["cost"])
        below, loss, above = (100 * each for each in point["loss"])
        axes.errorbar(
            cost,
            loss,
            xerr=[[cost - low], [high - cost]],
            yerr=[[loss - below], [above - loss]],
            fmt="*" if point["is_answer"] else "o",
            markersize=13 if point["is_answer"] else 7,
            color=colors[point["name"]],
            capsize=3,
        )
        axes.annotate(point["name"], (cost, loss), (6, 6), textcoords="offset points", fontsize=9)
    axes.axhline(100 * evidence.settings.tolerance, color="#cf222e", linestyle="--", linewidth=1)
    axes.set_xlim(left=0)
    axes.margins(x=0.25, y=0.2)
    axes.set_xlabel(label)
    axes.set_ylabel(f"{words.value} against float32 (%)")
    _dress(axes)


def _draw_losses(axes: Any, proof: ProofEvidence, colors: dict[str, str], words: Words) -> None:
    for trial in proof.trials:
        steps = range(min(map(len, trial.curves), default=0))
        means = []
        for step in steps:
            known = [loss for curve in trial.curves if (loss := curve[step]) is not None]
            means.append(statistics.fmean(known) if known else math.nan)
        axes.plot([step + 1 for step in steps], means, color=colors[trial.name], label=trial.name)
    axes.set_xlabel("step" if words is TRAINING else words.trial)
    axes.set_ylabel(f"loss, mean of {proof.seeds} seeds" if words is TRAINING else words.value)
    axes.legend(fontsize=9, frameon=False)
    _dress(axes)


def _dress(axes: Any) -> None:
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
