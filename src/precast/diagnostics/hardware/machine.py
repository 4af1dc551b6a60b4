"""The speed of a device in each dtype relative to float32, measured, and the diagnosis that follows.

Invariants:

- a diagnosis comes from measured time alone, never from a list of hardware; the hardware's own list of units is
  reported in addition;
- a ratio compares the best time of each dtype, both timed in turns: other load on the machine only adds time, to both
  equally, so the best time shows the machine's speed;
- the CPU is measured on one thread: the units of a core do not depend on the number of cores, and with more threads the
  time would depend on other load on the machine;
- sizes grow until one run is long enough to measure, so the measurement of an emulated dtype, which may be a thousand
  times slower, takes no longer than that of a native one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "DTYPES",
    "DtypeReport",
    "OperationSpeed",
    "dtypes_of",
    "interleaved_seconds",
    "matmul_speed",
    "measure",
    "one_thread",
    "synchronize",
    "times",
]

DTYPES: Final = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""The measured precisions, in display order."""

_NATIVE: Final = 1.2  # times float32's speed: well above the spread of a ratio of best times
_LONG_ENOUGH: Final = 0.004  # seconds for one run; longer runs would add time, not precision
_BUDGET: Final = 0.2  # seconds for the rounds of one ratio
_ROUNDS: Final = (5, 25)  # at least, at most

TimedRun = Callable[[], object]
RunFactory = Callable[[torch.device, str, int], TimedRun]


