"""Draws a picture from what a program of `examples/` computes.

Invariants: the program's own functions compute all that is shown; the ground is transparent.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from math import log2
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tools.site.pictures import STYLES, TWO_RUNS, file_name

__all__ = ["DRAWINGS", "draw"]

_INK = {"light": "#1f2328", "dark": "#e6edf3"}
_EQUAL = 1e-9
"""The distance at which equal results are drawn."""
_GRID = {"light": "#d0d7de", "dark": "#3d444d"}
_COLORS = {"light": ("#1f6feb", "#d1570a", "#2da44e"), "dark": ("#6cb6ff", "#f69d50", "#57ab5a")}


def draw(name: str, folder: Path) -> None:
    """Draws a program's picture in each style."""
    sys.path.insert(0, "examples")
    program = importlib.import_module(name.partition(".py")[0])
    inches, paint = DRAWINGS[name]
    folder.mkdir(parents=True, exist_ok=True)
    paint_on = paint(program)
    for style in STYLES:
        with rc_context(_settings(name, style)):
            figure = Figure(inches, facecolor="none", layout="constrained")
            FigureCanvasSVG(figure)
            paint_on(figure, _COLORS[style])
            figure.savefig(folder / file_name(name, style), metadata={"Date": None})


def _settings(name: str, style: str) -> Any:
    ink = _INK[style]
    return {
        "svg.hashsalt": name,  # the same picture has the same bytes
        "font.size": 10,
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.edgecolor": _GRID[style],
        "grid.color": _GRID[style],
        "axes.facecolor": "none",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


_Paint = Callable[[Figure, tuple[str, ...]], None]


def _checkerboard(program: Any) -> _Paint:
    result = program.train()
    runs = {run.dtype: run for run in (result.float32, result.mixed)}
    images = {"target": result.task.image} | {name: run.output for name, run in runs.items()}

    def paint(figure: Figure, colors: tuple[str, ...]) -> None:
        rows: Any = [[*images], ["losses"] * len(images)]
        places = figure.subplot_mosaic(rows, height_ratios=(1.2, 1))
        for title, image in images.items():
            axes = places[title]
            axes.imshow(image[0, 0].numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(title, fontsize=10)
            axes.set_axis_off()
        axes = places["losses"]
        for (name, run), color, width in zip(runs.items(), colors, (2.4, 1), strict=False):
            axes.plot(run.losses, color=color, label=name, linewidth=width)
        axes.set(xlabel="step", ylabel="loss")
        axes.grid(linewidth=0.5)
        axes.legend()

    return paint


def _formats(program: Any) -> _Paint:
    measurements = {_short(dtype): program.measured(dtype) for dtype in reversed(program.FORMATS)}

    def paint(figure: Figure, colors: tuple[str, ...]) -> None:
        axes = figure.subplots()
        for row, limits in enumerate(measurements.values()):
            edges = [log2(x) for x in (limits.smallest, limits.smallest_normal, limits.largest)]
            axes.barh(row, edges[1] - edges[0], 0.5, edges[0], color=colors[1])
            axes.barh(row, edges[2] - edges[1], 0.5, edges[1], color=colors[0])
        axes.set_yticks(range(len(measurements)), list(measurements))
        axes.set_xticks(range(-150, 151, 50), [f"$2^{{{k}}}$" for k in range(-150, 151, 50)])
        axes.legend(axes.containers[:2], ["subnormal", "normal"], loc="lower right")
        axes.grid(axis="x", linewidth=0.5)
        axes.set_axisbelow(True)

    return paint


def _scaler(program: Any) -> _Paint:
    float16, bfloat16 = torch.float16, torch.bfloat16
    runs = {
        "float32": program.train(None, program.a_scaler(enabled=False)),
        "float16, no scaler": program.train(float16, program.a_scaler(enabled=False)),
        "float16, scaler from $2^{40}$": program.train(
            float16, program.a_scaler(init_scale=2.0**40)
        ),
        'float16, scaler "auto"': program.train(float16, program.a_scaler(init_scale="auto")),
        "bfloat16, no scaler": program.train(bfloat16, program.a_scaler(enabled=False)),
    }

    def paint(figure: Figure, colors: tuple[str, ...]) -> None:
        losses, scales = figure.subplots(1, 2)
        lines = dict(zip(runs, (*colors, colors[0], colors[1]), strict=True))
        for number, (name, run) in enumerate(runs.items()):
            style = {"color": lines[name], "linestyle": "-" if number < 3 else "--"}
            losses.plot(run.losses, label=name, **style)
            if "scaler " in name:
                scales.plot(run.scales, **style)
        losses.set(xlabel="step", ylabel="loss", yscale="log")
        scales.set(xlabel="step", ylabel="scale")
        scales.set_yscale("log", base=2)
        for axes in (losses, scales):
            axes.grid(linewidth=0.5)
        figure.legend(loc="outside lower center", ncols=2)

    return paint


def _growth(comparison: str) -> Callable[[Any], _Paint]:
    """Returns what draws the distance of two runs along the modules."""

    def of(program: Any) -> _Paint:
        with TemporaryDirectory() as folder:
            points = getattr(program, comparison)(Path(folder)).growth

        def paint(figure: Figure, colors: tuple[str, ...]) -> None:
            axes = figure.subplots()
            names = [point.module.removeprefix("blocks.") or "model" for point in points]
            distances = [max(point.distance, _EQUAL) for point in points]
            axes.plot(range(len(points)), distances, "o-", markersize=3, color=colors[0])
            axes.set_xticks(range(len(points)), names, rotation=90, fontsize=7)
            axes.set(yscale="log", ylim=(_EQUAL / 3, 1))
            axes.set_ylabel("distance; lowest: equal", fontsize=8)
            axes.grid(linewidth=0.5)

        return paint

    return of


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DRAWINGS: dict[str, tuple[tuple[float, float], Callable[[Any], _Paint]]] = {
    "07_limits.py": ((7, 2.4), _formats),
    "08_checkerboard.py": ((7, 4.6), _checkerboard),
    "08_scaler.py": ((7, 3.8), _scaler),
    **{f"two_runs.py {name}": ((7, 2.2), _growth(name)) for name in TWO_RUNS},
}
"""By the program's file name, and perhaps a part of it: the size in inches, and what computes once and then paints in
each style."""
