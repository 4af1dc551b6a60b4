"""Finds the line of a program that a warning is about: the one that called precast, however many calls lie between.

Invariants: needs no PyTorch; calls that PyTorch's own decorators add between two of precast's are no program's.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Final

__all__ = ["callers_level"]

_OURS: Final = str(Path(__file__).parent.parent)
_BETWEEN: Final = ("torch/utils/_contextlib.py", "torch/_dynamo/eval_frame.py")


def callers_level() -> int:
    """The `stacklevel` for a warning, asked where `warnings.warn` is called: it points at the program's line."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and _is_ours(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) or file.replace("\\", "/").endswith(_BETWEEN)