@dataclass(frozen=True)
class OperationSpeed:
    """One operation in one dtype, and the same operation in another: float32, or bfloat16 for a float8 rule."""

    name: str
    """"matmul", "convolution" or "convolution backward"; or the float8 rule of a linear layer."""
    seconds: float | None = None
    """The best time of one run; None if it is unsupported."""
    baseline_seconds: float | None = None
    """The best time of the same work in the other dtype."""
    error: str | None = None
    """The first line of PyTorch's error if it is unsupported."""

    @property
    def ratio(self) -> float | None:
        """The speed relative to the other dtype; above 1 is faster."""
        if self.seconds is None or self.baseline_seconds is None:
            return None
        return self.baseline_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class DtypeReport:
    """The report on one device in one dtype."""

    device: str
    """As in `str(torch.device)`."""
    dtype: str
    """One of `DTYPES`."""
    speeds: tuple[OperationSpeed, ...]
    """One for each measured operation."""
    units: tuple[str, ...] = ()
    """The units that the hardware lists for this dtype, such as "amx_bf16"."""

    @property
    def ratios(self) -> dict[str, float]:
        """Maps each supported operation to its speed relative to float32."""
        return {speed.name: speed.ratio for speed in self.speeds if speed.ratio is not None}

    @property
    def diagnosis(self) -> str:
        """The support of the dtype, from the measured speeds.

        "native": each supported operation runs at 1.2 times float32's speed or more;
        "partly native": some do; "emulated": none does, so the dtype is converted to another one
        or computed by a fallback; "unsupported": no operation runs. float32 itself is "native".
        """
        faster = [ratio >= _NATIVE for ratio in self.ratios.values()]
        if not faster:
            return "unsupported"
        if all(faster) or self.dtype == "float32":
            return "native"
        return "partly native" if any(faster) else "emulated"

    @property
    def training_speed(self) -> float | None:
        """The speed relative to float32 of a step that spends equal float32 time in each operation.

        None if one is unsupported. The harmonic mean of the ratios: times add up, speeds do not.
        """
        if len(self.ratios) < len(self.speeds):
            return None
        return statistics.harmonic_mean(self.ratios.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "diagnosis": self.diagnosis,
            "units": list(self.units),
            "speeds": [speed.to_dict() for speed in self.speeds],
        }


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Return the names in `DTYPES` that exist on `device`: tf32 only on CUDA devices that have it."""
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return tuple(name for name in DTYPES if name != "tf32" or has_tf32)


def measure(device: torch.device, dtype: str) -> DtypeReport:
    """Time matmul, convolution and its backward in one of `dtypes_of(device)` and in float32, in about a second."""
    with one_thread():
        speeds = tuple(_speed(name, run, device, dtype) for name, run in _OPERATIONS.items())
    return DtypeReport(str(device), dtype, speeds, _units(device, dtype))


def matmul_speed(device: torch.device, dtype: str) -> float | None:
    """Return how many times as fast as float32 a small matrix product is on one thread; None if it is not supported.

    It takes a hundredth of a second, so the ratio tells an emulated dtype from a native one, and no more.
    """
    with one_thread(), suppress(RuntimeError, NotImplementedError):
        runs = [_matmul(device, each, 1) for each in (dtype, "float32")]
        for run in runs:
            run()  # the first run also builds and caches the kernel
        ours, float32 = map(min, interleaved_seconds(runs, device, _ROUNDS[0]))
        return float32 / ours
    return None


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


def _speed(name: str, prepare: RunFactory, device: torch.device, dtype: str) -> OperationSpeed:
    try:
        run, level, once = _long_enough(prepare, device, dtype)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return OperationSpeed(name, error=str(error).strip().split("\n")[0])
    reference = run if dtype == "float32" else prepare(device, "float32", level)
    reference()  # the first run also builds and caches the kernel
    fewest, most = _ROUNDS
    rounds = max(fewest, min(most, int(_BUDGET / (2 * once))))
    ours, float32 = interleaved_seconds([run, reference], device, rounds)
    if dtype == "float32":
        ours = float32 = ours + float32
    return OperationSpeed(name, min(ours), min(float32))


def _long_enough(
    prepare: RunFactory, device: torch.device, dtype: str
) -> tuple[TimedRun, int, float]:
    for level in range(_LEVELS):
        run = prepare(device, dtype, level)
        run()
        once = min(_seconds(run, device) for _ in range(3))
        if once > _LONG_ENOUGH:
            break
    return run, level, once


def _units(device: torch.device, dtype: str) -> tuple[str, ...]:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return (f"sm_{major}{minor}",)
    if device.type != "cpu":
        return ()
    capabilities = torch.cpu.get_capabilities()
    return tuple(unit for unit in _CPU_UNITS.get(dtype, ()) if capabilities.get(unit))


# Names from `torch.cpu.get_capabilities`, x86 first.
_CPU_UNITS: Final = {
    "float32": ("avx2", "avx512_f", "neon", "sve"),
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


# --- the operations: sizes by level, small first; one column for the CPU, one for accelerators ---

_LEVELS: Final = 4
_MATMUL_SIDES: Final = {"cpu": (64, 128, 256, 512), "accelerator": (512, 1024, 2048, 4096)}
# (images, channels, side)
_CONVOLUTIONS: Final = {
    "cpu": ((1, 16, 8), (2, 32, 14), (4, 64, 28), (8, 64, 56)),
    "accelerator": ((8, 64, 28), (16, 64, 56), (32, 128, 56), (64, 128, 56)),
}


def _matmul(device: torch.device, dtype: str, level: int) -> TimedRun:
    side = _MATMUL_SIDES[_kind(device)][level]
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    if dtype.startswith("float8"):
        return _scaled_matmul(a, b, getattr(torch, dtype))
    a, b = a.to(_stored_as(dtype)), b.to(_stored_as(dtype))
    return _float32_as(dtype)(lambda: a @ b)


def _scaled_matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> TimedRun:
    # An 8-bit matmul takes a scale for each operand, and the right operand in column-major order. The right one is
    # e4m3 even if the left one is e5m2, as in training: CUDA has no product of two e5m2 matrices.
    lowered, weight = a.to(dtype), b.to(torch.float8_e4m3fn).t()
    one, whole = torch.ones((), device=a.device), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(lowered, weight, one, whole, one, whole)


def _convolution(device: torch.device, dtype: str, level: int) -> TimedRun:
    inputs, weight = _convolution_tensors(device, dtype, level)
    return _float32_as(dtype)(lambda: F.conv2d(inputs, weight, padding=1))


def _convolution_backward(device: torch.device, dtype: str, level: int) -> TimedRun:
    inputs, weight = (t.requires_grad_() for t in _convolution_tensors(device, dtype, level))
    with _float32_as(dtype):
        output = F.conv2d(inputs, weight, padding=1)
    gradient = torch.ones_like(output)
    grad = torch.autograd.grad
    return _float32_as(dtype)(lambda: grad(output, (inputs, weight), gradient, retain_graph=True))


def _convolution_tensors(device: torch.device, dtype: str, level: int) -> tuple[Tensor, Tensor]:
    images, channels, side = _CONVOLUTIONS[_kind(device)][level]
    inputs = torch.randn(images, channels, side, side, device=device)
    weight = torch.randn(channels, channels, 3, 3, device=device)
    # channels_last is the layout that 16-bit convolutions are written for, on CPUs and GPUs.
    to = partial(Tensor.to, dtype=_stored_as(dtype), memory_format=torch.channels_last)
    return to(inputs), to(weight)


def _stored_as(dtype: str) -> torch.dtype:
    stored: torch.dtype = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    return stored


_OPERATIONS: Final[dict[str, RunFactory]] = {
    "matmul": _matmul,
    "convolution": _convolution,
    "convolution backward": _convolution_backward,
}


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "accelerator"


@contextmanager
def _float32_as(dtype: str) -> Iterator[None]:
    """Compute float32 as tf32 for "tf32", else in all its 24 bits; also decorates a function.

    cuDNN's convolutions use tf32 by default, so that float32 would seem as fast as tf32.
    """
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        yield
    finally:
        for switch, was in zip(switches, before, strict=True):
            switch.fp32_precision = was
