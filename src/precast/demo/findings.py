"""The comparison in words and numbers: the rows of the table, and why the times are what they are.

Invariants: every sentence follows from what was measured in this very run, and quotes it; the terminal and the page
show the same rows and the same sentences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from precast.demo.compare import Comparison, Run
from precast.demo.profile import KINDS
from precast.demo.task import Panel
from precast.diagnostics.hardware.doctor import processor, report_as_dict
from precast.diagnostics.hardware.machine import times

__all__ = ["Cost", "Row", "as_dict", "caption", "costs", "failure"]
__all__ += ["machine", "reasons", "rows", "title"]

_SAME: Final = 0.03  # speeds this close are the same: less than the spread of a step's time
_PRODUCTS, _CASTS, _REST = KINDS


@dataclass(frozen=True)
class Row:
    """One line of the table; `beside` compares the mixed run with float32."""

    name: str
    float32: str
    mixed: str
    beside: str = ""


@dataclass(frozen=True)
class Cost:
    """What a step took of one thing, in both runs."""

    name: str
    float32: float
    mixed: float
    said: Callable[[float], str]

    @property
    def texts(self) -> tuple[str, str]:
        """Both figures with their unit."""
        return self.said(self.float32), self.said(self.mixed)


def title(comparison: Comparison) -> str:
    """What was trained, in one line."""
    asked, threads = comparison.settings, comparison.threads
    plural = "" if threads == 1 else "s"
    device = str(asked.device) if threads is None else f"{asked.device} ({threads} thread{plural})"
    return f"{comparison.summary}; {asked.steps} steps on {device}, seed {asked.seed}"


def machine(comparison: Comparison) -> str:
    """What it was trained on, in one line: the processor or GPU, and PyTorch's version."""
    device = comparison.settings.device
    return f"{processor(device)}, PyTorch {torch.__version__}"


def costs(comparison: Comparison) -> tuple[Cost, Cost]:
    """The median time of a step, in seconds, and the peak of its tensor memory, in bytes."""
    float32, mixed = comparison.float32, comparison.mixed
    return (
        Cost("time", float32.seconds, mixed.seconds, _ms),
        Cost("memory", float32.profile.peak_bytes, mixed.profile.peak_bytes, _mib),
    )


def caption(comparison: Comparison, panel: Panel) -> str:
    """What a panel shows, and how good it is."""
    runs = {run.label: run for run in (comparison.float32, comparison.mixed)}
    if panel.title not in runs:
        return panel.title
    run = runs[panel.title]
    if run.accuracy is not None:
        return f"{run.name}: {run.accuracy:.1%} right"
    return f"{run.name}: loss {run.losses[-1]:.3f}"


def rows(comparison: Comparison) -> tuple[Row, ...]:
    """The table."""
    float32, mixed = comparison.float32, comparison.mixed
    time, memory = costs(comparison)
    share = f"{memory.mixed / memory.float32:.2f}x the memory"
    rows = [
        Row("time per step, median", *time.texts, _pace(comparison)),
        Row("peak memory of a step", *memory.texts, share),
        Row("final loss", f"{float32.losses[-1]:.4f}", f"{mixed.losses[-1]:.4f}"),
    ]
    if float32.accuracy is not None and mixed.accuracy is not None:
        rows += [Row("held-out accuracy", f"{float32.accuracy:.1%}", f"{mixed.accuracy:.1%}")]
    scale = f"scale {mixed.scales[-1]:g} at the end" if mixed.scales else "no scaler needed"
    rows += [
        Row("steps skipped by scaler", "-", str(mixed.skipped), scale),
        Row("computed", "native", comparison.machine.verdict, "by measured speed"),
    ]
    return tuple(rows)


def reasons(comparison: Comparison) -> tuple[str, ...]:
    """Why mixed precision is as fast as it is here, and what "memory" means."""
    slower = comparison.speedup < 1 - _SAME
    return (
        *([_why_slower(comparison)] if slower else []),
        _where_time_goes(comparison),
        _machine(comparison),
        *_waiting(comparison),
        _memory(comparison),
    )


