"""Carries out a plan: hooks that give each module the precision of its rule while it runs.

Invariants:

- rules act inside an enabled region of the device type alone, PyTorch's own included; outside nothing changes. Where
  the program switches autocast off, inside the model too, it stays off;
- what holds when a module begins is restored when it ends, also by an exception; what a call replaced is kept on the
  thread's stack, so modules may be called recursively and by several threads at once;
- a rule for a dtype sets PyTorch's flags and no more: the policy in force stays. Rows for operations are laid over it;
- a plan that is no longer carried out leaves no trace on the model.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from precast import _torch
from precast._internal.pytree import map_tensors
from precast.attachment.module_calls import (
    Off,
    acts,
    begin,
    end,
    forget_abandoned,
    off_here,
    switched_off,
)
from precast.attachment.module_steps import has_steps, later, refuse_async_generator, runs_later
from precast.autocast_mode.arguments import ACCEPTED, check_dtype
from precast.autocast_mode.region import autocast, in_graph
from precast.engine import registration
from precast.engine.operation import is_eligible
from precast.engine.thread_state import installed, thread_state
from precast.errors import PolicyError
from precast.policy.module_names import modules_by_name
from precast.policy.module_plan import Plan
from precast.policy.module_rules import ModuleRule, Precision
from precast.policy.policy import DEVICE_TYPES, Entry, Policy

__all__ = ["Applied", "Ruled", "apply"]

_DTYPES: Final = {Precision.FLOAT16: torch.float16, Precision.BFLOAT16: torch.bfloat16}


class Applied:
    """A plan that is carried out on a model, until `remove`."""

    def __init__(self, plan: Plan, give_way: Callable[[], None] | None = None) -> None:
        self.plan = plan
        self.give_way = give_way
        """Called when this ends as another plan wants one of its modules; None where the other is refused."""
        self._added: list[tuple[Ruled, Any, Any]] = []
        """Each rule, and what takes off its hooks before and after the module."""

    def remove(self) -> None:
        """Ends it; the model has the hooks that it had before. Does nothing the second time."""
        forget_abandoned()
        for hook, enter, leave in self._added:
            enter.remove()
            hook.owned, hook.ended = False, True
            if not hook.inside - {threading.get_ident()}:
                leave.remove()  # else another thread has yet to restore what it found; `apply` takes it off
        if self._added:
            _torch.reset_compiler()
        self._added.clear()

    def _add(self, module: nn.Module, rule: ModuleRule, tables: Policy | None) -> None:
        hook = Ruled(rule, True, tables, has_steps(module), applied=weakref.ref(self))
        # Not `module.register...`: that of a scripted module refuses, though its hooks are called. First the one that
        # restores: another thread may be calling the module.
        leave = nn.Module.register_forward_hook(module, hook.leave, always_call=True)
        enter = nn.Module.register_forward_pre_hook(
            module, hook.enter, prepend=True, with_kwargs=True
        )
        self._added.append((hook, enter, leave))


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    tables: bool = False,
    give_way: Callable[[], None] | None = None,
) -> Applied:
    """Has each module of `model` follow its rule whenever it is called in an enabled region.

    Inputs are cast where they are eligible: floating-point, not float64, on the region's device type; in lists, tuples,
    dicts and dataclasses too, which are then copies. Outputs stay as they are, but where a module around has switched
    autocast off: there they are cast to float32, as nothing else would. Copies of the model, by `deepcopy` or pickle,
    follow the same rules, as they keep all hooks.

    Args:
        model: the model that `plan` was made for.
        plan: what `precast.policy.module_plan.plan` returned.
        tables: whether the plan's policy is in force inside the model, too; else it is that of the region.
        give_way: called when a later plan for one of these modules has ended this one; None has that plan refused.

    Raises:
        PolicyError: a module already follows a rule of another plan that is carried out, or its forward is an
            asynchronous generator.
    """
    modules = modules_by_name(model)
    acting = {
        id(modules[m.name]): m for m in plan.modules if m.carried_out or (tables and not m.name)
    }
    named = {id(module): module for module in modules.values()}
    for module in named.values():
        _drop_those_of_a_copy(module)
        if give_way is None:
            _end_those_that_give_way(module)
    for key, planned in acting.items():
        refuse_async_generator(named[key])
        if any(_ruled(hook) for _, hook in _torch.forward_hooks(named[key])):
            raise PolicyError(
                f"the module {planned.name!r} already follows a rule of another attachment; detach that one first"
            )
    applied = Applied(plan, give_way)
    for key, planned in acting.items():
        whole = plan.policy if tables and not planned.name else None
        applied._add(named[key], planned.carried_out or ModuleRule(None), whole)
    if acting:
        _torch.reset_compiler()  # compiled functions do not look whether there are new hooks
    return applied


def _drop_those_of_a_copy(module: nn.Module) -> None:
    for number, hook in _torch.forward_hooks(module):
        ruled = _ruled(hook)
        if ruled is not None and not ruled.owned:
            _torch.drop_forward_hook(module, number)


def _end_those_that_give_way(module: nn.Module) -> None:
    for _, hook in _torch.forward_hooks(module):
        ruled = _ruled(hook)
        applied = ruled.applied() if ruled is not None and ruled.applied is not None else None
        if applied is not None and applied.give_way is not None:
            applied.remove()
            applied.give_way()


def _ruled(hook: object) -> Ruled | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Ruled) else None


@functools.cache
def _devices() -> tuple[str, ...]:
    """The device types that this machine can use."""
    return tuple(filter(_torch.has_device, DEVICE_TYPES))


class _Target(NamedTuple):
    """What a rule makes of one device type, and what inputs are cast to there."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cast: torch.dtype | None


