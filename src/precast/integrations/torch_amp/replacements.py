"""What replaces PyTorch's scalers and the decorators of custom functions while precast is installed.

Invariants:

- calling the replacement of a scaler's class makes a `precast.GradScaler`, which is a scaler of PyTorch's, too;
- an instance of PyTorch's class is one of its replacement, so that checks in libraries hold, whichever came first;
- a subclass of a replacement is a subclass of PyTorch's class, as it uses that class's private parts;
- the old spellings warn as PyTorch's do, in their words, and at the line of the program that calls them;
- a pickle of a scaler of PyTorch's loads as a `precast.GradScaler`; a scaler of PyTorch's is pickled as it is without
  precast, and loads as that in a process that has no precast.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import pkgutil
import warnings
from typing import Any, Final

import torch

from precast._internal.callers import callers_level
from precast.autocast_mode.custom_function import custom_bwd, custom_fwd
from precast.grad_scaler.scaler import GradScaler

__all__ = ["FUNCTIONS", "SCALERS"]


class _Replacement(type):
    """The class of classes that stand for one of PyTorch's scalers."""

    stands_for: type
    old_device: str | None

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **named: Any
    ) -> type:
        if "stands_for" in namespace:
            return super().__new__(cls, name, bases, namespace)
        bases = tuple(b.stands_for if isinstance(b, _Replacement) else b for b in bases)
        return type(name, bases, namespace, **named)  # a subclass, which a program writes

    def __call__(cls, *args: Any, **kwargs: Any) -> GradScaler:
        if cls.old_device is None:
            return GradScaler(*args, **kwargs)
        _warn_old(vars(cls.stands_for)["__init__"])
        return GradScaler(cls.old_device, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.stands_for, GradScaler))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.stands_for, GradScaler))


def _scaler(stands_for: type, old_device: str | None = None) -> Any:
    namespace = {
        "__module__": GradScaler.__module__,
        "__doc__": GradScaler.__doc__,
        "__signature__": inspect.signature(stands_for),
        "__new__": _new,
        "__setstate__": _go_on,
        "stands_for": stands_for,
        "old_device": old_device,
    }
    return _Replacement("GradScaler", (GradScaler,), namespace)


def _new(cls: type, *_: Any, **__: Any) -> Any:  # noqa: ARG001 -- a pickle of PyTorch's scaler names a replacement
    return object.__new__(GradScaler)


def _go_on(self: Any, state: dict[str, Any]) -> None:
    """As `GradScaler.__setstate__`, for an object that a pickle of an old protocol has made."""
    self.__class__ = GradScaler
    self.__setstate__(state)


class _Name:
    """Stands in a pickle for what is found at a place when that is loaded; precast need not be there then."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (self._place,)


class _Empty:
    """Makes an empty object of one of PyTorch's classes; in a pickle, of what has its name."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __call__(self) -> Any:
        return object.__new__(self._kind)

    def __reduce__(self) -> tuple[Any, ...]:
        place = f"{self._kind.__module__}:{self._kind.__qualname__}"
        return functools.partial, (object.__new__, _Name(place))


def _reduced(scaler: Any) -> tuple[Any, ...]:
    return _Empty(type(scaler)), (), scaler.__getstate__()


def let_be_pickled(installed: bool) -> None:
    """Has scalers of PyTorch's be pickled while another class has their name; `installed` says whether it has."""
    for stand_in in _STANDING:
        if installed:
            copyreg.pickle(stand_in.stands_for, _reduced)
        elif copyreg.dispatch_table.get(stand_in.stands_for) is _reduced:
            del copyreg.dispatch_table[stand_in.stands_for]


_CUSTOM_FWD, _CUSTOM_BWD = torch.cuda.amp.custom_fwd, torch.cuda.amp.custom_bwd


def _old_custom_fwd(fwd: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """`torch.cuda.amp.custom_fwd`."""
    _warn_old(_CUSTOM_FWD)
    return custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def _old_custom_bwd(bwd: Any) -> Any:
    """`torch.cuda.amp.custom_bwd`."""
    _warn_old(_CUSTOM_BWD)
    return custom_bwd(bwd, device_type="cuda")


def _warn_old(function: Any) -> None:
    """Warns as a deprecated function of PyTorch's does, in its words."""
    text = getattr(function, "__deprecated__", None)
    if text is not None:
        warnings.warn(text, FutureWarning, stacklevel=callers_level())


_Places = list[tuple[Any, dict[str, Any]]]


def _under(*modules: Any, **stand_ins: Any) -> _Places:
    return [(module, stand_ins) for module in modules]


_STANDING: Final = (
    _scaler(torch.amp.GradScaler),
    _scaler(torch.cuda.amp.grad_scaler.GradScaler, "cuda"),
    _scaler(torch.cpu.amp.grad_scaler.GradScaler, "cpu"),
)
SCALERS: Final[_Places] = [
    *_under(torch, torch.amp, torch.amp.grad_scaler, GradScaler=_STANDING[0]),
    *_under(torch.cuda.amp, torch.cuda.amp.grad_scaler, GradScaler=_STANDING[1]),
    *_under(torch.cpu.amp, torch.cpu.amp.grad_scaler, GradScaler=_STANDING[2]),
]
"""The modules with a scaler of PyTorch's, each with its name and what stands there while precast is installed."""

_OLD: Final = {"custom_fwd": _old_custom_fwd, "custom_bwd": _old_custom_bwd}
FUNCTIONS: Final[_Places] = [
    *_under(torch.amp, torch.amp.autocast_mode, custom_fwd=custom_fwd, custom_bwd=custom_bwd),
    *_under(torch.cuda.amp, torch.cuda.amp.autocast_mode, **_OLD),
]
"""The same of the decorators of custom functions."""
