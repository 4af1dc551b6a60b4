"""What each thread keeps about calls of modules with rules: what each replaced, and where one switched autocast off.

Invariants:

- a call that ends restores what it replaced; one that is abandoned, by Ctrl-C, is forgotten when the outermost region
  ends, when the next call begins, or when its plan ends;
- autocast that a rule switched off may be switched on again by a rule inside; what the program switched off may not;
- what a checkpoint runs again in backward finds what it found first.
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
from precast.autocast_mode.region import current, put_in_force, refuse_export
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
    "switched_off",
]

Off = Mapping[str, int]
"""Device type -> how many regions were open when a rule switched autocast off there: in a later region it is not that
rule that keeps it off."""


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
    """What runs until the call ends: the caller of the hook, or a step of a generator."""
    off: Off
    """What was off before."""
    replaced: list[Replaced]

    def replace(
        self, device: str, enabled: bool, dtype: torch.dtype, bound: BoundPolicy | None
    ) -> None:
        """Has other flags, and a policy unless it is None, in force on one device type."""
        if _torch.function_modes():
            _write_down((device, dtype, enabled, None), bound)
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


class _Thread(threading.local):
    """This thread's calls, outermost first, and what their rules have switched off."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.off: Off = {}


_thread: Final = _Thread()


def begin(module: nn.Module, caller: FrameType | None) -> Call:
    """A new call, which runs as long as `caller` does."""
    _torch.wrap_checkpoints()
    forget_abandoned(caller)
    call = Call(module, caller, _thread.off, [])
    _thread.calls.append(call)
    return call


def end(module: nn.Module) -> Call | None:
    """The innermost call, ended; None where it is not of `module`, as a hook before `begin` raised."""
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
    return call


def forget_abandoned(frame: FrameType | None = None) -> None:
    """Forgets calls that no longer run. `frame` is what runs now; None for the caller's."""
    while _thread.calls and not _is_running(_thread.calls[-1], frame or inspect.currentframe()):
        _forget(_thread.calls.pop())


registration.cache_clear_hooks.append(forget_abandoned)


def innermost() -> nn.Module | None:
    """The innermost module with a rule that runs in this thread."""
    return _thread.calls[-1].module if _thread.calls else None


def off_here() -> Off:
    """What rules have switched off in this thread."""
    return _thread.off


def switched_off(device_types: list[str]) -> None:
    """Notes that a rule keeps autocast off on these device types, until its call ends."""
    if device_types:
        _set_off({**_thread.off, **dict.fromkeys(device_types, _torch.autocast_nesting())})


def acts(device: str, off: Off) -> bool:
    """Whether rules act on a device type now: where autocast is on, or off because a rule said so."""
    return torch.is_autocast_enabled(device) or _is_off_by_rule(device, off)


def _write_down(region: tuple[Any, ...], bound: BoundPolicy | None) -> None:
    """Tells an exporter that runs the program of this call, as of a region: it does not look at flags."""
    if _torch.export_region(region) and bound is not None and bound.meaning is not None:
        _torch.export_region(None)
        refuse_export(bound.policy)


def _is_off_by_rule(device: str, off: Off) -> bool:
    return device in off and off[device] == _torch.autocast_nesting()


def _set_off(off: Off) -> None:
    """Writes it into the guard id too: compiled functions look at flags, which do not say who switched them off."""
    for device in _thread.off.keys() ^ off.keys():
        guard_id = regions.guard_id.after(f"{device} off by a rule", "" if device in off else None)
        write_guard_id(guard_id, regions.written_guard_id)
    _thread.off = off


def _forget(call: Call) -> None:
    """Forgets a call that never ended: PyTorch calls no hook where Ctrl-C ends a module.

    What regions restore is right by now, for the one around the call has ended. PyTorch's own restore no policy.
    """
    _set_off(call.off)
    if not regions.records:
        for replaced in reversed(call.replaced):
            _put_policy(replaced, None)


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
    """What a checkpoint runs again: with the policy in force here, and off where a rule had switched autocast off.

    PyTorch restores its flags, and a region of precast's what it set; of rules, neither knows.
    """
    if not _thread.calls:
        return function
    devices = {replaced.device_type for call in _thread.calls for replaced in call.replaced}
    off = [device for device in devices if _is_off_by_rule(device, _thread.off)]
    policies = [current(device) for device in devices]

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for policy in policies:
                stack.enter_context(policy)
            stack.callback(_set_off, _thread.off)
            _set_off(dict.fromkeys(off, _torch.autocast_nesting()))
            return function(*args, **kwargs)

    return again


_torch.checkpoint_wrappers.append(_again_under_rules)
