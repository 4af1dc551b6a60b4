"""The library's functions in Python, and whether this process uses them.

Invariants:

- the GIL is held during a call (`ctypes.PyDLL`); a call runs no Python code except the callback passed to `begin`;
- an exception of C++ is raised as a `PrecastError`.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from precast._torch import UNUSED_DEVICE_TYPES, all_dtypes, impl_address, isolated
from precast.errors import PrecastError
from precast.weights.native.boundary import (
    BUILT_INS,
    COMPARE,
    FUNCTIONS,
    DeviceNumber,
    DtypeNumber,
    HeldRecord,
    Owner,
    RegionPart,
)
from precast.weights.native.built_in import built_in

__all__ = ["NativeApi", "NativeEngine", "NativeHeldCopy", "native_engine"]


_PYTHON_FUNCTIONS: Final = (
    *("Py_IncRef", "Py_DecRef", "PyLong_FromLong", "PyLong_AsVoidPtr", "PyErr_SetString"),
)


class NativeApi:
    """The library's functions, by the names and with the arguments that `boundary.py` declares.

    Args:
        library: the loaded library.
        compare: compares a held copy with its parameter; called every `uses_between_checks` operations.
        uses_between_checks: the number of operations that take weights between two comparisons.
        device_types: those that policies have tables for.

    Attributes:
        operations: the library's operations, which take and return tensors.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        library: ctypes.PyDLL,
        compare: Callable[[], None],
        uses_between_checks: int,
        device_types: Iterable[str],
    ) -> None:
        for name, result, parameters in FUNCTIONS:
            function = getattr(library, f"precast_{name}")
            function.restype = result.ctypes
            function.argtypes = [kind.ctypes for kind in parameters.values()]
            setattr(self, name, function)
        for name in BUILT_INS:
            setattr(self, name, built_in(getattr(library, f"precast_{name}")))
        self.set_python_functions(*map(_address, _PYTHON_FUNCTIONS), None, PrecastError)
        self._compare = COMPARE(compare)  # C++ calls it, so it must live as long as the library
        self.begin(self._compare, uses_between_checks)
        atexit.register(self.end)
        self.operations: Any = torch.ops.precast_native
        number_of = self.operations.number_of.default
        # Otherwise a mode of the program sees the operation, and a graph records it.
        with isolated():
            for dtype in all_dtypes():
                DtypeNumber.numbers[dtype] = ctypes.c_int(number_of(dtype))
        DeviceNumber.numbers.number_of = self.device
        for device_type in (*device_types, *UNUSED_DEVICE_TYPES):
            DeviceNumber.numbers[device_type] = ctypes.c_int(self.device(device_type))
        self.set_guard_devices(*UNUSED_DEVICE_TYPES)

    def fill_record(self, index: int) -> None:
        """Fill the record of a region that the library has entered in this thread, counted from the outermost."""
        owner, entry, record = (self.open_region(index, part) for part in RegionPart)
        record.fill(owner, entry.previous, [self.open_count(index)])


class NativeHeldCopy:
    """A held copy in the library, which is passed to its functions, with the record that it shares with Python."""

    __slots__ = ("_as_parameter_", "api", "record")

    def __init__(self, api: NativeApi, parameter: Tensor, dtype: torch.dtype) -> None:
        self.api = api
        self._as_parameter_ = api.new_held(
            impl_address(parameter), dtype
        )  # the address, for ctypes
        self.record: HeldRecord = api.held_record(self).contents

    def __del__(self) -> None:
        # Objects that are freed in the same collection may still read the record: keep a copy of it.
        address, self._as_parameter_ = self._as_parameter_, 0
        self.record = HeldRecord.from_buffer_copy(self.record)
        self.record.owner = Owner.PYTHON
        self.api.free_held(address)

    def cast_of(self, parameter: Tensor, copy: Tensor) -> Tensor:
        """Return the copy as a cast of the parameter, whose gradient flows to the parameter."""
        make = self.api.operations.with_gradient.default
        cast: Tensor = make(parameter, copy, self._as_parameter_)
        return cast

    def record_samples(self, parameter: Tensor) -> None:
        """Record values of the parameter, before the copy is written."""
        self.api.record_samples(self, impl_address(parameter))

    def match_samples(self, parameter: Tensor, *, compares_all: bool) -> bool:
        """Return True if the parameter has the recorded values, all of them or the next ones."""
        return bool(self.api.match_samples(self, impl_address(parameter), compares_all))


def _address(function: str) -> int | None:
    """Return the address of a function of Python's C API."""
    return ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p).value


class NativeEngine:
    """The library of compiled kernels, once it is loaded.

    Attributes:
        api: the library's functions; None until it is loaded.
        is_used: True if regions that are entered now use it.
        leave: `api.leave`; without a library, a function that leaves no region.
    """

    __slots__ = ("api", "is_used", "leave")

    def __init__(self) -> None:
        self.api: NativeApi | None = None
        self.is_used = False
        self.leave: Callable[[object], int] = lambda _: 0

    def load(self, api: NativeApi) -> None:
        """Use the library, until the process ends."""
        self.api, self.leave = api, api.leave


native_engine = NativeEngine()
