"""All patches of PyTorch that precast makes.

Invariants:

- importing precast patches nothing: the first use of a feature makes the patches that it needs;
- exactly the names in `patch_list.PATCHES` are patched here;
- the end of a patch restores the original, unless other code has replaced the name since: then that stays.

Hooks that PyTorch offers (on modules, optimizers, parameters) are not patches; the files that use them set them.
"""

from __future__ import annotations

import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, Final, Protocol

import torch

from precast._internal.locks import make_fork_safe
from precast._internal.pytree import tensors_in
from precast._torch.compile import never_compiled
from precast._torch.patch_list import PATCHES, WRITING_COLLECTIVES
from precast._torch.transforms import is_real

__all__ = [
    "RegionListener",
    "checkpoint_wrappers",
    "checkpoints",
    "clear_autocast_cache",
    "custom_function_arguments",
    "custom_functions",
    "enter_region",
    "exit_region",
    "on_average",
    "on_backward",
    "on_cleared_cache",
    "on_collectives",
    "on_fake_operation",
    "on_gradient_clipping",
    "on_graph_region",
    "on_module_call",
    "on_region_error",
    "on_regions",
    "on_scaler_call",
    "replace_names",
    "replace_regions",
    "unfused_attention",
]

_lock = make_fork_safe(threading.RLock())
_INHERITED: Final = object()
Stop = Callable[[], None]


def _check_listed(owner: str, name: str) -> None:
    assert name in PATCHES.get(owner, ()), f"{owner} {name} is not in PATCHES"


def replace_names(owner: str, **values: object) -> Stop:
    """Replace names of a module or class of PyTorch, as `PATCHES` lists them; return a function that restores them."""
    for name in values:
        _check_listed(owner, name)
    where = pkgutil.resolve_name(owner)
    originals = {name: vars(where).get(name, _INHERITED) for name in values}
    for name, value in values.items():
        setattr(where, name, value)

    def stop() -> None:
        for name, original in originals.items():
            if vars(where).get(name) is not values[name]:
                continue  # other code has replaced it since, and calls ours
            if original is _INHERITED:
                delattr(where, name)
            else:
                setattr(where, name, original)

    return stop


class SharedPatch:
    """A patch shared by several listeners: made for the first one, in any thread, and ended after the last one."""

    def __init__(self, make: Callable[[list[Any]], list[Stop]]) -> None:
        self._make = make
        self._stops: list[Stop] = []
        self._listeners: list[Any] = []

    def begin(self) -> None:
        """Make the patch, if it is not made yet."""
        if not self._stops:
            with _lock:
                self._stops = self._stops or self._make(self._listeners)

    def end(self) -> None:
        """End the patch, if it is made."""
        with _lock:
            while self._stops:
                self._stops.pop()()
            self._listeners.clear()  # other code may keep calling the patched function
            self._listeners = []

    def set(self, *listeners: Any) -> None:
        """Replace the listeners; without any, end the patch."""
        with _lock:
            self._listeners[:] = listeners
            if listeners:
                self.begin()
            else:
                self.end()

    def add(self, listener: Any) -> Stop:
        """Add a listener after the others; return a function that removes it."""
        with _lock:
            self.set(*self._listeners, listener)

        def stop() -> None:
            with _lock:
                self.set(*(each for each in self._listeners if each is not listener))

        return stop


# --- the weight cache ---


def on_cleared_cache(clear: Callable[[bool], None] | None) -> None:
    """Call `clear` whenever PyTorch's weight cache is cleared; None ends that.

    Its argument is True if the program cleared the cache, False if the end of a region did. PyTorch's regions look up
    `torch.clear_autocast_cache` when they end.
    """
    _cleared_cache.set(*([clear] if clear else []))


def clear_autocast_cache() -> None:
    """Clear PyTorch's weight cache alone. `torch._C` has the unpatched function (2.11 to 2.15)."""
    torch._C.clear_autocast_cache()


def _patch_cache_clearing(listeners: list[Callable[[bool], None]]) -> list[Stop]:
    pytorchs = torch.clear_autocast_cache

    @never_compiled
    def clear_autocast_cache() -> None:
        """Drop the lower-precision copies of weights, PyTorch's and precast's."""
        by_region = sys._getframe(1).f_code is torch.autocast.__exit__.__code__
        for clear in listeners:
            clear(not by_region)
        pytorchs()

    return [replace_names("torch", clear_autocast_cache=clear_autocast_cache)]


_cleared_cache: Final = SharedPatch(_patch_cache_clearing)


# --- checkpoints ---

checkpoint_wrappers: Final[list[Callable[[Callable[..., Any]], Callable[..., Any]]]] = []
"""Each function gets the function of a `torch.utils.checkpoint`, and returns its replacement, also for the rerun in
backward. The first is the outermost."""


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    for wrap in reversed(checkpoint_wrappers):
        function = wrap(function)
    return function


