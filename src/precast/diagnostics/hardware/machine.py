"""The speed of a linear layer on a device in each dtype relative to float32, and the diagnosis that follows.

Invariants:

- a diagnosis comes from measured time alone, never from a list of hardware;
- a ratio compares the best time of each dtype, both timed in turns: other load on the machine only adds time, to both
  equally, so the best time shows the machine's speed;
- the CPU is measured on one thread: the units of a core do not depend on the number of cores, and with more threads the
  time would depend on other load on the machine;
- sizes grow until one run is long enough to measure, so the measurement of an emulated dtype, which may be a thousand
  times slower, takes no longer than that of a native one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from precast import _torch

__all__ = [
    "DTYPES",
    "DtypeReport",
    "compared",
    "interleaved_seconds",
    "linear_layer",
    "matmul_speed",
    "measure",
    "one_thread",
    "synchronize",
    "times",
]

DTYPES: Final = ("float32", "bfloat16", "float16")
"""The measured precisions, in display order."""

_NATIVE: Final = 1.2  # times float32's speed: well above the spread of a ratio of best times
_LONG_ENOUGH: Final = 0.004  # seconds for one run; longer runs would add time, not precision
_BUDGET: Final = 0.2  # seconds for the rounds of one ratio
_ROUNDS: Final = (5, 25)  # at least, at most
_SIDES: Final = {"cpu": (64, 128, 256, 512), "accelerator": (512, 1024, 2048, 4096)}
"""Rows, inputs and outputs of the layer, small first."""
_UNSUPPORTED: Final = (RuntimeError, NotImplementedError, ValueError)

TimedRun = Callable[[], object]
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DtypeReport:
    """The speed of a linear layer in one dtype on one device."""

    device: str
    """As in `str(torch.device)`."""
    dtype: str
    """One of `DTYPES`, or a float8 rule."""
    seconds: float | None = None
    """The best time of one run; None if it is unsupported."""
    baseline_seconds: float | None = None
    """The best time of the same work in float32."""
    error: str | None = None
    """The first line of PyTorch's error if it is unsupported."""
    method: str = ""
    """For a float8 rule "kernel", "emulated" or "unsupported"."""

    @property
    def ratio(self) -> float | None:
        """The speed relative to float32; above 1 is faster."""
        if self.seconds is None or self.baseline_seconds is None:
            return None
        return self.baseline_seconds / self.seconds

    @property
    def diagnosis(self) -> str:
        """The support of the dtype, from the measured speed.

        "native": 1.2 times float32's speed or more; "emulated": less, so the dtype is converted to another one or
        computed by a fallback; "unsupported": it does not run. float32 is "native", and a float8 rule has its method.
        """
        if self.method:
            return self.method
        if self.ratio is None:
            return "unsupported"
        return "native" if self.ratio >= _NATIVE or self.dtype == "float32" else "emulated"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "ratio": self.ratio, "diagnosis": self.diagnosis}


def measure(device: torch.device, dtype: str) -> DtypeReport:
    """Time a linear layer in one of `DTYPES` and in float32, in about half a second."""
    with one_thread():
        try:
            run, side, once = _long_enough(device, dtype)
        except _UNSUPPORTED as error:
            return DtypeReport(str(device), dtype, error=_first_line(error))
        fewest, most = _ROUNDS
        rounds = max(fewest, min(most, int(_BUDGET / (2 * once))))
        if dtype == "float32":
            seconds = min(interleaved_seconds([run], device, rounds)[0])
            return DtypeReport(str(device), dtype, seconds, seconds)
        return compared(device, dtype, run, _layer(device, "float32", side), rounds)


def compared(
    device: torch.device, dtype: str, run: TimedRun, baseline: TimedRun, rounds: int
) -> DtypeReport:
    """Return the best times of two runs, or PyTorch's error if the first one fails."""
    try:
        run()  # the first run also builds and caches the kernel
    except _UNSUPPORTED as error:
        return DtypeReport(str(device), dtype, error=_first_line(error))
    baseline()
    ours, theirs = interleaved_seconds([run, baseline], device, rounds)
    return DtypeReport(str(device), dtype, min(ours), min(theirs))


def matmul_speed(device: torch.device, dtype: str) -> float | None:
    """Return how many times as fast as float32 small matrix products are on one thread; None if they are not supported.

    It takes some hundredths of a second, so the ratio tells an emulated dtype from a native one, and no more.
    """
    side = _SIDES[_kind(device)][1]
    ours, float32 = (_layer(device, each, side) for each in (dtype, "float32"))
    with one_thread():
        return compared(device, dtype, ours, float32, _ROUNDS[0]).ratio


def linear_layer(
    device: torch.device,
    side: int,
    product: Product,
    dtype: torch.dtype,
    weight_dtype: torch.dtype = torch.float32,
) -> TimedRun:
    """Return a function that runs forward and backward of a linear layer of `side` inputs and outputs and rows."""
    generator = torch.Generator(device).manual_seed(0)
    x, gradient, w = (
        torch.randn(side, side, device=device, generator=generator).to(each)
        for each in (dtype, dtype, weight_dtype)
    )
    x.requires_grad_()
    w.requires_grad_()

    def run() -> object:
        with torch.enable_grad(), _torch.AutocastOff(device.type)():
            return torch.autograd.grad(product(x, w), (x, w), gradient)

    return run


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def times(ratio: float) -> str:
    """Format a ratio with about two significant digits: 6.1x, 0.011x."""
    return f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2g}x"


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all work; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def interleaved_seconds(
    runs: Sequence[TimedRun], device: torch.device, rounds: int
) -> list[list[float]]:
    """Return a list of times for each of `runs`, which are timed in turns; each round begins with another one."""
    seconds: list[list[float]] = [[] for _ in runs]
    for start in range(rounds):
        for offset in range(len(runs)):
            which = (start + offset) % len(runs)
            seconds[which].append(_seconds(runs[which], device))
    return seconds


def _seconds(run: TimedRun, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "accelerator"


def _long_enough(device: torch.device, dtype: str) -> tuple[TimedRun, int, float]:
    for side in _SIDES[_kind(device)]:
        run = _layer(device, dtype, side)
        run()
        once = min(_seconds(run, device) for _ in range(3))
        if once > _LONG_ENOUGH:
            break
    return run, side, once


def _layer(device: torch.device, dtype: str, side: int) -> TimedRun:
    stored = getattr(torch, dtype)
    return linear_layer(device, side, F.linear, stored, stored)
