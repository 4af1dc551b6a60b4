"""State dicts of scalers: reads those of precast, PyTorch, FSDP's `ShardedGradScaler` and Apex, and writes precast's.

A state dict has PyTorch's five numbers. Values that PyTorch has no entry for (limits that are not the defaults, an
unfinished search) are stored under ``"precast"`` with a version, if there are any.

Invariant: a state dict is read and checked completely before any of it is used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from precast._internal.callers import callers_level
from precast.errors import PrecastWarning, ScalerError
from precast.grad_scaler.settings import (
    DEFAULT_LIMITS,
    LARGEST_SCALE,
    LOW_SCALE,
    MOST_TRACKED,
    Limits,
    checked_limits,
    number_in,
    require_count,
    require_flag,
    require_number,
)

__all__ = ["ScalerState", "by_loss", "of_pytorchs", "precast_entry", "read"]

_VERSION = 1
_NUMBERS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True, slots=True)
class ScalerState:
    """The contents of a state dict."""

    attributes: dict[str, Any]
    """The scaler attributes that the state sets; `_init_scale` and `_init_growth_tracker` always."""
    searching: bool = False
    """True if the search for the first scale was not finished."""


def precast_entry(limits: Limits, searching: bool) -> dict[str, Any]:
    """Return the entry that follows PyTorch's five numbers, in a dictionary that is empty if there is none."""
    usual = asdict(DEFAULT_LIMITS)
    unusual = {name: value for name, value in asdict(limits).items() if value != usual[name]}
    if not unusual and not searching:
        return {}
    return {"precast": {"version": _VERSION, "limits": unusual, "searching": searching}}


def read(state: Mapping[str, Any], limits: Limits) -> ScalerState | None:
    """Read a state dict of any of these scalers; return None for the empty one of a disabled scaler.

    Raises:
        ScalerError: Entries are missing or have invalid values.
    """
    state = _mapping(state, "a state")
    if not state:
        return None
    is_apex = "loss_scaler0" in state or "loss_scale" in state
    scaler_state = _of_apex(state) if is_apex else _of_torch(state)
    attributes = scaler_state.attributes
    attributes["_init_scale"] = _within(
        attributes["_init_scale"], attributes.get("_limits", limits)
    )
    return scaler_state


def of_pytorchs(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a PyTorch scaler with these attributes. Its pickle stores only the attributes."""
    other = {"scale": "_init_scale", "_growth_tracker": "_init_growth_tracker"}
    return {name: attributes[other.get(name, f"_{name}")] for name in _NUMBERS}


def by_loss(state: Mapping[str, Any], losses: Iterable[str]) -> Mapping[str, Any]:
    """Return `state` with the names of losses as keys. Apex numbers its scalers in the order of the losses."""
    state = _mapping(state, "a state")
    numbered = {name: f"loss_scaler{number}" for number, name in enumerate(losses)}
    if set(state) != set(numbered.values()):
        return state
    return {name: state[key] for name, key in numbered.items()}


def _of_torch(state: Mapping[str, Any]) -> ScalerState:
    missing = [key for key in _NUMBERS if key not in state]
    if missing:
        raise ScalerError(
            f"load_state_dict() got a state without {', '.join(missing)}; it has "
            f"{', '.join(map(str, state))}. Pass the result of state_dict() of a GradScaler of "
            "PyTorch, Apex or precast; the empty one of a disabled scaler is allowed too."
        )
    attributes = {
        **_scale_and_tracker(state, "scale", "_growth_tracker"),
        "_growth_factor": require_number("growth_factor", state["growth_factor"]),
        "_backoff_factor": require_number("backoff_factor", state["backoff_factor"]),
        "_growth_interval": require_count("growth_interval", state["growth_interval"]),
    }
    own = _mapping(state.get("precast", {}), "'precast' in its state")
    version = require_count("version", own.get("version", 0), least=0) if own else 0
    if version > _VERSION:
        warnings.warn(
            f"this scaler's state was saved by a newer precast (version {version} of its "
            f"format, here {_VERSION}): only PyTorch's five numbers are loaded.",
            PrecastWarning,
            stacklevel=callers_level(),
        )
    elif own:
        attributes["_limits"] = _limits(_mapping(own.get("limits", {}), "its limits"))
        return ScalerState(attributes, require_flag("searching", own.get("searching")))
    return ScalerState(attributes)


def _limits(state: Mapping[str, Any]) -> Limits:
    """Return the defaults, updated by the limits in `state`, validated."""
    usual = asdict(DEFAULT_LIMITS)
    unknown = sorted(str(key) for key in state if key not in usual)
    if unknown:
        raise ScalerError(f"load_state_dict() got unknown limits: {', '.join(unknown)}.")
    settings = {**usual, **state}
    floor = require_number("min_scale", settings["min_scale"], below=LARGEST_SCALE)
    return checked_limits(floor, settings)


def _of_apex(state: Mapping[str, Any]) -> ScalerState:
    """Read Apex's ``amp.state_dict()``, or its entry of one loss scaler; of several loss scalers, the first."""
    scaler = _mapping(state.get("loss_scaler0", state), "'loss_scaler0' in its state")
    missing = [key for key in ("loss_scale", "unskipped") if key not in scaler]
    if missing:
        raise ScalerError(f"load_state_dict() got a state of Apex without {', '.join(missing)}.")
    return ScalerState(_scale_and_tracker(scaler, "loss_scale", "unskipped"))


def _scale_and_tracker(state: Mapping[str, Any], scale: str, tracker: str) -> dict[str, Any]:
    """Return the scale and the growth tracker, which each format names differently."""
    number = number_in(state[scale])
    if math.isnan(number) or number < 0:
        raise ScalerError(
            f"load_state_dict() got {scale}={state[scale]!r}: it must be a positive number."
        )
    good_iterations = require_count(tracker, state[tracker], 0, MOST_TRACKED)
    return {"_init_scale": number, "_init_growth_tracker": good_iterations}


def _mapping(value: Any, entry: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ScalerError(
        f"load_state_dict() got a {type(value).__name__} for {entry}: pass the dictionary that state_dict() returned."
    )


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
