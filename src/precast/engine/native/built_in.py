"""Makes a function of Python's own out of one of the library's that is called often: ctypes takes 0.4 us for each call.

Invariants:

- only what Python's stable ABI has is used, and nothing of its headers: the library does not depend on its version;
- the function in C has the signature of `METH_FASTCALL`: a module, which is null, the arguments, and their count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

__all__ = ["built_in"]

_FASTCALL: Final = 0x0080
"""`METH_FASTCALL`, in the stable ABI since Python 3.10 (Include/methodobject.h)."""


class _MethodDef(ctypes.Structure):
    """`PyMethodDef`, with the fields that the stable ABI gives it."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_definitions: Final[list[_MethodDef]] = []
"""Python reads a function's definition as long as the function lives."""
_make: Final = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_void_p] * 3)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)


def built_in(function: Any) -> Callable[..., Any]:
    """The function of Python's that calls a function of a library, which stays loaded, with the lock held."""
    address = ctypes.cast(function, ctypes.c_void_p)
    _definitions.append(_MethodDef(function.__name__.encode(), address, _FASTCALL, None))
    made: Callable[..., Any] = _make(ctypes.addressof(_definitions[-1]), None, None)
    return made
