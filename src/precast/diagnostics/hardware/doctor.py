"""`precast doctor`: what this machine can do in each dtype and under float8 rules, measured, and the setting to use.

Invariants: the recommendation follows from the measured reports alone, and its reason quotes the numbers that decided.
Nothing is printed here; `render` returns what a console prints.
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
from precast.diagnostics.hardware.float8 import Float8Report, float8_on
from precast.diagnostics.hardware.machine import DtypeReport, dtypes_of, measure, times

__all__ = [
    "Diagnosis",
    "Recommendation",
    "diagnose",
    "processor",
    "recommend",
    "render",
    "report_as_dict",
]

_WORTH_IT: Final = 1.1
"""A 16-bit dtype is recommended if a training step is at least so many times as fast as in float32."""
_OVER_BFLOAT16: Final = 1.25
"""float16 is recommended if it is more than so many times as fast as bfloat16, since it needs a scaler."""


@dataclass(frozen=True)
class Recommendation:
    """The one setting that follows from the measurements."""

    device: str
    """The device type to train on, such as "cuda"."""
    dtype: str
    """"bfloat16", "float16" or, if neither is faster, "float32"."""
    scaler: bool
    """Whether training needs a gradient scaler, as it does with float16."""
    reason: str
    code: str
    """The line to write; "" for float32."""


@dataclass(frozen=True)
class Device:
    """One device: its name in PyTorch, and what it is."""

    name: str
    description: str


@dataclass(frozen=True)
class Diagnosis:
    """All that doctor found."""

    torch: str
    python: str
    devices: tuple[Device, ...]
    reports: tuple[DtypeReport, ...]
    recommendation: Recommendation
    engine: EngineReport
    float8: tuple[Float8Report, ...] = ()
    """What each device that was measured does under the float8 rules."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON; times in seconds, ratios to float32's speed."""
        return {
            "torch": self.torch,
            "python": self.python,
            "devices": [asdict(device) for device in self.devices],
            "dtypes": [report_as_dict(report) for report in self.reports],
            "recommendation": asdict(self.recommendation),
            "engine": asdict(self.engine),
            "float8": [report.as_dict() for report in self.float8],
        }


def report_as_dict(report: DtypeReport) -> dict[str, Any]:
    """One report as plain values, for JSON."""
    return {
        "device": report.device,
        "dtype": report.dtype,
        "verdict": report.verdict,
        "units": list(report.units),
        "speeds": [{**asdict(speed), "ratio": speed.ratio} for speed in report.speeds],
    }


