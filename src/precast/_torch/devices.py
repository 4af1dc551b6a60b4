"""Device types, dtypes, streams and CUDA graphs: the few functions that differ by device.

Invariants:

- for a device that this machine does not have, checks return False instead of raising an error;
- nothing here has been run on CUDA yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch

__all__ = [
    "UNUSED_DEVICE_TYPES",
    "all_dtypes",
    "copy_to_host_async",
    "custom_backend",
    "has_device",
    "is_captured",
    "is_capturing",
    "is_on",
    "lower_dtypes",
    "stream_of",
]

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


def copy_to_host_async(number: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copy a scalar to the CPU; return the copy with the event after which it is valid, None if it is valid now.

    The copy uses pinned memory, which PyTorch caches, so the host does not wait.
    """
    if number.device.type == "cpu":
        return number, None
    if number.device.type != "cuda":
        return number.cpu(), None
    host = torch.empty((), dtype=number.dtype, pin_memory=True)
    host.copy_(number, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(number.device))
    return host, event


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
