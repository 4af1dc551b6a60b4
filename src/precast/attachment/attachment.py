"""attach: regions learn a model's names: its weights are cast once, and its modules have their own precision.

Invariants:

- the model itself is not changed but for hooks, which `detach` takes off; no copy is in its state;
- a parameter that is added or replaced later is held from the next region on, one that is gone no longer;
- what cannot be held is named with its reason, and runs as without an attachment.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from precast._internal.display import Card, Displayed, size
from precast._torch import is_captured, on_collectives, runs_uncompiled
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.attachment.module_hooks import apply
from precast.engine.thread_state import regions
from precast.errors import AttachError, PrecastWarning
from precast.policy.module_names import named_parameters, names_in
from precast.policy.module_plan import Plan, plan
from precast.policy.policy import Policy, as_policy
from precast.weights import held
from precast.weights.held import Copy, HeldParameter
from precast.weights.low_precision_gradients import LowPrecisionGradients

__all__ = ["Attachment", "Memory", "attach", "attached_models", "names_of"]

_living: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()
"""Attachments that have not ended."""


class Memory(int):
    """A number of bytes that says so."""

    def __repr__(self) -> str:
        return f"{int(self):,} bytes"

    __str__ = __repr__


def attach(
    model: nn.Module,
    policy: Policy | str | os.PathLike[str] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    hold: bool = True,
    grad_dtype: torch.dtype | None = None,
) -> Attachment:
    """Keeps the 16-bit copies of a model's weights between regions, and sets the precision of its modules by name.

    Args:
        model: the model, or a part of one. Several attachments of one model share the copies.
        policy: the policy for the model in every enabled region, also in PyTorch's, instead of the region's: its
            tables, and its rules for modules by name. A `Policy`, the name of a preset, or the path of a policy file.
            None: the policy of the region.
        optimizer: the one that trains the model, which `grad_dtype` needs. Any of PyTorch's kind is listened to; one
            that is given here is known before its first step. Copies are renewed when they are next used: on the CPU
            each by itself, as it is then in the processor's cache; elsewhere all together.
        hold: whether copies are held; False has the weights cast in each region.
        grad_dtype: torch.bfloat16 or torch.float16 has the gradients of held weights that `optimizer` trains stay in
            that dtype until its step, which sees them in float32 and writes each weight and its copy in one go: 2 bytes
            a number in place of 4. What is summed before the step is rounded each time. None has them be float32, as
            without an attachment.

    Returns:
        The attachment, which lives as long as the model, or until its `detach`.

    Raises:
        PolicyError: a policy that cannot be read or carried out: two patterns that disagree on a module, a rule for a
            part of a scripted module.
        AttachError: `model` is no module, `optimizer` is none, or has no parameter of the model; `grad_dtype` is not
            one of the two, or comes without an optimizer, or with one that takes many gradients in a step.

    Examples:
        >>> import precast
        >>> model = torch.nn.Linear(256, 256)
        >>> attachment = attach(model)
        >>> with torch.no_grad(), precast.autocast("cpu", dtype=torch.bfloat16):
        ...     model(torch.ones(1, 256)).dtype
        torch.bfloat16
        >>> attachment.memory()
        131,584 bytes
    """
    _check(model, optimizer)
    _check_gradients(grad_dtype, optimizer, hold=hold)
    planned = None
    if policy is not None:
        planned = plan(model, as_policy(policy))
        for complaint in planned.complaints():
            warnings.warn(complaint, PrecastWarning, stacklevel=2)
    return Attachment(model, planned, optimizer, hold=hold, grad_dtype=grad_dtype)


def names_of(parameters: Iterable[torch.Tensor]) -> dict[int, str]:
    """``id`` of each of `parameters` that is in an attached model -> its name there; a copy is no parameter."""
    wanted, named = list(parameters), dict[int, str]()
    for model in [attachment._model() for attachment in list(_living)]:
        named |= {} if model is None else names_in(model, wanted)
    return named


def attached_models() -> list[tuple[nn.Module, Plan | None]]:
    """Every attached model, with what its attachment's policy means for it."""
    found = [(attachment._model(), attachment.plan) for attachment in list(_living)]
    return [(model, planned) for model, planned in found if model is not None]