def _patch_checkpoints(_: list[Any]) -> list[Stop]:
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(module, f"{name}_impl") else ""
    generator, forward = getattr(module, name), module.CheckpointFunction.forward

    @wraps(generator)
    def not_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_wrapped(function), *args, **kwargs)

    @wraps(forward)
    def reentrant(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _wrapped(function), *args)

    kind = "torch.utils.checkpoint:CheckpointFunction"
    return [
        replace_names("torch.utils.checkpoint", **{name: not_reentrant}),
        replace_names(kind, forward=staticmethod(reentrant)),
    ]


checkpoints: Final = SharedPatch(_patch_checkpoints)
"""Applies `checkpoint_wrappers` to the functions of checkpoints from `begin` to `end`; wrapped ones stay wrapped."""


# --- custom autograd functions ---

custom_function_arguments: Final[list[Callable[[tuple[Any, ...]], tuple[Any, ...]]]] = []
"""Each function gets the arguments of a `torch.autograd.Function`, and returns the arguments to use."""


def _patch_custom_functions(_: list[Any]) -> list[Stop]:
    module: Any = torch._functorch.utils
    unwrap = module.unwrap_dead_wrappers

    @wraps(unwrap)
    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = unwrap(args)
        for change in custom_function_arguments:
            args = change(args)
        return args

    return [replace_names("torch._functorch.utils", unwrap_dead_wrappers=unwrap_dead_wrappers)]


custom_functions: Final = SharedPatch(_patch_custom_functions)
"""Applies `custom_function_arguments` to the arguments of custom functions from `begin` to `end`."""


# --- regions ---

OpenRegion = Callable[[str, torch.dtype, bool, str], Any]
_open_region: list[OpenRegion] = []
_end_after_error: list[Callable[[Callable[[], Any]], Any]] = []
_enter: Callable[..., Any] = torch.autocast.__enter__
_exit: Callable[..., Any] = torch.autocast.__exit__


def on_graph_region(
    open_region: OpenRegion, end_after_error: Callable[[Callable[[], Any]], Any]
) -> None:
    """Open regions in a graph whose `cache_enabled` is a string with ``open_region(device, dtype, enabled, text)``.

    Dynamo puts a region into a graph as two calls with constant arguments. They run when the graph is traced further
    or, with the backend "eager", in each call. Dynamo supports PyTorch's regions only, and no other argument of theirs
    can name the policy. The result of `open_region` is entered and left in place of PyTorch's region.

    A graph has no `finally`: an error in it leaves its regions open. So each call of a graph with regions, and each
    compilation of one, is made by ``end_after_error(run)``.
    """
    _open_region[:], _end_after_error[:] = [open_region], [end_after_error]
    _graph_regions.begin()
    if "torch._dynamo.output_graph" in sys.modules:
        _graph_calls.begin()


@wraps(_enter)
def enter_region(region: Any) -> Any:
    """Enter a region of PyTorch's as `torch.autocast.__enter__` does; a region that names a policy as precast's."""
    text = region._cache_enabled
    if not isinstance(text, str):
        return _enter(region)
    region._precast = _open_region[0](region.device, region.fast_dtype, region._enabled, text)
    region._precast.__enter__()
    return region


@wraps(_exit)
def exit_region(region: Any, *exc_info: Any) -> Any:
    """Leave a region as `torch.autocast.__exit__` does, or the region of precast's in its place."""
    ours = vars(region).get("_precast")
    return _exit(region, *exc_info) if ours is None else ours.__exit__(*exc_info)


def _patch_graph_regions(_: list[Any]) -> list[Stop]:
    graphs = "torch.amp.autocast_mode:_UnmanagedAutocast"
    owner = graphs if _GRAPHS_HAVE_THEIR_OWN else "torch:autocast"
    return [replace_names(owner, __enter__=enter_region, __exit__=exit_region)]


_GRAPHS_HAVE_THEIR_OWN: Final = hasattr(torch.amp.autocast_mode, "_UnmanagedAutocast")  # since 2.12
_graph_regions: Final = SharedPatch(_patch_graph_regions)


def _patch_graph_calls(_: list[Any]) -> list[Stop]:
    owner = "torch._dynamo.output_graph:OutputGraph"
    original = pkgutil.resolve_name(owner).call_user_compiler

    @wraps(original)
    def call_user_compiler(self: Any, graph: torch.fx.GraphModule, *args: Any) -> Any:
        if not _has_regions(graph):
            return original(self, graph, *args)
        compiled = _end_after_error[0](lambda: original(self, graph, *args))
        # Other objects are for the compiler's cache of whole functions, and contain no regions.
        if not isinstance(compiled, FunctionType | MethodType):
            return compiled

        def run(*args: Any, **kwargs: Any) -> Any:
            return _end_after_error[0](lambda: compiled(*args, **kwargs))

        vars(run).update(vars(compiled))
        return run

    return [replace_names(owner, call_user_compiler=call_user_compiler)]


