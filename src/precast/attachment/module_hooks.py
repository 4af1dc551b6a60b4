"""Hooks that carry out a plan for a model: each module has the precision of its rule while it runs.

Invariants:

- a rule applies on a device type only inside an enabled region, PyTorch's included. Where the program disables
  autocast, also inside the model, it stays off;
- the state that a call replaces is kept on the thread's stack and restored at its end, also after an exception, so
  modules may be called recursively and by several threads at once;
- a rule for a dtype only sets PyTorch's flags; rules for operations are added to the policy in force;
- a plan that has ended leaves nothing on the model.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from precast import _torch
from precast._internal.pytree import map_tensors
from precast.attachment import module_calls, module_steps, weight_casts
from precast.attachment.weight_casts import UncastDtypes, WeightCasts
from precast.autocast_mode.arguments import ACCEPTED, check_dtype
from precast.autocast_mode.region import autocast, precision_in_graph
from precast.engine import registration
from precast.engine.operation import is_eligible
from precast.engine.thread_state import installed, thread_state
from precast.errors import PolicyError
from precast.policy.module_names import modules_by_name
from precast.policy.module_plan import Plan, PlannedModule
from precast.policy.module_rules import ModuleRule, Precision
from precast.policy.policy import DEVICE_TYPES, Policy, derived_values

__all__ = ["AppliedPlan", "ModuleRuleHooks", "apply"]

_DTYPES: Final[dict[Precision | None, torch.dtype]] = {
    Precision.FLOAT16: torch.float16,
    Precision.BFLOAT16: torch.bfloat16,
}


class AppliedPlan:
    """A plan that is carried out on a model until `remove`."""

    def __init__(self, plan: Plan, give_way: Callable[[], None] | None = None) -> None:
        self.plan = plan
        self.give_way = give_way
        """Called when another plan takes over one of the modules. With None the other plan is refused."""
        self._added: list[tuple[ModuleRuleHooks, Any, Any]] = []
        """The hooks of each module, with the handles of its pre-hook and its forward hook."""

    def remove(self) -> None:
        """Remove the hooks from the model. A second call does nothing."""
        module_calls.forget_abandoned()
        for hook, enter, leave in self._added:
            enter.remove()
            hook.applied, hook.ended = None, True
            if not hook.inside - {threading.get_ident()}:
                leave.remove()  # otherwise another thread has yet to restore its flags; `apply` will remove the hook
        if self._added:
            _torch.reset_compiler()
        self._added.clear()

    def _add(self, module: nn.Module, planned: PlannedModule, tables: Policy | None) -> None:
        rule = planned.applied_rule or ModuleRule(None)
        where = f"[modules] {planned.pattern!r} = {rule} for the module {planned.name!r}"
        steps = module_steps.has_steps(module)
        hook = ModuleRuleHooks(rule, tables, steps, where, weakref.ref(self))
        # A scripted module calls hooks, but its own `register_...` methods refuse them. The hook that restores comes
        # first, because another thread may be calling the module.
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
) -> AppliedPlan:
    """Apply a plan: each module of `model` follows its rule whenever it is called in an enabled region.

    Eligible inputs are cast: floating-point tensors other than float64 on the region's device type, also inside lists,
    tuples, dicts and dataclasses, which are then copied. Outputs are unchanged, unless an outer module has disabled
    autocast: then they are cast to float32, because operations there do not cast. Copies of the model by `deepcopy`
    or pickle keep all hooks, and so follow the same rules.

    With `tables` the plan's policy is in force inside the model, otherwise the region's. `give_way` is called when a
    later plan for one of these modules replaces this one; with None that plan is refused.

    Raises:
        PolicyError: a module already follows a rule of another plan, or its forward is an asynchronous generator.
    """
    modules = modules_by_name(model)
    planned_by_id = {
        id(modules[m.name]): m for m in plan.modules if m.applied_rule or (tables and not m.name)
    }
    modules_by_id = {id(module): module for module in modules.values()}
    for module in modules_by_id.values():
        _remove_outdated(module, replaces=give_way is None)
    for key, planned in planned_by_id.items():
        module_steps.refuse_async_generator(modules_by_id[key])
        if _rules_on(modules_by_id[key]):
            raise PolicyError(
                f"the module {planned.name!r} already follows a rule of another attachment; detach that one first"
            )
    applied = AppliedPlan(plan, give_way)
    for key, planned in planned_by_id.items():
        policy_inside = plan.policy if tables and not planned.name else None
        applied._add(modules_by_id[key], planned, policy_inside)
    if planned_by_id:
        _torch.reset_compiler()  # compiled functions do not notice new hooks
    return applied


def _remove_outdated(module: nn.Module, *, replaces: bool) -> None:
    """Remove rules that came with a copy of a module and, if `replaces`, end plans that give way to another."""
    for number, owner in [(number, rule.applied) for number, rule in _rules_on(module)]:
        applied = None if owner is None else owner()
        if owner is None:
            _torch.drop_forward_hook(module, number)
        elif replaces and applied is not None and applied.give_way is not None:
            applied.remove()
            applied.give_way()


def _rules_on(module: nn.Module) -> list[tuple[int, ModuleRuleHooks]]:
    """Return the rules whose hooks are on a module, each with the hook's number."""
    owners = [(n, getattr(hook, "__self__", None)) for n, hook in _torch.forward_hooks(module)]
    return [(number, owner) for number, owner in owners if isinstance(owner, ModuleRuleHooks)]


