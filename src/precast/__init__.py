"""A replacement for torch.amp whose precision table you can edit.

Each public name is loaded when it is first used, so that importing precast takes about 2 ms and does not load torch.
Names that programs rarely write are not here: `precast.errors` has all errors, and the classes that `attach`, `monitor`
and `Policy.resolve` return stand beside these functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from precast._internal.version import __version__

if TYPE_CHECKING:
    from precast import errors, optim
    from precast._internal.events import (
        HealthEvent,
        NonfiniteOrigin,
        OperationNote,
        ScalerDiagnosis,
        StepEvent,
        observe,
    )
    from precast.attachment.attachment import attach
    from precast.autocast_mode.custom_function import custom_bwd, custom_fwd
    from precast.autocast_mode.region import autocast, current, disable
    from precast.diagnostics.numerics.monitoring import monitor
    from precast.diagnostics.tracing.tracer import Trace, trace
    from precast.errors import BrokenModelError, PolicyError, PrecastError
    from precast.grad_scaler.losses import LossScalers
    from precast.grad_scaler.scaler import GradScaler
    from precast.integrations.torch_amp.installation import install, uninstall
    from precast.policy.policy import Policy
    from precast.shipping.converted import convert
    from precast.shipping.exported import export
    from precast.shipping.loading import load
    from precast.tuning.options import TuningOptions
    from precast.tuning.result import TuningResult
    from precast.tuning.tuner import tune

_HOME = {
    "precast.attachment.attachment": ("attach",),
    "precast.autocast_mode.custom_function": ("custom_bwd", "custom_fwd"),
    "precast.errors": ("BrokenModelError", "PolicyError", "PrecastError"),
    "precast._internal.events": (
        "HealthEvent",
        "NonfiniteOrigin",
        "OperationNote",
        "ScalerDiagnosis",
        "StepEvent",
        "observe",
    ),
    "precast.diagnostics.numerics.monitoring": ("monitor",),
    "precast.integrations.torch_amp.installation": ("install", "uninstall"),
    "precast.grad_scaler.losses": ("LossScalers",),
    "precast.policy.policy": ("Policy",),
    "precast.shipping.converted": ("convert",),
    "precast.shipping.loading": ("load",),
    "precast.autocast_mode.region": ("autocast", "current", "disable"),
    "precast.grad_scaler.scaler": ("GradScaler",),
    "precast.diagnostics.tracing.tracer": ("Trace", "trace"),
    "precast.shipping.exported": ("export",),
    "precast.tuning.options": ("TuningOptions",),
    "precast.tuning.result": ("TuningResult",),
    "precast.tuning.tuner": ("tune",),
}
_WITHOUT_TORCH = ("precast.errors", "precast._internal.events")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BrokenModelError",
    "GradScaler",
    "HealthEvent",
    "LossScalers",
    "NonfiniteOrigin",
    "OperationNote",
    "Policy",
    "PolicyError",
    "PrecastError",
    "ScalerDiagnosis",
    "StepEvent",
    "Trace",
    "TuningOptions",
    "TuningResult",
    "__version__",
    "attach",
    "autocast",
    "convert",
    "current",
    "custom_bwd",
    "custom_fwd",
    "disable",
    "errors",
    "export",
    "install",
    "load",
    "monitor",
    "observe",
    "optim",
    "trace",
    "tune",
    "uninstall",
]


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        if name in ("errors", "optim"):
            return import_module(f"precast.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'precast' has no attribute {name!r}")
        module = _MODULE_OF[name]
        if module not in _WITHOUT_TORCH:
            # This is first, as it refuses a PyTorch that the others cannot be loaded with.
            import_module("precast._torch")
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