def _has_regions(graph: torch.fx.GraphModule) -> bool:
    """Return True if a graph, or one that it contains, opens a region."""
    graphs = [part.graph for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    enter: Any = torch.amp.autocast_mode._enter_autocast
    return any(node.target is enter for each in graphs for node in each.nodes)


_graph_calls: Final = SharedPatch(_patch_graph_calls)


def replace_regions(enter: Callable[..., Any], leave: Callable[..., Any]) -> Stop:
    """Enter PyTorch's regions by ``enter(region)`` and leave them by ``leave(region, *exc_info)``.

    These call `enter_region` and `exit_region`. Returns a function that ends it.
    """
    if not _GRAPHS_HAVE_THEIR_OWN:
        _graph_regions.begin()  # first, because it outlasts this one, and both replace the same methods
    return replace_names("torch:autocast", __enter__=enter, __exit__=leave)


def on_region_error(listener: Callable[[BaseException, str, torch.dtype], None]) -> Stop:
    """Call ``listener(error, device_type, dtype)`` when an error leaves an enabled region of PyTorch's.

    Returns a function that ends it.
    """

    @wraps(_exit)
    def leave(region: Any, *exc_info: Any) -> Any:
        error = exc_info[1] if len(exc_info) > 1 else None
        if error is not None and region._enabled:
            listener(error, region.device, region.fast_dtype)
        return exit_region(region, *exc_info)

    return replace_regions(enter_region, leave)


class RegionListener(Protocol):
    """Functions that are called for each region."""

    def entered(self) -> None:
        """Called before a region is entered, by the caller's caller."""

    def left(self) -> None:
        """Called before a region ends."""

    def switched(self, device_type: str, enabled: bool) -> None:
        """Called after autocast is switched on or off."""


def on_fake_operation(listener: Callable[[Any, Any, Any], Callable[[Any], Any] | None]) -> Stop:
    """Call ``listener(overload, args, kwargs)`` before each operation on fake tensors, in any thread.

    The operation raises its exceptions. If it returns a function, that gets the result and returns the final one.
    Returns a function that ends it.
    """
    return _fake_operations.add(listener)


def _patch_fake_operations(listeners: list[Callable[..., Any]]) -> list[Stop]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    original = FakeTensorMode.dispatch

    @wraps(original)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = [listener(func, args, kwargs or {}) for listener in tuple(listeners)]
        result = original(self, func, types, args, kwargs or {})
        for change in changes:
            result = result if change is None else change(result)
        return result

    return [replace_names("torch._subclasses.fake_tensor:FakeTensorMode", dispatch=dispatch)]


_fake_operations: Final = SharedPatch(_patch_fake_operations)


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Disable PyTorch's fused kernels for attention in this thread, in a block; the compiler records none, too."""
    stop = _fused_attention.add(threading.get_ident())
    try:
        yield
    finally:
        stop()


def _patch_fused_attention(threads: list[int]) -> list[Stop]:
    from torch.backends import mha

    original = mha.get_fastpath_enabled

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def get_fastpath_enabled() -> bool:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]  # TorchScript compiles only what follows
            return threading.get_ident() not in threads and original()
        return True

    return [replace_names("torch.backends.mha", get_fastpath_enabled=get_fastpath_enabled)]


_fused_attention: Final = SharedPatch(_patch_fused_attention)


def on_average(read: Callable[[torch.nn.Module, torch.nn.Module], torch.nn.Module]) -> None:
    """Make an `AveragedModel` update itself from ``read(average, model)`` instead of `model`.

    Only `parameters()` and `buffers()` of the result are called.
    """
    _averages.set(read)


def _patch_averages(readers: list[Callable[..., Any]]) -> list[Stop]:
    from torch.optim.swa_utils import AveragedModel

    original = AveragedModel.update_parameters

    @wraps(original)
    def update_parameters(self: Any, model: torch.nn.Module) -> None:
        original(self, readers[0](self.module, model))

    return [
        replace_names("torch.optim.swa_utils:AveragedModel", update_parameters=update_parameters)
    ]


_averages: Final = SharedPatch(_patch_averages)


def on_regions(listener: RegionListener | None) -> None:
    """Call a listener for all regions, PyTorch's and precast's; None ends that.

    All regions look up the functions that count them and that switch autocast.
    """
    _regions.set(*([listener] if listener else []))


