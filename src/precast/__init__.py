"""A replacement for torch.amp whose precision table you can edit.

Each public name is loaded when it is first used, so that importing precast takes about 2 ms and does not load torch.
Types that programs seldom write are in `precast.events`, all errors in `precast.errors`, weights stored in bfloat16 in
`precast.optim`, and sharded models in `precast.fsdp`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from precast._internal.version import __version__

if TYPE_CHECKING:
    from precast import errors, events, fsdp, optim
    from precast._internal.events import observe
    from precast.attachment.attachment import Attachment, attach
    from precast.autocast_mode.custom_function import custom_bwd, custom_fwd
    from precast.autocast_mode.region import Regions, autocast, current_precision, disable
    from precast.comparison.comparing import compare
    from precast.comparison.difference import RunDifference
    from precast.comparison.recording import Recording, record
    from precast.diagnostics.numerics.monitoring import Monitor, monitor
    from precast.diagnostics.tracing.tracer import Trace, trace
    from precast.grad_scaler.distributed import Reduction, check_same
    from precast.grad_scaler.losses import LossScalers
    from precast.grad_scaler.scaler import GradScaler
    from precast.integrations.torch_amp.installation import Installation, install
    from precast.policy.policy import Entry, ModuleRule, Policy, Precision, Resolution, Rule
    from precast.shipping.conversion import Conversion
    from precast.shipping.converted import conversion_report, convert
    from precast.shipping.exported import export
    from precast.shipping.loading import load_converted
    from precast.tuning.options import TuningOptions, TuningProgress
    from precast.tuning.result import TuningResult
    from precast.tuning.setting_comparison import Setting, compare_settings
    from precast.tuning.tuner import tune

_HOME = {
    "precast._internal.events": ("observe",),
    "precast.attachment.attachment": ("Attachment", "attach"),
    "precast.autocast_mode.custom_function": ("custom_bwd", "custom_fwd"),
    "precast.autocast_mode.region": ("Regions", "autocast", "current_precision", "disable"),
    "precast.comparison.comparing": ("compare",),
    "precast.comparison.difference": ("RunDifference",),
    "precast.comparison.recording": ("Recording", "record"),
    "precast.diagnostics.numerics.monitoring": ("Monitor", "monitor"),
    "precast.diagnostics.tracing.tracer": ("Trace", "trace"),
    "precast.grad_scaler.distributed": ("Reduction", "check_same"),
    "precast.grad_scaler.losses": ("LossScalers",),
    "precast.grad_scaler.scaler": ("GradScaler",),
    "precast.integrations.torch_amp.installation": ("Installation", "install"),
    "precast.policy.policy": ("Entry", "ModuleRule", "Policy", "Precision", "Resolution", "Rule"),
    "precast.shipping.conversion": ("Conversion",),
    "precast.shipping.converted": ("conversion_report", "convert"),
    "precast.shipping.exported": ("export",),
    "precast.shipping.loading": ("load_converted",),
    "precast.tuning.options": ("TuningOptions", "TuningProgress"),
    "precast.tuning.result": ("TuningResult",),
    "precast.tuning.setting_comparison": ("Setting", "compare_settings"),
    "precast.tuning.tuner": ("tune",),
}
_MODULES = ("errors", "events", "fsdp", "optim")
_WITHOUT_TORCH = ("precast._internal.events", "precast.shipping.conversion")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Attachment",
    "Conversion",
    "Entry",
    "GradScaler",
    "Installation",
    "LossScalers",
    "ModuleRule",
    "Monitor",
    "Policy",
    "Precision",
    "Recording",
    "Reduction",
    "Regions",
    "Resolution",
    "Rule",
    "RunDifference",
    "Setting",
    "Trace",
    "TuningOptions",
    "TuningProgress",
    "TuningResult",
    "__version__",
    "attach",
    "autocast",
    "check_same",
    "compare",
    "compare_settings",
    "conversion_report",
    "convert",
    "current_precision",
    "custom_bwd",
    "custom_fwd",
    "disable",
    "errors",
    "events",
    "export",
    "fsdp",
    "install",
    "load_converted",
    "monitor",
    "observe",
    "optim",
    "record",
    "trace",
    "tune",
]


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
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
