"""The boundary between Python and the library: structures, enumerations and functions, declared here alone.

`boundary.h` is made from this file by `python -m tools.native_boundary`: its prototypes, enumerations and structures,
with assertions on sizes and offsets.

Invariants:

- a held copy has a record even without the library, so that its fields are read in one place;
- Python takes a copy back before it changes the record; kernels change only the records of copies lent to them.
"""

from __future__ import annotations

import ctypes
import enum
import operator
import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

import torch

__all__ = [
    "BUILT_INS",
    "COMPARE",
    "FUNCTIONS",
    "SHARED_BY_THREADS",
    "Action",
    "DeviceNumber",
    "DtypeNumber",
    "Eviction",
    "Function",
    "HeldRecord",
    "Mixture",
    "Owner",
    "RegionExit",
    "RegionPart",
    "ThreadKind",
    "ThreadNumbers",
    "ValueType",
]


class Action(enum.IntEnum):
    """The action of an operation's kernel under a policy."""

    PASS = 0
    """PyTorch's kernel implements the policy."""
    DELEGATE = 1
    """PyTorch's kernel does, after weights are replaced by casts."""
    REFERENCE = 2
    """The Python kernel runs."""
    PROMOTE = 3
    """The operation runs in the widest of its dtypes if these are float32 and the lower precision, else in Python."""
    PRODUCT = 4
    """The operation runs in float32 on factors rounded to the lower precision, if its dtypes are these two."""


class Mixture(enum.IntEnum):
    """Selects the calls of an operation on mixed floating dtypes that are not left to PyTorch's kernel."""

    ANY = 0
    """Calls with several dtypes, which PyTorch may refuse."""
    REFUSED = 1
    """The same, and PyTorch refuses all of them."""
    FLOAT64 = 2
    """Calls with float64 and another dtype: PyTorch's kernel casts all others to one dtype."""
    FOREIGN = 3
    """Calls with a dtype other than float32 and the region's: PyTorch's kernel casts these two to the wider one."""


class Eviction(enum.IntEnum):
    """Selects the entries of a held copy that an eviction removes."""

    ALL = 0
    PERSISTENT = 1
    """Those without a gradient, which outlive regions."""
    PERSISTENT_AND_OLDER = 2
    """The persistent ones, and those of other versions of the parameter."""


class Owner(enum.IntEnum):
    """The owner of a held copy, who may use and rewrite it."""

    PYTHON = 0
    LENT = 1
    """The kernels of one thread."""
    IN_USE = 2
    """The kernels of one thread, during a use."""


class ThreadKind(enum.IntEnum):
    """The kind of a thread."""

    UNKNOWN = 0
    """Not registered: its operations run on the reference."""
    PYTHON = 1
    """It drops its casts when its regions end."""
    PYTORCH = 2
    """It stores no casts."""


class RegionPart(enum.IntEnum):
    """An object of a region that the library has entered."""

    OWNER = 0
    ENTRY = 1
    RECORD = 2


class RegionExit(enum.IntEnum):
    """The result of `leave`."""

    ELSEWHERE = 0
    """The region was not entered by the library, or its state has changed: nothing was done."""
    ONE_OF_SEVERAL = 1
    """Other regions that the library has entered are open."""
    OUTERMOST = 2
    """It was the outermost of all, PyTorch's included, so all casts were dropped."""
    OTHERS_ELSEWHERE = 3
    """The open regions were entered elsewhere."""


class HeldRecord(ctypes.Structure):
    """The shared fields of one held copy."""

    _fields_ = (
        ("version", ctypes.c_int64),
        ("pointer", ctypes.c_int64),
        ("writes", ctypes.c_int64),
        ("received", ctypes.c_int64),
        ("received_at_write", ctypes.c_int64),
        ("had_gradient_at_write", ctypes.c_int64),
        ("has_optimizer", ctypes.c_int64),
        ("thread", ctypes.c_uint64),
        ("owner", ctypes.c_uint8),
    )

    version: int
    """The parameter's version counter at the last write; -1 for a copy that must be rewritten."""
    pointer: int
    """The parameter's data pointer at the last write."""
    writes: int
    """The number of writes."""
    received: int
    """The number of gradients that were computed through casts of the copy."""
    received_at_write: int
    """`received` at the last write."""
    had_gradient_at_write: int
    """1 if the parameter had a gradient at the last write."""
    has_optimizer: int
    """1 if an observed optimizer steps the parameter."""
    thread: int
    """The `ident` of the thread whose kernels the copy is lent to."""
    owner: int
    """A value of `Owner`."""

    def __init__(self) -> None:
        super().__init__(version=-1, pointer=-1)


class ThreadNumbers(ctypes.Structure):
    """Numbers of a thread that Python accesses in place."""

    _fields_ = (
        ("guard_id", ctypes.c_int64),
        ("written_guard_id", ctypes.c_int64),
        ("policies_inherited", ctypes.c_int64),
        ("open", ctypes.c_int64),
        ("attempts", ctypes.c_int64),
    )

    guard_id: int
    """The number of the guard id of the policies in force."""
    written_guard_id: int
    """The number of the guard id in the flags; 0 while they are being changed."""
    policies_inherited: int
    """1 if PyTorch's own threads have this thread's policies."""
    open: int
    """The number of open regions without a record in Python."""
    attempts: int
    """The number of operations that are being tried on mixed dtypes, with autocast on inside them."""


