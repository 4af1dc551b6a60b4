"""Selection of the kernel for each operation, and its registration at PyTorch's autocast keys.

There are two engines, which give the same bits. The *reference* engine is the Python kernels of `reference_kernels`.
The *native* engine adds a C++ kernel above each of them for the common case: PyTorch's own rule, with weights from the
cache. In all other cases the C++ kernel calls the reference.

Invariants:

- if PyTorch's kernel implements the policy's rule for an operation, this kernel runs. An operation that needs no kernel
  of precast is not overridden, and costs the same as without precast;
- the registered kernels are the same for every policy: they look up the thread's bound policy, and without one (another
  thread, plain `torch.autocast`) call PyTorch's kernel;
- while there is a watcher, all operations with an autocast kernel are overridden, and each kernel calls the watcher.
  Afterwards the dispatcher has the previous kernels.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.library import Library
from torch.optim import Optimizer

from precast import _torch
from precast._internal.locks import make_fork_safe
from precast._torch import Kernel as DispatcherKernel
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.engine import reference_kernels
from precast.engine.compile_cache_key import key_text
from precast.engine.entry_point import Watcher, entry_point, watchers
from precast.engine.float8_kernels import RECIPES, check_device
from precast.engine.operation import Operation
from precast.engine.product_kernels import is_product_in_float32
from precast.engine.thread_state import (
    BoundPolicy,
    Kernel,
    Registration,
    any_region_open,
    installed,
    regions,
)
from precast.engine.undefined_ops import needs_rebinding, track_undefined
from precast.policy.measured import warn_if_moved
from precast.policy.mixed_dtypes import refuses_mixtures
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule, derived_values, expanded_rules
from precast.weights import held, unversioned_writes
from precast.weights.native import library
from precast.weights.native.api import NativeApi, native_engine
from precast.weights.native.boundary import Action, Mixture
from precast.weights.native.library import ENGINES

__all__ = [
    "ENGINES",
    "TorchKernel",
    "available_engines",
    "bind",
    "bind_default",
    "cache_clear_hooks",
    "clear_cache",
    "engine",
    "leaves_autocast_on",
    "promotes",
    "torch_kernel",
    "unregister",
    "unwatch",
    "use_engine",
    "watch",
]

_lock = make_fork_safe(threading.RLock())
_bound_policies: Final[weakref.WeakValueDictionary[tuple[str, ...], BoundPolicy]] = (
    weakref.WeakValueDictionary()
)
"""Bound policies by device type, engine, name and fingerprint, shared by equal policies. A bound policy lives as long
as its policy, or as a region, an installation or a thread of PyTorch's own that uses it."""
_defaults: Final[dict[tuple[str, str], BoundPolicy]] = {}
_torch_kernels: dict[tuple[str, str], TorchKernel] = {}
_registered: dict[tuple[str, str], DispatcherKernel] = {}
_libraries: dict[str, Library] = {}
_watcher_kernels: dict[tuple[str, str], DispatcherKernel] = {}
"""Kernels that are registered for the watcher alone."""
_watcher_libraries: Final[list[Library]] = []
_registration = Registration()


_engine_name: str | None = None
"""The engine in use; None until the first use, because the choice may load the library."""


def engine() -> str:
    """Return the engine for regions entered from now on: one of `ENGINES`."""
    if _engine_name is None:
        with _lock:  # one thread loads the library
            if _engine_name is None:
                _choose_engine(library.chosen_engine())
    assert _engine_name is not None
    return _engine_name


