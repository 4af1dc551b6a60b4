"""State dicts of scalers: reads those of precast, PyTorch and FSDP's `ShardedGradScaler`.

A state dict has PyTorch's five numbers, and ``"searching"`` while the search for the first scale is not finished.

Invariant: a state dict is read and checked completely before any of it is used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from precast._internal.callers import callers_level
from precast.errors import PrecastWarning, ScalerError
from precast.grad_scaler.settings import (
    LOW_SCALE,
    MOST_TRACKED,
    Limits,
    number_in,
    require_count,
    require_number,
)

__all__ = ["SEARCHING", "of_pytorchs", "read"]

SEARCHING = "searching"
"""The entry of a state whose search for the first scale is not finished."""
_NUMBERS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def read(state: Mapping[str, Any], limits: Limits) -> tuple[dict[str, Any], bool] | None:
    """Read a state dict of any of these scalers; return None for the empty one of a disabled scaler.

    Returns:
        The attributes of the scaler that the state sets, and True if the search for the first scale was not finished.

    Raises:
        ScalerError: Entries are missing or have invalid values.
    """
    if not isinstance(state, Mapping):
        raise ScalerError(
            f"load_state_dict() got a {type(state).__name__}: pass the dictionary that state_dict() returned."
        )
    if not state:
        return None
    missing = [key for key in _NUMBERS if key not in state]
    if missing:
        raise ScalerError(
            f"load_state_dict() got a state without {', '.join(missing)}; it has "
            f"{', '.join(map(str, state))}. Pass the result of state_dict() of a GradScaler of "
            "PyTorch or precast; the empty one of a disabled scaler is allowed too."
        )
    scale = number_in(state["scale"])
    if math.isnan(scale) or scale < 0:
        raise ScalerError(
            f"load_state_dict() got scale={state['scale']!r}: it must be a positive number."
        )
    attributes = {
        "_init_growth_tracker": require_count(
            "_growth_tracker", state["_growth_tracker"], 0, MOST_TRACKED
        ),
        "_growth_factor": require_number("growth_factor", state["growth_factor"]),
        "_backoff_factor": require_number("backoff_factor", state["backoff_factor"]),
        "_growth_interval": require_count("growth_interval", state["growth_interval"]),
        "_init_scale": _within(scale, limits),
    }
    return attributes, state.get(SEARCHING) is True


def of_pytorchs(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a PyTorch scaler with these attributes. Its pickle stores only the attributes."""
    other = {"scale": "_init_scale", "_growth_tracker": "_init_growth_tracker"}
    return {name: attributes[other.get(name, f"_{name}")] for name in _NUMBERS}


def _within(scale: float, limits: Limits) -> float:
    """Return `scale` clamped to the limits. A scale below them is raised at least to `LOW_SCALE`."""
    if limits.min_scale <= scale <= limits.max_scale:
        return scale
    moved = min(max(scale, limits.min_scale, LOW_SCALE), limits.max_scale)
    where, cause = "above max_scale", ""
    if scale < limits.min_scale:
        where = "below min_scale"
        cause = " Many skipped steps lead to a scale this low: the saved weights may hold NaN."
    warnings.warn(
        f"the scale in the state is {scale:g}, {where}: {moved:g} is used.{cause}",
        PrecastWarning,
        stacklevel=callers_level(),
    )
    return moved
