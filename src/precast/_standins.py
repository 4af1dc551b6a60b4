"""What stands for PyTorch's scalers and custom function decorators while precast is installed.

Invariants:

- calling a stand-in for a scaler makes a `precast.GradScaler`, which is one of PyTorch's too;
- what is one of PyTorch's is one of the stand-in's, so checks in libraries hold whichever came first;
- a subclass of a stand-in is a subclass of PyTorch's class: such classes are written against its private parts;
- the old spellings warn as PyTorch's do.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from precast.autograd import custom_bwd, custom_fwd
from precast.scaler import GradScaler

__all__ = ["FUNCTIONS", "SCALERS"]


class _StandIn(type):
    """The class of classes that stand for one of PyTorch's scalers."""

    stands_for: type
    old_device: str | None

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any
    ) -> type:
        if not settings:
            bases = tuple(b.stands_for if isinstance(b, _StandIn) else b for b in bases)
            return type(name, bases, namespace)
        return super().__new__(cls, name, bases, namespace)

    def __init__(
        cls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        stands_for: type,
        old_device: str | None,
    ) -> None:
        super().__init__(name, bases, namespace)
        cls.stands_for, cls.old_device = stands_for, old_device
        cls.__signature__ = inspect.signature(stands_for)

    def __call__(cls, *args: Any, **kwargs: Any) -> GradScaler:
        if cls.old_device is None:
            return GradScaler(*args, **kwargs)
        _warn_old("GradScaler", cls.old_device)
        return GradScaler(cls.old_device, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.stands_for, GradScaler))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.stands_for, GradScaler))


def _scaler(stands_for: type, old_device: str | None = None) -> _StandIn:
    namespace = {"__module__": GradScaler.__module__, "__doc__": GradScaler.__doc__}
    return _StandIn(
        "GradScaler", (GradScaler,), namespace, stands_for=stands_for, old_device=old_device
    )


def _old_custom_fwd(fwd: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """`torch.cuda.amp.custom_fwd`."""
    _warn_old("custom_fwd", "cuda")
    return custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def _old_custom_bwd(bwd: Any) -> Any:
    """`torch.cuda.amp.custom_bwd`."""
    _warn_old("custom_bwd", "cuda")
    return custom_bwd(bwd, device_type="cuda")


def _warn_old(name: str, device: str) -> None:
    argument = f"{device!r}, ..." if name == "GradScaler" else f"device_type={device!r}"
    warnings.warn(
        f"`torch.{device}.amp.{name}` is deprecated. Write `torch.amp.{name}({argument})`.",
        FutureWarning,
        stacklevel=3,
    )


def _under(names: tuple[Any, ...], values: dict[str, Callable[..., Any]]) -> list[Any]:
    return [(owner, name, value) for owner in names for name, value in values.items()]


_now = _scaler(torch.amp.GradScaler)
SCALERS: Final[list[tuple[Any, str, Any]]] = [
    *_under((torch, torch.amp, torch.amp.grad_scaler), {"GradScaler": _now}),
    *_under(
        (torch.cuda.amp, torch.cuda.amp.grad_scaler),
        {"GradScaler": _scaler(torch.cuda.amp.grad_scaler.GradScaler, "cuda")},
    ),
    *_under(
        (torch.cpu.amp, torch.cpu.amp.grad_scaler),
        {"GradScaler": _scaler(torch.cpu.amp.grad_scaler.GradScaler, "cpu")},
    ),
]
"""Where each name of a scaler of PyTorch's is (module, name), and what stands there while precast is installed."""
FUNCTIONS: Final[list[tuple[Any, str, Any]]] = [
    *_under(
        (torch.amp, torch.amp.autocast_mode),
        {"custom_fwd": custom_fwd, "custom_bwd": custom_bwd},
    ),
    *_under(
        (torch.cuda.amp, torch.cuda.amp.autocast_mode),
        {"custom_fwd": _old_custom_fwd, "custom_bwd": _old_custom_bwd},
    ),
]
"""The same of the decorators of custom functions."""