def available_engines() -> tuple[str, ...]:
    """Return the engines that can run in this process: without a library, only the reference."""
    has_library = isinstance(library.load(), library.Library)
    return tuple(name for name in ENGINES if has_library or name != "native")


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Use an engine for the regions entered inside, in all threads; for tests and comparisons."""
    assert name in ENGINES, name
    before = engine()
    _choose_engine(name)
    try:
        yield
    finally:
        _choose_engine(before)


def _choose_engine(name: str) -> None:
    global _engine_name  # noqa: PLW0603 -- one setting for the process, like the environment variable
    if name == "native" and native_engine.api is None:
        _load_native()
    native_engine.is_used = name == "native"
    _engine_name = name
    _allow_fast_entries()


def _allow_fast_entries() -> None:
    """Allow fast entries if the native engine is used and the registration is active, else forbid them."""
    if native_engine.api is not None:
        is_allowed = native_engine.is_used and _registration.is_active
        native_engine.api.allow_fast_entries(_registration.number if is_allowed else 0)


def _load_native() -> None:
    loaded = library.load()
    assert isinstance(loaded, library.Library), loaded
    # Kernels that are already registered have to be registered again, after the library has recorded PyTorch's kernels.
    assert unregister(), "the library is loaded while no region is open and nothing is installed"
    with _lock, held.lock:
        api = NativeApi(
            loaded.functions,
            unversioned_writes.check_within_region,
            unversioned_writes.USES_BETWEEN_CHECKS,
            DEVICE_TYPES,
        )
        while _permanent_libraries:  # Ctrl-C interrupted an earlier call
            _torch.destroy(_permanent_libraries.pop())
        operations = Library("precast_native", "IMPL")
        operations.impl("cast_in_python", _cast_for_kernel, "CompositeImplicitAutograd")
        _permanent_libraries.append(operations)
        native_engine.load(api)
        api.watch(bool(watchers))
        if watchers:  # the library records PyTorch's kernels before they are overridden again
            _remove_kernels()
        for held_parameter in held.held_parameters.values():
            api.hold(held_parameter.source, True)
            held_parameter.drop()  # its copies are not the library's


_permanent_libraries: Final[list[Library]] = []
"""Libraries that stay registered until the process ends."""


@_torch.never_compiled
def _cast_for_kernel(source: Tensor, dtype: torch.dtype, device_type: str) -> Tensor | None:
    """Return the copy of a weight that is not in the compiled kernels' table; None if it should be cast in place."""
    return regions.cache.cast(source, dtype, device_type)


def bind(policy: Policy, device_type: str) -> BoundPolicy:
    """Return the bound policy for `policy` on `device_type`, with its kernels registered; cached per engine."""
    key = device_type, engine()
    bound: BoundPolicy | None = derived_values(policy).get(key)
    if bound is None or not bound.registration.is_active or needs_rebinding(bound):
        with _lock:
            bound = derived_values(policy)[key] = _bind_shared(policy, device_type)
    return bound


def _bind_shared(policy: Policy, device_type: str) -> BoundPolicy:
    """Return the bound policy of an equal policy, or a new one."""
    key = device_type, engine(), policy.name, policy.fingerprint
    bound = _bound_policies.get(key)
    is_valid = bound is not None and bound.registration.is_active and not bound.undefined_operations
    if bound is None or not is_valid or bound.policy != policy:
        bound = _bound_policies[key] = _bind(policy, device_type)
    return bound


cache_clear_hooks: list[Callable[[], None]] = []
"""Called when a thread's outermost region has ended."""


def clear_cache() -> None:
    """Drop this thread's copies and call `cache_clear_hooks`, when its outermost region has ended."""
    regions.cache.clear()
    for act in cache_clear_hooks:
        act()


def _on_cleared_cache(by_program: bool) -> None:
    """Drop this thread's casts when `torch.clear_autocast_cache` is called.

    If the program calls it, which is PyTorch's remedy after a write without a version counter, also invalidate held
    copies and free spare memory.
    """
    clear_cache()
    if by_program:
        held.invalidate_all()
        if native_engine.api is not None:
            native_engine.api.free_spare_memory()


_optimizer_hooks: Final[list[Callable[[], None]]] = []


def _observe_optimizers(observe: bool) -> None:
    """Start or stop observing optimizer steps: fused optimizers do not increment version counters (2.13)."""
    if observe and not _optimizer_hooks:
        _optimizer_hooks.append(on_optimizer_step(after=_on_step))
    elif not observe and _optimizer_hooks:
        _optimizer_hooks.pop()()


def _on_step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        regions.cache.invalidate(group["params"])


def bind_default(device_type: str) -> BoundPolicy:
    """Return the bound policy of a region that has no policy, is not inside another, and if none is installed."""
    return _defaults.get((device_type, engine())) or _bind_and_store_default(device_type)


def _bind_and_store_default(device_type: str) -> BoundPolicy:
    bound = _defaults[device_type, engine()] = bind(Policy.load("default"), device_type)
    return bound


