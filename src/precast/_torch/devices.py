"""Device types, dtypes, streams and CUDA graphs: the few functions that differ by device.

Invariants:

- for a device that this machine does not have, checks return False instead of raising an error;
- nothing queries an event, which would end a capture of a CUDA graph in any thread.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, Final

import torch

from precast._torch.modes import without_dispatch

__all__ = [
    "UNUSED_DEVICE_TYPES",
    "HostCopy",
    "StreamMark",
    "all_dtypes",
    "custom_backend",
    "has_device",
    "is_captured",
    "is_capturing",
    "is_on",
    "lower_dtypes",
    "seed_all",
    "stream_of",
]


def seed_all(seed: int) -> None:
    """Seed the generators of Python and PyTorch, and of NumPy if it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


UNUSED_DEVICE_TYPES = ("ipu", "maia")
"""Device types for which each thread has autocast flags, and on which no released PyTorch runs (2.13)."""


def all_dtypes() -> list[torch.dtype]:
    """Return all dtypes, always in the same order; no public function lists them."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(dtypes, key=str)


@cache
def is_on(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Return a test of a tensor's device type. Reading `is_cpu` is four times as fast as reading `device`."""
    name = f"is_{device_type}"
    if hasattr(torch.Tensor, name):
        return attrgetter(name)
    return lambda tensor: tensor.device.type == device_type


def has_device(device_type: str) -> bool:
    """Return True if this machine has a device of that type that PyTorch can use."""
    module = getattr(torch, device_type, None)  # some types have no module
    return device_type == "cpu" or (module is not None and bool(module.is_available()))


def custom_backend() -> str:
    """Return the name of the out-of-tree backend, "privateuseone" unless renamed; no public getter (2.13)."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


def lower_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Return the lower precisions that autocast on `device_type` supports.

    CUDA devices are not queried: `torch.cuda.is_bf16_supported` is True for all of them (2.11 to 2.15), and on old ones
    it creates a tensor, which must not happen while a graph is captured.
    """
    backend = getattr(torch, device_type, None) if device_type == custom_backend() else None
    supported = getattr(backend, "get_amp_supported_dtype", None)  # PyTorch's protocol for backends
    return (torch.bfloat16, torch.float16) if supported is None else tuple(supported())


class HostCopy:
    """A copy of one number in the CPU's memory, which a device with streams writes later. Nothing waits.

    Until the number arrives, the memory has the bits of a signaling NaN, which no computation results in. So no event
    is queried to look for it. Not to be created while a graph is captured.
    """

    __slots__ = ("_bits", "_memory", "_number", "event")

    def __init__(self, number: torch.Tensor) -> None:
        stream = stream_of(number.device)
        self._memory: _PinnedNumbers | None = None
        self.event: Any = None
        """The event after the copy in the stream; None on devices without streams."""
        if stream is None:
            self._number = self._bits = number.cpu()
            return
        is_small = number.dtype.itemsize < 4 or number.dtype is torch.float32
        self._memory = _pinned[torch.float32 if is_small else torch.float64]
        self._number, self._bits = self._memory.take()
        self._number.copy_(number.reshape(()), non_blocking=True)
        self.event = stream.record_event()

    def __del__(self) -> None:
        if self._memory is not None:
            self._memory.put_back(self._number, self._bits)

    def has_arrived(self) -> bool:
        """Return True if `read` would not wait."""
        return self._memory is None or self._memory.is_written(self._bits)

    def read(self) -> float:
        """Return the number; wait for the device if necessary."""
        if not self.has_arrived():
            self.event.synchronize()
        # `tolist` reads the CPU's memory without running an operation.
        number: Any = self._number.tolist()
        return float(number)


class _PinnedNumbers:
    """Numbers of one dtype in pinned memory, for use by copies in turn.

    PyTorch has a cache of pinned memory, too, but queries events when memory is allocated.
    """

    def __init__(self, dtype: torch.dtype, integer: torch.dtype, pending: int) -> None:
        self._dtypes, self._pending = (dtype, integer), pending
        self._free: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unwritten: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        """Numbers that were put back before the device has written them, oldest first."""

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a number that is not in use, and its bits."""
        while self._unwritten and self.is_written(self._unwritten[0][1]):
            self._free.append(self._unwritten.popleft())
        if not self._free:
            self._allocate()
        number, bits = self._free.pop()
        bits.fill_(self._pending)
        return number, bits

    def put_back(self, number: torch.Tensor, bits: torch.Tensor) -> None:
        """Return a number after its use."""
        (self._free if self.is_written(bits) else self._unwritten).append((number, bits))

    def is_written(self, bits: torch.Tensor) -> bool:
        """Return True if the device has written the number."""
        present: Any = bits.tolist()
        return bool(present != self._pending)

    def _allocate(self) -> None:
        dtype, integer = self._dtypes
        with without_dispatch(), torch.inference_mode(False):
            numbers = torch.empty(_PINNED_AT_ONCE, dtype=dtype, pin_memory=True)
            self._free += zip(numbers, numbers.view(integer), strict=True)


_PINNED_AT_ONCE: Final = 256
_pinned: Final = {
    torch.float32: _PinnedNumbers(torch.float32, torch.int32, 0x7FA5_A5A5),
    torch.float64: _PinnedNumbers(torch.float64, torch.int64, 0x7FF5_A5A5_A5A5_A5A5),
}


class StreamMark:
    """The end of the work that a stream has been given so far. Not to be created while a graph is captured."""

    __slots__ = ("_one",)

    def __init__(self, device: torch.device) -> None:
        self._one = HostCopy(_one_on(device))

    def is_reached(self) -> bool:
        """Return True if the device has done the work before the mark."""
        return self._one.has_arrived()

    def hold_back(self, stream: Any) -> None:
        """Make another stream wait for the work before the mark."""
        stream.wait_event(self._one.event)


@cache
def _one_on(device: torch.device) -> torch.Tensor:
    with without_dispatch(), torch.inference_mode(False):
        return torch.ones((), device=device)


def stream_of(device: torch.device) -> Any:
    """Return this thread's current stream on a device; None on devices without streams, such as the CPU."""
    if device.type not in ("cuda", "xpu"):
        return None
    return torch.get_device_module(device).current_stream(device)


def is_captured(tensor: torch.Tensor) -> bool:
    """Return True if operations on the tensor's device are being captured into a CUDA graph instead of run."""
    return tensor.is_cuda and is_capturing()


def is_capturing() -> bool:
    """Return True if operations on the current CUDA device are being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
