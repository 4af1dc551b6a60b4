"""The table `[measured]` of a policy file: where and how the policy was measured.

Invariants:
    - The table has no effect on results: a policy's rules and fingerprint are the same without it.
    - A policy that was measured on another machine, or with another release of PyTorch, warns once in a process.
    - Properties of this machine that cannot be determined are not compared.
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

__all__ = ["Measured", "Value", "check_measured", "machine_name", "this_machine", "warn_if_moved"]

Value = str | int | float | bool
Measured = Mapping[str, Value]

_COMPARED: Final = ("device", "machine", "torch")
_warned: Final[set[tuple[str, frozenset[tuple[str, Value]]]]] = set()


def this_machine(device_type: str) -> dict[str, Value]:
    """Return the entries for this machine: the device type, the machine's name and PyTorch's version."""
    return {
        "device": device_type,
        "machine": machine_name(device_type),
        "torch": str(torch.__version__),
    }


@functools.cache
def machine_name(device_type: str) -> str:
    """Return the name of the processor, or of the current accelerator; empty if it cannot be determined."""
    if device_type != "cpu":
        with contextlib.suppress(
            Exception
        ):  # the error for an absent device depends on the backend
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


def check_measured(value: object, where: str) -> Measured:
    """Return the table as an immutable mapping, or raise a `PolicyError`."""
    example = '{"machine": "Xeon", "torch": "2.13.0"}'
    table = check_mapping(value, where, example)
    for key, entry in table.items():
        check_text(key, f"{where}: a key")
        if isinstance(entry, str):
            check_text(entry, f"{where} {key}")
        elif not isinstance(entry, int | float):
            raise PolicyError(
                f"{where} {key} is {shown(entry)}; it must be text, a number, true or false; write a date as text: "
                'date = "2026-11-23"'
            )
        if key in _COMPARED and not isinstance(entry, str):
            raise PolicyError(f"{where} {key} is {shown(entry)}; it must be text")
    return MappingProxyType(dict(table))


def warn_if_moved(name: str, measured: Measured, device_type: str) -> None:
    """Warn, once for each policy, if it was measured on another machine or release of PyTorch."""
    policy = name, frozenset(measured.items())
    if not measured or policy in _warned:
        return
    differing = _differing(measured, this_machine(device_type))
    if differing:
        _warned.add(policy)
        listed = "; ".join(f"{key}: {old}, here {new}" for key, old, new in differing)
        warnings.warn(
            f"The policy {name!r} was measured elsewhere ({listed}). Its rules are valid here, but its time, memory "
            "and accuracy may differ. Measure again here, or remove [measured] from the file.",
            PrecastWarning,
            stacklevel=2,
        )


def _differing(measured: Measured, machine: Measured) -> list[tuple[str, Value, Value]]:
    """Return the compared keys that differ, with both values. Of PyTorch's version, major and minor are compared."""
    device = measured.get("device", machine["device"])
    keys = _COMPARED if device == machine["device"] else ("device", "torch")
    return [
        (key, measured[key], machine[key])
        for key in keys
        if measured.get(key)
        and machine[key]
        and _comparable(key, measured[key]) != _comparable(key, machine[key])
    ]


def _comparable(key: str, value: Value) -> object:
    if key == "torch":
        with contextlib.suppress(ValueError):
            return torch_versions.parse(str(value))
    return value
