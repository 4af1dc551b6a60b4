"""Draws the comparison with matplotlib: what was learnt, how the loss fell, how the scale changed, what a step took.

Invariants: matplotlib is imported when something is drawn, never before. Nothing here depends on its global state or
changes it: figures are made with the object interface, and styles apply to one figure.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from precast._internal.missing import missing_extra
from precast.demo.compare import Comparison, Run
from precast.demo.findings import caption, costs, machine, title
from precast.demo.task import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["curves_png", "panel_png", "picture_png", "require"]

_STYLES = {
    "light": {"ink": "#1f2328", "grid": "#d0d7de", "float32": "#1f6feb", "mixed": "#d1570a"},
    "dark": {"ink": "#e6edf3", "grid": "#3d444d", "float32": "#6cb6ff", "mixed": "#f69d50"},
}
_RIGHT, _WRONG = "#7ee787", "#ff7b72"  # on a panel's dark ground, in both styles


def require() -> None:
    """Fails at once, and not after a minute of training, where nothing can be drawn.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    for package in ("matplotlib", "jinja2"):
        try:
            __import__(package)
        except ImportError as error:
            raise missing_extra("the demo", package, "demo") from error


def picture_png(comparison: Comparison) -> bytes:
    """One picture of everything: the panels in a row, and below them the curves and what a step took."""
    figure = _figure((9, 6.4), "white")
    figure.suptitle(f"{title(comparison)}\n{machine(comparison)}", fontsize=10, linespacing=1.4)
    parts: Any = figure.subfigures(2, 1, height_ratios=(3, 2.4), facecolor="white")
    above, below = parts
    for axes, panel in zip(above.subplots(1, 3), comparison.panels, strict=True):
        _draw_panel(axes, panel)
        axes.set_title(caption(comparison, panel), fontsize=10)
    if comparison.mixed.scales:
        losses, scales, took = below.subplots(1, 3)
        _draw_scales(scales, comparison.mixed, "light")
    else:  # the losses get the place of the chart of scales
        losses, took = below.subplots(1, 2, width_ratios=(2, 1))
    _draw_losses(losses, comparison, "light")
    _draw_costs(took, comparison, "light")
    return _png(figure, 150)


def panel_png(panel: Panel) -> bytes:
    """One panel alone, without a frame, for a page that sets its own title."""
    height, width = panel.image.shape
    figure = _figure((3, 3 * height / width), "none", layout=None)
    _draw_panel(figure.add_axes((0, 0, 1, 1)), panel)
    return _png(figure, 160)


def curves_png(comparison: Comparison, what: str, style: str) -> bytes:
    """One chart, small enough to be read on a phone.

    Args:
        comparison: what to draw.
        what: "loss", or "scale" where the mixed run had a scaler.
        style: "light" or "dark"; the ground is transparent in both.
    """
    figure = _figure((4.4, 2.9), "none")
    if what == "loss":
        _draw_losses(figure.subplots(), comparison, style)
    else:
        _draw_scales(figure.subplots(), comparison.mixed, style)
    return _png(figure, 160)


def _figure(inches: tuple[float, float], ground: str, layout: Any = "constrained") -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(inches, facecolor=ground, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure, dots_per_inch: int) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch, metadata={"Software": "precast"})
    return buffer.getvalue()


def _draw_panel(axes: Any, panel: Panel) -> None:
    axes.imshow(panel.image.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    for mark in panel.marks:
        color, weight = (_RIGHT, "normal") if mark.right else (_WRONG, "bold")
        words = {"fontsize": 8, "ha": "center", "va": "center"}
        axes.text(mark.column, mark.row, mark.text, color=color, fontweight=weight, **words)
    axes.set_axis_off()


def _draw_losses(axes: Any, comparison: Comparison, style: str) -> None:
    colors = _STYLES[style]
    # The widths differ so that both curves are seen where they agree.
    for name, run, width in (
        ("float32", comparison.float32, 2.4),
        ("mixed", comparison.mixed, 0.9),
    ):
        axes.plot(run.losses, color=colors[name], label=run.name, linewidth=width)
    axes.set_yscale("log")
    _dress(axes, "training loss", style)
    axes.legend(fontsize=8, frameon=False, labelcolor=colors["ink"])


def _draw_scales(axes: Any, run: Run, style: str) -> None:
    colors = _STYLES[style]
    _dress(axes, "scale of the loss", style)
    scales = (run.initial_scale, *run.scales)
    axes.step(range(len(scales)), scales, color=colors["mixed"], where="post", linewidth=1.3)
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(scales) / 4, max(scales) * 4)


def _draw_costs(axes: Any, comparison: Comparison, style: str) -> None:
    """Draws two bars for each cost, of which the longer has length 1, with the figure beside each."""
    colors = _STYLES[style]
    _dress(axes, "a step took (shorter is better)", style)
    for place, cost in enumerate(costs(comparison)):
        longest = max(cost.float32, cost.mixed)
        bars = (("float32", cost.float32, -0.2), ("mixed", cost.mixed, 0.2))
        for name, amount, beside in bars:
            share = amount / longest if longest else 0.0
            axes.barh(place + beside, share, height=0.36, color=colors[name])
            words = {"color": colors["ink"], "fontsize": 8, "va": "center"}
            axes.text(share + 0.03, place + beside, cost.said(amount), **words)
    axes.set_yticks(range(2), [cost.name for cost in costs(comparison)])
    axes.set_ylim(1.6, -0.6)
    axes.set_xlim(0, 1.45)  # the figure beside the longest bar is within
    axes.set_xticks([])
    axes.set_xlabel("")
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def _dress(axes: Any, name: str, style: str) -> None:
    colors = _STYLES[style]
    axes.set_facecolor("none")
    axes.set_title(name, fontsize=10, color=colors["ink"])
    axes.set_xlabel("step", fontsize=9, color=colors["ink"])
    axes.tick_params(which="both", labelsize=8, colors=colors["ink"])
    axes.grid(color=colors["grid"], linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(colors["grid"])
