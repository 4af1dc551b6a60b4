"""The library's functions in Python: one method for each C function.

Invariants:

- a tensor is passed as the address of its TensorImpl, and must live until the call returns;
- the GIL is held during a call (`ctypes.PyDLL`); a call runs no Python code except the callbacks passed to `begin`;
- an exception of C++ is raised as a `PrecastError`.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from precast._torch import UNUSED_DEVICE_TYPES, all_dtypes, impl_address, isolated
from precast.errors import PrecastError
from precast.weights.native.boundary import (
    COMPARE,
    FUNCTIONS,
    Eviction,
    HeldRecord,
    Mixture,
    Owner,
    RegionPart,
    ThreadKind,
    ThreadNumber,
)
from precast.weights.native.built_in import built_in

__all__ = ["NativeApi", "NativeHeldCopy"]


_PYTHON_FUNCTIONS: Final = (
    *("Py_IncRef", "Py_DecRef", "PyLong_FromLong", "PyLong_AsVoidPtr", "PyErr_SetString"),
)


class NativeHeldCopy:
    """A held copy in the library, with its record and its memory for the parameter's gradient.

    Args:
        functions: the library's functions by name.
        operations: the library's operations, which return tensors.
        source: the address of the parameter's TensorImpl.
        dtype: the library's number of the copy's dtype.
    """

    __slots__ = ("_address", "_functions", "_operations", "record")

    def __init__(self, functions: dict[str, Any], operations: Any, source: int, dtype: int) -> None:
        self._functions, self._operations = functions, operations
        self._address = int(functions["new_held"](source, dtype))
        self.record = HeldRecord.from_address(functions["held_record"](self._address))

    def __del__(self) -> None:
        # Objects that are freed in the same collection may still read the record: keep a copy of it.
        address, self._address = self._address, 0
        self.record = HeldRecord.from_buffer_copy(self.record)
        self.record.owner = Owner.PYTHON
        self._functions["free_held"](address)

    def cast_of(self, parameter: Tensor, copy: Tensor) -> Tensor:
        """Return the copy as a cast of the parameter, whose gradient flows to the parameter."""
        cast: Tensor = self._operations.with_gradient.default(parameter, copy, self._address)
        return cast

    def keep(
        self, parameter: Tensor, cast: Tensor, *, has_gradient: bool, version: int, pointer: int
    ) -> None:
        """Add a cast of the copy, written at this version and address of the parameter, to this thread's table."""
        addresses = impl_address(parameter), impl_address(cast)
        self._functions["keep"](self._address, *addresses, has_gradient, version, pointer)

    def evict(self, which: Eviction, version: int) -> None:
        """Remove the casts of the copy in all threads."""
        self._functions["evict"](self._address, which, version)

    def record_samples(self, parameter: Tensor) -> None:
        """Record values of the parameter, before the copy is written."""
        self._functions["record_samples"](self._address, impl_address(parameter))

    def match_samples(self, parameter: Tensor, *, compares_all: bool) -> bool:
        """Return True if the parameter has the recorded values, all of them or the next ones."""
        address = impl_address(parameter)
        return bool(self._functions["match_samples"](self._address, address, compares_all))

    def lend(self, parameter: Tensor, copy: Tensor) -> None:
        """Let this thread's kernels use and update the copy from now on."""
        self._functions["lend"](self._address, impl_address(parameter), impl_address(copy))

    def step(self) -> bool:
        """Evict a lent copy and make its next use rewrite it; return False if it is not lent."""
        return bool(self._address and self._functions["step_held"](self._address))

    def take_back(self) -> bool:
        """End `lend`; return False while a kernel is using the copy."""
        return not self._address or bool(self._functions["take_back"](self._address))

    def is_shared(self, copy: Tensor) -> bool:
        """Return True if another tensor uses the memory of the copy."""
        return bool(self._functions["is_shared"](impl_address(copy)))


