"""Validation of a region's arguments.

Invariants:

- each error says what was passed, what is allowed and what to write;
- a value that was accepted once is not checked again.
"""

from __future__ import annotations

import warnings
from typing import Any, Final, NoReturn

import torch

from precast import _torch
from precast.errors import PrecastWarning, RegionError, RegionTypeError
from precast.policy.policy import DEVICE_TYPES
from precast.policy.values import canonical_dtype

__all__ = [
    "ACCEPTED",
    "REQUIRED",
    "check_device_type",
    "check_dtype",
    "cuda_is_usable",
    "dtype_of",
    "refuse_dtype_type",
]

REQUIRED: Final[Any] = "(required)"
ACCEPTED: Final[set[object]] = set()
"""Device types, and pairs of device type and dtype, that have been checked and accepted."""


def check_device_type(device_type: object) -> None:
    """Raise an error for a device type without autocast."""
    if isinstance(device_type, str) and device_type is not REQUIRED:
        _check_name(device_type)
        return
    if device_type is REQUIRED or isinstance(device_type, bool):
        passed = "no device type"
    elif isinstance(device_type, torch.device):
        passed = f"a torch.device (write {device_type.type!r})"
    else:
        passed = f"a {type(device_type).__name__}"
    raise RegionTypeError(
        f'autocast got {passed}. Its first argument is the device type as text: autocast("cuda", dtype=torch.float16). '
        'The old torch.cuda.amp.autocast() is autocast("cuda"), torch.cpu.amp.autocast() is autocast("cpu").'
    )


def _check_name(device_type: str) -> None:
    names = tuple(dict.fromkeys((*DEVICE_TYPES, _torch.custom_backend())))
    if device_type in names:
        ACCEPTED.add(device_type)
        return
    hint = (
        f"; write {device_type.partition(':')[0]!r}, without an index" if ":" in device_type else ""
    )
    raise RegionError(
        f"{device_type!r} is not a device type that PyTorch has autocast for{hint}. "
        f"Allowed: {', '.join(names)}."
    )


def cuda_is_usable() -> bool:
    """Return True if CUDA is available; otherwise warn, as PyTorch does, and the region is disabled."""
    if not torch.cuda.amp.common.amp_definitely_not_available():
        return True
    warnings.warn(
        'CUDA is not available: this autocast region does nothing. Use autocast("cpu") for tensors on the CPU.',
        PrecastWarning,
        stacklevel=3,
    )
    return False


def check_dtype(dtype: object, device_type: str) -> None:
    """Raise an error for a value that is no dtype, or for a dtype to which autocast cannot cast on that device type."""
    if not isinstance(dtype, torch.dtype):
        refuse_dtype_type(dtype)
    allowed = _torch.lower_dtypes(device_type)
    if dtype not in allowed:
        raise RegionError(
            f"dtype is {dtype}, which {device_type} has no autocast for. Allowed: {', '.join(map(str, allowed))}. "
            "For full precision write enabled=False."
        )
    ACCEPTED.add((device_type, dtype))


def dtype_of(dtype: Any) -> Any:
    """Return the `torch.dtype` with a name such as "bf16", and all other values unchanged."""
    name = None if isinstance(dtype, torch.dtype) else canonical_dtype(dtype)
    return dtype if name is None else getattr(torch, name)


def refuse_dtype_type(dtype: object) -> NoReturn:
    """Raise the error for a value that is no dtype."""
    raise RegionTypeError(
        f"dtype is {dtype!r}, of type {type(dtype).__name__}. Allowed: torch.bfloat16, torch.float16, their names, "
        "or None."
    )
