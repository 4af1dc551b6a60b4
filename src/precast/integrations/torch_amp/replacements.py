"""Replacements of PyTorch's scalers and decorators of custom functions while precast is installed.

Invariants:

- calling the replacement of a scaler's class creates a `precast.GradScaler`, which is a subclass of PyTorch's;
- an instance of PyTorch's class is an instance of its replacement, so checks in libraries hold for both;
- a subclass of a replacement is a subclass of PyTorch's class, because it uses that class's private parts;
- the old spellings warn as PyTorch's do, with the same text, and at the program's line that calls them;
- a pickle of a PyTorch scaler loads as a `precast.GradScaler`; a PyTorch scaler is pickled as without precast, and
  loads in a process without precast.
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
    """The metaclass of the replacements of PyTorch's scalers."""

    original: type
    old_device: str | None

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **named: Any
    ) -> type:
        if "original" in namespace:
            return super().__new__(cls, name, bases, namespace)
        bases = tuple(b.original if isinstance(b, _Replacement) else b for b in bases)
        return type(name, bases, namespace, **named)  # a subclass in a program

    def __call__(cls, *args: Any, **kwargs: Any) -> GradScaler:
        if cls.old_device is None:
            return GradScaler(*args, **kwargs)
        _warn_old(vars(cls.original)["__init__"])
        return GradScaler(cls.old_device, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.original, GradScaler))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.original, GradScaler))


def _scaler(original: type, old_device: str | None = None) -> Any:
    namespace = {
        "__module__": GradScaler.__module__,
        "__doc__": GradScaler.__doc__,
        "__signature__": inspect.signature(original),
        "__new__": _new,
        "__setstate__": _restore_state,
        "original": original,
        "old_device": old_device,
    }
    return _Replacement("GradScaler", (GradScaler,), namespace)


def _new(cls: type, *_: Any, **__: Any) -> Any:  # noqa: ARG001 -- a pickle of PyTorch's scaler names a replacement
    return object.__new__(GradScaler)


def _restore_state(self: Any, state: dict[str, Any]) -> None:
    """Call `GradScaler.__setstate__` for an object created by a pickle of an old protocol."""
    self.__class__ = GradScaler
    self.__setstate__(state)


class _PickledName:
    """Pickles as a name that is looked up when the pickle is loaded; precast need not be installed then."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (self._place,)


class _ScalerConstructor:
    """Creates an empty object of one of PyTorch's classes; pickles without a reference to precast."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __call__(self) -> Any:
        return object.__new__(self._kind)

    def __reduce__(self) -> tuple[Any, ...]:
        place = f"{self._kind.__module__}:{self._kind.__qualname__}"
        return functools.partial, (object.__new__, _PickledName(place))


def _reduced(scaler: Any) -> tuple[Any, ...]:
    return _ScalerConstructor(type(scaler)), (), scaler.__getstate__()


def let_be_pickled(installed: bool) -> None:
    """Let PyTorch's scalers be pickled while their names refer to replacements, if `installed`."""
    for replacement in _REPLACEMENTS:
        if installed:
            copyreg.pickle(replacement.original, _reduced)
        elif copyreg.dispatch_table.get(replacement.original) is _reduced:
            del copyreg.dispatch_table[replacement.original]


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
    """Warn with the text of PyTorch's deprecated function."""
    text = getattr(function, "__deprecated__", None)
    if text is not None:
        warnings.warn(text, FutureWarning, stacklevel=callers_level())


_Places = list[tuple[Any, dict[str, Any]]]


def _under(*modules: Any, **replacements: Any) -> _Places:
    return [(module, replacements) for module in modules]


_REPLACEMENTS: Final = (
    _scaler(torch.amp.GradScaler),
    _scaler(torch.cuda.amp.grad_scaler.GradScaler, "cuda"),
    _scaler(torch.cpu.amp.grad_scaler.GradScaler, "cpu"),
)
SCALERS: Final[_Places] = [
    *_under(torch, torch.amp, torch.amp.grad_scaler, GradScaler=_REPLACEMENTS[0]),
    *_under(torch.cuda.amp, torch.cuda.amp.grad_scaler, GradScaler=_REPLACEMENTS[1]),
    *_under(torch.cpu.amp, torch.cpu.amp.grad_scaler, GradScaler=_REPLACEMENTS[2]),
]
"""The modules with a scaler of PyTorch's; for each, its name there and the replacement."""

_OLD: Final = {"custom_fwd": _old_custom_fwd, "custom_bwd": _old_custom_bwd}
FUNCTIONS: Final[_Places] = [
    *_under(torch.amp, torch.amp.autocast_mode, custom_fwd=custom_fwd, custom_bwd=custom_bwd),
    *_under(torch.cuda.amp, torch.cuda.amp.autocast_mode, **_OLD),
]
"""The same for the decorators of custom functions."""
