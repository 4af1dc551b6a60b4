"""The machine on which a benchmark runs."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

import torch

from precast.engine import registration

__all__ = ["about"]

_BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Units for bfloat16 on x86 and on ARM, by their names in `torch.cpu.get_capabilities`."""


def about() -> dict[str, Any]:
    """Return the properties of the machine, and its load."""
    capabilities = torch.cpu.get_capabilities()
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": capabilities.get("cpu_name", capabilities.get("architecture", "a CPU")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "amx_bf16": bool(capabilities.get("amx_bf16", False)),
        "bfloat16_units": [unit for unit in _BFLOAT16_UNITS if capabilities.get(unit)],
        "engine": registration.engine(),
        "load": round(os.getloadavg()[0], 2),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }
