"""The results of a demo as a table and a picture.

Invariants: matplotlib is imported only for a picture, and its global state is neither used nor changed.
"""

from __future__ import annotations

import io
import math
from typing import Any, Final

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from precast._internal.display import plural
from precast._internal.missing import missing_extra
from precast.cli.demo.example import DemoResult, DemoRun
from precast.diagnostics.hardware.doctor import processor
from precast.diagnostics.hardware.machine import times

__all__ = ["failure", "picture_png", "render", "require_matplotlib"]

_EQUAL_SPEED: Final = 0.03  # a smaller difference is called "the same": times vary more
_COLORS: Final = ("#1f6feb", "#d1570a")
_INK, _GRID = "#1f2328", "#d0d7de"


def require_matplotlib() -> None:
    """Raise an error if no picture can be drawn. To be called before the training, which takes a minute.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra("the demo", "matplotlib", "demo") from error


def title(result: DemoResult) -> str:
    """Return one line with the task, the device and the seed."""
    size, device = result.task.size, str(result.task.device)
    if result.threads is not None:
        device += f" ({plural(result.threads, 'thread')})"
    task = f"an 8 x 8 checkerboard from the coordinates of {size} x {size} pixels"
    return f"{task}; {result.steps} steps on {device}, seed {result.seed}"


def failure(result: DemoResult) -> str | None:
    """Return a message if the last loss of a run is not finite, else None."""
    for run in (result.float32, result.mixed):
        if not math.isfinite(run.losses[-1]):
            return f"the {run.name} run ended with loss {run.losses[-1]}; try another --seed"
    return None


def render(result: DemoResult) -> RenderableType:
    """Return the table, with notes on the dtype's speed and on the memory, as a rich object."""
    float32, mixed, speedup, report = result.float32, result.mixed, result.speedup, result.machine
    comparison = (
        "the same" if abs(speedup - 1) <= _EQUAL_SPEED else "faster" if speedup > 1 else "slower"
    )
    ratio = f"{speedup:.2f}x" if speedup >= 1 else times(speedup)
    memory = f"{mixed.peak_bytes / float32.peak_bytes:.2f}x the memory"
    scale = f"scale {mixed.scales[-1]:g} at the end" if mixed.scales else "no scaler needed"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column("float32", justify="right", overflow="fold")
    table.add_column(mixed.name, justify="right", overflow="fold")
    table.add_column("mixed compared with float32", overflow="fold")
    seconds, sizes = ([show(run) for run in _runs(result)] for show in (_step_time, _memory))
    table.add_row("time per step, median", *seconds, f"{ratio}: {comparison}")
    table.add_row("peak memory of a step", *sizes, memory)
    table.add_row("final loss", f"{float32.losses[-1]:.4f}", f"{mixed.losses[-1]:.4f}")
    table.add_row("steps skipped by scaler", "-", str(mixed.skipped), scale)
    table.add_row("computed", "native", report.diagnosis, "by measured speed")
    detail = f": a linear layer at {times(report.ratio)} float32's speed" if report.ratio else ""
    speed = f"{report.dtype} is {report.diagnosis} on {report.device}{detail}"
    notes = f"- {speed}.\n- Memory is the peak of the tensors in the last step, not of the process."
    return Group(Text(title(result), "bold"), table, Text(notes))


def _step_time(run: DemoRun) -> str:
    return f"{run.seconds * 1e3:.{1 if run.seconds >= 1e-3 else 2}f} ms"


def _memory(run: DemoRun) -> str:
    return f"{run.peak_bytes / 2**20:.1f} MiB"


def picture_png(result: DemoResult) -> bytes:
    """Return a PNG: above, the target and the results of both runs; below, losses and the cost of a step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((9, 6.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    machine = f"{processor(result.task.device)}, PyTorch {torch.__version__}"
    figure.suptitle(f"{title(result)}\n{machine}", fontsize=10, linespacing=1.4)
    halves: Any = figure.subfigures(2, 1, height_ratios=(3, 2.4), facecolor="white")
    images = {"target": result.task.image.cpu()}
    images |= {f"{run.name}: loss {run.losses[-1]:.3f}": run.output for run in _runs(result)}
    for axes, (name, image) in zip(halves[0].subplots(1, 3), images.items(), strict=True):
        pixels = image[0, 0].clamp(0, 1).numpy()
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(name, fontsize=10)
    losses, costs = halves[1].subplots(1, 2, width_ratios=(2, 1))
    _draw_losses(losses, result)
    _draw_costs(costs, result)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": "precast"})
    return buffer.getvalue()


def _runs(result: DemoResult) -> tuple[DemoRun, DemoRun]:
    return result.float32, result.mixed


def _draw_losses(axes: Any, result: DemoResult) -> None:
    # The widths differ so that both curves are visible where they agree.
    for run, color, width in zip(_runs(result), _COLORS, (2.4, 0.9), strict=True):
        axes.plot(run.losses, color=color, label=run.name, linewidth=width)
    axes.set_yscale("log")
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.grid(color=_GRID, linewidth=0.6)
    _style(axes, "training loss")
    axes.legend(fontsize=8, frameon=False, labelcolor=_INK)


def _draw_costs(axes: Any, result: DemoResult) -> None:
    """Draw two bars for time and two for memory. The longer bar has length 1; the value stands beside each."""
    for position, (name, show) in enumerate((("seconds", _step_time), ("peak_bytes", _memory))):
        longest = max(getattr(run, name) for run in _runs(result))
        for run, color, offset in zip(_runs(result), _COLORS, (-0.2, 0.2), strict=True):
            y, length = position + offset, getattr(run, name) / longest
            axes.barh(y, length, height=0.36, color=color)
            axes.text(length + 0.03, y, show(run), color=_INK, fontsize=8, va="center")
    axes.set_yticks(range(2), ["time", "memory"])
    axes.set_ylim(1.6, -0.6)
    axes.set_xlim(0, 1.45)  # includes the value beside the longer bar
    _style(axes, "cost of a step (shorter is better)")
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _style(axes: Any, name: str) -> None:
    axes.set_facecolor("none")
    axes.set_title(name, fontsize=10, color=_INK)
    axes.tick_params(which="both", labelsize=8, colors=_INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(_GRID)