class Attachment(Displayed):
    """A model whose weights are held, and whose modules follow their rules; what `attach` returns.

    Attributes:
        plan: what the policy means for the model; None where no policy was given.
        left_alone: name of each parameter that is not held -> the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        hold: bool,
        grad_dtype: torch.dtype | None,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._hold = hold
        self._held_parameters: dict[str, HeldParameter] = {}
        self._left_alone: dict[str, str] = {}
        self._modules: frozenset[int] = frozenset()
        self._hooks: list[Any] = []
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._gradients: LowPrecisionGradients | None = None
        if optimizer is not None and grad_dtype is not None:
            self._gradients = LowPrecisionGradients(optimizer, grad_dtype)
        self.plan = plan
        if plan is not None:
            # First: it may refuse. What is installed is in force already.
            self._hooks.append(apply(model, plan, tables=give_way is None, give_way=give_way))
        self._look()
        _living.add(self)
        if hold:
            held.attached.append(self)
            _watch()
        self._end = weakref.finalize(model, _end, self)
        self._end.atexit = False

    @classmethod
    def of_installed(cls, model: nn.Module, plan: Plan, gave_way: Callable[[], None]) -> Attachment:
        """The rules of an installed policy on a model; one of the program's own replaces it, and calls `gave_way`.

        Raises:
            PolicyError: there is an attachment of the program's own, with rules for the same modules.
        """
        return cls(model, plan, None, hold=False, grad_dtype=None, give_way=gave_way)

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Name of each parameter that is not held -> why."""
        return MappingProxyType(self._left_alone)

    def memory(self) -> Memory:
        """Bytes of the copies that exist now: 2 for each number of each parameter that was used, and dtype."""
        tensors = (copy.tensor for copy in self._copies())
        return Memory(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def refresh(self) -> None:
        """Renews all copies, whatever version counters say: for after a write through `.data`."""
        with held.lock:
            self._look()
            for held_parameter in self._each():
                held_parameter.drop_unfit()
            for copy in self._copies():
                copy.evict()
            held.renew(self._copies())
        self._invalidate_in_this_thread()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that may write parameters through `.data`.

        Regions inside cast weights anew, and all copies are renewed after it.
        """
        some = list(self._each())
        held.suspend(some, 1)
        self._invalidate_in_this_thread()
        try:
            yield
        finally:
            held.suspend(some, -1)
            self.refresh()

    def detach(self) -> None:
        """Ends the attachment: the model is as before it, in regions too. A second call does nothing."""
        self._end()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    def _card(self) -> Card:
        what, rules = f"Attachment of {self._name}", () if self.plan is None else self.plan.rules
        if not self._end.alive:
            return Card(what, ["ended"])
        facts = [f"{size(len(self._held_parameters), 'parameter')} held"]
        if self._left_alone:
            facts.append(f"{len(self._left_alone)} left alone")
        alone = [(name, f"not held: {why}") for name, why in self._left_alone.items()]
        return Card(what, facts, ("name", "how it runs"), [*rules, *alone])

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, as of a model that has its attachment as an attribute, is of no model.
        return _ended, ()

    def _each(self) -> Iterable[HeldParameter]:
        return self._held_parameters.values()

    def _know(self, held_parameters: Iterable[HeldParameter]) -> None:
        """Tells what is held of the optimizer that steps it, before its first step."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            its = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for held_parameter in held_parameters:
                if id(held_parameter.parameter()) in its:
                    held_parameter.optimizer = self._optimizer

    def _copies(self) -> Iterator[Copy]:
        return (copy for held_parameter in self._each() for copy in held_parameter.copies.values())

    def _invalidate_in_this_thread(self) -> None:
        """Has an open region of this thread cast again what it has cast itself."""
        parameters = (held_parameter.parameter() for held_parameter in self._each())
        regions.cache.invalidate([p for p in parameters if p is not None])

    def _look(self) -> None:
        """Finds the model's parameters as they are now."""
        with held.lock:
            model = self._model()
            if model is None or not self._hold:
                return
            self._modules = frozenset(map(id, model.modules()))
            managed = _managed_by_fsdp(model)
            held_parameters, left_alone = {}, {}
            for name, parameter in named_parameters(model):
                reason = managed.get(id(parameter)) or held.reason_not_held(parameter)
                if reason is None:
                    held_parameters[name] = held.hold(name, parameter)
                else:
                    left_alone[name] = reason
            self._know(held_parameters.values())
            before, self._held_parameters, self._left_alone = (
                self._held_parameters,
                held_parameters,
                left_alone,
            )
            for held_parameter in before.values():
                held.release(held_parameter)
            if self._gradients is not None:
                self._gradients.ask_for(self._each())


def _ended() -> Attachment:
    return Attachment(nn.Module(), None, None, hold=False, grad_dtype=None)


def _end(attachment: Attachment) -> None:
    """Ends an attachment, whose model may be gone."""
    for hook in attachment._hooks:
        hook.remove()
    attachment._hooks = []
    if attachment._gradients is not None:
        attachment._gradients.end()
    with held.lock:
        attachment._hold = False  # what is still to look for parameters finds none
        for held_parameter in attachment._each():
            held.release(held_parameter)
        attachment._held_parameters, attachment._left_alone = {}, {}
    _living.discard(attachment)
    held.before_next_region.pop(id(attachment), None)
    if attachment in held.attached:
        held.attached.remove(attachment)
        _watch()


# While there are attachments, modules tell of the parameters and modules that they get, optimizers of their steps, and
# process groups of what they write: fused optimizers and collectives move no version counter (2.13).
_registrations: Final[list[Any]] = []


class _Ending(NamedTuple):
    """What ends when it is removed, as a hook does."""

    remove: Callable[[], None]


def _watch() -> None:
    if held.attached and not _registrations:
        _registrations.append(register_module_parameter_registration_hook(_registered))
        _registrations.append(register_module_module_registration_hook(_registered))
        _registrations.append(_Ending(on_optimizer_step(after=_stepped)))
        _registrations.append(_Ending(on_collectives(held.note_unversioned_writes)))
        held.parameter_freed_hooks.append(_look_again)
    elif not held.attached:
        while _registrations:
            _registrations.pop().remove()
        held.parameter_freed_hooks.clear()


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if parameters and is_captured(parameters[0]):
        held.leave_to_cuda_graphs(parameters)
        for attachment in held.attached:
            attachment._look()
    its = [a for a in held.attached if a._optimizer is not None and a._optimizer() is optimizer]
    renewed: set[int] = set()
    for attachment in its:
        if attachment._gradients is not None:
            renewed |= attachment._gradients.after_step()
    held.stepped(optimizer, (p for p in parameters if id(p) not in renewed))


@runs_uncompiled
def _registered(module: nn.Module, _name: str, _value: object) -> None:
    _look_again(a for a in held.attached if id(module) in a._modules)


def _look_again(some: Iterable[Attachment] = held.attached) -> None:
    """Has attachments look for parameters before the next region: what a module is given is not in it yet."""
    for attachment in some:
        held.before_next_region[id(attachment)] = attachment._look


def _managed_by_fsdp(model: nn.Module) -> dict[int, str]:
    """``id`` of each parameter whose memory FSDP comes and goes with -> why it is not held."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    kinds = fsdp.FullyShardedDataParallel, fsdp.FSDPModule
    return {
        id(parameter): "FSDP manages its memory, and writes it unseen"
        for module in model.modules()
        if isinstance(module, kinds)
        for parameter in module.parameters()
    }


def _check(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach(model) got {type(model).__name__}. It takes a torch.nn.Module: the model, or a part of it."
        )
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AttachError(
            f"attach(optimizer=...) got {type(optimizer).__name__}. It takes a torch.optim.Optimizer; of a wrapper "
            "give the optimizer inside, or none: then the first use of a changed parameter renews its copy."
        )
    written = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if written.isdisjoint(map(id, model.parameters())):
        raise AttachError(
            f"attach(optimizer=...) got a {type(optimizer).__name__} with no parameter of this {type(model).__name__}. "
            "Give the one that trains this model, made after the model was moved or converted, or none."
        )


def _check_gradients(dtype: object, optimizer: object, *, hold: bool) -> None:
    if dtype is None:
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise AttachError(
            f"attach(grad_dtype={dtype!r}): gradients stay in torch.bfloat16 or torch.float16 until the step. Give one "
            "of these, or None for gradients in float32."
        )
    if optimizer is None or not hold:
        raise AttachError(
            f"attach(grad_dtype={dtype}) needs the optimizer whose step reads these gradients, and weights that are "
            "held: attach(model, optimizer=optimizer, grad_dtype=...)."
        )
