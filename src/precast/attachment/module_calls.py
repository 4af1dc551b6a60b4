"""The running calls of modules with rules in each thread, with the state that each call replaced.

Invariants:

- the end of a call restores the state that it replaced. A call that Ctrl-C ended, without its hook, is dropped when the
  next call begins, the outermost region ends, or its plan ends;
- if a rule disabled autocast, a rule inside may enable it again; if the program disabled it, it stays disabled;
- a checkpoint's rerun in backward has the policy and the flags of the first run.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from precast import _torch
from precast.attachment import weight_casts
from precast.attachment.weight_casts import WeightCasts
from precast.autocast_mode.region import current_precision, put_in_force, record_for_export
from precast.engine import registration
from precast.engine.thread_state import (
    BoundPolicy,
    RegionRecord,
    present_state,
    regions,
    thread_state,
    write_guard_id,
)

__all__ = [
    "DisabledDevices",
    "ModuleCall",
    "begin",
    "disabled_devices",
    "end",
    "forget_abandoned",
    "innermost",
    "rule_applies",
]

DisabledDevices = Mapping[str, int]
"""Maps a device type to the number of open regions when a rule disabled autocast. With another number of open regions,
this rule is not the reason that autocast is off."""


class ModuleCall(NamedTuple):
    """One call of a module with a rule."""

    module: nn.Module
    caller: FrameType | None
    """A frame that exists until the call ends: the caller of the hook, or a step of a generator."""
    off: DisabledDevices
    """The devices on which rules had disabled autocast before the call."""
    casts: WeightCasts | None
    """The casts of weights that were in force before the call."""
    replaced: list[RegionRecord]
    """The state that the rule replaced, by device type."""

    def replace(
        self, device: str, enabled: bool, dtype: torch.dtype, bound: BoundPolicy | None
    ) -> None:
        """Set the flags of a device type, and the policy unless it is None."""
        if _torch.function_modes():
            record_for_export((device, dtype, enabled), None, bound)
        state = thread_state(device).state
        record = RegionRecord()
        record.fill(self.module, present_state(device), [])
        self.replaced.append(record)
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
        if bound is not None:
            put_in_force(state, device, bound)
            if not bound.matches_torch:
                _torch.optimize_torchscript(False)
        if not enabled:
            _set_off({**_thread.off, device: _torch.autocast_nesting()})


class _ThreadCalls(threading.local):
    """This thread's calls, outermost first, and the device types on which their rules disabled autocast."""

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []
        self.off: DisabledDevices = {}


_thread: Final = _ThreadCalls()


def begin(module: nn.Module, caller: FrameType | None) -> ModuleCall:
    """Record the beginning of a call, which ends before `caller` does."""
    _torch.checkpoints.begin()
    forget_abandoned(caller)
    call = ModuleCall(module, caller, _thread.off, weight_casts.current(), [])
    _thread.calls.append(call)
    return call


def end(module: nn.Module) -> ModuleCall | None:
    """End the innermost call. Return None if it is of another module, because a hook failed before `begin`."""
    if not _thread.calls or _thread.calls[-1].module is not module:
        return None
    call = _thread.calls.pop()
    for replaced in reversed(call.replaced):
        device = replaced.device_type
        if _torch.function_modes():
            _torch.export_region(None)
        torch.set_autocast_enabled(device, replaced.enabled)
        torch.set_autocast_dtype(device, replaced.dtype)
        _put_policy(replaced, replaced.bound_policy)
    _set_off(call.off)
    weight_casts.put(call.casts)
    return call


def forget_abandoned(frame: FrameType | None = None) -> None:
    """Drop the calls that no longer run in `frame`, by default that of the caller.

    PyTorch calls no hook if Ctrl-C ends a module. The region around the call has then restored the flags, but a region
    of PyTorch restores no policy.
    """
    while _thread.calls and not _is_running(_thread.calls[-1], frame or inspect.currentframe()):
        call = _thread.calls.pop()
        _set_off(call.off)
        weight_casts.put(call.casts)
        if not regions.is_open:
            for replaced in reversed(call.replaced):
                _put_policy(replaced, None)


registration.cache_clear_hooks.append(forget_abandoned)


def innermost() -> nn.Module | None:
    """Return the innermost running module with a rule in this thread; None if there is none."""
    return _thread.calls[-1].module if _thread.calls else None


def disabled_devices() -> DisabledDevices:
    """Return the device types on which rules have disabled autocast in this thread."""
    return _thread.off


def rule_applies(device: str, off: DisabledDevices) -> bool:
    """Return True if rules apply on a device type: autocast is on, or a rule has disabled it."""
    return torch.is_autocast_enabled(device) or _is_off_by_rule(device, off)


def _is_off_by_rule(device: str, off: DisabledDevices) -> bool:
    return device in off and off[device] == _torch.autocast_nesting()


def _set_off(off: DisabledDevices) -> None:
    """Set the disabled devices, and the guard id: compiled functions cannot see from the flags that a rule set them."""
    for device in _thread.off.keys() ^ off.keys():
        guard_id = regions.guard_id.with_policy(
            f"{device} off by a rule", "" if device in off else None
        )
        write_guard_id(guard_id, regions.written_guard_id)
    _thread.off = off


def _put_policy(replaced: RegionRecord, bound: BoundPolicy | None) -> None:
    state = thread_state(replaced.device_type).state
    if state.bound_policy is not bound:
        put_in_force(state, replaced.device_type, bound)
        _torch.optimize_torchscript(replaced.optimizes_torchscript)


def _is_running(call: ModuleCall, frame: FrameType | None) -> bool:
    while frame is not None and frame is not call.caller:
        frame = frame.f_back
    return frame is not None


def _rerun_under_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of a checkpoint so that its rerun has the current policies and disabled devices.

    PyTorch restores its flags, and a region of precast restores its own state. Neither handles rules.
    """
    if not _thread.calls:
        return function
    devices = {replaced.device_type for call in _thread.calls for replaced in call.replaced}
    off = [device for device in devices if _is_off_by_rule(device, _thread.off)]
    policies = [current_precision(device) for device in devices]
    casts = weight_casts.current()

    def rerun(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for policy in policies:
                stack.enter_context(policy)
            stack.callback(_set_off, _thread.off)
            _set_off(dict.fromkeys(off, _torch.autocast_nesting()))
            stack.enter_context(weight_casts.using(casts and casts.without_casts()))
            return function(*args, **kwargs)

    return rerun


_torch.checkpoint_wrappers.append(_rerun_under_rules)