SHARED_BY_THREADS: Final = {
    "version": "int64_t",
    "received": "int64_t",
    "has_optimizer": "int64_t",
    "owner": "Owner",
}
"""The fields of `HeldRecord` that are atomic in C++, with their types there."""

BUILT_INS: Final = ("enter", "leave", "has_leaves")
"""The functions with the signature of `METH_FASTCALL` (`built_in.py`)."""

COMPARE: Final = ctypes.CFUNCTYPE(None)
"""The type of the callback that compares a held copy with its parameter."""

_DECLARATIONS: Final = """
void set_python_functions(pointer increment_references, pointer decrement_references, pointer new_integer, \
pointer integer_as_pointer, pointer set_error, object none, object error_type)
void begin(callback compare, int uses_between_checks)
void end()
int device(text type)
void record_torch_kernel(text name, text overload, text key)
void register(text name, text overload, text key, device device, int64 number, int takes_weights, \
int mixture)
void deregister(int64 number)
pointer policy(int promotes, bytes actions, int64 count)
void put_in_force(device device, pointer policy, int64 number)
void install(device device, pointer policy, int64 number)
void watch(int is_watched)
void register_thread(int kind)
void set_guard_devices(device low, device high)
pointer snapshot(device device)
void free_snapshot(pointer snapshot)
void allow_fast_entries(int64 registration)
number bound_number(device device)
numbers thread_numbers()
pointer fast_entry(pointer before)
void free_fast_entry(pointer fast_entry)
object open_region(int64 index, int part)
int open_count(int64 index)
object take_record()
int any_open()
void clear()
int64 count()
void record_casts()
int64 recorded_casts(int are_alive)
int has(tensor source, dtype dtype)
void invalidate(tensor source, dtype dtype)
void hold(pointer source, int is_held)
pointer new_held(tensor source, dtype dtype)
void free_held(pointer held)
record held_record(pointer held)
void keep(pointer held, tensor source, tensor cast, int has_gradient, int64 version, int64 address)
void evict(pointer held, int which, int64 version)
void record_samples(pointer held, tensor parameter)
int match_samples(pointer held, tensor parameter, int compares_all)
void lend(pointer held, tensor parameter, tensor copy)
int take_back(pointer held)
int step_held(pointer held)
void set_cast_per_region(pointer source, int is_cast_per_region)
int is_shared(tensor tensor)
void free_temporaries()
void free_spare_memory()
int64 spare_bytes()
void measure(pointer data, int64 count, int is_bfloat16, pointer factors, pointer signs, pointer result)
"""


class _Text:
    # No function of Python's, in which Ctrl-C would become an error of ctypes.
    from_param = operator.methodcaller("encode")


class DtypeNumber:
    """A dtype, passed as PyTorch's number of it; None is passed as -1."""

    numbers: ClassVar[dict[torch.dtype | None, ctypes.c_int]] = {None: ctypes.c_int(-1)}
    """Those of dtypes are added when the library is loaded."""
    from_param = numbers.__getitem__  # as in `_Text`


class _DeviceNumbers(dict[str, ctypes.c_int]):
    number_of: Callable[[str], int]

    def __missing__(self, device_type: str) -> ctypes.c_int:
        number = self[device_type] = ctypes.c_int(self.number_of(device_type))
        return number


class DeviceNumber:
    """A device type, passed as PyTorch's number of it."""

    numbers: ClassVar = _DeviceNumbers()
    """Its `number_of` is set when the library is loaded."""
    from_param = numbers.__getitem__


class ValueType(NamedTuple):
    """A type of an argument or a result, in ctypes and in C++."""

    ctypes: Any
    cpp: str


_TYPES: Final = {  # a `tensor` is passed as the address of its TensorImpl, and must live until the call returns
    "void": ValueType(None, "void"),
    "int": ValueType(ctypes.c_int, "int"),
    "int64": ValueType(ctypes.c_int64, "int64_t"),
    "text": ValueType(_Text, "const char*"),
    "bytes": ValueType(ctypes.c_char_p, "const char*"),
    "device": ValueType(DeviceNumber, "int"),
    "dtype": ValueType(DtypeNumber, "int"),
    "tensor": ValueType(ctypes.c_void_p, "void*"),
    "pointer": ValueType(ctypes.c_void_p, "void*"),
    "number": ValueType(ctypes.POINTER(ctypes.c_int64), "void*"),
    "numbers": ValueType(ctypes.POINTER(ThreadNumbers), "void*"),
    "record": ValueType(ctypes.POINTER(HeldRecord), "void*"),
    "object": ValueType(ctypes.py_object, "void*"),
    "callback": ValueType(COMPARE, "Callback"),
}


class Function(NamedTuple):
    """A function of the library, called `precast_<name>` there."""

    name: str
    result: ValueType
    parameters: dict[str, ValueType]

    @classmethod
    def of(cls, declaration: str) -> Function:
        """Parse a line of the declarations."""
        match = re.fullmatch(r"(\w+) (\w+)\((.*)\)", declaration)
        assert match is not None, declaration
        result, name, parameters = match.groups()
        pairs = [part.split(" ") for part in parameters.split(", ") if part]
        return cls(name, _TYPES[result], {each: _TYPES[kind] for kind, each in pairs})


FUNCTIONS: Final = tuple(map(Function.of, _DECLARATIONS.strip().split("\n")))
"""All functions but `BUILT_INS`."""
