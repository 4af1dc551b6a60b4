"""Chooses what runs behind each operation, and registers it at PyTorch's autocast keys.

There are two engines, which give the same bits. The *reference* is the Python kernels of `reference_kernels`. The
*native* one is a kernel in C++ above each of them, which does what is common: PyTorch's own rule, with weights from the
cache. All else it hands to the reference.

Invariants:

- where a policy's rule is the one PyTorch compiled, the compiled kernel does the work; an operation that
  needs nothing of us is not overridden at all, and costs what it costs without precast;
- what is registered is the same for every policy: it asks the thread's bound policy, and without one (another
  thread, plain `torch.autocast`) hands straight on to PyTorch's kernel;
- while somebody watches, every operation that PyTorch or precast has an autocast kernel for is registered, and each
  kernel calls the watcher; afterwards there is on the dispatcher what there was before.
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
from precast._internal.locks import survives_fork
from precast._torch import Kernel as DispatcherKernel
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.engine import compile_cache_key, reference_kernels
from precast.engine.entry_point import Watcher, entry_point, watchers
from precast.engine.float8_kernels import RECIPES, check_device
from precast.engine.native import library
from precast.engine.native.calls import Calls
from precast.engine.native.library import ENGINES
from precast.engine.operation import Operation
from precast.engine.pending import is_overtaken, wait
from precast.engine.thread_state import (
    BoundPolicy,
    Kernel,
    Registration,
    a_region_is_open,
    installed,
    native_engine,
    regions,
)
from precast.policy.measured import warn_elsewhere
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule
from precast.weights import held, unversioned_writes
from precast.weights.native_copies import native

__all__ = [
    "ENGINES",
    "NativeKernel",
    "available_engines",
    "bind",
    "bind_default",
    "cache_clear_hooks",
    "clear_cache",
    "engine",
    "native_kernel",
    "promotes",
    "unregister",
    "unwatch",
    "use_engine",
    "watch",
]

_lock = survives_fork(threading.RLock())
_bound_policies: Final[weakref.WeakValueDictionary[tuple[str, ...], BoundPolicy]] = (
    weakref.WeakValueDictionary()
)
"""Bound policies by device type, engine, name and fingerprint, for equal policies to share. One lives as long
as its policy, which keeps it, or whoever runs under it: a region, an installation, a thread of PyTorch's own."""
_defaults: Final[dict[tuple[str, str], BoundPolicy]] = {}
_native_kernels: dict[tuple[str, str], NativeKernel] = {}
_registered: dict[tuple[str, str], DispatcherKernel] = {}
_libraries: dict[str, Library] = {}
_watched_only: dict[tuple[str, str], DispatcherKernel] = {}
"""What is registered for the watcher alone."""
_watching: Final[list[Library]] = []
_registration = Registration()


_chosen: str | None = None
"""The engine, once it has been asked for: to find out may load a library."""


def engine() -> str:
    """The engine that regions entered from now on will use: one of `ENGINES`."""
    if _chosen is None:
        with _lock:  # one thread loads the library
            if _chosen is None:
                _choose_engine(library.chosen_engine())
    assert _chosen is not None
    return _chosen


