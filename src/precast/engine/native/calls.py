"""What Python asks of the library: one method for each C function of `api.cpp`.

Invariants:

- a tensor is passed as the address of its TensorImpl, and lives as long as the call;
- the interpreter's lock is held during a call (`ctypes.PyDLL`); the only Python code that a call runs is what `begin`
  was given.
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
from precast.engine.native.built_in import built_in
from precast.errors import PrecastError
from precast.weights.held_record import HeldRecord, Owner
from precast.weights.native_copies import Evicted, Use

__all__ = ["ONE_OF_SEVERAL", "OUTERMOST", "Calls", "Held"]

OUTERMOST, ONE_OF_SEVERAL = 2, 1
"""What `leave` says: the thread's outermost region has ended, or others that it has entered are open."""

_Compare: Final = ctypes.CFUNCTYPE(None)
_IsCapturing: Final = ctypes.CFUNCTYPE(ctypes.c_int)
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "error": (ctypes.c_char_p, []),
    "begin": (None, [_Compare, _IsCapturing, ctypes.c_int]),
    "end": (None, []),
    "device": (ctypes.c_int, [ctypes.c_char_p]),
    "take_native": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p]),
    "register": (
        ctypes.c_int64,
        [
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_int,
        ],
    ),
    "deregister": (None, [ctypes.c_int64]),
    "policy": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p, ctypes.c_int64]),
    "put_in_force": (None, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]),
    "install": (None, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]),
    "watch": (None, [ctypes.c_int]),
    "this_thread": (None, [ctypes.c_int]),
    "attempts": (ctypes.c_int, [ctypes.c_int]),
    "guard_types": (None, [ctypes.c_int, ctypes.c_int]),
    "snapshot": (ctypes.c_void_p, [ctypes.c_int]),
    "free_snapshot": (None, [ctypes.c_void_p]),
    "references": (None, [*[ctypes.c_void_p] * 4, ctypes.py_object]),
    "allow_shortcuts": (None, [ctypes.c_int64]),
    "number": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_int]),
    "shortcut": (ctypes.c_void_p, [ctypes.c_void_p]),
    "free_shortcut": (None, [ctypes.c_void_p]),
    "open_region": (ctypes.py_object, [ctypes.c_int64, ctypes.c_int]),
    "open_count": (ctypes.c_int, [ctypes.c_int64]),
    "take_record": (ctypes.py_object, []),
    "any_open": (ctypes.c_int, []),
    "clear": (None, []),
    "count": (ctypes.c_int64, []),
    "record_casts": (None, []),
    "recorded_casts": (ctypes.c_int64, [ctypes.c_int]),
    "promoted_at_once": (ctypes.c_int64, []),
    "has": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
    "invalidate": (None, [ctypes.c_void_p, ctypes.c_int]),
    "hold": (None, [ctypes.c_void_p, ctypes.c_int]),
    "keep": (
        ctypes.c_int64,
        [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
        ],
    ),
    "new_held": (ctypes.c_void_p, [ctypes.c_int64]),
    "free_held": (None, [ctypes.c_void_p]),
    "held_record": (ctypes.c_void_p, [ctypes.c_void_p]),
    "lend": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "take_back": (ctypes.c_int, [ctypes.c_void_p]),
    "step_held": (ctypes.c_int, [ctypes.c_void_p]),
    "leave_to_regions": (None, [ctypes.c_void_p, ctypes.c_int]),
    "is_shared": (ctypes.c_int, [ctypes.c_void_p]),
    "free_temporaries": (None, []),
    "free_spare_memory": (None, []),
    "spare_bytes": (ctypes.c_int64, []),
    "evict": (
        None,
        [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int64],
    ),
}


