"""The dispatcher: autocast keys, the kernels behind them, and the registered operators.

Invariants:

- operators have the dispatcher's names: "aten::softmax.int";
- a kernel returned by this file is called as ``kernel(keyset, *args, **kwargs)``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = [
    "AutocastOff",
    "Kernel",
    "OpOverload",
    "autocast_key",
    "call_below_python",
    "compiled_kernel",
    "definition_counts",
    "destroy",
    "dispatch_key",
    "fallthrough",
    "find_overload",
    "full_dispatch",
    "has_autocast_kernel",
    "has_kernel",
    "is_composite",
    "is_dispatched",
    "keyset_of",
    "operator_names",
    "operator_overloads",
    "schema_of",
    "selects_backend",
    "without_override_warning",
]

Kernel = Callable[..., Any]
"""A kernel behind a dispatch key, called as ``kernel(keyset, *args, **kwargs)``."""

_WITH_OWN_KEY = ("cpu", "cuda", "mps", "xpu", "mtia", "maia", "hpu", "ipu", "xla")
"""Device types with a separate autocast key of that name; no public function lists them (2.13)."""


def autocast_key(device_type: str) -> str:
    """Return the name of the dispatch key that PyTorch enables for autocast on `device_type`."""
    return f"Autocast{device_type.upper() if device_type in _WITH_OWN_KEY else 'PrivateUse1'}"


def dispatch_key(device_type: str) -> Any:
    """Return the dispatch key; `torch._C.DispatchKey` does not name those of MTIA, MAIA and XLA (2.11 to 2.13)."""
    return torch._C._dispatch_key_parse(autocast_key(device_type))


def keyset_of(device_type: str) -> Any:
    """Return a keyset with the autocast key alone. Compiled autocast kernels take one and ignore it (2.13)."""
    return torch._C.DispatchKeySet(dispatch_key(device_type))


class AutocastOff:
    """Excludes the autocast key of a device type in this thread, as PyTorch's kernels do around their call (2.13).

    `torch.autocast(enabled=False)` costs more, and changes the result of `torch.is_autocast_enabled` for the program.
    """

    __slots__ = ("_keys",)

    def __init__(self, device_type: str) -> None:
        self._keys = keyset_of(device_type)

    def __call__(self) -> Any:
        """Return a new guard, for one `with`."""
        return torch._C._ExcludeDispatchKeyGuard(self._keys)


def has_autocast_kernel(op: str, device_type: str) -> bool:
    """Return True if `op` ("aten::linear") has a kernel at the autocast key of `device_type` (2.13)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, autocast_key(device_type))


def compiled_kernel(overload: OpOverload, device_type: str) -> Kernel:
    """Return the kernel of `overload` at the autocast key of `device_type`; it stays callable after an override.

    `torch.library.get_kernel` is public, but its result is not (2.13).
    """
    kernel: Kernel = torch.library.get_kernel(overload, dispatch_key(device_type)).call_boxed
    return kernel


def fallthrough(overload: OpOverload, device_type: str) -> Kernel:
    """Return a kernel that skips the autocast key and keeps autocast on, as if nothing were registered there.

    A call of the overload would call ``__torch_function__`` a second time; `redispatch_boxed` does not (2.13).
    """
    if _takes_numbers(overload):
        off = AutocastOff(device_type)
        call = full_dispatch(overload)

        def with_numbers(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
            with off():  # these operations call no others, so autocast may be off
                return call(*args, **kwargs)

        return with_numbers
    below = torch._C._dispatch_keyset_full_after(dispatch_key(device_type))
    redispatch = overload._handle.redispatch_boxed

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keyset & below, *args, **kwargs)

    return kernel


def full_dispatch(overload: OpOverload) -> Callable[..., Any]:
    """Return a function that calls `overload` from the top of the dispatcher, without ``__torch_function__``."""
    if _takes_numbers(overload):
        # This is slower and calls ``__torch_function__``, but it converts the numbers to tensors again.
        return overload._op
    return partial(torch._C._dispatch_call_boxed, overload._handle)


