"""Puts compiled libraries into the wheel, where `tools/native_library.py` asks hatchling to.

Invariant: without the variable `HATCH_BUILD_HOOK_ENABLE_CUSTOM` hatchling does not load this file, and the wheel is the
source tree alone, for every platform.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["Libraries"]


class Libraries(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries in `PRECAST_WHEEL_LIBRARIES`, and names the platform that they are for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds; `version` is the wheel's kind."""
        assert version == "standard", version
        for path in Path(os.environ["PRECAST_WHEEL_LIBRARIES"]).glob("*.so"):
            build_data["force_include"][str(path)] = f"precast/weights/native/compiled/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{os.environ['PRECAST_WHEEL_PLATFORM']}"
