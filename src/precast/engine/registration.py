"""Chooses what runs behind each operation, and registers it at PyTorch's autocast keys.

Invariants:

- where a policy's rule is the one PyTorch compiled, the compiled kernel does the work; an operation that
  needs nothing of us is not overridden at all, and costs what it costs without precast;
- what is registered is the same for every policy: it asks the thread's bound policy, and without one (another
  thread, plain `torch.autocast`) hands straight on to PyTorch's kernel;
- while somebody watches, every operation that PyTorch or precast has an autocast kernel for is registered, and each
  kernel calls the watcher; afterwards there is on the dispatcher what there was before;
- with `PRECAST_ENGINE=reference` in the environment every operation with a rule runs on the Python
  kernels of `kernels` instead. Both engines give the same bits.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from torch.library import Library
from torch.optim import Optimizer

from precast import _torch
from precast._internal.locks import survives_fork
from precast._torch import Kernel as DispatcherKernel
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.engine import compile_cache_key, generated, reference_kernels
from precast.engine.generated import DELEGATE, Watcher
from precast.engine.operation import Operation
from precast.engine.pending import is_overtaken, wait
from precast.engine.thread_state import (
    BoundPolicy,
    Kernel,
    Registration,
    a_region_is_open,
    installed,
    regions,
)
from precast.errors import PrecastError
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule

__all__ = [
    "ENGINES",
    "bind",
    "bind_default",
    "cache_clear_hooks",
    "engine",
    "unregister",
    "unwatch",
    "use_engine",
    "watch",
]

ENGINES: Final = ("delegated", "reference")

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
_watcher: Watcher | None = None
_watched_only: dict[tuple[str, str], DispatcherKernel] = {}
"""What is registered for the watcher alone."""
_watching: Final[list[Library]] = []
_registration = Registration()


def _from_environment() -> str:
    asked = os.environ.get("PRECAST_ENGINE", "delegated")
    if asked not in ENGINES:
        raise PrecastError(f"PRECAST_ENGINE is {asked!r}. Allowed: {', '.join(ENGINES)}")
    return asked


_engine = _from_environment()


def engine() -> str:
    """The engine that regions entered from now on will use: one of `ENGINES`."""
    return _engine


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Chooses the engine for the regions entered inside, in all threads; for tests and comparisons."""
    global _engine  # noqa: PLW0603 -- one switch for the process, as the environment variable is
    assert name in ENGINES, name
    before, _engine = _engine, name
    try:
        yield
    finally:
        _engine = before


def bind(policy: Policy, device_type: str) -> BoundPolicy:
    """The bound policy for `policy` on `device_type`, its kernels registered; made once for each engine."""
    key = device_type, _engine
    bound: BoundPolicy | None = policy.made_of.get(key)
    if bound is None or not bound.registration.holds or is_overtaken(bound):
        with _lock:
            bound = policy.made_of[key] = _shared(policy, device_type)
    return bound


def _shared(policy: Policy, device_type: str) -> BoundPolicy:
    """The bound policy of an equal policy, if there is one, or a new one."""
    key = device_type, _engine, policy.name, policy.fingerprint
    bound = _bound_policies.get(key)
    holds = bound is not None and bound.registration.holds and not bound.pending
    if bound is None or not holds or bound.policy != policy:
        bound = _bound_policies[key] = _bind(policy, device_type)
    return bound


cache_clear_hooks: list[Callable[[], None]] = []
"""What else is to be done when a thread's outermost region has ended."""


def _clear_cache() -> None:
    regions.cache.clear()
    for act in cache_clear_hooks:
        act()


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
    return _defaults.get((device_type, _engine)) or _remember_default(device_type)


def _remember_default(device_type: str) -> BoundPolicy:
    bound = _defaults[device_type, _engine] = bind(Policy.load("default"), device_type)
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
        if a_region_is_open() or any(installed(device).bound_policy for device in DEVICE_TYPES):
            _registration.holds = True
            return False
        _bound_policies.clear()  # what policies keep does not hold any more, which `bind` sees
        _defaults.clear()
        if kernels:
            _take_off_kernels()
            _torch.unwrap_checkpoints()  # another thread may be in a module with a rule
        _registration = Registration()
        compile_cache_key.take_off()
        _torch.on_cleared_cache(None)
        _listen_to_optimizers(False)
        return True


def _take_off_kernels() -> None:
    _take_off_watched_only()
    for library in _libraries.values():
        _torch.destroy(library)
    for state in (_libraries, _registered, _native_kernels):
        state.clear()
    if _watcher is not None:
        _watch_all(_watcher)


def watch(watcher: Watcher) -> None:
    """Has `watcher` called around every operation that has an autocast kernel, in all threads, until `unwatch`."""
    global _watcher  # noqa: PLW0603 -- the dispatcher is one for the process
    with _lock:
        assert _watcher is None, "one watcher at a time"
        _watcher = watcher
        _watch_all(watcher)


