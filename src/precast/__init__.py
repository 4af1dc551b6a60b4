"""A replacement for torch.amp whose precision table you can edit.

The public names, loaded when first used, so that the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from precast._version import __version__

if TYPE_CHECKING:
    from precast.attachment import Attachment, attach
    from precast.autograd import custom_bwd, custom_fwd
    from precast.errors import (
        AttachError,
        BannedOperationError,
        BrokenModelError,
        MissingExtraError,
        MonitorError,
        PolicyError,
        PrecastError,
        PrecastWarning,
        RegionError,
        RegionTypeError,
        ScalerError,
        StaleWeightError,
        TorchVersionError,
    )
    from precast.events import First, HealthEvent, Note, StepEvent, Verdict, observe
    from precast.health.monitor import Monitor, monitor
    from precast.installation import install, uninstall
    from precast.losses import LossScalers
    from precast.policy import Policy, Rule
    from precast.region import autocast, current, disable
    from precast.scaler import GradScaler
    from precast.tracing.trace import Trace, trace

_HOME = {
    "precast.attachment": ("Attachment", "attach"),
    "precast.autograd": ("custom_bwd", "custom_fwd"),
    "precast.errors": (
        "AttachError",
        "BannedOperationError",
        "BrokenModelError",
        "MissingExtraError",
        "MonitorError",
        "PolicyError",
        "PrecastError",
        "PrecastWarning",
        "RegionError",
        "RegionTypeError",
        "ScalerError",
        "StaleWeightError",
        "TorchVersionError",
    ),
    "precast.events": ("First", "HealthEvent", "Note", "StepEvent", "Verdict", "observe"),
    "precast.health.monitor": ("Monitor", "monitor"),
    "precast.installation": ("install", "uninstall"),
    "precast.losses": ("LossScalers",),
    "precast.policy": ("Policy", "Rule"),
    "precast.region": ("autocast", "current", "disable"),
    "precast.scaler": ("GradScaler",),
    "precast.tracing.trace": ("Trace", "trace"),
}
_WITHOUT_TORCH = ("precast.errors", "precast.events")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AttachError",
    "Attachment",
    "BannedOperationError",
    "BrokenModelError",
    "First",
    "GradScaler",
    "HealthEvent",
    "LossScalers",
    "MissingExtraError",
    "Monitor",
    "MonitorError",
    "Note",
    "Policy",
    "PolicyError",
    "PrecastError",
    "PrecastWarning",
    "RegionError",
    "RegionTypeError",
    "Rule",
    "ScalerError",
    "StaleWeightError",
    "StepEvent",
    "TorchVersionError",
    "Trace",
    "Verdict",
    "__version__",
    "attach",
    "autocast",
    "current",
    "custom_bwd",
    "custom_fwd",
    "disable",
    "install",
    "monitor",
    "observe",
    "trace",
    "uninstall",
]


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'precast' has no attribute {name!r}")
        module = _MODULE_OF[name]
        if module not in _WITHOUT_TORCH:
            # First: it refuses a PyTorch that the others cannot be loaded with.
            import_module("precast._torch")
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