def failure(comparison: Comparison) -> str | None:
    """A sentence on what went wrong in training; None if nothing did."""
    for run in (comparison.float32, comparison.mixed):
        if _number(run.losses[-1]) is None:
            return f"the {run.label} run ended with loss {run.losses[-1]}; try another seed"
    return None


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything but the pictures as plain values for JSON; times are seconds, sizes are bytes."""
    asked = comparison.settings
    return {
        **vars(asked),
        "device": str(asked.device),
        "threads": comparison.threads,
        "speedup": comparison.speedup,
        "runs": {"float32": _run(comparison.float32), "mixed": _run(comparison.mixed)},
        "machine": report_as_dict(comparison.machine),
        "reasons": list(reasons(comparison)),
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "label": run.label,
        "seconds_per_step": run.seconds,
        "peak_bytes": run.profile.peak_bytes,
        "profiled_seconds": run.profile.seconds,
        "final_loss": _number(run.losses[-1]),
        "accuracy": run.accuracy,
        "skipped_steps": run.skipped,
        "losses": [_number(loss) for loss in run.losses],
        "scales": list(run.scales),
    }


def _number(value: float) -> float | None:
    """The value; None if it is infinite or NaN, which JSON cannot say."""
    return value if math.isfinite(value) else None


def _pace(comparison: Comparison) -> str:
    speedup = comparison.speedup
    ratio = f"{speedup:.2f}x" if speedup >= 1 else times(speedup)
    if abs(speedup - 1) <= _SAME:
        return f"{ratio}: the same"
    return f"{ratio}: {'faster' if speedup > 1 else 'slower'}"


def _differences(comparison: Comparison) -> dict[str, float]:
    before, after = comparison.float32.profile.seconds, comparison.mixed.profile.seconds
    return {kind: after[kind] - before[kind] for kind in KINDS}


def _why_slower(comparison: Comparison) -> str:
    dtype, ratios = comparison.settings.dtype, comparison.machine.ratios.items()
    slow = ", ".join(f"{name} {times(ratio)}" for name, ratio in ratios if ratio < 1)
    differences = _differences(comparison)
    kind = max(differences, key=lambda each: differences[each])
    if differences[kind] <= 0:
        return (
            "Slower though no kind of operation is: what is left is the time between them, "
            "spent on finding casts, on the scaler and in Python."
        )
    if kind == _PRODUCTS and slow:
        because = f"this machine computes {dtype} slower than float32 ({slow})"
    else:
        because = _BECAUSE[kind]
    more = _ms(differences[kind])
    return f"Slower because {because}: {kind} take {more} more of a step than in float32."


_BECAUSE: Final = {
    _PRODUCTS: "this network's products are too small to gain",
    _CASTS: "its products are too small to win back what the casts cost",
    _REST: "what is neither product nor cast (normalization, activations, optimizer) grew",
}


def _where_time_goes(comparison: Comparison) -> str:
    parts = ", ".join(
        f"{'-' if difference < 0 else '+'}{_ms(abs(difference))} in {kind}"
        for kind, difference in _differences(comparison).items()
    )
    return f"A profiled {comparison.settings.dtype} step, beside float32's: {parts}."


def _machine(comparison: Comparison) -> str:
    report = comparison.machine
    speeds = ", ".join(f"{name} {times(ratio)}" for name, ratio in report.ratios.items())
    units = f"; units: {' '.join(report.units)}" if report.units else ""
    return (
        f"{report.dtype} is {report.verdict} on {report.device}: {speeds} float32's speed{units}."
    )


def _waiting(comparison: Comparison) -> tuple[str, ...]:
    """A sentence if a GPU waits for work for half of a step or more, which no dtype changes."""
    mixed = comparison.mixed
    busy = sum(mixed.profile.seconds.values())
    if comparison.settings.device.type == "cpu" or busy == 0 or busy > mixed.seconds / 2:
        return ()
    return (
        f"The device computes {_ms(busy)} of a {_ms(mixed.seconds)} step and waits for the rest: "
        "launching its kernels takes longer than running them, in any dtype.",
    )


def _memory(comparison: Comparison) -> str:
    counted = "every allocation of PyTorch's, recorded in the last steps"
    if comparison.settings.device.type == "cuda":
        counted = "PyTorch's allocator's own maximum"
    return f"Memory is that of tensors, not of the process: {counted}."


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{1 if milliseconds >= 1 else 2}f} ms"


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"