def available_engines() -> tuple[str, ...]:
    """The engines that can run in this process: without a library, the reference alone."""
    has_library = isinstance(library.load(), library.Library)
    return tuple(name for name in ENGINES if has_library or name != "native")


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Chooses the engine for the regions entered inside, in all threads; for tests and comparisons."""
    assert name in ENGINES, name
    before = engine()
    _choose_engine(name)
    try:
        yield
    finally:
        _choose_engine(before)


def _choose_engine(name: str) -> None:
    global _chosen  # noqa: PLW0603 -- one switch for the process, as the environment variable is
    if name == "native" and native_engine.calls is None:
        _load_native()
    native.is_used = name == "native"
    _chosen = name
    _allow_shortcuts()


def _allow_shortcuts() -> None:
    """Has the library enter regions in one step, where its engine is in use and kernels are registered to stay."""
    if native_engine.calls is not None:
        allowed = native.is_used and _registration.holds
        native_engine.calls.allow_shortcuts(_registration.number if allowed else 0)


def _load_native() -> None:
    """Loads the library, and tells it what there is already."""
    found = library.load()
    assert isinstance(found, library.Library), found
    # What is on the dispatcher already is put there anew, with PyTorch's own kernels known to the library.
    assert unregister(), "the library is loaded while no region is open and nothing is installed"
    with _lock, held.lock:
        calls = Calls(
            found.functions,
            unversioned_writes.check_within_region,
            _torch.is_capturing,
            unversioned_writes.USES_BETWEEN_CHECKS,
        )
        asked = Library("precast_native", "IMPL")
        asked.impl("ask", _asked, "CompositeImplicitAutograd")
        _for_good.append(asked)
        native.copies = calls
        native_engine.load(calls)
        calls.watch(bool(watchers))
        if watchers:  # so that the library takes note of PyTorch's kernels before those of the watcher stand above
            _take_off_kernels()
        for held_parameter in held.held_parameters.values():
            calls.hold(held_parameter.source, True)


_for_good: Final[list[Library]] = []
"""What stays registered as long as the process lives."""


@_torch.never_compiled
def _asked(source: Tensor, dtype: torch.dtype, device_type: str) -> Tensor | None:
    """The copy of a weight that compiled kernels have none of; None where each use casts it."""
    return regions.cache.cast(source, dtype, device_type)


def bind(policy: Policy, device_type: str) -> BoundPolicy:
    """The bound policy for `policy` on `device_type`, its kernels registered; made once for each engine."""
    key = device_type, engine()
    bound: BoundPolicy | None = policy.derived.get(key)
    if bound is None or not bound.registration.holds or is_overtaken(bound):
        with _lock:
            bound = policy.derived[key] = _shared(policy, device_type)
    return bound


def _shared(policy: Policy, device_type: str) -> BoundPolicy:
    """The bound policy of an equal policy, if there is one, or a new one."""
    key = device_type, engine(), policy.name, policy.fingerprint
    bound = _bound_policies.get(key)
    holds = bound is not None and bound.registration.holds and not bound.pending
    if bound is None or not holds or bound.policy != policy:
        bound = _bound_policies[key] = _bind(policy, device_type)
    return bound


cache_clear_hooks: list[Callable[[], None]] = []
"""What else is to be done when a thread's outermost region has ended."""


def clear_cache() -> None:
    """Drops the copies of this thread, as its outermost region has ended, and does what else is to be done then."""
    regions.cache.clear()
    for act in cache_clear_hooks:
        act()


def _cleared(by_program: bool) -> None:
    """What `torch.clear_autocast_cache` does here; a program that calls it leaves nothing for later regions either."""
    clear_cache()
    if by_program and native.copies is not None:
        native.copies.free_spare_memory()


_optimizer_hooks: Final[list[Callable[[], None]]] = []


def _listen_to_optimizers(hear: bool) -> None:
    """Listens to the steps of all optimizers: fused ones write weights, and move no version counter (2.13)."""
    if hear and not _optimizer_hooks:
        _optimizer_hooks.append(on_optimizer_step(after=_stepped))
    elif not hear and _optimizer_hooks:
        _optimizer_hooks.pop()()


