"""`precast doctor`: the speed of this machine in each dtype and under float8 rules, and a recommendation.

Invariants: the recommendation follows from the measurements alone, and its reason quotes them. Nothing is printed here;
`render` returns a renderable object.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from precast.diagnostics.hardware.engine_report import EngineReport, engine_here
from precast.diagnostics.hardware.float8 import measure_rules
from precast.diagnostics.hardware.machine import DTYPES, DtypeReport, measure, times

__all__ = ["MachineDiagnosis", "Recommendation", "diagnose", "processor", "recommend", "render"]

_WORTH_IT: Final = 1.1
"""The smallest speed of a training step relative to float32 for which a 16-bit dtype is recommended."""
_OVER_BFLOAT16: Final = 1.25
"""The smallest speed relative to bfloat16 for which float16 is recommended, because it needs a scaler."""


@dataclass(frozen=True)
class Recommendation:
    """The one setting that follows from the measurements."""

    device: str
    """The device type to train on, such as "cuda"."""
    dtype: str
    """"bfloat16", "float16" or, if neither is faster, "float32"."""
    scaler: bool
    """True if training needs a gradient scaler, as with float16."""
    reason: str
    code: str
    """The line to write; "" for float32."""


@dataclass(frozen=True)
class MachineDiagnosis:
    """All measurements of this machine, and the recommendation."""

    torch: str
    python: str
    devices: dict[str, str]
    """Maps the name of each device in PyTorch to its processor."""
    reports: tuple[DtypeReport, ...]
    recommendation: Recommendation
    engine: EngineReport
    float8: tuple[str, ...] = ()
    """A sentence on the float8 rules for each measured device."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; times are in seconds, ratios are relative to float32's speed."""
        return {
            "torch": self.torch,
            "python": self.python,
            "devices": [{"name": n, "description": d} for n, d in self.devices.items()],
            "dtypes": [report.to_dict() for report in self.reports],
            "recommendation": asdict(self.recommendation),
            "engine": asdict(self.engine),
            "float8": list(self.float8),
        }


def diagnose(progress: Callable[[str], None] = lambda _: None) -> MachineDiagnosis:
    """Measure the CPU and the accelerator, if there is one: about half a second for each dtype.

    Args:
        progress: called with the name of the next measurement, such as "bfloat16 on cpu".
    """
    reports: list[DtypeReport] = []
    float8 = []
    for device in (torch.device("cpu"), *_accelerators()[:1]):
        for dtype in DTYPES:
            progress(f"{dtype} on {device}")
            reports.append(measure(device, dtype))
        progress(f"the float8 rules on {device}")
        text, rules = measure_rules(device)
        float8.append(text)
        reports += rules
    cpu = f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} threads"
    devices = {"cpu": cpu} | {str(each): processor(each) for each in _accelerators()}
    return MachineDiagnosis(
        torch.__version__,
        platform.python_version(),
        devices,
        tuple(reports),
        recommend(reports),
        engine_here(),
        tuple(float8),
    )


def recommend(reports: Sequence[DtypeReport]) -> Recommendation:
    """Return the setting for training that follows from `reports`: on the accelerator if one was measured.

    bfloat16 has float32's range and needs no scaler, so float16 has to be clearly faster to be recommended. If neither
    is faster than float32, float32 is recommended.
    """
    device = next((r.device for r in reports if r.device != "cpu"), "cpu")
    speed = {
        r.dtype: r.ratio or 0.0
        for r in reports
        if r.device == device and r.dtype in {"bfloat16", "float16"}
    }
    half, brain = speed.get("float16", 0.0), speed.get("bfloat16", 0.0)
    dtype = "float16" if half > brain * _OVER_BFLOAT16 else "bfloat16"
    device_type = torch.device(device).type
    if speed.get(dtype, 0.0) < _WORTH_IT:
        return Recommendation(device_type, "float32", False, _why_not(device, speed), "")
    code = f'with precast.autocast("{device_type}", dtype=torch.{dtype}):'
    why = _why(device, dtype, speed)
    return Recommendation(device_type, dtype, dtype == "float16", why, code)


def render(diagnosis: MachineDiagnosis) -> RenderableType:
    """Return the report for the console, in 80 columns."""
    parts: list[RenderableType] = [_header(diagnosis)]
    for device in dict.fromkeys(report.device for report in diagnosis.reports):
        of_device = [report for report in diagnosis.reports if report.device == device]
        threads = ", one thread" if device == "cpu" else ""
        title = f"{device}: speed of a linear layer beside float32 (higher is faster{threads})"
        parts += [Text(), Text(title, "bold"), _table(of_device)]
        parts += [Text(f"{r.dtype}: {r.error}", "dim") for r in of_device if r.error is not None]
    parts += [Text(), _advice(diagnosis.recommendation)]
    if diagnosis.float8:
        parts += [Text(), *map(Text, diagnosis.float8)]
    return Group(*parts, *_slower(diagnosis.engine))


def processor(device: torch.device) -> str:
    """Return the name of the processor or GPU; the type of the device if it has no name."""
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return str(capabilities.get("cpu_name", capabilities.get("architecture", "CPU")))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _accelerators() -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def _why(device: str, dtype: str, speed: dict[str, float]) -> str:
    range_of = {
        "bfloat16": "it has float32's range, so training needs no scaler",
        "float16": "its range is small, so training needs a gradient scaler",
    }
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    beside = f" ({other}: {times(speed[other])})" if speed.get(other) else ""
    return (
        f"on {device} {dtype} computes {times(speed[dtype])} as fast as float32{beside}, in "
        f"forward and backward of a linear layer; {range_of[dtype]}"
    )


def _why_not(device: str, speed: dict[str, float]) -> str:
    measured = ", ".join(f"{dtype} {times(ratio)}" for dtype, ratio in speed.items())
    return (
        f"on {device} no 16-bit dtype computes faster than float32 ({measured or 'none measured'}); "
        "mixed precision would save memory, not time"
    )


def _header(diagnosis: MachineDiagnosis) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("torch", f"{diagnosis.torch} (Python {diagnosis.python})")
    for name, description in diagnosis.devices.items():
        table.add_row(name, description)
    table.add_row("engine", diagnosis.engine.name)
    return table


def _table(reports: Sequence[DtypeReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("dtype", "computed", "speed"):
        table.add_column(name, no_wrap=True, justify="right" if name == "speed" else "left")
    for report in reports:
        style = {"native": "green", "kernel": "green", "unsupported": "red"}.get(
            report.diagnosis, "yellow"
        )
        ratio = "none" if report.ratio is None else times(report.ratio)
        table.add_row(report.dtype, Text(report.diagnosis, style), ratio)
    return table


def _advice(recommendation: Recommendation) -> RenderableType:
    scaler = "needed" if recommendation.scaler else "not needed"
    title = f"Use {recommendation.dtype} on {recommendation.device}; gradient scaler {scaler}."
    code = [Text(f"    {recommendation.code}", "cyan")] if recommendation.code else []
    return Group(Text(title, "bold"), Text(f"Why: {recommendation.reason}."), *code)


def _slower(engine: EngineReport) -> list[RenderableType]:
    """Return the reason and the remedy of the slower engine, if it runs."""
    if not engine.reason:
        return []
    lines = [
        Text(),
        Text("precast runs on its reference engine, the slower one.", "bold"),
        Text(f"Why: {engine.reason}."),
    ]
    return [*lines, *([Text(f"    {engine.remedy}", "cyan")] if engine.remedy else [])]