def unregister(*, kernels: bool = True) -> bool:
    """Remove precast's hooks and kernels from PyTorch; the next region entered adds them again.

    Args:
        kernels: also remove the kernels from the dispatcher. Not allowed while other threads compute: PyTorch does not
            support the removal of a kernel during a call. Kernels that are not removed call PyTorch's.

    Returns:
        False if nothing was removed, because a thread is in a region or a policy is installed.
    """
    global _registration  # noqa: PLW0603 -- the dispatcher is one for the process
    with _lock:
        # First set `is_active`, then look for regions: a thread that enters one now is either seen here, or sees this
        # and rebinds.
        _registration.is_active = False
        _allow_fast_entries()
        if any_region_open() or any(installed(device).bound_policy for device in DEVICE_TYPES):
            _registration.is_active = True
            _allow_fast_entries()
            return False
        _bound_policies.clear()  # policies keep theirs, but `bind` checks `registration.is_active`
        _defaults.clear()
        if kernels:
            _remove_kernels()
            _torch.checkpoints.end()  # another thread may be in a module with a rule
            _torch.custom_functions.end()
        _registration = Registration()
        _allow_fast_entries()
        _torch.set_compile_cache_tag(None)
        _torch.set_backward_autocast(None)
        _torch.on_cleared_cache(None)
        _observe_optimizers(False)
        return True


def _remove_kernels() -> None:
    _remove_watcher_kernels()
    for number in _compiled:
        assert native_engine.api is not None
        native_engine.api.deregister(number)
    for added in _libraries.values():
        _torch.destroy(added)
    _compiled.clear()
    for state in (_libraries, _registered, _torch_kernels):
        state.clear()
    if watchers:
        _watch_all()


def watch(watcher: Watcher) -> None:
    """Call `watcher` around every operation with an autocast kernel, in all threads, until `unwatch`."""
    with _lock:
        assert not watchers, "one watcher at a time"
        watchers.append(watcher)
        if native_engine.api is not None:
            native_engine.api.watch(True)
        _watch_all()


def unwatch() -> None:
    """End `watch`."""
    with _lock:
        if native_engine.api is not None:
            native_engine.api.watch(False)
        watchers.clear()
        _remove_watcher_kernels()


def _watch_all() -> None:
    """Register the Python kernels of operations that no policy has needed yet."""
    added = Library("aten", "IMPL")
    _watcher_libraries.append(added)
    for device_type in filter(_torch.has_device, DEVICE_TYPES):
        for name in _torch_table(device_type):
            base = torch_kernel(name, device_type)
            key = name, device_type
            if base is None or not base.compiled or key in _registered:
                continue
            _watcher_kernels[key] = entry_point(base.op, base.kernel)
            _override(added, base, _watcher_kernels[key])


def _remove_watcher_kernels() -> None:
    while _watcher_libraries:
        _torch.destroy(_watcher_libraries.pop())
    for (name, device_type), entry in _watcher_kernels.items():
        if (name, device_type) in _registered:  # a policy needs it by now
            base = _torch_kernels[name, device_type]
            _override(_library(name), base, entry)
            _compile(base)
    _watcher_kernels.clear()


def _bind(policy: Policy, device_type: str) -> BoundPolicy:
    warn_if_moved(policy.name, policy.measured, device_type)
    for rule in {entry.rule for entry in policy.rules(device_type).values()} & RECIPES.keys():
        check_device(device_type, rule)
    _torch.on_cleared_cache(_on_cleared_cache)
    _torch.checkpoints.begin()
    _torch.set_backward_autocast(lambda: bool(key_text()))
    _observe_optimizers(True)
    definitions = _torch.definition_counts()
    table, unknown = expanded_rules(policy, device_type)
    bound_kernels: dict[str, Kernel] = {}
    actions: dict[str, Action] = {}
    matches_torch = True
    for name in table.keys() | _torch_table(device_type).keys():
        base = torch_kernel(name, device_type)
        if base is None:
            continue
        matches_torch &= _matches_torch(policy, base, table.get(name))
        kernel = _kernel_for(policy, base, table.get(name))
        if kernel is None:
            continue
        is_native = engine() == "native"
        actions[name] = _action(policy, base, table.get(name)) if is_native else Action.REFERENCE
        _register(base)
        bound_kernels[name] = kernel
    undefined_operations = tuple(name for name in unknown if not name.startswith("aten::"))
    distinct_fingerprint = None if matches_torch and policy.mixed == "raise" else policy.fingerprint
    bound = BoundPolicy(
        policy,
        bound_kernels,
        _registration,
        undefined_operations,
        definitions,
        matches_torch,
        distinct_fingerprint,
    )
    if native_engine.api is not None:
        bound.native_policy = _native_policy(native_engine.api, policy, actions, device_type)
    track_undefined(bound)
    if distinct_fingerprint is not None:
        _torch.set_compile_cache_tag(key_text)
    return bound