class NativeApi:
    """The library's functions, with arguments of Python types.

    Args:
        library: the loaded library.
        compare: compares a held copy with its parameter; called every `uses_between_checks` operations.
        uses_between_checks: the number of operations that take weights between two comparisons.
    """

    def __init__(
        self, library: ctypes.PyDLL, compare: Callable[[], None], uses_between_checks: int
    ) -> None:
        self._functions: dict[str, Any] = {}
        for name, result, parameters in FUNCTIONS:
            function = getattr(library, f"precast_{name}")
            function.restype = result.ctypes
            function.argtypes = [kind.ctypes for kind in parameters.values()]
            self._functions[name] = function
        python = map(_address, _PYTHON_FUNCTIONS)
        self._functions["set_python_functions"](*python, None, PrecastError)
        self._compare = COMPARE(compare)  # C++ calls it, so it must live as long as the library
        self._functions["begin"](self._compare, uses_between_checks)
        atexit.register(self._functions["end"])
        self.put_in_force: Callable[[int, int, int], None] = self._functions["put_in_force"]
        self.install: Callable[[int, int, int], None] = self._functions["install"]
        self.allow_fast_entries: Callable[[int], None] = self._functions["allow_fast_entries"]
        self.fast_entry: Callable[[int], int] = self._functions["fast_entry"]
        self.enter: Callable[[int, object, object, object], int] = built_in(library.precast_enter)
        self.leave: Callable[[object], int] = built_in(library.precast_leave)
        self._has_leaves: Callable[[], int] = built_in(library.precast_has_leaves)
        self._open_region: Callable[[int, int], Any] = self._functions["open_region"]
        self.take_record: Callable[[], Any] = self._functions["take_record"]
        self.any_open: Callable[[], int] = self._functions["any_open"]
        self.free_snapshot: Callable[[int], None] = self._functions["free_snapshot"]
        self.free_fast_entry: Callable[[int], None] = self._functions["free_fast_entry"]
        self.clear: Callable[[], None] = self._functions["clear"]
        self.watch: Callable[[bool], None] = self._functions["watch"]
        self.register_thread: Callable[[ThreadKind], None] = self._functions["register_thread"]
        self.deregister: Callable[[int], None] = self._functions["deregister"]
        self._operations: Any = torch.ops.precast_native
        number_of = self._operations.number_of.default
        with (
            isolated()
        ):  # otherwise a mode of the program sees the operation, and a graph records it
            self._dtypes = {dtype: int(number_of(dtype)) for dtype in all_dtypes()}
        self._functions["set_guard_devices"](*map(self.device, UNUSED_DEVICE_TYPES))

    @cache  # noqa: B019 -- one object for the process
    def device(self, device_type: str) -> int:
        """Return PyTorch's number of a device type."""
        return int(self._functions["device"](device_type.encode()))

    def dtype(self, dtype: torch.dtype) -> int:
        """Return PyTorch's number of a dtype."""
        return self._dtypes[dtype]

    def snapshot(self, device_type: str) -> int:
        """Return a snapshot of this thread's state on a device type, to be freed by `free_snapshot`."""
        return int(self._functions["snapshot"](self.device(device_type)))

    def bound_number(self, device_type: str) -> ctypes.c_int64:
        """Return the shared memory of the number of the bound policy in force on a device type in this thread."""
        address = self._functions["bound_number"](self.device(device_type))
        return ctypes.c_int64.from_address(address)

    def thread_numbers(self) -> Iterator[ctypes.c_int64]:
        """Yield the shared memory of the numbers of this thread, in the order of `ThreadNumber`."""
        for which in ThreadNumber:
            yield ctypes.c_int64.from_address(self._functions["thread_number"](which))

    def fill_record(self, index: int) -> None:
        """Fill the record of a region that the library has entered in this thread, counted from the outermost."""
        owner, entry, record = (self._open_region(index, part) for part in RegionPart)
        record.fill(owner, entry.previous, [self._functions["open_count"](index)])

    def record_torch_kernel(self, name: str, overload: str, key: str) -> None:
        """Record the present kernel of an operation at an autocast key as PyTorch's own."""
        self._functions["record_torch_kernel"](name.encode(), overload.encode(), key.encode())

    def register(
        self,
        name: str,
        overload: str,
        key: str,
        *,
        device_type: str,
        number: int,
        takes_weights: bool,
        mixture: Mixture,
    ) -> None:
        """Register a compiled kernel above the present Python kernel of an operation at an autocast key."""
        self._functions["register"](
            name.encode(),
            overload.encode(),
            key.encode(),
            self.device(device_type),
            number,
            takes_weights,
            mixture,
        )

    def policy(self, *, promotes: bool, actions: bytes) -> int:
        """Return the policy with these actions by operation number; equal policies are one object."""
        return int(self._functions["policy"](promotes, actions, len(actions)))

    def copy_of(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the copy of a leaf for this region, cached or new."""
        copy: Tensor = self._operations.copy_of.default(source, dtype)
        return copy

    def find(self, source: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the valid copy of a leaf for this region, if any."""
        if not self._functions["has"](impl_address(source), self.dtype(dtype)):
            return None
        copy: Tensor | None = self._operations.find.default(source, dtype)
        return copy

    def invalidate(self, sources: Iterable[Tensor], dtype: torch.dtype | None) -> None:
        """Make the copies of these leaves stale, in one dtype or in all, regardless of version counters."""
        if not self._has_leaves():
            return
        number = -1 if dtype is None else self.dtype(dtype)
        for source in sources:
            self._functions["invalidate"](impl_address(source), number)

    def new_held(self, source: int, dtype: torch.dtype) -> NativeHeldCopy:
        """Return a new held copy of a parameter, identified by the address of its TensorImpl."""
        return NativeHeldCopy(self._functions, self._operations, source, self.dtype(dtype))

    def set_cast_per_region(self, source: int, is_cast_per_region: bool) -> None:
        """Set whether kernels cast a held parameter once per region where its gradient is recorded."""
        self._functions["set_cast_per_region"](source, is_cast_per_region)

    def free_temporaries(self) -> None:
        """Free the memory that the gradients of several parameters share."""
        self._functions["free_temporaries"]()

    def hold(self, source: int, is_held: bool) -> None:
        """Set whether a parameter, identified by the address of its TensorImpl, is held."""
        self._functions["hold"](source, is_held)

    def count(self) -> int:
        """Return the number of copies in this thread, held ones included."""
        return int(self._functions["count"]())

    def free_spare_memory(self) -> None:
        """Free the spare memory of all threads."""
        self._functions["free_spare_memory"]()

    def spare_bytes(self) -> int:
        """Return the bytes of spare memory of all threads; for tests."""
        return int(self._functions["spare_bytes"]())

    def measure(self, values: Tensor, factors: Tensor, signs: Tensor, result: Tensor) -> None:
        """Write the measurement of contiguous float32 or bfloat16 values on the CPU into `result`."""
        tables = factors.data_ptr(), signs.data_ptr(), result.data_ptr()
        is_bfloat16 = values.dtype is torch.bfloat16
        self._functions["measure"](values.data_ptr(), values.numel(), is_bfloat16, *tables)

    def record_casts(self) -> None:
        """Record the casts of weights from now on, in all threads; for tests."""
        self._functions["record_casts"]()

    def recorded_casts(self) -> tuple[int, int]:
        """Return the number of recorded casts, and of those that are alive."""
        return tuple(self._functions["recorded_casts"](alive) for alive in (False, True))


def _address(function: str) -> int | None:
    """Return the address of a function of Python's C API."""
    return ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p).value
