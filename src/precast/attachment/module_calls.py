"""The calls of modules with rules that run in each thread: what each replaced, and where a rule switched autocast off.

Invariants:

- a call that ends restores what it replaced. One that Ctrl-C has ended without its hook is forgotten when the next call
  begins, when the outermost region ends, or when its plan ends;
- autocast that a rule switched off may be switched on again by a rule inside; what the program switched off may not;
- what a checkpoint runs again in backward runs under the policy and the flags that it ran under first.
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
from precast.autocast_mode.region import current, put_in_force, write_down
from precast.engine import registration
from precast.engine.thread_state import BoundPolicy, regions, thread_state, write_guard_id

__all__ = [
    "Call",
    "Off",
    "Replaced",
    "acts",
    "begin",
    "end",
    "forget_abandoned",
    "innermost",
    "off_here",
]

Off = Mapping[str, int]
"""Device type -> how many regions were open when a rule switched autocast off there. While another number of regions is
open, it is not that rule that keeps autocast off."""


class Replaced(NamedTuple):
    """What a module's rule replaced on one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    bound_policy: BoundPolicy | None
    optimizes_torchscript: bool


class Call(NamedTuple):
    """One call of a module with a rule."""

    module: nn.Module
    caller: FrameType | None
    """The frame that runs until the call ends: the caller of the hook, or a step of a generator."""
    off: Off
    """What rules had switched off before the call."""
    casts: WeightCasts | None
    """The casts of weights that were in force before the call."""
    replaced: list[Replaced]

    def replace(
        self, device: str, enabled: bool, dtype: torch.dtype, bound: BoundPolicy | None
    ) -> None:
        """Puts other flags in force on one device type, and a policy unless it is None."""
        if _torch.function_modes():
            write_down((device, dtype, enabled), None, bound)
        here = thread_state(device).state
        flags = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.replaced.append(
            Replaced(device, *flags, here.bound_policy, _torch.optimizes_torchscript())
        )
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
        if bound is not None:
            put_in_force(here, device, bound)
            if not bound.is_pytorchs:
                _torch.optimize_torchscript(False)
        if not enabled:
            _set_off({**_thread.off, device: _torch.autocast_nesting()})


class _Thread(threading.local):
    """This thread's calls, the outermost first, and what their rules have switched off."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.off: Off = {}


_thread: Final = _Thread()


def begin(module: nn.Module, caller: FrameType | None) -> Call:
    """Notes a new call, which runs as long as `caller` does."""
    _torch.wrap_checkpoints()
    forget_abandoned(caller)
    call = Call(module, caller, _thread.off, weight_casts.current(), [])
    _thread.calls.append(call)
    return call


def end(module: nn.Module) -> Call | None:
    """Ends the innermost call. None where it is of another module, because a hook raised before `begin`."""
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
    """Forgets the calls that no longer run in `frame`, or in the caller's if that is None.

    PyTorch calls no hook where Ctrl-C ends a module. What regions restore is right by then, because the region around
    the call has ended; but PyTorch's own regions restore no policy.
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
    """The innermost module with a rule that runs in this thread; None where there is none."""
    return _thread.calls[-1].module if _thread.calls else None


def off_here() -> Off:
    """Where rules have switched autocast off in this thread."""
    return _thread.off


def acts(device: str, off: Off) -> bool:
    """Whether rules act on a device type now: autocast is on there, or a rule has switched it off."""
    return torch.is_autocast_enabled(device) or _is_off_by_rule(device, off)


def _is_off_by_rule(device: str, off: Off) -> bool:
    return device in off and off[device] == _torch.autocast_nesting()


def _set_off(off: Off) -> None:
    """Writes `off` into the guard id too, as the flags that compiled functions look at do not say who changed them."""
    for device in _thread.off.keys() ^ off.keys():
        guard_id = regions.guard_id.after(f"{device} off by a rule", "" if device in off else None)
        write_guard_id(guard_id, regions.written_guard_id)
    _thread.off = off


def _put_policy(replaced: Replaced, bound: BoundPolicy | None) -> None:
    here = thread_state(replaced.device_type).state
    if here.bound_policy is not bound:
        put_in_force(here, replaced.device_type, bound)
        _torch.optimize_torchscript(replaced.optimizes_torchscript)


def _is_running(call: Call, frame: FrameType | None) -> bool:
    while frame is not None and frame is not call.caller:
        frame = frame.f_back
    return frame is not None


def _again_under_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint runs again: with the policies of now, and with autocast off where a rule has it off now.

    PyTorch restores its flags, and a region of precast restores what it set. Neither knows of rules.
    """
    if not _thread.calls:
        return function
    devices = {replaced.device_type for call in _thread.calls for replaced in call.replaced}
    off = [device for device in devices if _is_off_by_rule(device, _thread.off)]
    policies = [current(device) for device in devices]
    casts = weight_casts.current()

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for policy in policies:
                stack.enter_context(policy)
            stack.callback(_set_off, _thread.off)
            _set_off(dict.fromkeys(off, _torch.autocast_nesting()))
            stack.enter_context(weight_casts.using(casts and casts.anew()))
            return function(*args, **kwargs)

    return again


_torch.checkpoint_wrappers.append(_again_under_rules)
