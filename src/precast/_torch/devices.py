"""Device types, dtypes, streams and CUDA graphs: the few functions that differ by device.

Invariants:

- questions about a device that this machine does not have are answered with "no", not with an error;
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
    """Every dtype, always in the same order; nothing public lists them."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(dtypes, key=str)


@cache
def is_on(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Returns what tells whether a tensor is on that device type; `is_cpu` is read four times as fast as `device`."""
    name = f"is_{device_type}"
    if hasattr(torch.Tensor, name):
        return attrgetter(name)
    return lambda tensor: tensor.device.type == device_type


def has_device(device_type: str) -> bool:
    """Whether this machine has a device of that type that PyTorch can use."""
    module = getattr(torch, device_type, None)  # there is none for some
    return device_type == "cpu" or (module is not None and bool(module.is_available()))


def custom_backend() -> str:
    """The name of the out-of-tree backend, "privateuseone" unless one renamed it; no public getter (2.13)."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


def lower_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Return the lower precisions that autocast on `device_type` can use.

    A CUDA device is not asked: `torch.cuda.is_bf16_supported` is true of every one (2.11 to 2.15), and would make a
    tensor on an old one, which must not happen while a graph is captured.
    """
    backend = getattr(torch, device_type, None) if device_type == custom_backend() else None
    ask = getattr(backend, "get_amp_supported_dtype", None)  # PyTorch's protocol for such backends
    return (torch.bfloat16, torch.float16) if ask is None else tuple(ask())


def copy_to_host_async(number: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy of `number` in memory of the CPU, and the event after which it is there; None if it is there now.

    The copy goes to pinned memory, which PyTorch keeps and uses again, so that the host does not wait.
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
    """The stream to which this thread sends its work on a device; None where there is none, as on the CPU."""
    if device.type not in ("cuda", "xpu"):
        return None
    return torch.get_device_module(device).current_stream(device)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether work on the tensor's device is being captured into a CUDA graph instead of run."""
    return tensor.is_cuda and is_capturing()


def is_capturing() -> bool:
    """Whether work on the current CUDA device is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