class Held:
    """One held copy as the library knows it, and its memory for the parameter's gradient.

    Args:
        functions: the library's functions by name.
        operations: those that give tensors.
        number: the held copy's.
    """

    __slots__ = ("_address", "_functions", "_operations", "record")

    def __init__(self, functions: dict[str, Any], operations: Any, number: int) -> None:
        self._functions, self._operations = functions, operations
        self._address = int(functions["new_held"](number))
        self.record = HeldRecord.from_address(functions["held_record"](self._address))

    def __del__(self) -> None:
        # Of what ends together, others may end later and still ask: they get what it was.
        address, self._address = self._address, 0
        self.record = HeldRecord.from_buffer_copy(self.record)
        self.record.owner = Owner.PYTHON
        self._functions["free_held"](address)

    def cast_of(self, parameter: Tensor, copy: Tensor) -> Tensor:
        """The copy as a cast of the parameter, which gives it its gradient."""
        cast: Tensor = self._operations.with_gradient.default(parameter, copy, self._address)
        return cast

    def lend(self, parameter: Tensor, copy: Tensor) -> None:
        """Lets this thread's kernels use the copy and renew it, from now on."""
        self._functions["lend"](self._address, impl_address(parameter), impl_address(copy))

    def step(self) -> bool:
        """Takes a lent copy out of all caches, and has it renewed at its next use; False where it is not lent."""
        return bool(self._address and self._functions["step_held"](self._address))

    def take_back(self) -> bool:
        """Ends that; False where kernels are using it at this moment."""
        return not self._address or bool(self._functions["take_back"](self._address))

    def is_shared(self, copy: Tensor) -> bool:
        """Whether another tensor uses the memory of the copy."""
        return bool(self._functions["is_shared"](impl_address(copy)))