_numbers = itertools.count()
_ruled_by_number: Final[weakref.WeakValueDictionary[int, Ruled]] = weakref.WeakValueDictionary()
_Casts = tuple[tuple[str, torch.dtype], ...]
"""Device types, and what eligible tensors there are cast to."""
_Depths = tuple[tuple[str, int], ...]
"""`off` as a constant."""


class _Traced(NamedTuple):
    """A call in a function that `torch.compile` traces."""

    regions: list[Generator[None, None, None]]
    outputs: _Casts
    off: _Depths


_in_trace: Final[list[_Traced]] = []


@dataclass(eq=False)
class Ruled:
    """The two hooks of one module, and the rule that they carry out."""

    rule: ModuleRule
    owned: bool = False
    """Whether an `Applied` will take it away; not where it came with a copy of a module."""
    tables: Policy | None = None
    """The policy that holds inside; None for that of the region."""
    has_steps: bool = False
    """Whether the module's forward is a generator or a coroutine."""
    ended: bool = False
    """Whether an `Applied` has taken it away: what still runs step by step follows it no longer."""
    applied: weakref.ref[Applied] | None = field(default=None, repr=False)
    """What puts it on and takes it away."""
    inside: set[int] = field(default_factory=set, repr=False)
    """The threads that run the module, by their `ident`."""
    _number: int = field(default_factory=lambda: next(_numbers), repr=False)
    _rows: tuple[str, frozenset[tuple[str, Entry]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rows = "rows", frozenset(self.rule.ops.items())
        _ruled_by_number[self._number] = self

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rule, False, self.tables, self.has_steps)

    @property
    def sets_policy(self) -> bool:
        """Whether another policy is in force inside than around."""
        return bool(self.rule.ops) or self.tables is not None

    @_torch.runs_uncompiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Before the module: sets its precision, and casts its inputs."""
        if kwargs is None:  # another thread puts the hook on, or takes it off, in this moment
            return None
        if _is_traced():
            return self._enter_traced(args, kwargs)
        frame = inspect.currentframe()
        targets = self._begin(module, frame and frame.f_back)
        return _cast((args, kwargs), _casts(targets))

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """After the module, and after an exception in it: restores what it found."""
        if _is_traced():
            return _leave_traced(result)
        off = self._end(module)
        if runs_later(result) and not any(result is given for given in args):
            return later(result, functools.partial(self._step, module), module)
        return _cast(result, off) if off else None

    def _begin(self, module: nn.Module, caller: FrameType | None) -> list[_Target]:
        self.inside.add(threading.get_ident())
        call = begin(module, caller)
        targets = self.targets(off_here())
        for device, enabled, dtype, _ in targets:
            frame = registration.bind(self.policy(device), device) if self.sets_policy else None
            call.replace(device, enabled, dtype, frame)
        switched_off([target.device_type for target in targets if not target.enabled])
        return targets

    def _end(self, module: nn.Module) -> _Casts:
        """Restores what the call found; what its results are cast to."""
        call = end(module)
        self.inside.discard(threading.get_ident())
        replaced = call.replaced if call else []
        return tuple((r.device_type, torch.float32) for r in replaced if not r.enabled)

    @_torch.never_compiled
    def _step(self, module: nn.Module, function: Callable[[Any], Any], given: Any) -> Any:
        """A step of what the module returned, which runs after it: see `_module_steps`."""
        if self.ended:
            return function(given)
        targets = self._begin(module, inspect.currentframe())
        try:
            value = function(_cast_all(given, _casts(targets)))
        except StopIteration as last:
            raise StopIteration(_cast_all(last.value, self._end(module))) from None
        except BaseException:
            self._end(module)
            raise
        return _cast_all(value, self._end(module))

    def targets(self, off: Off) -> list[_Target]:
        """What is to hold inside, for each device type that the rule acts on in the region around."""
        return [self._target(device) for device in _devices() if acts(device, off)]

    def policy(self, device_type: str) -> Policy:
        """The policy in force, or that of the plan, with the rule's rows laid over it."""
        frame = thread_state(device_type).state.bound_policy or installed(device_type).bound_policy
        around = self.tables or (Policy.load("torch") if frame is None else frame.policy)
        # Kept by the policy, not here: a model may run under thousands, one after the other.
        known = around.made_of.get(self._rows)
        if known is None:
            known = around.made_of[self._rows] = around.replace(ops=self.rule.ops)
        return known

    def _target(self, device: str) -> _Target:
        asked = self.rule.dtype
        enabled = torch.is_autocast_enabled(device) if asked is None else asked != Precision.FP32
        dtype = torch.get_autocast_dtype(device) if asked is None else _DTYPES.get(asked)
        dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
        if enabled and (device, dtype) not in ACCEPTED:
            check_dtype(dtype, device)
        cast = None if asked is None else dtype if enabled else torch.float32
        return _Target(device, enabled, dtype, cast)

    def _enter_traced(self, args: Any, kwargs: Any) -> Any:
        if _has_steps(self._number):
            _leave_graph()
        off_around = _in_trace[-1].off if _in_trace else ()
        regions, casts, outputs, off = _plan(self._number, off_around)
        steps = [_in_graph(*arguments) for arguments in regions]
        for region in steps:
            next(region)
        _in_trace.append(_Traced(steps, outputs, off))
        return (_cast_in_trace(args, casts), _cast_in_trace(kwargs, casts)) if casts else None


def _leave_traced(result: Any) -> Any:
    call = _in_trace.pop()
    for region in reversed(call.regions):
        next(region, None)
    return _cast_in_trace(result, call.outputs) if call.outputs else None


_is_traced = torch.compiler.is_dynamo_compiling


@_torch.traced_as_constant
def _has_steps(number: int) -> bool:
    return _ruled_by_number[number].has_steps


@_torch.never_compiled
def _leave_graph() -> None:
    """Has a module be called as it is: in a graph nothing is left between two steps of a generator."""


@_torch.traced_as_constant
def _plan(number: int, off_around: _Depths) -> tuple[Any, _Casts, _Casts, _Depths]:
    """For the graph: arguments for regions of PyTorch's, casts of inputs and outputs, and what is off inside."""
    hook = _ruled_by_number[number]
    off = {**off_here(), **dict(off_around)}
    targets = hook.targets(off)
    regions = tuple(_region_of(hook, target) for target in targets)
    outputs = tuple(
        (t.device_type, torch.float32)
        for t in targets
        if not torch.is_autocast_enabled(t.device_type)
    )
    depth = _torch.autocast_nesting() + len(targets)  # the regions of the graph are counted
    off |= {t.device_type: depth for t in targets if not t.enabled}
    return regions, _casts(targets), outputs, tuple(off.items())


def _region_of(hook: Ruled, target: _Target) -> tuple[Any, ...]:
    device, enabled, dtype, _ = target
    if not hook.sets_policy:
        return device, dtype, enabled, None
    with autocast(device, dtype, enabled, policy=hook.policy(device)):
        return in_graph(device)


def _in_graph(
    device: str, dtype: torch.dtype, enabled: bool, cache: Any
) -> Generator[None, None, None]:
    with torch.autocast(device, dtype, enabled, cache):
        yield


def _casts(targets: list[_Target]) -> _Casts:
    return tuple((t.device_type, t.cast) for t in targets if t.cast is not None)


def _cast(value: Any, casts: Iterable[tuple[str, torch.dtype]]) -> Any:
    """`value` with its eligible tensors cast; None where there is nothing to cast."""
    new = _cast_all(value, casts)
    return None if new is value else new


def _cast_all(value: Any, casts: Iterable[tuple[str, torch.dtype]]) -> Any:
    return map_tensors(value, functools.partial(_cast_tensor, casts))


def _cast_tensor(casts: Iterable[tuple[str, torch.dtype]], tensor: torch.Tensor) -> torch.Tensor:
    for device, dtype in casts:
        if is_eligible(tensor, device):
            return tensor.to(dtype)
    return tensor


def _cast_in_trace(value: Any, casts: Iterable[tuple[str, torch.dtype]]) -> Any:
    """The same in a graph; Dynamo does not know whether two tuples are one, which `map_tensors` asks (2.13)."""
    if type(value) is tuple:
        return tuple([_cast_in_trace(item, casts) for item in value])
    if type(value) is list:
        return [_cast_in_trace(item, casts) for item in value]
    if type(value) is dict:
        return {key: _cast_in_trace(item, casts) for key, item in value.items()}
    return map_tensors(value, lambda tensor: _cast_tensor(casts, tensor))