@functools.cache
def _devices() -> tuple[str, ...]:
    """Return the device types that this machine can use."""
    return tuple(filter(_torch.has_device, DEVICE_TYPES))


class _RuleTarget(NamedTuple):
    """The flags that a rule sets on one device type, and the dtype to which inputs are cast there; None for no cast."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cast: torch.dtype | None


_numbers = itertools.count()
_hooks_by_number: Final[weakref.WeakValueDictionary[int, ModuleRuleHooks]] = (
    weakref.WeakValueDictionary()
)
_DtypeCasts = tuple[tuple[str, torch.dtype], ...]
"""Device types with the dtype to which eligible tensors are cast there."""
_DisabledItems = tuple[tuple[str, int], ...]
"""`DisabledDevices` as a constant of a graph."""


class _TracedCall(NamedTuple):
    """A call of a module in a function that `torch.compile` traces."""

    regions: list[Generator[None, None, None]]
    outputs: _DtypeCasts
    off: _DisabledItems


_in_trace: Final[list[_TracedCall]] = []


class ModuleRuleHooks:
    """The two hooks of one module, and the rule that they carry out.

    Args:
        tables: the policy in force inside; None for the region's.
        where: the pattern, the rule and the module, for messages.
        applied: the plan that owns the hooks; None if they came with a copy of a module.
    """

    def __init__(
        self,
        rule: ModuleRule,
        tables: Policy | None,
        has_steps: bool,
        where: str,
        applied: weakref.ref[AppliedPlan] | None = None,
    ) -> None:
        self.rule = rule
        self.tables = tables
        self.has_steps = has_steps
        self.where = where
        self.applied = applied
        self.sets_policy = bool(rule.ops) or tables is not None
        """True if the policy inside the module differs from that around it."""
        self.ended = False
        """True once the plan has ended; a forward that still runs step by step then no longer follows the rule."""
        self.inside: set[int] = set()
        """The `ident` of each thread that runs the module now."""
        self._rows = "rows", frozenset(rule.ops.items())
        self._number = next(_numbers)
        _hooks_by_number[self._number] = self

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rule, self.tables, self.has_steps, self.where)

    @_torch.runs_uncompiled
    def enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Set the module's precision and cast its inputs; a forward pre-hook."""
        if kwargs is None:  # another thread is just adding or removing the hook
            return None
        if _is_traced():
            return self._enter_traced(module, args, kwargs)
        frame = inspect.currentframe()
        targets = self._begin(module, frame and frame.f_back)
        return _cast((args, kwargs), _casts(targets))

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Restore the state before `enter`, also after an exception; a forward hook."""
        if _is_traced():
            return _leave_traced(result)
        off, result = self._end(module, result)
        if module_steps.runs_later(result) and not any(result is each for each in args):
            return module_steps.run_in_steps(result, functools.partial(self._step, module), module)
        return _cast(result, off)

    def _begin(self, module: nn.Module, caller: FrameType | None) -> list[_RuleTarget]:
        self.inside.add(threading.get_ident())
        call = module_calls.begin(module, caller)
        targets = self.targets(module_calls.disabled_devices())
        for device, enabled, dtype, _ in targets:
            bound = registration.bind(self.policy(device), device) if self.sets_policy else None
            call.replace(device, enabled, dtype, bound)
        uncast = _uncast_dtypes(targets)
        if uncast:
            weight_casts.put(self._casts_of(module, uncast))
        return targets

    def _casts_of(self, module: nn.Module, uncast: UncastDtypes) -> WeightCasts | None:
        """Return the casts of the weights in a module whose 16-bit dtype differs from the rule's."""
        around = weight_casts.current()
        if around is not None and around.uncast == uncast:
            return around
        low = weight_casts.low_weights(module, uncast, self.where)
        return WeightCasts(uncast, low) if low else None

    def _end(self, module: nn.Module, result: Any = None) -> tuple[_DtypeCasts, Any]:
        """Restore the flags; return the casts of the results, and the result with casts in place of 16-bit weights."""
        casts = weight_casts.current()
        call = module_calls.end(module)
        self.inside.discard(threading.get_ident())
        if call is None:
            return (), result
        if casts is not None and casts is not call.casts:
            weight_casts.add_note(sys.exception(), self.where)
            result = map_tensors(result, casts.of)
            casts.write_back()
        elif self.rule.ops and self.rule.dtype is None:
            weight_casts.add_note(sys.exception(), self.where, module)
        off = tuple((r.device_type, torch.float32) for r in call.replaced if not r.enabled)
        return off, result

    @_torch.never_compiled
    def _step(self, module: nn.Module, function: Callable[[Any], Any], value: Any) -> Any:
        """Run one step of the generator or coroutine that the module returned."""
        if self.ended:
            return function(value)
        targets = self._begin(module, inspect.currentframe())
        try:
            value = function(_cast(value, _casts(targets)))
        except StopIteration as last:
            off, value = self._end(module, last.value)
            raise StopIteration(_cast(value, off)) from None
        except BaseException:
            self._end(module)
            raise
        off, value = self._end(module, value)
        return _cast(value, off)

    def targets(self, off: module_calls.DisabledDevices) -> list[_RuleTarget]:
        """Return the flags that the rule sets on each device type where it applies. Rules have disabled `off`."""
        return [
            self._target(device) for device in _devices() if module_calls.rule_applies(device, off)
        ]

    def policy(self, device_type: str) -> Policy:
        """Return the plan's policy or the one in force, with the rule's rows for operations added."""
        bound = thread_state(device_type).state.bound_policy or installed(device_type).bound_policy
        around = self.tables or (Policy.load("torch") if bound is None else bound.policy)
        # Cached on the policy: a cache on this object would grow for a model that runs with many policies.
        merged = derived_values(around).get(self._rows)
        if merged is None:
            merged = derived_values(around)[self._rows] = around.replace(ops=self.rule.ops)
        return merged

    def _target(self, device: str) -> _RuleTarget:
        rule_dtype = self.rule.dtype
        enabled = (
            torch.is_autocast_enabled(device)
            if rule_dtype is None
            else rule_dtype != Precision.FP32
        )
        dtype = _DTYPES.get(rule_dtype) or torch.get_autocast_dtype(device)
        if enabled and (device, dtype) not in ACCEPTED:
            check_dtype(dtype, device)
        cast = None if rule_dtype is None else dtype if enabled else torch.float32
        return _RuleTarget(device, enabled, dtype, cast)

    def _enter_traced(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        off_around = _in_trace[-1].off if _in_trace else ()
        regions, casts, outputs, off, uncast = _plan(self._number, off_around)
        low = weight_casts.low_weights(module, dict(uncast), self.where) if uncast else []
        if _has_steps(self._number) or any(not isinstance(t, nn.Parameter) for t in low):
            _leave_graph()
        steps = [_in_graph(*arguments) for arguments in regions]
        if uncast and (low or weight_casts.is_traced()):
            steps.append(weight_casts.in_trace(uncast))
        for region in steps:
            next(region)
        _in_trace.append(_TracedCall(steps, outputs, off))
        return (_cast_in_trace(args, casts), _cast_in_trace(kwargs, casts)) if casts else None


def _leave_traced(result: Any) -> Any:
    call = _in_trace.pop()
    for region in reversed(call.regions):
        next(region, None)
    return _cast_in_trace(result, call.outputs) if call.outputs else None


_is_traced = torch.compiler.is_dynamo_compiling


@_torch.traced_as_constant
def _has_steps(number: int) -> bool:
    return _hooks_by_number[number].has_steps


@_torch.never_compiled
def _leave_graph() -> None:
    """Break the graph at a module that cannot be a part of it.

    In a graph, nothing could run between two steps of a forward, and writes to the float32 cast of a 16-bit buffer
    would be lost.
    """


@_torch.traced_as_constant
def _plan(
    number: int, off_around: _DisabledItems
) -> tuple[Any, _DtypeCasts, _DtypeCasts, _DisabledItems, Any]:
    """Return constants for a graph: the effect of a module's rule while `off_around` is disabled.

    Returns:
        The arguments of regions, the casts of inputs and of outputs, the disabled devices inside, and the dtypes of
        weights that are not cast.
    """
    hook = _hooks_by_number[number]
    off = {**module_calls.disabled_devices(), **dict(off_around)}
    targets = hook.targets(off)
    regions = tuple(_region_of(hook, target) for target in targets)
    outputs = tuple(
        (t.device_type, torch.float32)
        for t in targets
        if not torch.is_autocast_enabled(t.device_type)
    )
    depth = _torch.autocast_nesting() + len(targets)  # the regions in the graph count too
    off |= {t.device_type: depth for t in targets if not t.enabled}
    return (
        regions,
        _casts(targets),
        outputs,
        tuple(off.items()),
        tuple(_uncast_dtypes(targets).items()),
    )


def _region_of(hook: ModuleRuleHooks, target: _RuleTarget) -> tuple[Any, ...]:
    device, enabled, dtype, _ = target
    if not hook.sets_policy:
        return device, dtype, enabled, None
    with autocast(device, dtype, enabled, policy=hook.policy(device)):
        return precision_in_graph(device)


def _in_graph(
    device: str, dtype: torch.dtype, enabled: bool, cache: Any
) -> Generator[None, None, None]:
    with torch.autocast(device, dtype, enabled, cache):
        yield


def _casts(targets: list[_RuleTarget]) -> _DtypeCasts:
    return tuple((t.device_type, t.cast) for t in targets if t.cast is not None)


def _uncast_dtypes(targets: list[_RuleTarget]) -> UncastDtypes:
    """Return the 16-bit dtype of weights without a cast, for each device type with a rule for a dtype."""
    return {t.device_type: t.dtype if t.enabled else None for t in targets if t.cast is not None}


def _cast(value: Any, casts: _DtypeCasts) -> Any:
    """Return `value` with its eligible tensors cast."""
    return map_tensors(value, functools.partial(_cast_tensor, casts)) if casts else value


def _cast_tensor(casts: _DtypeCasts, tensor: torch.Tensor) -> torch.Tensor:
    for device, dtype in casts:
        if is_eligible(tensor, device):
            return tensor.to(dtype)
    return tensor


def _cast_in_trace(value: Any, casts: _DtypeCasts) -> Any:
    """Cast eligible tensors in a graph, where Dynamo does not support the tests of identity of `map_tensors` (2.13)."""
    if type(value) is tuple:
        return tuple([_cast_in_trace(item, casts) for item in value])
    if type(value) is list:
        return [_cast_in_trace(item, casts) for item in value]
    if type(value) is dict:
        return {key: _cast_in_trace(item, casts) for key, item in value.items()}
    return _cast(value, casts)
