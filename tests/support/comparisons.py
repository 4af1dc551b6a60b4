"""Comparisons and reports made by hand, with numbers that a test can reason about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from precast.demo.compare import Comparison, Run
from precast.demo.profile import KINDS, StepProfile
from precast.demo.settings import settings
from precast.demo.task import Panel
from precast.diagnostics.hardware.machine import DtypeReport, Speed

OPERATIONS = ("matmul", "convolution", "convolution backward")


def report(dtype: str, *ratios: float | None, device: str = "cpu", units: Any = ()) -> DtypeReport:
    """A report with these ratios for matmul, convolution and its backward; None is unsupported."""
    speeds = (
        Speed(name, error="not implemented") if ratio is None else Speed(name, 1.0, ratio)
        for name, ratio in zip(OPERATIONS, ratios, strict=True)
    )
    return DtypeReport(device, dtype, tuple(speeds), tuple(units))


def run(label: str, seconds: float, kinds: tuple[float, float, float], **changes: Any) -> Run:
    """A run with this time a step, and these seconds in each kind of operation."""
    return Run(
        **{
            "label": label,
            "losses": (0.5, 0.25, 0.125),
            "step_seconds": (seconds, seconds * 5, seconds / 5),
            "profile": StepProfile(2**20, dict(zip(KINDS, kinds, strict=True))),
            "scales": (),
            "initial_scale": 1.0,
            "accuracy": None,
            **changes,
        }
    )


def comparison(
    *,
    float32: Mapping[str, Any] | None = None,
    mixed: Mapping[str, Any] | None = None,
    mixed_seconds: float = 0.010,
    kinds: tuple[float, float, float] = (0.008, 0.001, 0.001),
    machine: DtypeReport | None = None,
    **asked: Any,
) -> Comparison:
    """float32 takes 20 ms a step (16 in products, 1 in copies, 3 in the rest); the mixed run as given."""
    image = torch.eye(4)
    chosen = settings("checkerboard", device="cpu", **asked)
    return Comparison(
        chosen,
        "a picture",
        run("float32", 0.020, (0.016, 0.001, 0.003), **(float32 or {})),
        run(chosen.dtype, mixed_seconds, kinds, **(mixed or {})),
        tuple(Panel(name, image) for name in ("target", "float32", chosen.dtype)),
        machine or report(chosen.dtype, 4.0, 3.0, 2.0, units=["amx_bf16"]),
        2,
    )
