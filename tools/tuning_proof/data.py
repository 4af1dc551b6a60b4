"""Keeps what was measured in docs/data/tuning.json: a part for each kind of measurement, each with where, when and how.

Invariant: a part is written as soon as it is measured, and the others stay as they are.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from precast._internal import atomic_write
from precast.diagnostics.hardware.doctor import processor

__all__ = ["DATA", "put", "read", "where"]

DATA = Path(__file__).parents[2] / "docs" / "data" / "tuning.json"


def where() -> dict[str, Any]:
    """The machine and how busy it is, the version of PyTorch, the day, and the command."""
    return {
        "command": shlex.join(["python", "-m", "tools.tuning_proof", *sys.argv[1:]]),
        "machine": processor(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 2),
    }


def read(path: Path = DATA) -> dict[str, Any]:
    """All parts; none where nothing was measured."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def put(part: str, measured: Any, key: str = "", path: Path = DATA) -> None:
    """Writes a part, or what is at a key of it."""
    everything = read(path)
    if key:
        everything.setdefault(part, {})[key] = _finite(measured)
    else:
        everything[part] = _finite(measured)
    text = json.dumps(everything, indent=1, sort_keys=True, allow_nan=False) + "\n"
    atomic_write.replace(path, text.encode())


def _finite(value: Any) -> Any:
    """The value for strict JSON: a number that is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
