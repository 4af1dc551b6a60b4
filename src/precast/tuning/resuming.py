"""What is written of a search when it begins, and whether an earlier search was of the same model and question.

Invariant: an earlier search is gone on with only where each of its figures would be measured again as it was.
"""

from __future__ import annotations

import datetime
import os
import platform
from typing import Literal

import torch

from precast._internal.version import __version__
from precast.errors import TuningError
from precast.tuning.evidence import SCHEMA, Evidence, Settings
from precast.tuning.training import Workload

__all__ = ["begun", "checked"]


def begun(  # noqa: PLR0917 -- in the order of the file
    workload: Workload,
    objective: Literal["time", "memory"],
    tolerance: float,
    budget: float,
    candidates: list[str],
    base: str,
) -> Evidence:
    """The evidence of a search that begins now and was asked this."""
    model = workload.model
    task: Literal["training", "inference"] = "inference" if workload.step is None else "training"
    device, seed = workload.device_type, workload.seed
    settings = Settings(objective, tolerance, budget, candidates, base, device, seed, task)
    return Evidence(
        SCHEMA,
        __version__,
        torch.__version__,
        f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        settings,
    )


def checked(earlier: Evidence, now: Evidence, path: str | os.PathLike[str]) -> Evidence:
    """The evidence of an earlier search, if it is of this model, machine and question.

    Raises:
        TuningError: it is of another.
    """
    for what in ("model", "parameters", "torch", "machine"):
        was, is_now = getattr(earlier, what), getattr(now, what)
        if was != is_now:
            raise TuningError(
                f"{os.fspath(path)} cannot be resumed: its {what} is {was!r}, and here it is {is_now!r}"
            )
    for what in ("task", "objective", "tolerance", "base", "device_type", "seed"):
        was, is_now = getattr(earlier.settings, what), getattr(now.settings, what)
        if was != is_now:
            raise TuningError(
                f"{os.fspath(path)} cannot be resumed: it was made with {what}={was!r}, and here it is {is_now!r}"
            )
    return earlier
