"""How a device multiplies matrices in 8 bits: by a kernel, by an emulation, or not at all.

Invariants:

- `support_of` alone decides;
- a device of which nothing is known is emulated, which is right anywhere and fast nowhere.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from precast import _torch

__all__ = ["Support", "Way", "pretended", "reason_impossible", "support_of"]

_FIRST_CAPABILITY: Final = (8, 9)
"""The first compute capability of NVIDIA's with products of float8 matrices (Ada)."""
_AMD: Final = ("gfx942", "gfx950", "gfx1200", "gfx1201")
"""AMD's architectures for which PyTorch has the kernel (2.13)."""
_WITHOUT_NEGATIVE_ZERO: Final = ("gfx940", "gfx941", "gfx942")
"""Those that compute in the formats `float8_e4m3fnuz` and `float8_e5m2fnuz`."""
_IMPOSSIBLE: Final = {
    "mps": "it has neither float8 nor float64 numbers",
}


class Way(enum.Enum):
    """How a product is computed."""

    KERNEL = "kernel"
    EMULATED = "emulated"


class Support(NamedTuple):
    """How a device multiplies matrices in 8 bits.

    Attributes:
        way: by a kernel, or emulated.
        reason: a few words on why.
        without_negative_zero: whether its formats are those that end in `fnuz`.
    """

    way: Way
    reason: str
    without_negative_zero: bool = False


_pretended: list[Support] = []


def support_of(device: torch.device) -> Support:
    """How products of float8 matrices on a device are computed."""
    if _pretended:
        return _pretended[-1]
    if device.type != "cuda":
        return _of_type(device.type)
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


def reason_impossible(device_type: str) -> str | None:
    """Why tensors on a device type cannot be in 8 bits; None where they can."""
    return _IMPOSSIBLE.get(device_type)


@contextmanager
def pretended(support: Support) -> Iterator[None]:
    """Takes every device for one with this support; for tests, as the CPU of PyTorch 2.13 can call the kernel."""
    _pretended.append(support)
    try:
        yield
    finally:
        _pretended.remove(support)


@functools.cache
def _of_type(device_type: str) -> Support:
    return Support(Way.EMULATED, f"{device_type} has no kernel for 8 bits")


@functools.cache
def _of_gpu(index: int) -> Support:
    vendor, architecture = _torch.float8_architecture(torch.device("cuda", index))
    if vendor == "amd":
        if architecture in _AMD:
            has_fnuz = architecture in _WITHOUT_NEGATIVE_ZERO
            return Support(Way.KERNEL, f"AMD {architecture}", has_fnuz)
        return Support(Way.EMULATED, f"AMD {architecture} has no kernel for 8 bits")
    major, _, minor = architecture.partition(".")
    if (int(major), int(minor)) >= _FIRST_CAPABILITY:
        return Support(Way.KERNEL, f"compute capability {architecture}")
    return Support(
        Way.EMULATED, f"compute capability {architecture} is below 8.9, the first with 8 bits"
    )
