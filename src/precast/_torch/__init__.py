"""The only place that touches private PyTorch API; each use says why, and since when it was seen to work.

Invariants: nothing here decides anything about precision; every name is a thin, typed door to one
private feature of the installed PyTorch (developed on 2.13), so that a new version is one file to read.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from operator import attrgetter
from types import CodeType
from typing import Any, Final, Protocol, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from precast._internal import torch_versions

__all__ = [
    "BACKWARD",
    "MODULE_CALL",
    "UNUSED_DEVICE_TYPES",
    "VERSION",
    "AutocastOff",
    "Kernel",
    "ObservingMode",
    "OpOverload",
    "RegionListener",
    "all_dtypes",
    "autocast_key",
    "autocast_nesting",
    "base_of",
    "cast_without_torch_function",
    "check_and_unscale_",
    "compiled_kernel",
    "copy_to_host_async",
    "count_other_modes",
    "counts_versions",
    "current_node",
    "custom_backend",
    "definitions",
    "deprecation_of",
    "destroy",
    "dispatch_modes",
    "drop_forward_hook",
    "enter_mode",
    "export_region",
    "fallthrough",
    "find_overload",
    "forward_hooks",
    "found_infs_of",
    "full_dispatch",
    "function_modes",
    "fused_copy",
    "handles_scaling",
    "has_autocast_kernel",
    "has_compiled",
    "has_device",
    "in_backward",
    "in_ddp",
    "in_forward_mode",
    "in_pool_thread",
    "inherited_tls",
    "innermost_dispatch_mode",
    "innermost_other_mode",
    "is_captured",
    "is_composite",
    "is_dtensor",
    "is_functorch_active",
    "is_functorch_wrapper",
    "is_in_graph_tree",
    "is_on",
    "is_optimizer_step",
    "is_plain",
    "is_shared",
    "is_tracing",
    "is_view",
    "keyset_of",
    "leave_mode",
    "leave_process_groups",
    "lower_dtypes",
    "never_compiled",
    "next_sequence",
    "on_backward",
    "on_call_without_hooks",
    "on_checkpoint",
    "on_cleared_cache",
    "on_collectives",
    "on_graph_region",
    "on_module_call",
    "on_regions",
    "operator_names",
    "operator_overloads",
    "optimize_torchscript",
    "optimizes_torchscript",
    "other_modes",
    "outside_inference_mode",
    "redispatch_in_mode",
    "reset_compiler",
    "runs_uncompiled",
    "scale_of",
    "schema_of",
    "sequence_of",
    "set_compile_cache_tag",
    "set_inherited_tls",
    "sparse_values",
    "step_without_hooks",
    "swaps_parameters",
    "traced_as_constant",
    "update_scale_",
    "version_of",
    "warning_of_old_contract",
    "without_dispatch",
    "without_override_warning",
    "without_torch_function",
    "writes_graph",
]

VERSION: Final = torch_versions.check(torch.__version__)
"""The installed PyTorch, major and minor: checked here, before anything of it is used that older ones do not have."""

Kernel = Callable[..., Any]
"""What stands behind a dispatch key: called as ``kernel(keyset, *args, **kwargs)``."""

# Tensor attributes without a public spelling; the kernel that `hotpath` writes reads them in place.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view


def counts_versions(tensor: torch.Tensor) -> bool:
    """Whether writes to a tensor can be seen: not where it was made in inference mode, whatever its data is now."""
    try:
        version_of(tensor)
    except RuntimeError:
        return False
    return not tensor.is_inference()


# The dispatcher's autocast keys have no public list by device type (2.13); PrivateUse1 is the odd name.
_KEY_NAMES = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "mps": "AutocastMPS",
    "xpu": "AutocastXPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
    "hpu": "AutocastHPU",
    "ipu": "AutocastIPU",
    "xla": "AutocastXLA",
}


@cache
def autocast_key(device_type: str) -> str:
    """Name of the dispatch key that PyTorch switches on for autocast on `device_type`."""
    return _KEY_NAMES.get(device_type, "AutocastPrivateUse1")


UNUSED_DEVICE_TYPES = ("ipu", "maia")
"""Device types that PyTorch keeps autocast flags for, in each thread, and that no released PyTorch runs on (2.13)."""


def all_dtypes() -> list[torch.dtype]:
    """Every dtype, in one order for ever; nothing public lists them."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(dtypes, key=str)


def _key(device_type: str) -> Any:
    """The dispatch key; `torch._C.DispatchKey` has no names for MTIA's, MAIA's and XLA's (2.11 to 2.13)."""
    return torch._C._dispatch_key_parse(autocast_key(device_type))