def _stepped(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        regions.cache.invalidate(group["params"])


def bind_default(device_type: str) -> BoundPolicy:
    """The bound policy of the policy that a region uses when none is named, in none, and with none installed."""
    return _defaults.get((device_type, engine())) or _remember_default(device_type)


def _remember_default(device_type: str) -> BoundPolicy:
    bound = _defaults[device_type, engine()] = bind(Policy.load("default"), device_type)
    return bound


def unregister(*, kernels: bool = True) -> bool:
    """Takes all that is ours off PyTorch; the next region entered puts there again what it needs.

    Args:
        kernels: the kernels on the dispatcher, too. Only where no other thread computes: PyTorch does not expect a
            kernel to end while it is called. Those that stay hand on to PyTorch's.

    Returns:
        Whether it did: not while a thread is in a region, or a policy is installed.
    """
    global _registration  # noqa: PLW0603 -- the dispatcher is one for the process
    with _lock:
        # First the announcement, then the look: who enters a region meanwhile is seen here, or sees it and binds anew.
        _registration.holds = False
        _allow_shortcuts()
        if a_region_is_open() or any(installed(device).bound_policy for device in DEVICE_TYPES):
            _registration.holds = True
            _allow_shortcuts()
            return False
        _bound_policies.clear()  # what policies keep does not hold any more, which `bind` sees
        _defaults.clear()
        if kernels:
            _take_off_kernels()
            _torch.unwrap_checkpoints()  # another thread may be in a module with a rule
            _torch.unwrap_custom_functions()
        _registration = Registration()
        _allow_shortcuts()
        compile_cache_key.take_off()
        _torch.set_backward_autocast(None)
        _torch.on_cleared_cache(None)
        _listen_to_optimizers(False)
        return True


def _take_off_kernels() -> None:
    _take_off_watched_only()
    for number in _compiled:
        assert native_engine.calls is not None
        native_engine.calls.deregister(number)
    for put in _libraries.values():
        _torch.destroy(put)
    _compiled.clear()
    for state in (_libraries, _registered, _native_kernels):
        state.clear()
    if watchers:
        _watch_all()


def watch(watcher: Watcher) -> None:
    """Has `watcher` called around every operation that has an autocast kernel, in all threads, until `unwatch`."""
    with _lock:
        assert not watchers, "one watcher at a time"
        watchers.append(watcher)
        if native_engine.calls is not None:
            native_engine.calls.watch(True)
        _watch_all()


def unwatch() -> None:
    """Ends `watch`: the dispatcher has again what it had."""
    with _lock:
        if native_engine.calls is not None:
            native_engine.calls.watch(False)
        watchers.clear()
        _take_off_watched_only()


def _watch_all() -> None:
    """Registers the Python kernels of operations that no policy has needed yet."""
    put = Library("aten", "IMPL")
    _watching.append(put)
    for device_type in filter(_torch.has_device, DEVICE_TYPES):
        for name in _torchs_table(device_type):
            found = native_kernel(name, device_type)
            key = name, device_type
            if found is None or not found.compiled or key in _registered:
                continue
            _watched_only[key] = entry_point(found.op, found.kernel)
            _put(put, found, _watched_only[key])


def _take_off_watched_only() -> None:
    while _watching:
        _torch.destroy(_watching.pop())
    for (name, device_type), entry in _watched_only.items():
        if (name, device_type) in _registered:  # a policy has come to need it meanwhile
            found = _native_kernels[name, device_type]
            _put(_library(name), found, entry)
            _compile(found)
    _watched_only.clear()


def _bind(policy: Policy, device_type: str) -> BoundPolicy:
    warn_elsewhere(policy.name, policy.measured, device_type)
    for rule in {entry.rule for entry in policy.entries(device_type).values()} & RECIPES.keys():
        check_device(device_type, rule)
    _torch.on_cleared_cache(_cleared)
    _torch.wrap_checkpoints()
    _torch.set_backward_autocast(compile_cache_key.is_in_force)
    _listen_to_optimizers(True)
    defined = _torch.definitions()
    table, unknown = policy.expand(device_type)
    bound_kernels: dict[str, Kernel] = {}
    delegated: set[str] = set()
    is_pytorchs = True
    for name in table.keys() | _torchs_table(device_type).keys():
        found = native_kernel(name, device_type)
        if found is None:
            continue
        is_pytorchs &= _is_pytorchs(policy, found, table.get(name))
        kernel = _kernel_for(policy, found, table.get(name))
        if kernel is None:
            continue
        if engine() == "native" and _can_delegate(policy, found, table.get(name)):
            delegated.add(name)
        _register(found)
        bound_kernels[name] = kernel
    pending = tuple(name for name in unknown if not name.startswith("aten::"))
    meaning = None if is_pytorchs and policy.mixed == "raise" else policy.fingerprint
    bound = BoundPolicy(
        policy, bound_kernels, _registration, pending, is_pytorchs, meaning, frozenset(delegated)
    )
    if native_engine.calls is not None:
        bound.native = _native_policy(native_engine.calls, bound, device_type)
    wait(bound, defined)
    if meaning is not None:
        compile_cache_key.put_on()
    return bound


@functools.cache
def _torchs_table(device_type: str) -> dict[str, Entry]:
    return Policy.load("torch").expand(device_type)[0]


def _is_pytorchs(policy: Policy, native: NativeKernel, entry: Entry | None) -> bool:
    """Whether the policy does with an operation what PyTorch does, where PyTorch raises no error."""
    if not native.compiled:
        if entry is None or entry.builds:  # a build that has the operation has its kernel too
            return True
        if entry.rule is Rule.FALLTHROUGH:
            return True
        return entry.rule is Rule.PROMOTE and policy.mixed == "promote"
    return entry is not None and (entry.rule is native.rule or native.rule is Rule.BANNED)


def _kernel_for(policy: Policy, native: NativeKernel, entry: Entry | None) -> Kernel | None:
    """What runs an operation; None where PyTorch's kernel (or none) does just what the policy says."""
    if entry is None and not native.compiled:
        return None
    op, rule = native.op, Rule.KEEP if entry is None else entry.rule
    if rule is Rule.FALLTHROUGH and not native.compiled:
        return None
    retries = promotes(policy, native, rule)
    if retries and rule is Rule.PROMOTE and not native.compiled:
        # Promotion is asked for where the operation raises, and only there.
        return reference_kernels.attempting(op, native.kernel)
    if rule is native.rule and rule is not Rule.LOWER and not retries and engine() == "native":
        return None
    kernel = reference_kernels.kernel_for(rule, op)
    if native.rule is Rule.BANNED and rule is not Rule.BANNED:
        kernel = reference_kernels.noting(op, f"banned by PyTorch, ran as '{rule}'", kernel)
    return reference_kernels.promoting(op, kernel) if retries else kernel


def _can_delegate(policy: Policy, native: NativeKernel, entry: Entry | None) -> bool:
    """Whether PyTorch's kernel (or none) does what the policy says, given weights that are cast already."""
    rule = Rule.KEEP if entry is None else entry.rule
    if not native.compiled:
        # What an extension defines may be Python, whose errors compiled kernels cannot read.
        is_pytorchs = native.op.name.startswith("aten::")
        return is_pytorchs and rule is Rule.PROMOTE and promotes(policy, native, rule)
    return rule is native.rule


def promotes(policy: Policy, native: NativeKernel, rule: Rule) -> bool:
    """Whether an operation that raises on mixed floating dtypes runs once more in the widest of them."""
    unpromoted = Rule.BANNED, Rule.FALLTHROUGH
    return policy.mixed == "promote" and rule not in unpromoted and native.op.takes_several


_numbers: Final[dict[tuple[str, str], int]] = {}
"""What compiled kernels know operations by: name and device type -> a number, for the process."""


def _number(name: str, device_type: str) -> int:
    return _numbers.setdefault((name, device_type), len(_numbers))


def _native_policy(calls: Calls, bound: BoundPolicy, device_type: str) -> int:
    """What the compiled kernels do under a policy."""
    actions = bytearray(len(_numbers))
    for name in bound.kernels:
        number = _number(name, device_type)
        actions.extend(bytes(max(0, number + 1 - len(actions))))
        actions[number] = _DELEGATE if name in bound.delegated else _REFERENCE
    return calls.policy(promotes=bound.policy.mixed == "promote", actions=bytes(actions))


_DELEGATE, _REFERENCE = 1, 2  # the numbers of `Action` in `native/state.h`


@dataclass(frozen=True, slots=True, eq=False)
class NativeKernel:
    """What was at an operation's autocast key before precast: PyTorch's compiled kernel, or a way past it."""

    op: Operation
    kernel: DispatcherKernel
    compiled: bool
    rule: Rule | None
    """The rule that PyTorch's kernel follows; None where there is none, or it follows none we know."""


def native_kernel(name: str, device_type: str) -> NativeKernel | None:
    """What is at an operation's autocast key without precast; None for an operation that PyTorch does not have."""
    known = _native_kernels.get((name, device_type))
    if known is not None:
        return known
    overload = _torch.find_overload(name)
    if overload is None:
        return None
    compiled = _torch.has_autocast_kernel(name, device_type)
    kernel = (_torch.compiled_kernel if compiled else _torch.fallthrough)(overload, device_type)
    entry = _torchs_table(device_type).get(name)
    rule = entry.rule if entry is not None and compiled else None
    native = NativeKernel(Operation(name, device_type, overload), kernel, compiled, rule)
    if compiled and native_engine.calls is not None:
        native_engine.calls.take_native(*_in_dispatcher(native.op))
    return _native_kernels.setdefault((name, device_type), native)


def _register(native: NativeKernel) -> None:
    """Puts one kernel for all policies at the operation's autocast key, once."""
    key = native.op.name, native.op.device_type
    if key in _registered:
        if key not in _watched_only:
            _compile(native)  # the library may have come since
        return
    if key in _watched_only:
        _registered[key] = _watched_only[key]
        return
    entry = _registered[key] = entry_point(native.op, native.kernel)
    _put(_library(native.op.name), native, entry)
    _compile(native)


_compiled: Final[set[int]] = set()
"""The numbers of the operations that have a compiled kernel."""


def _compile(native: NativeKernel) -> None:
    """Puts a compiled kernel above the Python kernel of an operation, once there is a library."""
    calls, op = native_engine.calls, native.op
    number = _number(op.name, op.device_type)
    if calls is None or number in _compiled:
        return
    _compiled.add(number)
    calls.register(
        *_in_dispatcher(op),
        device_type=op.device_type,
        number=number,
        takes_weights=native.rule is Rule.LOWER,
        keeps_autocast_on=not native.compiled,
    )


def _in_dispatcher(op: Operation) -> tuple[str, str, str]:
    """The name, overload and key under which the dispatcher knows an operation's kernel."""
    name, _, overload = op.name.partition(".")
    return name, overload, _torch.autocast_key(op.device_type)


def _library(name: str) -> Library:
    namespace = name.partition("::")[0]
    return _libraries.setdefault(namespace, Library(namespace, "IMPL"))


def _put(library: Library, native: NativeKernel, entry: DispatcherKernel) -> None:
    operation = native.op.name.partition("::")[2]
    with _torch.without_override_warning():
        key = _torch.autocast_key(native.op.device_type)
        library.impl(operation, entry, key, with_keyset=True)
