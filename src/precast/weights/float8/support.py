"""Support for 8-bit matrix products by device: a kernel, an emulation, or none.

Invariants:

- only `support_of` chooses among them;
- the product is emulated on unknown devices. The emulation is correct everywhere, and slow.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

__all__ = ["ProductMethod", "Support", "override_support", "reason_unsupported", "support_of"]

_FIRST_CAPABILITY: Final = (8, 9)
"""The first compute capability of NVIDIA's GPUs with float8 matrix products (Ada)."""
_AMD_WITH_KERNEL: Final = ("gfx942", "gfx950", "gfx1200", "gfx1201")
"""AMD architectures for which PyTorch has the kernel (2.13)."""
_WITHOUT_NEGATIVE_ZERO: Final = ("gfx940", "gfx941", "gfx942")
"""AMD architectures with the formats `float8_e4m3fnuz` and `float8_e5m2fnuz`."""
_UNSUPPORTED: Final = {"mps": "it has neither float8 nor float64 numbers"}


class ProductMethod(enum.Enum):
    """The implementation of a float8 product."""

    KERNEL = "kernel"
    EMULATED = "emulated"


class Support(NamedTuple):
    """The implementation of 8-bit matrix products on a device.

    Attributes:
        method: the kernel, or its emulation.
        reason: a few words for reports.
        without_negative_zero: True if the device has the `fnuz` formats.
    """

    method: ProductMethod
    reason: str
    without_negative_zero: bool = False


_overrides: list[Support] = []


def support_of(device: torch.device) -> Support:
    """Return the implementation of float8 matrix products on a device."""
    if _overrides:
        return _overrides[-1]
    if device.type != "cuda":
        return _of_type(device.type)
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


def reason_unsupported(device_type: str) -> str | None:
    """Return the reason why a device type has no 8-bit tensors; None if it has."""
    return _UNSUPPORTED.get(device_type)


@contextmanager
def override_support(support: Support) -> Iterator[None]:
    """Make `support_of` return this support for every device; for tests: CPU builds can call the kernel (2.13)."""
    _overrides.append(support)
    try:
        yield
    finally:
        _overrides.remove(support)


@functools.cache
def _of_type(device_type: str) -> Support:
    return Support(ProductMethod.EMULATED, f"{device_type} has no kernel for 8 bits")


@functools.cache
def _of_gpu(index: int) -> Support:
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
        if architecture in _AMD_WITH_KERNEL:
            has_fnuz = architecture in _WITHOUT_NEGATIVE_ZERO
            return Support(ProductMethod.KERNEL, f"AMD {architecture}", has_fnuz)
        return Support(ProductMethod.EMULATED, f"AMD {architecture} has no kernel for 8 bits")
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) >= _FIRST_CAPABILITY:
        return Support(ProductMethod.KERNEL, f"compute capability {major}.{minor}")
    return Support(
        ProductMethod.EMULATED,
        f"compute capability {major}.{minor} is below 8.9, the first with 8 bits",
    )
