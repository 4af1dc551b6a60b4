"""The results of a demo as a table, a picture and JSON.

Invariants: matplotlib is imported when a picture is drawn, never before. Its global state is neither used nor changed.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from precast._internal.missing import missing_extra
from precast.cli.demo.example import DemoResult, DemoRun
from precast.diagnostics.hardware.doctor import processor
from precast.diagnostics.hardware.machine import times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["failure", "picture_png", "render", "require_matplotlib", "to_dict"]

_SAME: Final = 0.03  # speeds this close are the same: less than the spread of a step's time
_COLORS: Final = {"float32": "#1f6feb", "mixed": "#d1570a"}
_INK, _GRID = "#1f2328", "#d0d7de"


def require_matplotlib() -> None:
    """Raise an error before a minute of training if the picture cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra("the demo", "matplotlib", "demo") from error


def title(result: DemoResult) -> str:
    """Return one line on the task, the device and the seed."""
    threads, device = result.threads, str(result.task.device)
    if threads is not None:
        device += f" ({threads} thread{'' if threads == 1 else 's'})"
    size = result.task.size
    task = f"an 8 x 8 checkerboard from the coordinates of {size} x {size} pixels"
    return f"{task}; {result.steps} steps on {device}, seed {result.seed}"


def failure(result: DemoResult) -> str | None:
    """Return a message if a run ended with a loss that is not finite."""
    for run in (result.float32, result.mixed):
        if not math.isfinite(run.losses[-1]):
            return f"the {run.name} run ended with loss {run.losses[-1]}; try another --seed"
    return None


def rows(result: DemoResult) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: name, float32, mixed, and mixed compared with float32."""
    float32, mixed, speedup = result.float32, result.mixed, result.speedup
    comparison = "the same" if abs(speedup - 1) <= _SAME else "faster" if speedup > 1 else "slower"
    ratio = f"{speedup:.2f}x" if speedup >= 1 else times(speedup)
    memory = f"{mixed.peak_bytes / float32.peak_bytes:.2f}x the memory"
    table = [
        (
            "time per step, median",
            _ms(float32.seconds),
            _ms(mixed.seconds),
            f"{ratio}: {comparison}",
        ),
        ("peak memory of a step", _mib(float32.peak_bytes), _mib(mixed.peak_bytes), memory),
        ("final loss", f"{float32.losses[-1]:.4f}", f"{mixed.losses[-1]:.4f}", ""),
    ]
    scale = f"scale {mixed.scales[-1]:g} at the end" if mixed.scales else "no scaler needed"
    table.append(("steps skipped by scaler", "-", str(mixed.skipped), scale))
    table.append(("computed", "native", result.machine.diagnosis, "by measured speed"))
    return table


def notes(result: DemoResult) -> list[str]:
    """Return the measured speeds of the dtype on this machine, and the definition of the memory."""
    report = result.machine
    speeds = ", ".join(f"{name} {times(ratio)}" for name, ratio in report.ratios.items())
    units = f"; units: {' '.join(report.units)}" if report.units else ""
    counter = (
        "the maximum of PyTorch's allocator"
        if result.threads is None
        else "all allocations of PyTorch"
    )
    return [
        f"{report.dtype} is {report.diagnosis} on {report.device}: {speeds} float32's speed{units}.",
        f"Memory is that of tensors in the last step, not of the process: {counter}.",
    ]


def render(result: DemoResult) -> RenderableType:
    """Return the table and the notes, for rich."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "float32", result.mixed.name, "mixed compared with float32"):
        numbers = name in ("float32", result.mixed.name)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows(result):
        table.add_row(*row)
    return Group(Text(title(result), "bold"), table, *(Text(f"- {note}") for note in notes(result)))


def to_dict(result: DemoResult) -> dict[str, Any]:
    """Return all but the picture as plain values for JSON; times are seconds, sizes are bytes."""
    return {
        "device": str(result.task.device),
        "dtype": result.mixed.dtype,
        "size": result.task.size,
        "steps": result.steps,
        "seed": result.seed,
        "threads": result.threads,
        "speedup": result.speedup,
        "runs": {"float32": _run(result.float32), "mixed": _run(result.mixed)},
        "machine": result.machine.to_dict(),
    }