def _patch_region_functions(listeners: list[RegionListener]) -> list[Stop]:
    increment, decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    set_enabled: Any = torch.set_autocast_enabled

    def autocast_increment_nesting() -> int:
        for listener in listeners:
            listener.entered()
        return increment()

    def autocast_decrement_nesting() -> int:
        for listener in listeners:
            listener.left()
        return decrement()

    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*args)
        for listener in listeners:
            listener.switched(*(args if len(args) == 2 else ("cuda", *args)))

    functions = (autocast_increment_nesting, autocast_decrement_nesting, set_autocast_enabled)
    return [replace_names("torch", **{each.__name__: never_compiled(each) for each in functions})]


_regions: Final = SharedPatch(_patch_region_functions)


# --- backward passes, calls of modules, scalers ---


def on_backward(listener: Callable[[Any, Any], None]) -> Stop:
    """Call ``listener(roots, gradients)`` before each backward pass; return a function that ends that."""
    backward = torch.autograd.backward

    @never_compiled
    @wraps(backward)
    def wrapper(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        listener(tensors, grad_tensors)
        backward(tensors, grad_tensors, *args, **kwargs)

    return replace_names("torch.autograd", backward=wrapper)


Outermost = Callable[[torch.nn.Module, Callable[[], Any]], Any]


def on_module_call(outermost: Outermost) -> Stop:
    """Run each outermost call of a module as ``outermost(module, run)``, in any thread.

    With several, each runs inside the next one. Returns a function that ends it.
    """
    return _module_calls.add(outermost)


def _patch_module_calls(listeners: list[Outermost]) -> list[Stop]:
    module_class: Any = torch.nn.Module
    call = module_class.__call__
    thread = threading.local()

    @wraps(call)
    def __call__(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # `is_compiling` is a constant where the compiler traces, so nothing of this enters a graph.
        if torch.compiler.is_compiling() or getattr(thread, "inside", False):
            return call(module, *args, **kwargs)
        thread.inside = True
        try:
            return _run_through(tuple(listeners), module, lambda: call(module, *args, **kwargs))
        finally:
            thread.inside = False

    return [replace_names("torch.nn:Module", __call__=__call__)]


def _run_through(
    listeners: tuple[Outermost, ...], module: torch.nn.Module, run: Callable[[], Any]
) -> Any:
    if not listeners:
        return run()
    return listeners[-1](module, lambda: _run_through(listeners[:-1], module, run))


_module_calls: Final = SharedPatch(_patch_module_calls)


def on_scaler_call(name: str, act: Callable[..., Any]) -> Stop:
    """Run each call of a method of PyTorch's scaler as ``act(scaler, run, *args)``; return a function that ends it."""
    plain = vars(torch.amp.GradScaler)[name]

    @wraps(plain)
    def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        # `is_compiling` is a constant where the compiler traces, so nothing of this enters a graph.
        if torch.compiler.is_compiling() or not (is_real() and scaler.is_enabled()):
            return plain(scaler, *args, **kwargs)
        return act(scaler, lambda: plain(scaler, *args, **kwargs), *(args or kwargs.values()))

    return replace_names("torch.amp:GradScaler", **{name: wrapper})


def on_gradient_clipping(act: Callable[..., Any]) -> Stop:
    """Run each call that clips gradients as ``act(name, run, parameters, limit)``; return a function that ends that.

    ``run(parameters)`` clips.
    """
    from torch.nn.utils import clip_grad

    def clipping(name: str) -> Callable[..., Any]:
        plain = getattr(clip_grad, name)

        @wraps(plain)
        def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            # `is_compiling` is a constant where the compiler traces, so nothing of this enters a graph.
            if torch.compiler.is_compiling() or not is_real():
                return plain(parameters, *args, **kwargs)
            limit = args or [kwargs[key] for key in ("max_norm", "clip_value") if key in kwargs]
            return act(name, lambda each: plain(each, *args, **kwargs), parameters, *limit[:1])

        return wrapper

    calls = {name: clipping(name) for name in ("clip_grad_norm_", "clip_grad_value_")}
    ends = ExitStack()
    for owner in ("torch.nn.utils", "torch.nn.utils.clip_grad"):
        ends.callback(replace_names(owner, **calls))
    return ends.close


# --- collectives ---


def on_collectives(listener: Callable[[list[torch.Tensor]], None]) -> Stop:
    """Call `listener` with the tensors of each collective called from Python; return a function that ends that."""
    if not torch.distributed.is_available():
        return lambda: None
    group: Any = torch.distributed.ProcessGroup

    def listening(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            listener(tensors_in((args[1:], kwargs)))
            return call(*args, **kwargs)

        return wrapper

    names = [name for name in WRITING_COLLECTIVES if name in vars(group)]
    calls = {name: listening(getattr(group, name)) for name in names}
    return replace_names("torch.distributed:ProcessGroup", **calls)
