"""What a demo is asked to do, checked before anything runs.

Invariants: what a `Settings` says can be trained; anything else is a `ValueError` that says what was asked, what is
allowed and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from precast.demo.checkerboard import Checkerboard
from precast.demo.digits import IMAGES, Digits
from precast.demo.task import Task
from precast.policy.values import dtype_name

__all__ = ["DTYPES", "TASKS", "Settings", "settings"]

TASKS: Final = ("checkerboard", "digits")
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}

_FEWEST_STEPS: Final = 10  # some to warm up, some to time, some to look into

# task -> (size, steps) on CUDA, and on a CPU in each dtype. On 2 cores they end in about a minute;
# float16 convolutions have no fast backward on a CPU, so that one is small.
_DEFAULTS: Final = {
    "checkerboard": {"cuda": (512, 500), "bfloat16": (48, 1200), "float16": (16, 300)},
    "digits": {"cuda": (256, 500), "bfloat16": (128, 400), "float16": (16, 60)},
}

# task -> the smallest and the largest size, and what it is. A field has at least two pixels, BatchNorm needs two
# images, and a batch has at most those that are not held out.
_SIZES: Final = {
    "checkerboard": (16, 4096, "pixels along a side"),
    "digits": (2, IMAGES - IMAGES // 5, "images in a batch"),
}


@dataclass(frozen=True)
class Settings:
    """A demo to run: see `settings` for what the fields mean."""

    task: str
    device: torch.device
    dtype: str
    size: int
    steps: int
    seed: int

    def make_task(self) -> Task:
        """The task itself, with its data on the device."""
        if self.task == "digits":
            return Digits(self.size, self.device, self.seed)
        return Checkerboard(self.size, self.device)


def settings(
    task: str = "checkerboard",
    *,
    device: str | None = None,
    dtype: str | None = None,
    size: int | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Settings:
    """Checks what was asked, and chooses what was not asked.

    Args:
        task: "checkerboard" or "digits".
        device: "cpu", "cuda" or "cuda:1". Default: "cuda" if there is one.
        dtype: "bfloat16" or "float16". Default: float16 on CUDA, bfloat16 on a CPU.
        size: checkerboard: pixels along a side; digits: images in a batch.
        steps: training steps of each run.
        seed: of weights, batches and split.

    Raises:
        ValueError: what was asked cannot be trained.
    """
    _require(task in TASKS, f"task {task!r} is unknown; write one of: {', '.join(TASKS)}")
    where = _device(device)
    on_cuda = where.type == "cuda"
    if dtype is None:
        dtype = "float16" if on_cuda else "bfloat16"  # as autocast's defaults
    dtype = dtype_name(dtype) or dtype
    _require(dtype in DTYPES, f"dtype {dtype!r} is unknown; write one of: {', '.join(DTYPES)}")
    usual_size, usual_steps = _DEFAULTS[task]["cuda" if on_cuda else dtype]
    size = usual_size if size is None else size
    steps = usual_steps if steps is None else steps
    least, most, meaning = _SIZES[task]
    _require(least <= size <= most, f"size {size} ({meaning}) must be from {least} to {most}")
    _require(steps >= _FEWEST_STEPS, f"steps {steps} must be at least {_FEWEST_STEPS}")
    _require(0 <= seed < 2**63, f"seed {seed} must be from 0 to 2**63 - 1")
    return Settings(task, where, dtype, size, steps, seed)


def _device(asked: str | None) -> torch.device:
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    allowed = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {asked!r}: PyTorch {torch.__version__} sees no CUDA device here; "
            "write --device cpu, or install a CUDA build of PyTorch"
        )
    known = device.type == "cpu" or device in {torch.device("cuda"), *map(torch.device, allowed)}
    _require(known, f"device {asked!r} is not here; write one of: {', '.join(allowed)}")
    return device


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