@functools.cache
def _torch_table(device_type: str) -> dict[str, Entry]:
    return expanded_rules(Policy.load("torch"), device_type)[0]


_UNKNOWN_TO_TORCHSCRIPT: Final = {"aten::_grouped_mm": Rule.LOWER, "aten::linalg_pinv": Rule.FP32}
"""Rules of `default` for operations that TorchScript does not cast, so that precast's kernels run there too."""


def _matches_torch(policy: Policy, base: TorchKernel, entry: Entry | None) -> bool:
    """Return True if the policy runs an operation as PyTorch does, except for calls that PyTorch refuses."""
    if not base.compiled:
        if entry is None or entry.builds:  # a build that has the operation has its kernel too
            return True
        if entry.rule in (Rule.FALLTHROUGH, Rule.FP32_IF_REFUSED):
            return True
        unknown = _UNKNOWN_TO_TORCHSCRIPT.get(base.op.name.partition(".")[0])
        if unknown is not None:
            return entry.rule is unknown
        return entry.rule is Rule.PROMOTE and policy.mixed == "promote"
    return entry is not None and (entry.rule is base.rule or base.rule is Rule.BANNED)


def _kernel_for(policy: Policy, base: TorchKernel, entry: Entry | None) -> Kernel | None:
    """Return the kernel of an operation; None if PyTorch's kernel (or none) implements the policy."""
    if entry is None and not base.compiled:
        return None
    op, rule = base.op, Rule.KEEP if entry is None else entry.rule
    if rule is Rule.FALLTHROUGH and not base.compiled:
        return None
    if rule is Rule.FP32_IF_REFUSED:
        return reference_kernels.kernel_for(rule, op)
    retries = promotes(policy, base, rule)
    if retries and rule is Rule.PROMOTE and not base.compiled:
        # Promotion happens only where the operation raises.
        return reference_kernels.with_attempt(op, base.kernel)
    if rule is base.rule and rule is not Rule.LOWER and not retries and engine() == "native":
        return None
    if rule is base.rule is Rule.BANNED:  # PyTorch's own error
        return None
    kernel = reference_kernels.kernel_for(rule, op)
    if base.rule is Rule.BANNED and rule is not Rule.BANNED:
        kernel = reference_kernels.with_note(op, f"banned by PyTorch, ran as '{rule}'", kernel)
    return reference_kernels.with_promotion(op, rule, kernel) if retries else kernel


def leaves_autocast_on(policy: Policy, op: Operation, rule: str | None) -> bool:
    """Return True if rules also apply to the operations that an operation with this rule calls, in its first run."""
    base = torch_kernel(op.name, op.device_type)
    if rule != Rule.PROMOTE or base is None or base.compiled:
        return rule in (Rule.FALLTHROUGH, Rule.FP32_IF_REFUSED)
    return promotes(policy, base, Rule.PROMOTE)


def _action(policy: Policy, base: TorchKernel, entry: Entry | None) -> Action:
    rule = Rule.KEEP if entry is None else entry.rule
    if rule is Rule.LOWER_OUT_FP32 and is_product_in_float32(base.op):
        return Action.PRODUCT
    if not base.compiled:
        # An operation of an extension may be Python code, whose errors compiled kernels cannot read.
        matches_torch = base.op.name.startswith("aten::")
        matches_torch &= base.op.name not in reference_kernels.DERIVATIVE_REFUSES
        delegates = matches_torch and rule is Rule.PROMOTE and promotes(policy, base, rule)
    elif base.op.name == "aten::mkldnn_rnn_layer" and policy.mixed == "promote":
        return Action.REFERENCE  # some processors refuse it in 16 bits
    else:
        delegates = rule is base.rule
        if rule is Rule.PROMOTE and not delegates and not base.op.mutated:
            return Action.PROMOTE
    return Action.DELEGATE if delegates else Action.REFERENCE


def promotes(policy: Policy, base: TorchKernel, rule: Rule) -> bool:
    """Return True if an operation that raises on mixed floating dtypes is rerun in the widest of them."""
    unpromoted = Rule.BANNED, Rule.FALLTHROUGH
    can_mix = base.op.takes_several or (rule is Rule.PROMOTE and base.compiled)  # with the region's
    return policy.mixed == "promote" and rule not in unpromoted and can_mix


