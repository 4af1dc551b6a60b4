"""Stack level of the program's line in a warning: the last line outside of precast on the call stack.

Invariants: this file needs no PyTorch. Frames of PyTorch's decorators between two functions of precast are skipped too.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Final

__all__ = ["callers_level"]

_PACKAGE_FOLDER: Final = str(Path(__file__).parent.parent) + os.sep
_TORCH_WRAPPERS: Final = ("torch/utils/_contextlib.py", "torch/_dynamo/eval_frame.py")


def callers_level() -> int:
    """Return the `stacklevel` with which `warnings.warn`, called in the same function, reports the program's line."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and _is_skipped(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _is_skipped(file: str) -> bool:
    return file.startswith(_PACKAGE_FOLDER) or file.replace("\\", "/").endswith(_TORCH_WRAPPERS)