def diagnose(advance: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Measures the CPU and the accelerator, if there is one: about a second for each dtype.

    Args:
        advance: is told what is measured next, such as "bfloat16 on cpu".
    """
    reports, in_8_bits = [], []
    for device in (torch.device("cpu"), *_accelerators()[:1]):
        for dtype in dtypes_of(device):
            advance(f"{dtype} on {device}")
            reports.append(measure(device, dtype))
        advance(f"the float8 rules on {device}")
        in_8_bits.append(float8_on(device))
    advance("the engine")
    devices = (Device("cpu", _cpu()), *(Device(str(each), _gpu(each)) for each in _accelerators()))
    return Diagnosis(
        torch.__version__,
        platform.python_version(),
        devices,
        tuple(reports),
        recommend(reports),
        engine_here(),
        tuple(in_8_bits),
    )


def recommend(reports: Sequence[DtypeReport]) -> Recommendation:
    """The setting for training that follows from `reports`: on the accelerator if one was measured.

    bfloat16 has float32's range and needs no scaler, so float16 has to be clearly faster to be recommended. If neither
    is faster than float32, float32 is recommended.
    """
    device = next((r.device for r in reports if r.device != "cpu"), "cpu")
    speed = {
        r.dtype: r.training_speed or 0.0
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


def render(diagnosis: Diagnosis) -> RenderableType:
    """What a person reads, in 80 columns."""
    parts: list[RenderableType] = [_header(diagnosis)]
    for device in dict.fromkeys(report.device for report in diagnosis.reports):
        of_device = [report for report in diagnosis.reports if report.device == device]
        parts += [Text(), _table(device, of_device), *_errors(of_device)]
    parts += [Text(), _advice(diagnosis.recommendation)]
    if diagnosis.float8:
        parts += [Text(), Text("Products in 8 bits, the float8 rules:", "bold")]
        parts += [Text(report.verdict) for report in diagnosis.float8]
    return Group(*parts, *_slower(diagnosis.engine))


def processor(device: torch.device) -> str:
    """What the processor or GPU is called; the type of the device where it has no name."""
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return str(capabilities.get("cpu_name", capabilities.get("architecture", "CPU")))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _accelerators() -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def _cpu() -> str:
    vector = torch.backends.cpu.get_cpu_capability()
    return f"{processor(torch.device('cpu'))}, {torch.get_num_threads()} threads, {vector}"


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    memory = properties.total_memory / 2**30
    capability = f"compute capability {properties.major}.{properties.minor}"
    return f"{properties.name}, {memory:.0f} GiB, {capability}"


def _why(device: str, dtype: str, speed: dict[str, float]) -> str:
    range_of = {
        "bfloat16": "it has float32's range, so training needs no scaler",
        "float16": "its range is small, so training needs a gradient scaler",
    }
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    beside = f" ({other}: {times(speed[other])})" if speed.get(other) else ""
    return (
        f"on {device} {dtype} computes {times(speed[dtype])} as fast as float32{beside}, over "
        f"matmul, convolution and its backward; {range_of[dtype]}"
    )


def _why_not(device: str, speed: dict[str, float]) -> str:
    measured = ", ".join(f"{dtype} {times(ratio)}" for dtype, ratio in speed.items())
    return (
        f"on {device} no 16-bit dtype computes faster than float32 ({measured or 'none measured'}); "
        "mixed precision would save memory, not time"
    )


def _header(diagnosis: Diagnosis) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("torch", f"{diagnosis.torch} (Python {diagnosis.python})")
    for device in diagnosis.devices:
        table.add_row(device.name, device.description)
    table.add_row("engine", diagnosis.engine.name)
    return table


def _table(device: str, reports: Sequence[DtypeReport]) -> Table:
    threads = ", one thread" if device == "cpu" else ""
    table = Table(
        title=f"{device}: speed beside float32 (higher is faster{threads})",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("dtype", no_wrap=True)
    table.add_column("computed", no_wrap=True)
    for speed in reports[0].speeds:
        name = speed.operation.replace("convolution", "conv")
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("units")
    for report in reports:
        cells = ["none" if s.ratio is None else times(s.ratio) for s in report.speeds]
        units = " ".join(report.units) or "-"
        style = {"native": "green", "unsupported": "red"}.get(report.verdict, "yellow")
        table.add_row(report.dtype, Text(report.verdict, style), *cells, units)
    return table


def _errors(reports: Sequence[DtypeReport]) -> list[RenderableType]:
    """PyTorch's own error for each cell that says "none"."""
    errors: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for speed in report.speeds:
            if speed.error is not None:
                errors.setdefault((report.dtype, speed.error), []).append(speed.operation)
    return [
        Text(f"{dtype}, {', '.join(operations)}: {error}", "dim")
        for (dtype, error), operations in errors.items()
    ]


def _advice(recommendation: Recommendation) -> RenderableType:
    scaler = "needed" if recommendation.scaler else "not needed"
    title = f"Use {recommendation.dtype} on {recommendation.device}; gradient scaler {scaler}."
    code = [Text(f"    {recommendation.code}", "cyan")] if recommendation.code else []
    return Group(Text(title, "bold"), Text(f"Why: {recommendation.reason}."), *code)


def _slower(engine: EngineReport) -> list[RenderableType]:
    """Where the slower engine runs: why, what that costs, and the command that mends it."""
    if not engine.reason:
        return []
    lines = [
        Text(),
        Text("precast runs on its reference engine, the slower one.", "bold"),
        Text(f"Why: {engine.reason}."),
    ]
    if engine.cost is not None:
        reference, native = engine.cost.reference * 1e6, engine.cost.native * 1e6
        lines.append(
            Text(
                f"A small linear layer takes {reference:.1f} us in a region, and {native:.1f} us on the native engine."
            )
        )
    return [*lines, *([Text(f"    {engine.remedy}", "cyan")] if engine.remedy else [])]