_numbers: Final[dict[tuple[str, str], int]] = {}
"""The numbers of operations in compiled kernels: name and device type -> number."""


def _number(name: str, device_type: str) -> int:
    return _numbers.setdefault((name, device_type), len(_numbers))


def _native_policy(
    api: NativeApi, policy: Policy, actions: dict[str, Action], device_type: str
) -> int:
    """Return the address of a policy in the library, where it consists of the actions of compiled kernels."""
    numbered = {_number(name, device_type): action for name, action in actions.items()}
    by_number = bytes(numbered.get(number, Action.PASS) for number in range(len(_numbers)))
    number: int = api.policy(policy.mixed == "promote", by_number, len(by_number))
    return number


@dataclass(frozen=True, slots=True, eq=False)
class TorchKernel:
    """The kernel at an operation's autocast key below precast's: PyTorch's compiled kernel, or a fallthrough."""

    op: Operation
    kernel: DispatcherKernel
    compiled: bool
    rule: Rule | None
    """The rule that PyTorch's kernel implements; None if there is no kernel, or no such rule."""


def torch_kernel(name: str, device_type: str) -> TorchKernel | None:
    """Return the kernel below precast's at an operation's autocast key; None if the operation is not defined."""
    cached = _torch_kernels.get((name, device_type))
    if cached is not None:
        return cached
    overload = _torch.find_overload(name)
    if overload is None:
        return None
    compiled = _torch.has_autocast_kernel(name, device_type)
    kernel = (_torch.compiled_kernel if compiled else _torch.fallthrough)(overload, device_type)
    entry = _torch_table(device_type).get(name)
    rule = entry.rule if entry is not None and compiled else None
    base = TorchKernel(Operation(name, device_type, overload), kernel, compiled, rule)
    if compiled and native_engine.api is not None:
        native_engine.api.record_torch_kernel(*_in_dispatcher(base.op))
    return _torch_kernels.setdefault((name, device_type), base)


def _register(base: TorchKernel) -> None:
    """Register the kernel of an operation, which is the same for all policies, at its autocast key, unless it is."""
    key = base.op.name, base.op.device_type
    if key in _registered:
        if key not in _watcher_kernels:
            _compile(base)  # the library may have been loaded since
        return
    if key in _watcher_kernels:
        _registered[key] = _watcher_kernels[key]
        return
    entry = _registered[key] = entry_point(base.op, base.kernel)
    _override(_library(base.op.name), base, entry)
    _compile(base)


_compiled: Final[set[int]] = set()
"""The numbers of the operations with a compiled kernel."""


def _compile(base: TorchKernel) -> None:
    """Register a compiled kernel above the Python kernel of an operation, if the library is loaded."""
    api, op = native_engine.api, base.op
    number = _number(op.name, op.device_type)
    if api is None or number in _compiled:
        return
    _compiled.add(number)
    api.register(
        *_in_dispatcher(op), op.device_type, number, base.rule is Rule.LOWER, _mixture(base)
    )


def _mixture(base: TorchKernel) -> Mixture:
    """Return the kind of calls with mixed dtypes that a compiled kernel does not pass to PyTorch's kernel."""
    if not base.compiled:
        refuses = refuses_mixtures(base.op.name, base.op.device_type)
        return Mixture.REFUSED if refuses else Mixture.ANY
    kinds = {Rule.LOWER: Mixture.FLOAT64, Rule.FP32: Mixture.FLOAT64, Rule.PROMOTE: Mixture.FOREIGN}
    return Mixture.ANY if base.rule is None else kinds.get(base.rule, Mixture.ANY)


def _in_dispatcher(op: Operation) -> tuple[str, str, str]:
    name, _, overload = op.name.partition(".")
    return name, overload, _torch.autocast_key(op.device_type)


def _library(name: str) -> Library:
    namespace = name.partition("::")[0]
    return _libraries.setdefault(namespace, Library(namespace, "IMPL"))


def _override(library: Library, base: TorchKernel, entry: DispatcherKernel) -> None:
    operation = base.op.name.partition("::")[2]
    with _torch.without_override_warning():
        key = _torch.autocast_key(base.op.device_type)
        library.impl(operation, entry, key, with_keyset=True)
