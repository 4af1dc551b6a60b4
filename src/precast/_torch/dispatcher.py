"""The dispatcher: its autocast keys, the kernels behind them, and the operators that it knows.

Invariants:

- operators are named as the dispatcher names them: "aten::softmax.int";
- a kernel that this file gives is called as ``kernel(keyset, *args, **kwargs)``, whatever stands behind it.
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
    "definitions",
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
"""What stands behind a dispatch key: called as ``kernel(keyset, *args, **kwargs)``."""

_WITH_OWN_KEY = ("cpu", "cuda", "mps", "xpu", "mtia", "maia", "hpu", "ipu", "xla")
"""The device types whose autocast key has their name; nothing public lists them (2.13)."""


def autocast_key(device_type: str) -> str:
    """Name of the dispatch key that PyTorch switches on for autocast on `device_type`."""
    return f"Autocast{device_type.upper() if device_type in _WITH_OWN_KEY else 'PrivateUse1'}"


def dispatch_key(device_type: str) -> Any:
    """The dispatch key itself; `torch._C.DispatchKey` does not name those of MTIA, MAIA and XLA (2.11 to 2.13)."""
    return torch._C._dispatch_key_parse(autocast_key(device_type))


def keyset_of(device_type: str) -> Any:
    """A keyset with the autocast key alone, for compiled autocast kernels, which take one and ignore it (2.13)."""
    return torch._C.DispatchKeySet(dispatch_key(device_type))


class AutocastOff:
    """Excludes one device's autocast key in this thread, as PyTorch's own kernels do around their inner call (2.13).

    `torch.autocast(enabled=False)` would cost more, and change what `torch.is_autocast_enabled` tells the program.
    """

    __slots__ = ("_keys",)

    def __init__(self, device_type: str) -> None:
        self._keys = keyset_of(device_type)

    def __call__(self) -> Any:
        """A fresh guard, for one `with`."""
        return torch._C._ExcludeDispatchKeyGuard(self._keys)


def has_autocast_kernel(op: str, device_type: str) -> bool:
    """Whether something is registered for `op` ("aten::linear") at the autocast key of `device_type` (2.13)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, autocast_key(device_type))


def compiled_kernel(overload: OpOverload, device_type: str) -> Kernel:
    """The kernel now registered for `overload` at the autocast key of `device_type`; it stays callable when overridden.

    `torch.library.get_kernel` is public, but what it returns is not (2.13).
    """
    kernel: Kernel = torch.library.get_kernel(overload, dispatch_key(device_type)).call_boxed
    return kernel


def fallthrough(overload: OpOverload, device_type: str) -> Kernel:
    """A kernel that goes on below the autocast key, with autocast still on, as if nothing were registered there.

    A call of the overload would ask ``__torch_function__`` a second time; `redispatch_boxed` does not (2.13).
    """
    if _takes_numbers(overload):
        off = AutocastOff(device_type)
        call = full_dispatch(overload)

        def with_numbers(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
            with off():  # these operations call no others: on or off is the same to them
                return call(*args, **kwargs)

        return with_numbers
    below = torch._C._dispatch_keyset_full_after(dispatch_key(device_type))
    redispatch = overload._handle.redispatch_boxed

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keyset & below, *args, **kwargs)

    return kernel


def full_dispatch(overload: OpOverload) -> Callable[..., Any]:
    """Calls `overload` from the top of the dispatcher, without ``__torch_function__``: ``at::op`` of C++."""
    if _takes_numbers(overload):
        # This is slower and asks ``__torch_function__``, but it makes tensors of the numbers again.
        return overload._op
    return partial(torch._C._dispatch_call_boxed, overload._handle)


