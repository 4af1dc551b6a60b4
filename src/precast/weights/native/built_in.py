"""Built-in functions from C functions that are called often, because ctypes takes 0.4 us per call.

Invariants:

- only Python's stable ABI is used, and no header, so the library is independent of Python's version;
- the C function has the signature of `METH_FASTCALL`: a module, which is null, the arguments, and their count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

__all__ = ["built_in"]

_FASTCALL: Final = 0x0080
"""`METH_FASTCALL`, in the stable ABI since Python 3.10 (Include/methodobject.h)."""


class _MethodDef(ctypes.Structure):
    """`PyMethodDef` of the stable ABI."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_definitions: Final[list[_MethodDef]] = []
"""Python reads a function's definition until the function is freed."""
_make: Final = ctypes.PYFUNCTYPE(ctypes.py_object, *[ctypes.c_void_p] * 3)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)


def built_in(function: Any) -> Callable[..., Any]:
    """Return a built-in function that calls a function of a library, which must stay loaded, with the GIL held."""
    address = ctypes.cast(function, ctypes.c_void_p)
    _definitions.append(_MethodDef(function.__name__.encode(), address, _FASTCALL, None))
    result: Callable[..., Any] = _make(ctypes.addressof(_definitions[-1]), None, None)
    return result