def _run(run: DemoRun) -> dict[str, Any]:
    losses = [
        loss if math.isfinite(loss) else None for loss in run.losses
    ]  # JSON has no NaN and no infinity
    return {
        "dtype": run.dtype,
        "seconds_per_step": run.seconds,
        "peak_bytes": run.peak_bytes,
        "final_loss": losses[-1],
        "skipped_steps": run.skipped,
        "losses": losses,
        "scales": run.scales[1:],
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds >= 1e-3 else 2}f} ms"


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


# --- the picture ---


def picture_png(result: DemoResult) -> bytes:
    """Return a PNG: above, the target and the results of both runs; below, losses, scales, and the cost of a step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((9, 6.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    machine = f"{processor(result.task.device)}, PyTorch {torch.__version__}"
    figure.suptitle(f"{title(result)}\n{machine}", fontsize=10, linespacing=1.4)
    halves: Any = figure.subfigures(2, 1, height_ratios=(3, 2.4), facecolor="white")
    runs = (None, result.float32, result.mixed)
    for axes, run in zip(halves[0].subplots(1, 3), runs, strict=True):
        image = result.task.image.cpu() if run is None else run.output
        axes.imshow(
            image[0, 0].clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest"
        )
        axes.set_axis_off()
        axes.set_title(
            "target" if run is None else f"{run.name}: loss {run.losses[-1]:.3f}", fontsize=10
        )
    if result.mixed.scales:
        losses, scales, costs = halves[1].subplots(1, 3)
        _draw_scales(scales, result.mixed)
    else:
        losses, costs = halves[1].subplots(1, 2, width_ratios=(2, 1))
    _draw_losses(losses, result)
    _draw_costs(costs, result)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": "precast"})
    return buffer.getvalue()


def _draw_losses(axes: Any, result: DemoResult) -> None:
    # The widths differ so that both curves are visible where they agree.
    axes.plot(result.float32.losses, color=_COLORS["float32"], label="float32", linewidth=2.4)
    axes.plot(result.mixed.losses, color=_COLORS["mixed"], label=result.mixed.name, linewidth=0.9)
    axes.set_yscale("log")
    _style(axes, "training loss")
    axes.legend(fontsize=8, frameon=False, labelcolor=_INK)


def _draw_scales(axes: Any, run: DemoRun) -> None:
    _style(axes, "scale of the loss")
    axes.step(
        range(len(run.scales)), run.scales, color=_COLORS["mixed"], where="post", linewidth=1.3
    )
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(run.scales) / 4, max(run.scales) * 4)


def _draw_costs(axes: Any, result: DemoResult) -> None:
    """Draw two bars each for time and memory, the longer of length 1, with the figure beside each."""
    float32, mixed = result.float32, result.mixed
    costs = {
        "time": (float32.seconds, mixed.seconds, _ms),
        "memory": (float32.peak_bytes, mixed.peak_bytes, _mib),
    }
    _style(axes, "cost of a step (shorter is better)")
    for place, (*amounts, text) in enumerate(costs.values()):
        for name, amount, offset in zip(_COLORS, amounts, (-0.2, 0.2), strict=True):
            length = amount / max(amounts)
            axes.barh(place + offset, length, height=0.36, color=_COLORS[name])
            axes.text(
                length + 0.03, place + offset, text(amount), color=_INK, fontsize=8, va="center"
            )
    axes.set_yticks(range(2), list(costs))
    axes.set_ylim(1.6, -0.6)
    axes.set_xlim(0, 1.45)  # includes the figure beside the longest bar
    axes.set_xticks([])
    axes.set_xlabel("")
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def _style(axes: Any, name: str) -> None:
    axes.set_facecolor("none")
    axes.set_title(name, fontsize=10, color=_INK)
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.tick_params(which="both", labelsize=8, colors=_INK)
    axes.grid(color=_GRID, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(_GRID)