def keyset_of(device_type: str) -> Any:
    """A keyset with the autocast key alone: for compiled autocast kernels, which are plain functions and ignore it."""
    return torch._C.DispatchKeySet(_key(device_type))


class AutocastOff:
    """Excludes one device's autocast key in this thread, as PyTorch's own kernels do around their inner call.

    Not `torch.autocast(enabled=False)`: that costs more, and would change what the program reads from
    `torch.is_autocast_enabled`.
    """

    __slots__ = ("_keys",)

    def __init__(self, device_type: str) -> None:
        self._keys = keyset_of(device_type)

    def __call__(self) -> Any:
        """A fresh guard, for one `with`."""
        return torch._C._ExcludeDispatchKeyGuard(self._keys)


@cache
def is_on(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is on that device type; attributes like `is_cpu` are read four times as fast as `device`."""
    name = f"is_{device_type}"
    if hasattr(torch.Tensor, name):
        return attrgetter(name)
    return lambda tensor: tensor.device.type == device_type


def has_device(device_type: str) -> bool:
    """Whether this machine has a device of that type that PyTorch can use."""
    module = getattr(torch, device_type, None)  # there is none for some
    return device_type == "cpu" or (module is not None and bool(module.is_available()))


def has_autocast_kernel(op: str, device_type: str) -> bool:
    """Whether something is registered for `op` ("aten::linear") at the autocast key of `device_type`."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, autocast_key(device_type))


def compiled_kernel(overload: OpOverload, device_type: str) -> Kernel:
    """The kernel now registered for `overload` at the autocast key of `device_type`; it stays callable when overridden.

    `torch.library.get_kernel` is public (2.9 and later); the object that it returns is not.
    """
    kernel: Kernel = torch.library.get_kernel(overload, _key(device_type)).call_boxed
    return kernel


def fallthrough(overload: OpOverload, device_type: str) -> Kernel:
    """Goes on to the next kernel below the autocast key, with autocast still on, as if nothing were registered there.

    `redispatch_boxed` (2.13) does not ask ``__torch_function__`` a second time, as calling the overload would.
    """
    if _takes_numbers(overload):
        off = AutocastOff(device_type)
        call = full_dispatch(overload)

        def with_numbers(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
            with off():  # these operations call no others: on or off is the same to them
                return call(*args, **kwargs)

        return with_numbers
    below = torch._C._dispatch_keyset_full_after(_key(device_type))
    redispatch = overload._handle.redispatch_boxed

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return redispatch(keyset & below, *args, **kwargs)

    return kernel


def full_dispatch(overload: OpOverload) -> Callable[..., Any]:
    """Calls `overload` from the top of the dispatcher, without ``__torch_function__``: ``at::op`` of C++."""
    if _takes_numbers(overload):
        # Slower, and asks ``__torch_function__``, but makes tensors of the numbers again.
        return overload._op
    return partial(torch._C._dispatch_call_boxed, overload._handle)


def _takes_numbers(overload: OpOverload) -> bool:
    """Whether ``x * 2.0`` is such a call: C++ passes a tensor, and a Python kernel gets the number (2.13)."""
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
    """Arguments and aliasing of an operator; `OpOverload._schema` is the documented-by-use way (2.13)."""
    return overload._schema


def is_functorch_active() -> bool:
    """Whether a `torch.func` transform (vmap, grad ...) is running in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a `torch.func` transform, or `is_grads_batched`, made to stand for others (2.13)."""
    functorch = torch._C._functorch
    wraps: bool = functorch.is_functorch_wrapped_tensor(tensor)
    return wraps or functorch.is_legacy_batchedtensor(tensor)


def in_forward_mode() -> bool:
    """Whether a `torch.autograd.forward_ad.dual_level` is open: any tensor may have a tangent (2.13)."""
    return torch.autograd.forward_ad._current_level >= 0


# How many `TorchDispatchMode`s are active in this thread; the kernel that `hotpath` writes asks it at each call.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# Whether CUDA-graph trees manage a tensor's memory, and write it unseen: PyTorch's own cache asks the same (2.11).
is_in_graph_tree: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cached_tensor")  # noqa: B009 -- no stub

# What `torch.jit.is_tracing` asks, without a call in Python around it: the hot path asks for each operation (2.13).
is_tracing: Callable[[], bool] = torch._C._is_tracing


def is_real() -> bool:
    """Whether what runs in this thread gives numbers: nothing is traced, no `torch.func` transform is running."""
    return not is_tracing() and torch._C._functorch.peek_interpreter_stack() is None


class ObservingMode(TorchDispatchMode):
    """A `TorchDispatchMode` that sees what runs, and changes nothing: what is compiled is compiled as without it.

    The class is public, what it says of compilers is not (2.13): the compiler is to ignore it, its own code is not
    to be compiled (which costs 2 s of imports unless it is said here), and higher-order operators pass.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether the compiler may take no notice of it."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def enter_mode(mode: ObservingMode) -> None:
    """Begins a mode; its methods have no types (2.13)."""
    mode.__enter__()  # type: ignore[no-untyped-call]


def leave_mode(mode: ObservingMode) -> None:
    """Ends a mode, wherever it is on this thread's stack; ``__exit__`` ends the innermost, whichever that is (2.13)."""
    module = torch.utils._python_dispatch
    above = []
    while innermost_dispatch_mode() is not mode:
        above.append(module._pop_mode())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        module._push_mode(other)


def is_composite(op: Any) -> bool:
    """Whether an operation is made of others above autograd; a mode sees it only in inference mode (2.13)."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(op, OpOverload) and op.has_kernel_for_dispatch_key(key)


_BELOW_MODES: Final = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)
_LEFT_OUT: Final = [
    getattr(torch._C.DispatchKey, name) for name in ("ADInplaceOrView", "Negative", "Conjugate")
]


def redispatch_in_mode(
    mode: ObservingMode,
    op: Any,
    tensors: list[torch.Tensor],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    casting: list[str],
) -> Any:
    """Calls an operation that a mode was told of, so that the mode is told of what that calls in turn.

    What a mode calls runs with all modes off and all keys above them excluded, autocast's too: what an operation calls
    is not seen, and casts nothing that it would cast without the mode. Nothing public calls it otherwise (2.13).

    Args:
        mode: the one that was told, in its ``__torch_dispatch__``.
        op: the operation.
        tensors: those that it was given.
        call: its arguments.
        casting: device types on which autocast is on where the program calls it.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for tensor in tensors:
        keys = keys | torch._C._dispatch_keys(tensor)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in [*map(_key, casting), *(_LEFT_OUT if is_composite(op) else ())]:
        excluded = excluded.remove(key)
    args, kwargs = call
    with mode:
        included = torch._C._dispatch_tls_local_include_set()
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            return op.redispatch(keys & _BELOW_MODES, *args, **kwargs)


def other_modes() -> list[Any]:
    """The dispatch modes of this thread that do more than observe, outermost first (2.13)."""
    modes = map(torch._C._get_dispatch_stack_at, range(dispatch_modes()))
    return [mode for mode in modes if not isinstance(mode, ObservingMode)]


def count_other_modes() -> int:
    """How many they are."""
    return len(other_modes())


def innermost_other_mode() -> Any:
    """The innermost of them, or None."""
    return next(reversed(other_modes()), None)


_get_dispatch_mode = torch._C._get_dispatch_mode
_ModeKey = torch._C._TorchDispatchModeKey


def writes_graph() -> bool:
    """Whether a compiler or exporter runs this thread's operations without their numbers (2.13)."""
    return (
        _get_dispatch_mode(_ModeKey.FAKE) is not None
        or _get_dispatch_mode(_ModeKey.PROXY) is not None
    )


# The node of the graph whose backward runs in this thread, or None; how many nodes this thread has made. A node's own
# number, by which its backward is known, is what was next when it was made: just before its operation ran (2.13).
current_node: Callable[[], Any] = torch._C._current_autograd_node
next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr


def sequence_of(node: Any) -> int:
    """A node's number."""
    number: int = node._sequence_nr()
    return number


# What is on the stack while a module runs, while backward runs, while an optimizer steps: `self` of the first is the
# module. Global hooks on modules would say the same, and have `torch.compile` warn (2.13).
MODULE_CALL: Final = torch.nn.Module._call_impl.__code__
BACKWARD: Final = torch.autograd.graph._engine_run_backward.__code__
_OPTIMIZER: Final = sys.modules["torch.optim.optimizer"].__file__


def is_optimizer_step(code: CodeType) -> bool:
    """Whether it is what wraps every optimizer's `step`."""
    return code.co_name == "wrapper" and code.co_filename == _OPTIMIZER


_nesting = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_set_enabled = torch.set_autocast_enabled


class RegionListener(Protocol):
    """Who is told of regions."""

    def entered(self) -> None:
        """A region is being entered, by the caller's caller."""

    def left(self) -> None:
        """A region ends."""

    def switched(self, device_type: str, enabled: bool) -> None:
        """Autocast is switched on or off."""


def on_regions(listener: RegionListener | None) -> None:
    """Has a listener told of all regions, PyTorch's and precast's; None ends that.

    They look up the functions that count them and that switch autocast. Nothing public tells of it; and what a
    dispatch mode sees runs with all autocast keys excluded, so that PyTorch's own flags say nothing there (2.13).
    """
    increment, decrement = _nesting
    amp: Any = torch
    if listener is None:
        amp.autocast_increment_nesting, amp.autocast_decrement_nesting = _nesting
        amp.set_autocast_enabled = _set_enabled
        return

    def autocast_increment_nesting() -> int:
        listener.entered()
        return increment()

    def autocast_decrement_nesting() -> int:
        listener.left()
        return decrement()

    def set_autocast_enabled(*args: Any) -> None:
        _set_enabled(*args)
        listener.switched(*(args if len(args) == 2 else ("cuda", *args)))

    amp.autocast_increment_nesting = never_compiled(autocast_increment_nesting)
    amp.autocast_decrement_nesting = never_compiled(autocast_decrement_nesting)
    amp.set_autocast_enabled = never_compiled(set_autocast_enabled)


def innermost_dispatch_mode() -> Any:
    """The `TorchDispatchMode` that sees an operation first, or None; the stack has no public reader (2.13)."""
    depth = dispatch_modes()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


# TorchScript's optimiser runs an autocast pass of its own, which writes PyTorch's casts into the graph whatever the
# policy, and differentiates graphs without looking at casts made below. Both are off in a thread that has switched
# the optimiser off; a scripted function then runs operation by operation, like Python (2.13).
def optimizes_torchscript() -> bool:
    """Whether scripted functions that start in this thread are optimised."""
    optimizes: bool = torch._C._get_graph_executor_optimize()
    return optimizes


def optimize_torchscript(optimize: bool) -> None:
    """Switches TorchScript's optimiser in this thread; the getter is the setter."""
    torch._C._get_graph_executor_optimize(optimize)


@contextmanager
def without_override_warning() -> Iterator[None]:
    """Registers over PyTorch's kernels without its process-wide 'Overriding a previously registered kernel' warning."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel.*")
        yield


def operator_names() -> set[str]:
    """All operators that a kernel can be written for, as the dispatcher spells them ("aten::softmax.int").

    No public list (2.13). Overloads that take names of dimensions, which there are until 2.12, can be called from
    C++ alone: "aten::softmax.Dimname". They are left out here and below.
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

    The dispatcher tells nobody of new operations, and to count them takes a millisecond (2.13). Those that Python
    defines are in `torch.library._defs`, where it is there.
    """
    by_python = getattr(torch.library, "_defs", ())
    return len(by_python), len(torch.ops.loaded_libraries), len(sys.modules)


def _takes_names(name: str) -> bool:
    return re.search(r"aten::\w+\.\w*([Dd]imname|names)", name) is not None


def _reaches_dispatcher(operation: str, overload: str) -> bool:
    name = f"{operation}.{overload}" if overload else operation
    return torch._C._dispatch_has_kernel(name) and not _takes_names(name)


def custom_backend() -> str:
    """The name of the out-of-tree backend, "privateuseone" unless one renamed it; no public getter (2.13)."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


def lower_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """The lower precisions that autocast on `device_type` can use."""
    if device_type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return (torch.float16,)
    backend = getattr(torch, device_type, None) if device_type == custom_backend() else None
    ask = getattr(backend, "get_amp_supported_dtype", None)  # PyTorch's protocol for such backends
    return (torch.bfloat16, torch.float16) if ask is None else tuple(ask())


def destroy(library: torch.library.Library) -> None:
    """Takes a library's kernels off the dispatcher now; public code can only wait for it to be collected (2.13)."""
    library._destroy()


def check_and_unscale_(
    gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Multiplies gradients of one device and dtype in place, and sets `found_inf` to 1.0 if one was not finite.

    One fused pass that does not wait for the device; nothing public does both (2.13).
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth: float,
    backoff: float,
    interval: int,
) -> None:
    """Adapts scale and tracker in place on their device, without waiting for the verdict; no public way (2.13)."""
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval)


def copy_to_host_async(number: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy of `number` in memory of the CPU, and the event after which it is there; None if it is there now.

    Nothing private: it stands here as one of the few places that differ by device. The copy goes to pinned memory,
    which PyTorch keeps and uses again, so that the host does not wait. Never run on CUDA yet.
    """
    if number.device.type == "cpu":
        return number, None
    if number.device.type != "cuda":
        return number.cpu(), None
    host = torch.empty((), dtype=number.dtype, pin_memory=True)
    host.copy_(number, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(number.device))
    return host, event


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored values of a sparse COO tensor; the public `values()` refuses tensors with duplicate indices (2.13)."""
    return tensor._values()


def handles_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` of this optimizer unscales and decides itself; the mark of fused optimizers since 1.13."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def warning_of_old_contract() -> str:
    """What PyTorch's scaler says where an optimizer's step takes the scaler; only its code has the text (2.13)."""
    texts = torch.amp.GradScaler.step.__code__.co_consts
    said = [t for t in texts if isinstance(t, str) and t.startswith("GradScaler is going to stop")]
    return said[0] if said else "GradScaler is going to stop passing itself to optimizers' step."


def deprecation_of(function: Any) -> str | None:
    """What PyTorch says of a deprecated function; that attribute is public in Python 3.13 alone (2.13)."""
    text: str | None = getattr(function, "__deprecated__", None)
    return text


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """A copy of a scaler's scale, without waiting for the device; None before its first loss (2.13)."""
    scale = scaler._get_scale_async()
    return None if scale is None else scale.clone()


def found_infs_of(scaler: torch.amp.GradScaler, optimizer: object) -> list[torch.Tensor]:
    """What a scaler of PyTorch's found in this iteration, nonzero where a gradient was not finite (2.13)."""
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return list(state.get("found_inf_per_device", {}).values())


def cast_without_torch_function(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`. No ``__torch_function__`` is asked: the program did not call a kernel's cast (2.13)."""
    cast = _CASTS.get(dtype)
    if cast is not None and type(tensor) in _WITHOUT_TORCH_FUNCTION and not function_modes():
        return cast(tensor)
    with _DisableTorchFunction():
        return tensor.to(dtype) if cast is None else cast(tensor)


_DisableTorchFunction = torch._C.DisableTorchFunction
without_torch_function: Callable[[], Any] = _DisableTorchFunction
"""A context whose operations no subclass and no function mode hears: they are no calls of the program's (2.13)."""
_WITHOUT_TORCH_FUNCTION: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_CASTS = {torch.bfloat16: torch.Tensor.bfloat16, torch.float16: torch.Tensor.half}


# A context whose operations no `TorchDispatchMode` and no tensor subclass sees: what measures a program, or reads a
# number that it computed, is no part of it (2.13).
without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as what a checkpoint runs again does; it asks the same (2.13)."""
    return torch._C._current_graph_task_id() != -1


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor | None], None]) -> None:
    """Has `hook` called with the gradient of a tensor that is no leaf; it stays on the graph, not on the tensor.

    As `Tensor.register_hook`, at a third of its cost: that makes a dictionary for the tensor and a handle for the hook
    in Python (2.13). The tensor's own hooks, where it has some, are left as they are.
    """
    own = tensor._backward_hooks
    if own is not None:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = {0: hook}
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    tensor._backward_hooks = None


def fused_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Writes each source into its target, in the target's dtype; on CUDA in few kernels.

    The `_foreach` functions have no public list; optimizers are made of them (2.13).
    """
    torch._foreach_copy_(targets, sources)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`, whose module takes long to import: without it there is none.

    Nothing private: the one answer for all who ask.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether the tensors of a class are numbers in memory: a subclass without a dispatch of its own.

    Nothing private: the one answer for all who ask.
    """
    is_known = kind is torch.nn.Parameter or kind is torch.Tensor
    return is_known or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


swaps_parameters: Callable[[], bool] = torch.__future__.get_swap_module_params_on_conversion
"""Whether `Module.to()` and `load_state_dict` exchange what is in a parameter. Nothing private."""


def in_ddp() -> bool:
    """Whether a `DistributedDataParallel` runs its module: it takes gradients of the parameters' dtype alone (2.13)."""
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    return ddp is not None and ddp.DistributedDataParallel._active_ddp_module is not None


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's own step, for a part of its parameters.

    What `Optimizer.step` wraps has no public name; around it are only hooks and a mark for the profiler (2.13).
    """
    step = type(optimizer).step
    inside = getattr(step, "__wrapped__", step)
    return lambda: inside(optimizer)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether what is computed on the tensor's device now is written into a CUDA graph, and not run."""
    return tensor.is_cuda and is_capturing()


def is_capturing() -> bool:
    """The same of the device that is the current one."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> Any:
    """The stream in which this thread's work on a device waits for its turn; None on the CPU, which works at once.

    Nothing private: like `copy_to_host_async`, one of the few places that differ by device. Never run on CUDA yet.
    """
    if device.type not in ("cuda", "xpu"):
        return None
    return torch.get_device_module(device).current_stream(device)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor, a storage that the program keeps, or anything else shares the memory of one.

    Nothing public counts the users of a storage (2.13): tensors, arrays and capsules are counted by the storage itself,
    variables that are bound to it by Python, as there is one object for it whoever asks.
    """
    tensors, variables = _users(tensor)
    return tensors > _ALONE[0] or variables > _ALONE[1]


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE: Final = _users(torch.empty(1, device="cpu"))
"""What is counted of a tensor that is alone: itself, and what asks."""


def outside_inference_mode() -> Any:
    """A context in which gradients are recorded, whatever mode is around it.

    `torch.inference_mode(False)` and `torch.enable_grad()` in one, and without their Python: 0.5 us for 3 (2.13).
    """
    return torch._C._InferenceMode(False)


F = TypeVar("F", bound=Callable[..., Any])


def runs_uncompiled(function: F) -> F:
    """Has a function that Python calls, and all that it calls, run as they are, also in a compiled program.

    A function that is traced may still have it traced along: that is what `never_compiled` refuses, too (2.13).
    """
    skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(skip, skip)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def never_compiled(function: F) -> F:
    """Has `torch.compile` break its graph at a function, and run it and all that it calls as they are.

    As `torch.compiler.disable` does, which costs 2 s of imports, and a second call at each call (2.13). For what
    changes the state of the dispatcher: traced, it would do so once, and never again when the graph runs.
    """
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "this part of precast does not enter a graph"
    return runs_uncompiled(function)


def traced_as_constant(function: F) -> F:
    """Has `torch.compile` call a function when it traces, and put the answer into the graph.

    As `torch.compiler.assume_constant_result` does, which costs 2 s of imports (2.13).
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


# Whether a `TorchFunctionMode` is active in this thread; asked at each entry of a region.
function_modes: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


def export_region(arguments: tuple[Any, ...] | None) -> bool:
    """Tells `torch.export`, where it runs a program to write it down, that a region begins, or (None) that it ends.

    As PyTorch's own region does: the exporter is a function mode, and nothing public reaches it (2.13).

    Returns:
        Whether there is an exporter.
    """
    amp: Any = torch.amp
    exporter = torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, exporter):
            function = amp._enter_autocast if arguments else amp._exit_autocast
            mode.__torch_function__(function, (), arguments or ())
            return True
    return False


def in_pool_thread() -> bool:
    """Whether the thread that asks was not started by Python, but by PyTorch (or another library of compiled code)."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def set_inherited_tls(key: str, value: object) -> None:
    """Gives `value` to the threads of PyTorch's own that work for this one: deep backward, `torch.jit.fork`.

    They inherit this thread's dispatch keys, autocast's too, and nothing that Python knows as thread-local (2.13).
    """
    if VERSION < (2, 12):
        _count_reference(
            value
        )  # PyTorch takes a reference that it has not counted, and gives it back one day
    if (thread := threading.get_native_id()) not in _lenders:
        _note_lender(thread)
    torch._C._stash_obj_in_tls(key, value)


_lenders: Final[set[int]] = set()
"""The threads that have lent something, by the system's numbers; of those that are gone, not more than a few."""


def _note_lender(thread: int) -> None:
    if len(_lenders) >= 1024:
        _lenders.difference_update([t for t in list(_lenders) if not _runs(t)])
    _lenders.add(thread)


def _runs(thread: int) -> bool:
    """Whether the system still has a thread, as Linux says it; elsewhere False."""
    return os.path.exists(f"/proc/self/task/{thread}")


@atexit.register
def _await_lenders() -> None:
    """Waits, before Python ends, for threads that have ended for Python and not yet for the system.

    What they have lent is given back then, with the interpreter's lock, which aborts a process that is ending (2.13).
    """
    alive = {thread.native_id for thread in threading.enumerate()}
    until = time.monotonic() + 5.0
    for thread in _lenders - alive:
        while _runs(thread) and time.monotonic() < until:
            time.sleep(0.001)


def _count_reference(value: object) -> None:
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def inherited_tls(key: str) -> Any:
    """What the thread that this one works for has lent it under `key`, or None."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def forward_hooks(module: torch.nn.Module) -> list[tuple[int, Any]]:
    """A module's forward hooks and pre-hooks, each with the number under which all that belongs to it is kept.

    Public API adds hooks, and nothing lists them (2.13).
    """
    return [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]


def drop_forward_hook(module: torch.nn.Module, number: int) -> None:
    """Takes a hook off that somebody else added, or that a copy of a module came with (2.13)."""
    for kept in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        kept.pop(number, None)


def autocast_nesting() -> int:
    """How many of PyTorch's regions and precast's this thread is in; nothing reads it without changing it (2.13)."""
    increment, decrement = _nesting
    increment()
    return decrement()


def reset_compiler() -> None:
    """Drops what `torch.compile` made in this process, if it made anything; does not load it to find out.

    In the middle of a compilation, where PyTorch refuses, it stays: only the garbage collector comes then, for a model
    that is gone. `CompileContext` is what PyTorch's own guards ask (2.11 to 2.15).
    """
    if "torch._dynamo" in sys.modules and torch._guards.CompileContext.current_compile_id() is None:
        torch.compiler.reset()


def has_compiled() -> bool:
    """Whether `torch.compile` has compiled something in this process; its counters are documented for no use (2.13)."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def on_checkpoint(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Hands the function of every `torch.utils.checkpoint` to `wrap`; what comes back runs in its place in backward.

    PyTorch notes its own flags there and restores those alone. Nothing public sees that a function runs again:
    `context_fn` belongs to the caller, and the reentrant kind has none (2.13).
    """
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(module, f"{name}_impl") else ""  # since 2.14; the other calls it
    generator, forward = getattr(module, name), module.CheckpointFunction.forward

    @wraps(generator)
    def not_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(wrap(function), *args, **kwargs)

    @wraps(forward)
    def reentrant(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, wrap(function), *args)

    setattr(module, name, not_reentrant)
    module.CheckpointFunction.forward = staticmethod(reentrant)


def on_backward(tell: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Has ``tell(roots, gradients)`` called before each backward pass; calling what it returns ends that.

    `torch.autograd.backward` is public; that `Tensor.backward` looks it up there whenever it is called is not written
    down. Hooks of autograd see nodes and gradients, and never which tensor a pass began at (2.13).
    """
    backward = torch.autograd.backward

    @never_compiled
    @wraps(backward)
    def told(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        tell(tensors, grad_tensors)
        backward(tensors, grad_tensors, *args, **kwargs)

    def stop() -> None:
        if torch.autograd.backward is told:  # else somebody replaced it after us, and calls us
            torch.autograd.backward = backward

    torch.autograd.backward = told
    return stop


Outermost = Callable[[torch.nn.Module, Callable[[], Any]], Any]
_outermost: list[Outermost] = []


def on_module_call(outermost: Outermost) -> Callable[[], None]:
    """Has ``outermost(module, run)`` make each call of a module from outside of all modules, in any thread.

    Of several, each is what the one after it runs. Calling what this returns ends it. Public hooks for all modules take
    every call off its short path, and a model from `torch.compile` warns of them (2.13).
    """
    if not _outermost:
        _hear_module_calls()
    _outermost.append(outermost)

    def stop() -> None:
        if outermost in _outermost:
            _outermost.remove(outermost)
        if not _outermost:
            _hear_module_calls.stop()

    return stop


class _ModuleCalls:
    """`nn.Module.__call__`, replaced while somebody wants to make the outermost calls."""

    def __init__(self) -> None:
        self._replaced: tuple[Any, Any] | None = None

    def __call__(self) -> None:
        kind: Any = torch.nn.Module
        if self._replaced is not None and kind.__call__ is self._replaced[1]:
            return
        call = kind.__call__
        here = threading.local()

        @wraps(call)
        def __call__(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            # The first is a constant where the compiler traces: nothing of this is in a graph.
            if torch.compiler.is_compiling() or getattr(here, "inside", False):
                return call(module, *args, **kwargs)
            here.inside = True
            try:
                return _made_by(tuple(_outermost), module, lambda: call(module, *args, **kwargs))
            finally:
                here.inside = False

        self._replaced = call, __call__
        kind.__call__ = __call__

    def stop(self) -> None:
        """Puts back what was there, unless somebody replaced it after us, and calls us: then nothing hears."""
        kind: Any = torch.nn.Module
        if self._replaced is not None and kind.__call__ is self._replaced[1]:
            kind.__call__, self._replaced = self._replaced[0], None


def _made_by(
    listeners: tuple[Outermost, ...], module: torch.nn.Module, run: Callable[[], Any]
) -> Any:
    if not listeners:
        return run()
    return listeners[-1](module, lambda: _made_by(listeners[:-1], module, run))


_hear_module_calls = _ModuleCalls()


_WRITING_COLLECTIVES: Final = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


def on_collectives(tell: Callable[[list[torch.Tensor]], None]) -> Callable[[], None]:
    """Has `tell` called with the tensors of each collective that Python calls; calling what it returns ends that.

    What a collective writes moves no version counter, and nothing public tells of it. All of `torch.distributed` calls
    these methods of the group, whoever imported which of its functions; DDP's own do not come by (2.13).
    """
    if not torch.distributed.is_available():
        return lambda: None
    group: Any = torch.distributed.ProcessGroup
    before = {name: vars(group)[name] for name in _WRITING_COLLECTIVES if name in vars(group)}

    def telling(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def told(*args: Any, **kwargs: Any) -> Any:
            tell(list(_tensors_of([*args[1:], *kwargs.values()])))
            return call(*args, **kwargs)

        return told

    ours = {name: telling(getattr(group, name)) for name in before}
    for name, told in ours.items():
        setattr(group, name, told)

    def stop() -> None:
        for name, told in ours.items():
            if vars(group)[name] is told:  # else somebody replaced it after us, and calls us
                setattr(group, name, before[name])

    return stop


def _tensors_of(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_of(value)


def leave_process_groups() -> None:
    """Has other processes' collectives raise, which would wait for this one, as it is about to raise an error itself.

    What is public leaves one group in a friendly way, which waits for the others, or does not close what they wait for:
    `ProcessGroup.abort` of gloo (2.13).
    """
    distributed = torch.distributed
    is_one_of_several = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    if is_one_of_several:
        distributed.distributed_c10d._abort_process_group()


def on_call_without_hooks(module: torch.nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Has ``call(module, run, args, kwargs)`` make each call of a module; calling what it returns ends that.

    For modules of which PyTorch asks whether they have hooks, to leave its fast path if so. What `Module.compile` sets
    is called in place of the module, and is in no copy of it; where that is set, nothing is done (2.13).
    """
    known = weakref.ref(module)
    if module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule):
        return lambda: None

    def called(*args: Any, **kwargs: Any) -> Any:
        there = known()
        assert there is not None
        plain: Any = there._call_impl
        if torch.compiler.is_dynamo_compiling():
            return plain(*args, **kwargs)
        return call(there, lambda: plain(*args, **kwargs), args, kwargs)

    def stop() -> None:
        there = known()
        if there is not None and vars(there).get("_compiled_call_impl") is called:
            del there._compiled_call_impl

    module._compiled_call_impl = called
    return stop


_clear_autocast_cache = torch.clear_autocast_cache


def on_cleared_cache(clear: Callable[[], None] | None) -> None:
    """Has `clear` called whenever a program clears PyTorch's weight cache, as its regions do; None ends that.

    They all look up `torch.clear_autocast_cache`; nothing public tells of it (2.13).
    """

    def clear_autocast_cache() -> None:
        """Drops the lower-precision copies of weights, PyTorch's and precast's."""
        assert clear is not None
        clear()
        _clear_autocast_cache()

    ours = _clear_autocast_cache if clear is None else never_compiled(clear_autocast_cache)
    torch.clear_autocast_cache = ours


def on_graph_region(open_region: Callable[[str, torch.dtype, bool, str], Any]) -> None:
    """Has regions in a graph whose `cache_enabled` is text opened by ``open_region(device, dtype, enabled, text)``.

    Dynamo puts a region into a graph as two calls with constant arguments, which run when the graph is traced further
    or, with the backend "eager", each time. Dynamo knows PyTorch's regions only, and no other argument of theirs can
    say which policy is meant (2.13). What `open_region` gives is entered and left in its place.
    """
    # Such regions have a class of their own since 2.12.
    kind: Any = getattr(torch.amp.autocast_mode, "_UnmanagedAutocast", torch.autocast)
    enter, leave = kind.__enter__, kind.__exit__

    @wraps(enter)
    def __enter__(region: Any) -> Any:  # noqa: N807 -- what it stands for
        text = region._cache_enabled
        if not isinstance(text, str):
            return enter(region)
        region._precast = open_region(region.device, region.fast_dtype, region._enabled, text)
        region._precast.__enter__()
        return region

    @wraps(leave)
    def __exit__(region: Any, *exc_info: Any) -> Any:  # noqa: N807
        ours = vars(region).get("_precast")
        return leave(region, *exc_info) if ours is None else ours.__exit__(*exc_info)

    kind.__enter__, kind.__exit__ = __enter__, __exit__


class _Tag(str):
    """A tag that says, whenever a compiler's cache makes a key of it, what it is then."""

    said: Callable[[], str]

    def __str__(self) -> str:
        return self.said()

    def __format__(self, spec: str) -> str:
        return format(self.said(), spec)

    def __reduce__(self) -> tuple[Any, ...]:  # the keys are digests of pickles
        return str, (self.said(),)


def set_compile_cache_tag(extra: Callable[[], str] | None) -> None:
    """Adds what `extra` says to the key under which compiled code is kept on disk; None takes that away again.

    `torch.compiler.config.cache_key_tag` is public. That it may be more than a plain string is not, and neither is the
    place that holds for all threads and that no later setting of the user's hides: what a user sets is asked (2.13).
    """
    config: Any = torch.compiler.config
    entry = config._config["cache_key_tag"]
    unset = torch.utils._config_module._UNSET_SENTINEL

    def users() -> Any:
        own = entry.user_override
        return own.get() if isinstance(own, ContextVar) else own

    def said() -> str:
        assert extra is not None
        asked = users(), entry.env_value_default, entry.default
        return str(next(t for t in asked if t is not unset and not isinstance(t, _Tag))) + extra()

    tag = _Tag()
    tag.said = said
    entry.env_value_force = unset if extra is None else tag
    if extra is None and isinstance(users(), _Tag):  # `config.patch` puts back what it read
        config.cache_key_tag = entry.default