def call_below_python(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation from a dispatch mode as C++ would: without ``__torch_function__``, of subclasses and of modes.

    A plain call of an `OpOverload` calls the ``__torch_function__`` of a parameter that backward uses (2.13).
    """
    if isinstance(op, OpOverload) and is_dispatched(op) and not _takes_numbers(op):
        return torch._C._dispatch_call_boxed(op._handle, *args, **kwargs)
    with torch._C.DisableTorchFunction():
        return op(*args, **kwargs)


def _takes_numbers(overload: OpOverload) -> bool:
    """Whether a Python kernel may get a number where the schema has a tensor, as for ``x * 2.0`` (2.13)."""
    name = schema_of(overload).name.partition("::")[2]
    return torch._C._should_allow_numbers_as_tensors(name)


def find_overload(op: str) -> OpOverload | None:
    """The operator object of a dispatcher name ("aten::softmax.int", "mylib::myop"), or None if it is not there."""
    qualified, _, overload = op.partition(".")
    namespace, _, name = qualified.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
        found: OpOverload = getattr(packet, overload or "default")
    except (AttributeError, RuntimeError):
        return None  # it may still be defined later
    return found


def schema_of(overload: OpOverload) -> torch.FunctionSchema:
    """The arguments of an operator and what they alias; nothing public gives them (2.13)."""
    return overload._schema


def is_composite(op: Any) -> bool:
    """Whether an operation is made of others above autograd, so that modes see it only in inference mode (2.13).

    The dispatcher is asked, as `OpOverload` also counts decompositions in Python, which `native_batch_norm` has.
    """
    return has_kernel(op, "CompositeImplicitAutograd")


def is_dispatched(op: Any) -> bool:
    """Return whether the dispatcher runs an operation.

    It does not for higher-order operators, and for questions about a subclass, such as `prim::device` (2.13).
    """
    return isinstance(op, OpOverload) and torch._C._dispatch_has_kernel(op.name())


def selects_backend(op: Any) -> bool:
    """Return whether `device` or `layout` of a call choose the kernel, and not its tensors alone (2.13)."""
    return has_kernel(op, "BackendSelect")


def has_kernel(op: Any, key: str) -> bool:
    """Return whether an operation has a kernel, or a fallthrough, at a dispatch key (2.13)."""
    return is_dispatched(op) and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def operator_names() -> set[str]:
    """All operators that a kernel can be written for, as the dispatcher spells them ("aten::softmax.int").

    Nothing public lists them (2.13). Overloads that take names of dimensions ("aten::softmax.Dimname"), which
    exist until 2.12, can only be called from C++, and are left out here and below.
    """
    return {name for name in torch._C._dispatch_get_all_op_names() if not _takes_names(name)}


def operator_overloads(operation: str) -> dict[str, torch.FunctionSchema]:
    """The overloads of an operation ("aten::softmax"): name ("" is the default) -> schema; empty if it is unknown.

    Only the dispatcher has this list, and nothing public reads it (2.13). TorchScript's scalar overloads
    ("aten::exp.float"), which share the names but never reach the dispatcher, are left out.
    """
    schemas = torch._C._jit_get_schemas_for_operator(operation)
    return {s.overload_name: s for s in schemas if _reaches_dispatcher(operation, s.overload_name)}


def definitions() -> tuple[int, ...]:
    """Numbers of which one changes when an operation may have been defined: by Python, by a library, by an extension.

    The dispatcher tells nobody of new operations, and counting them takes a millisecond. `torch.library._defs` has
    those that Python defines (2.13).
    """
    by_python = getattr(torch.library, "_defs", ())
    return len(by_python), len(torch.ops.loaded_libraries), len(sys.modules)


def _takes_names(name: str) -> bool:
    return re.search(r"aten::\w+\.\w*([Dd]imname|names)", name) is not None


def _reaches_dispatcher(operation: str, overload: str) -> bool:
    name = f"{operation}.{overload}" if overload else operation
    return torch._C._dispatch_has_kernel(name) and not _takes_names(name)


def destroy(library: torch.library.Library) -> None:
    """Takes a library's kernels off the dispatcher now; public code can only wait for it to be collected (2.13)."""
    library._destroy()


@contextmanager
def without_override_warning() -> Iterator[None]:
    """Registers over PyTorch's kernels without its process-wide 'Overriding a previously registered kernel' warning."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel.*")
        yield
