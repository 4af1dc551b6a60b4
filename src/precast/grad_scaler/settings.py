"""Validation of a scaler's settings: each is in its range, or an error names it.

Invariants: nothing here reads a tensor's value; a rejected setting changes nothing.
"""

from __future__ import annotations

import math
import numbers
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from precast._internal.callers import callers_level
from precast.errors import PrecastWarning, ScalerError
from precast.policy.values import shown

__all__ = [
    "DEFAULT_LIMITS",
    "LARGEST_SCALE",
    "LOW_SCALE",
    "MOST_TRACKED",
    "Limits",
    "OnDiagnosis",
    "checked_attributes",
    "device_type_of",
    "is_usable",
    "new_scale_from",
    "number_in",
    "require_count",
    "require_number",
]

LARGEST_SCALE = torch.finfo(torch.float32).max  # the scale is a float32 tensor
LOW_SCALE = 2.0**-14
"""Float16's smallest normal number. A gradient that overflows float16 at this scale is larger than 10**9 unscaled."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # 2**-126: its inverse is still finite
_MOST = 2**63 - 1  # the largest whole number that PyTorch takes
MOST_TRACKED = 2**31 - 1
"""The largest value of the growth tracker, an int32 tensor."""

OnDiagnosis = Literal["raise", "warn", "ignore"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scale, and the limits of failure beyond which the run counts as broken.

    The default floor is 2**-48: a float16 gradient that overflows there is larger than 1.8e19, and its square exceeds
    float32, so neither a norm nor Adam could use it. The default ceiling is float32's largest number, as in PyTorch.
    The two counts are None by default: then only the rules in `precast.grad_scaler.diagnosis` apply.
    """

    min_scale: float = 2.0**-48
    max_scale: float = LARGEST_SCALE
    max_consecutive_skips: int | None = None
    max_nonfinite_losses: int | None = None
    on_diagnosis: OnDiagnosis = "raise"


DEFAULT_LIMITS = Limits()


def require_number(name: str, value: Any, above: float = 0.0, below: float = math.inf) -> float:
    """Return `value` as a float strictly between two bounds; otherwise raise an error that names `name`."""
    number = number_in(value) if isinstance(value, numbers.Real) else math.nan
    if above < number < below:
        return number
    bounds = f"above {above}" + (f" and below {below:.4g}" if below < math.inf else " and finite")
    raise ScalerError(f"{name} must be a number {bounds}; got {shown(value)}.")


def require_count(name: str, value: Any, least: int = 1, most: int = _MOST) -> int:
    """Return `value` as an int between two bounds, inclusive; otherwise raise an error that names `name`."""
    try:
        count = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError is raised by tensors
        count = least - 1
    if least <= count <= most:
        return count
    end = f" and at most 2**{most.bit_length()} - 1" if count > most else ""
    raise ScalerError(f"{name} must be a whole number, {least} or more{end}; got {shown(value)}.")


def number_in(value: Any) -> float:
    """Return a number, or a tensor of one element, as a float; NaN for any other value."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def checked_attributes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated arguments of a scaler as its attributes."""
    first = require_number("init_scale", arguments["init_scale"], below=LARGEST_SCALE)
    require_count("history", arguments["history"], least=0)
    return {
        "_init_scale": first,
        "_growth_factor": require_number("growth_factor", arguments["growth_factor"], above=1.0),
        "_backoff_factor": require_number("backoff_factor", arguments["backoff_factor"], below=1.0),
        "_growth_interval": require_count("growth_interval", arguments["growth_interval"]),
        "_limits": _checked_limits(first, arguments),
    }


def _checked_limits(init_scale: float, arguments: Mapping[str, Any]) -> Limits:
    """Return the limits for a validated `init_scale`. A limit of None is widened to include it."""
    names = "min_scale", "max_scale", "on_diagnosis"
    floor, ceiling, action = (arguments[name] for name in names)
    low, high = min(DEFAULT_LIMITS.min_scale, init_scale), LARGEST_SCALE
    if floor is not None:
        low = require_number("min_scale", floor, below=LARGEST_SCALE)
    if ceiling is not None:
        high = min(require_number("max_scale", ceiling), LARGEST_SCALE)
    for name, value in (("init_scale", init_scale), ("min_scale", low)):
        if value < _SMALLEST_SCALE:
            raise ScalerError(f"{name} must be at least 2**-126; got {arguments[name]!r}.")
    if not low <= init_scale <= high:
        raise ScalerError(
            f"init_scale must be between min_scale and max_scale, {low:g} and {high:g}; got "
            f"{init_scale:g}. Change one of the three."
        )
    if action not in get_args(OnDiagnosis):
        raise ScalerError(f"on_diagnosis must be 'raise', 'warn' or 'ignore'; got {shown(action)}.")

    def count(name: str, least: int) -> int | None:
        return None if arguments[name] is None else require_count(name, arguments[name], least)

    skips, losses = count("max_consecutive_skips", 1), count("max_nonfinite_losses", 0)
    return Limits(low, high, skips, losses, action)


def device_type_of(device: Any) -> str:
    """Return the type of a device or of its name; raise an error if PyTorch does not know the name."""
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError, ValueError) as error:
        raise ScalerError(
            f"GradScaler: unknown device {shown(device)}. Pass 'cuda', 'cpu' or another device type."
        ) from error


def is_usable(device_type: str) -> bool:
    """Return True if scaling is possible. Warn and return False for CUDA on a machine without it."""
    if device_type != "cuda" or torch.cuda.is_available() or find_spec("torch_xla"):
        return True
    warnings.warn(
        "GradScaler('cuda') is off: CUDA is not available. Write GradScaler('cpu') to scale on the "
        "CPU, or enabled=False to silence this warning.",
        PrecastWarning,
        stacklevel=callers_level(),
    )
    return False


def new_scale_from(value: Any, device_type: str, limits: Limits) -> float | Tensor:
    """Return the argument of `update` as a number or a tensor of shape ()."""
    if not isinstance(value, Tensor):
        scale = require_number("new_scale", value, below=LARGEST_SCALE)
        if limits.min_scale <= scale <= limits.max_scale:
            return scale
        raise ScalerError(
            f"new_scale must be between min_scale and max_scale, {limits.min_scale:g} and "
            f"{limits.max_scale:g}; got {scale:g}."
        )
    if value.numel() == 1 and value.device.type == device_type and not value.requires_grad:
        return value.reshape(())
    raise ScalerError(
        f"new_scale must be a number or a tensor of one element on {device_type!r} that does not "
        f"require a gradient; got shape {tuple(value.shape)} on {value.device.type!r}, "
        f"requires_grad={value.requires_grad}."
    )