class Calls:
    """The library's functions, with the arguments that Python has.

    Args:
        library: the loaded library.
        compare: compares a held copy with its parameter; called every `uses_between_checks` operations.
        is_capturing: whether a CUDA graph is being captured.
        uses_between_checks: how many operations that take weights run between two comparisons.
    """

    def __init__(
        self,
        library: ctypes.PyDLL,
        compare: Callable[[], None],
        is_capturing: Callable[[], bool],
        uses_between_checks: int,
    ) -> None:
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"precast_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        # These objects are what C++ calls: they live as long as it may.
        self._callbacks = _Compare(compare), _IsCapturing(is_capturing)
        self._functions["begin"](*self._callbacks, uses_between_checks)
        atexit.register(self._functions["end"])
        python = map(_address, ("Py_IncRef", "Py_DecRef", "PyLong_FromLong", "PyLong_AsVoidPtr"))
        self._functions["references"](*python, None)
        self.put_in_force: Callable[[int, int, int], None] = self._functions["put_in_force"]
        self.install: Callable[[int, int, int], None] = self._functions["install"]
        self.allow_shortcuts: Callable[[int], None] = self._functions["allow_shortcuts"]
        self.shortcut: Callable[[int], int] = self._functions["shortcut"]
        self.enter: Callable[[int, object, object, object], int] = built_in(library.precast_enter)
        self.leave: Callable[[object], int] = built_in(library.precast_leave)
        self._has_leaves: Callable[[], int] = built_in(library.precast_has_leaves)
        self._open_region: Callable[[int, int], Any] = self._functions["open_region"]
        self.take_record: Callable[[], Any] = self._functions["take_record"]
        self.any_open: Callable[[], int] = self._functions["any_open"]
        self.free_snapshot: Callable[[int], None] = self._functions["free_snapshot"]
        self.free_shortcut: Callable[[int], None] = self._functions["free_shortcut"]
        self.clear: Callable[[], None] = self._functions["clear"]
        self.attempts: Callable[[int], int] = self._functions["attempts"]
        self.watch: Callable[[bool], None] = self._functions["watch"]
        self.this_thread: Callable[[int], None] = self._functions["this_thread"]
        self.deregister: Callable[[int], None] = self._functions["deregister"]
        self._operations: Any = torch.ops.precast_native
        number_of = self._operations.number_of.default
        with isolated():  # a mode of the program would see the operation, and a graph contain it
            self._dtypes = {dtype: int(number_of(dtype)) for dtype in all_dtypes()}
        self._functions["guard_types"](*map(self.device, UNUSED_DEVICE_TYPES))

    @cache  # noqa: B019 -- one object for the process
    def device(self, device_type: str) -> int:
        """PyTorch's number of a device type."""
        return int(self._functions["device"](device_type.encode()))

    def dtype(self, dtype: torch.dtype) -> int:
        """Return PyTorch's number of a dtype."""
        return self._dtypes[dtype]

    def snapshot(self, device_type: str) -> int:
        """All that a region changes in this thread on a device type, as it is now; to be freed."""
        return int(self._functions["snapshot"](self.device(device_type)))

    def bound_number(self, device_type: str) -> ctypes.c_int64:
        """The number of the bound policy that this thread has in force on a device type, as memory."""
        address = self._functions["number"](self.device(device_type), 0)
        return ctypes.c_int64.from_address(address)

    def thread_numbers(self) -> Iterator[ctypes.c_int64]:
        """This thread's `guard_id`, `written_guard_id`, `lends` and `open` of `native/state.h`, as memory."""
        for which in range(4):
            yield ctypes.c_int64.from_address(self._functions["number"](-1, which))

    def fill_record(self, index: int) -> None:
        """Fills the record of a region that the library has entered in this thread, counted from the outermost."""
        owner, shortcut, record = (self._open_region(index, which) for which in range(3))
        record.fill(owner, shortcut.found, [self._functions["open_count"](index)])

    def take_native(self, name: str, overload: str, key: str) -> None:
        """Notes the kernel that an operation has at an autocast key now: PyTorch's own."""
        self._check(self._functions["take_native"](name.encode(), overload.encode(), key.encode()))

    def register(
        self,
        name: str,
        overload: str,
        key: str,
        *,
        device_type: str,
        number: int,
        takes_weights: bool,
        keeps_autocast_on: bool,
    ) -> None:
        """Puts a compiled kernel above the Python kernel that an operation has at an autocast key now."""
        self._check(
            self._functions["register"](
                name.encode(),
                overload.encode(),
                key.encode(),
                self.device(device_type),
                number,
                takes_weights,
                keeps_autocast_on,
            )
        )

    def policy(self, *, promotes: bool, actions: bytes) -> int:
        """What each operation's kernel does, by its number; policies that say the same are one."""
        return int(self._functions["policy"](promotes, actions, len(actions)))

    def copy_of(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of a leaf for this region, which is made if need be."""
        copy: Tensor = self._operations.copy_of.default(source, dtype)
        return copy

    def find(self, source: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of a leaf for this region, if there is one that stands for it."""
        if not self._functions["has"](impl_address(source), self.dtype(dtype)):
            return None
        copy: Tensor | None = self._operations.find.default(source, dtype)
        return copy

    def invalidate(self, sources: Iterable[Tensor], dtype: torch.dtype | None) -> None:
        """Makes the copies of these leaves, in one dtype or in all, out of date, whatever version counters say."""
        if not self._has_leaves():
            return
        number = -1 if dtype is None else self.dtype(dtype)
        for source in sources:
            self._functions["invalidate"](impl_address(source), number)

    def keep(
        self, source: Tensor, cast: Tensor, *, use: Use, held: int, version: int, pointer: int
    ) -> None:
        """Keeps what stands for the held copy of this number, as its source was when it was copied."""
        self._check(
            self._functions["keep"](
                impl_address(source),
                impl_address(cast),
                self.dtype(cast.dtype),
                use,
                held,
                version,
                pointer,
            )
        )

    def evict(
        self, source: int, dtype: torch.dtype, held: int, which: Evicted, version: int
    ) -> None:
        """Drops what stands for the held copy of this number, in all threads."""
        self._functions["evict"](source, self.dtype(dtype), held, which, version)

    def new_held(self, number: int) -> Held:
        """What kernels are to know of the held copy of this number; it ends with the object."""
        return Held(self._functions, self._operations, number)

    def leave_to_regions(self, source: int, is_left: bool) -> None:
        """Says whether each region casts a held parameter as if it were not held, where its gradient is recorded."""
        self._functions["leave_to_regions"](source, is_left)

    def free_temporaries(self) -> None:
        """Gives back the memory that gradients of several parameters take in turns."""
        self._functions["free_temporaries"]()

    def hold(self, source: int, is_held: bool) -> None:
        """Says whether a parameter, given by the address of its TensorImpl, is held."""
        self._functions["hold"](source, is_held)

    def count(self) -> int:
        """How many copies this thread has, those that outlive regions too."""
        return int(self._functions["count"]())

    def free_spare_memory(self) -> None:
        """Gives back the memory that waits for the copies of the next region, in all threads."""
        self._functions["free_spare_memory"]()

    def spare_bytes(self) -> int:
        """How much memory waits for the copies of the next region, in all threads; for tests."""
        return int(self._functions["spare_bytes"]())

    def record_casts(self) -> None:
        """Notes the casts of weights that are made from now on, in all threads; for tests."""
        self._functions["record_casts"]()

    def recorded_casts(self) -> tuple[int, int]:
        """How many there were, and how many of them are not freed."""
        return tuple(self._functions["recorded_casts"](alive) for alive in (False, True))

    def promoted_at_once(self) -> int:
        """How many operations of this thread were promoted without asking PyTorch first; for tests."""
        return int(self._functions["promoted_at_once"]())

    def _check(self, status: int) -> None:
        if status < 0:
            said = self._functions["error"]().decode()
            raise PrecastError(f"The native engine refused a call: {said}")


def _address(function: str) -> int | None:
    """The address of a function of Python's C API."""
    return ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p).value