def unwatch() -> None:
    """Ends `watch`: the dispatcher has again what it had."""
    global _watcher  # noqa: PLW0603
    with _lock:
        _watcher = None
        for entry in _registered.values():
            generated.unwatch(entry)
        _take_off_watched_only()


def _watch_all(watcher: Watcher) -> None:
    for entry in _registered.values():
        generated.watch(entry, watcher)
    library = Library("aten", "IMPL")
    _watching.append(library)
    for device_type in filter(_torch.has_device, DEVICE_TYPES):
        for name in _torchs_table(device_type):
            native = _native_kernel(name, device_type)
            key = name, device_type
            if native is None or not native.compiled or key in _registered:
                continue
            entry = _entry(native)
            generated.watch(entry, watcher)
            _put(library, native, entry)
            _watched_only[key] = entry


def _take_off_watched_only() -> None:
    while _watching:
        _torch.destroy(_watching.pop())
    for (name, device_type), entry in _watched_only.items():
        if (name, device_type) in _registered:  # a policy has come to need it meanwhile
            native = _native_kernels[name, device_type]
            _put(_library(name), native, entry)
    _watched_only.clear()


def _bind(policy: Policy, device_type: str) -> BoundPolicy:
    _torch.on_cleared_cache(_clear_cache)
    _torch.wrap_checkpoints()
    _listen_to_optimizers(True)
    defined = _torch.definitions()
    table, unknown = policy.expand(device_type)
    bound_kernels: dict[str, Kernel] = {}
    is_pytorchs = True
    for name in table.keys() | _torchs_table(device_type).keys():
        native = _native_kernel(name, device_type)
        if native is None:
            continue
        kernel = _choose(policy, native, table.get(name))
        is_pytorchs &= _is_pytorchs(policy, native, table.get(name))
        if kernel is not None:
            _register(native)
            bound_kernels[name] = kernel
    pending = tuple(name for name in unknown if not name.startswith("aten::"))
    meaning = None if is_pytorchs and policy.mixed == "raise" else policy.fingerprint
    bound = BoundPolicy(policy, bound_kernels, _registration, pending, is_pytorchs, meaning)
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
        return entry.rule is Rule.PROMOTE and policy.mixed == "promote"
    return entry is not None and (entry.rule is native.rule or native.rule is Rule.BANNED)


def _choose(policy: Policy, native: NativeKernel, entry: Entry | None) -> Kernel | None:
    """What runs an operation; None where PyTorch's kernel (or none) does just what the policy says."""
    if entry is None and not native.compiled:
        return None
    op, rule = native.op, Rule.KEEP if entry is None else entry.rule
    promotes = policy.mixed == "promote" and rule is not Rule.BANNED and op.takes_several
    if promotes and rule is Rule.PROMOTE and not native.compiled:
        return DELEGATE  # promotion is asked for where the operation raises, and only there
    if rule is native.rule and _engine == "delegated":
        return DELEGATE if promotes or rule is Rule.LOWER else None
    kernel = reference_kernels.kernel_for(rule, op)
    if native.rule is Rule.BANNED and rule is not Rule.BANNED:
        kernel = reference_kernels.noting(op, f"banned by PyTorch, ran as '{rule}'", kernel)
    return reference_kernels.promoting(op, kernel) if promotes else kernel


@dataclass(frozen=True, slots=True, eq=False)
class NativeKernel:
    """What was at an operation's autocast key before precast: PyTorch's compiled kernel, or a way past it."""

    op: Operation
    kernel: DispatcherKernel
    compiled: bool
    rule: Rule | None
    """The rule that PyTorch's kernel follows; None where there is none, or it follows none we know."""


def _native_kernel(name: str, device_type: str) -> NativeKernel | None:
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
    return _native_kernels.setdefault((name, device_type), native)


def _register(native: NativeKernel) -> None:
    """Puts one kernel for all policies at the operation's autocast key, once."""
    key = native.op.name, native.op.device_type
    if key in _registered:
        return
    if key in _watched_only:
        _registered[key] = _watched_only[key]
        return
    entry = _registered[key] = _entry(native)
    if _watcher is not None:
        generated.watch(entry, _watcher)
    _put(_library(native.op.name), native, entry)


def _entry(native: NativeKernel) -> DispatcherKernel:
    return generated.entry_point(
        native.op,
        native.kernel,
        takes_weights=native.rule is Rule.LOWER,
        needs_keyset=_needs_keyset(native),
    )


def _needs_keyset(native: NativeKernel) -> bool:
    # PyTorch's compiled autocast kernels are plain functions: a keyset made at each call would be thrown away.
    return not (native.compiled and native.op.name.startswith("aten::"))


def _library(name: str) -> Library:
    namespace = name.partition("::")[0]
    return _libraries.setdefault(namespace, Library(namespace, "IMPL"))


def _put(library: Library, native: NativeKernel, entry: DispatcherKernel) -> None:
    operation = native.op.name.partition("::")[2]
    with _torch.without_override_warning():
        key = _torch.autocast_key(native.op.device_type)
        library.impl(operation, entry, key, with_keyset=_needs_keyset(native))