def call_below_python(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation from a dispatch mode as C++ would, without any ``__torch_function__``.

    A plain call of an `OpOverload` calls the ``__torch_function__`` of a parameter that backward uses (2.13).
    """
    if isinstance(op, OpOverload) and is_dispatched(op) and not _takes_numbers(op):
        return torch._C._dispatch_call_boxed(op._handle, *args, **kwargs)
    with torch._C.DisableTorchFunction():
        return op(*args, **kwargs)


def _takes_numbers(overload: OpOverload) -> bool:
    """Return True if a Python kernel may get a number for a tensor of the schema, as for ``x * 2.0`` (2.13)."""
    name = schema_of(overload).name.partition("::")[2]
    return torch._C._should_allow_numbers_as_tensors(name)


def find_overload(op: str) -> OpOverload | None:
    """Return the operator with this name ("aten::softmax.int", "mylib::myop"); None if it is not defined."""
    qualified, _, overload = op.partition(".")
    namespace, _, name = qualified.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        operator: OpOverload = getattr(packet, overload or "default")
    except (AttributeError, RuntimeError):
        return None  # it may be defined later
    return operator


def schema_of(overload: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an operator, with the aliasing of its arguments; no public function does (2.13)."""
    return overload._schema


def is_composite(op: Any) -> bool:
    """Return True if an operation decomposes above autograd, so that modes see it only in inference mode (2.13).

    The dispatcher is queried because `OpOverload` also counts decompositions in Python, which `native_batch_norm` has.
    """
    return has_kernel(op, "CompositeImplicitAutograd")


def is_dispatched(op: Any) -> bool:
    """Return True if the dispatcher runs an operation.

    It does not run higher-order operators, or queries of a subclass such as `prim::device` (2.13).
    """
    return isinstance(op, OpOverload) and torch._C._dispatch_has_kernel(op.name())


def selects_backend(op: Any) -> bool:
    """Return True if the `device` or `layout` arguments of a call select the kernel, not only its tensors (2.13)."""
    return has_kernel(op, "BackendSelect")


def has_kernel(op: Any, key: str) -> bool:
    """Return True if an operation has a kernel, or a fallthrough, at a dispatch key (2.13)."""
    return is_dispatched(op) and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def operator_names() -> set[str]:
    """Return the names of all operators for which a kernel can be registered ("aten::softmax.int").

    No public function lists them (2.13). Overloads with dimension names ("aten::softmax.Dimname", until 2.12) can only
    be called from C++, and are left out here and below.
    """
    return {name for name in torch._C._dispatch_get_all_op_names() if not _has_dimnames(name)}


def operator_overloads(operation: str) -> dict[str, torch.FunctionSchema]:
    """Return the overloads of an operation ("aten::softmax"): name ("" is the default) -> schema; empty if undefined.

    Only the dispatcher has this list, and no public function reads it (2.13). TorchScript's scalar overloads
    ("aten::exp.float") share the names but are never dispatched, and are left out.
    """
    schemas = torch._C._jit_get_schemas_for_operator(operation)
    return {s.overload_name: s for s in schemas if _reaches_dispatcher(operation, s.overload_name)}


def definition_counts() -> tuple[int, ...]:
    """Return three counts. At least one of them changes when Python code or a library defines operations.

    The dispatcher reports no new operations, and counting all takes a millisecond. `torch.library._defs` has those
    that Python defines (2.13).
    """
    from_python = getattr(torch.library, "_defs", ())
    return len(from_python), len(torch.ops.loaded_libraries), len(sys.modules)


def _has_dimnames(name: str) -> bool:
    return re.search(r"aten::\w+\.\w*([Dd]imname|names)", name) is not None


def _reaches_dispatcher(operation: str, overload: str) -> bool:
    name = f"{operation}.{overload}" if overload else operation
    return torch._C._dispatch_has_kernel(name) and not _has_dimnames(name)


def destroy(library: torch.library.Library) -> None:
    """Remove a library's kernels from the dispatcher now; public code has to wait for garbage collection (2.13)."""
    library._destroy()


@contextmanager
def without_override_warning() -> Iterator[None]:
    """Suppress PyTorch's process-wide warning 'Overriding a previously registered kernel'."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel.*")
        yield
