"""What a policy says of the measurements that it comes from: the table `[measured]` of a file.

Invariants:
    - It changes no result: a policy's rules and fingerprint are the same with and without it.
    - A policy that was measured on another machine, or with another release of PyTorch, warns once in a process.
    - What cannot be found out about this machine is not compared.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from precast._internal import torch_versions
from precast.errors import PolicyError, PrecastWarning
from precast.policy.values import check_mapping, check_text, shown

__all__ = ["Measured", "Value", "check_measured", "here", "machine_name", "warn_elsewhere"]

Value = str | int | float | bool
Measured = Mapping[str, Value]

_COMPARED: Final = ("device", "machine", "torch")
_told: Final[set[tuple[str, frozenset[tuple[str, Value]]]]] = set()


def here(device_type: str) -> dict[str, Value]:
    """What `[measured]` says of this machine: `device`, its type; `machine`, its name; `torch`, the version."""
    return {
        "device": device_type,
        "machine": machine_name(device_type),
        "torch": str(torch.__version__),
    }


@functools.cache
def machine_name(device_type: str) -> str:
    """The name of the processor, or of the accelerator that is current; empty where it is not known."""
    if device_type != "cpu":
        with contextlib.suppress(
            Exception
        ):  # any: what an absent device raises is its backend's to choose
            return str(getattr(torch, device_type).get_device_name())
        return ""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def check_measured(given: object, where: str) -> Measured:
    """Returns what was measured, as a mapping that nobody can change.

    Raises:
        PolicyError: no mapping, a key that is no text, or a value that is neither text nor a number nor a boolean.
    """
    example = '{"machine": "Xeon", "torch": "2.13.0"}'
    found = check_mapping(given, where, example)
    for key, value in found.items():
        check_text(key, f"{where}: a key")
        if isinstance(value, str):
            check_text(value, f"{where} {key}")
        elif not isinstance(value, int | float):
            raise PolicyError(
                f"{where} {key} is {shown(value)}; it must be text, a number, true or false; write a date as text: "
                'date = "2026-11-23"'
            )
        if key in _COMPARED and not isinstance(value, str):
            raise PolicyError(f"{where} {key} is {shown(value)}; it must be text")
    return MappingProxyType(dict(found))


def warn_elsewhere(name: str, measured: Measured, device_type: str) -> None:
    """Warns, once for each policy, where it is used elsewhere than it was measured.

    Args:
        name: the policy's.
        measured: what it says.
        device_type: that of the region that it is used in.
    """
    known = name, frozenset(measured.items())
    if not measured or known in _told:
        return
    differing = _differing(measured, here(device_type))
    if differing:
        _told.add(known)
        named = "; ".join(f"{key}: {was}, here {now}" for key, was, now in differing)
        warnings.warn(
            f"The policy {name!r} was measured elsewhere ({named}). Its rules hold here too, but what was measured of "
            "time, memory and accuracy may not. Measure again here, or take [measured] out of the file.",
            PrecastWarning,
            stacklevel=2,
        )


def _differing(measured: Measured, now: Measured) -> list[tuple[str, Value, Value]]:
    """What differs of the keys that are compared, with both values; of a version of PyTorch two numbers count."""
    device = measured.get("device", now["device"])
    keys = _COMPARED if device == now["device"] else ("device", "torch")
    return [
        (key, measured[key], now[key])
        for key in keys
        if measured.get(key) and now[key] and _same(key, measured[key]) != _same(key, now[key])
    ]


def _same(key: str, value: Value) -> object:
    if key == "torch":
        with contextlib.suppress(ValueError):
            return torch_versions.parse(str(value))
    return value
