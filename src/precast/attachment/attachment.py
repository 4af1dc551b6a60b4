"""`attach` keeps the 16-bit copies of a model's weights between regions, and gives its modules their own precision.

Invariants:

- only hooks are added to the model, and `detach` removes them; the copies are in no state dict, pickle or deepcopy;
- from the next region on, a parameter that was added or replaced is held, and one that was removed is not;
- a parameter that cannot be held is listed with the reason, and runs as it would without an attachment.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from precast._internal.display import Card, Displayed, size
from precast._torch import is_captured, on_collectives, runs_uncompiled
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.attachment.fsdp import managed_by_fsdp, stepped_without_copies
from precast.attachment.module_hooks import Applied, apply
from precast.attachment.storage import Storage, check_states
from precast.engine.thread_state import regions
from precast.errors import AttachError, PrecastWarning
from precast.policy.module_names import named_parameters, names_in
from precast.policy.module_plan import Plan, plan
from precast.policy.policy import Policy, as_policy
from precast.weights import held
from precast.weights.clipping import Clipping
from precast.weights.held import Copy, HeldParameter
from precast.weights.low_precision_gradients import LowPrecisionGradients, check_takes_one_gradient
from precast.weights.one_pass import OnePassStep
from precast.weights.partial_steps import parameters_of
from precast.weights.stored_weights import StoredWeights

__all__ = ["Attachment", "Memory", "attach", "attached_models", "names_of"]

_living: Final[weakref.WeakSet[Attachment]] = weakref.WeakSet()
"""The attachments that have not ended, whether they hold weights or not."""


class Memory(int):
    """A number of bytes, which is printed with its unit."""

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
    step: Literal["one-pass"] | None = None,
    masters: Literal["float32", "kahan", "stochastic"] | None = None,
    states: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Attachment:
    """Keeps the 16-bit copies of a model's weights between regions, and sets the precision of its modules by name.

    Args:
        model: the model, or a part of one. Several attachments of one model share the copies.
        policy: the policy of the model, which replaces that of every enabled region, PyTorch's included: its tables,
            and its rules for modules by name. A `Policy`, the name of a preset, or the path of a policy file. With
            None the region's policy holds.
        optimizer: the optimizer that trains the model. Only `grad_dtype` needs it. The steps of every
            `torch.optim.Optimizer` are noticed anyway, but one that is given here is known before its first step.
        hold: whether the copies are kept. With False every region casts the weights again.
        grad_dtype: torch.bfloat16 or torch.float16 keeps the gradients of the held weights that `optimizer` trains in
            that dtype, 2 bytes for each number instead of 4, until its step. The step reads them in float32, and writes
            each weight and its copy together. Gradients that are added up before the step are rounded at each
            addition. With None gradients are float32.
        step: "one-pass" has `torch.compile` compile what `optimizer` does to a large weight, to a program that reads
            the gradient, writes weight, states and copies, and goes through memory once. What it cannot take is stepped
            as before, and a warning says so once. With None the optimizer steps as before.
        masters: "kahan" or "stochastic" stores the weights that `optimizer` trains in bfloat16 alone, from now on, and
            lets them learn: what a step rounds away stays beside them in bfloat16 and is added before the next, or they
            are rounded up or down by chance. That is for parameters that are bfloat16 already, and for float32 ones
            with at least two dimensions and 16,384 numbers; they are stepped in one pass. "float32" makes parameters in
            16 bits float32 ones. With None parameters stay as they are.
        states: torch.bfloat16 stores the optimizer's states of such weights in bfloat16, rounded by chance. With None
            they are float32.
        generator: where the chances come from, on the CPU. With None it is PyTorch's own; where torch.distributed is
            initialized, each process has the same chances, so that replicas stay equal.

    Returns:
        The attachment, which lasts as long as the model, or until its `detach`.

    Raises:
        PolicyError: the policy cannot be read or carried out, because two patterns disagree on a module or a rule is
            for a part of a scripted module.
        AttachError: `model` is no module; `optimizer` is no optimizer, or has no parameter of the model; `grad_dtype`
            is another dtype, or comes without an optimizer, or with one that takes several gradients in a step; `step`
            is not "one-pass", or comes without an optimizer; `masters` or `states` cannot be had for this optimizer or
            for one of these parameters.

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
    _check_step(step, optimizer, hold=hold)
    storage = None
    if masters is not None or states is not None:
        storage = Storage(masters, states, generator)
        storage.check(model, optimizer, hold=hold)
    stored_low = masters in ("kahan", "stochastic")
    if optimizer is not None and (step is not None or stored_low):
        asked = f'step="{step}"' if step is not None else f'masters="{masters}"'
        check_states(model, optimizer, stored_low=stored_low, asked=asked)
    planned = None
    if policy is not None:
        planned = plan(model, as_policy(policy))
        for complaint in planned.complaints():
            warnings.warn(complaint, PrecastWarning, stacklevel=2)
    return Attachment(
        model, planned, optimizer, hold=hold, grad_dtype=grad_dtype, step=step, storage=storage
    )


def names_of(parameters: Iterable[torch.Tensor]) -> dict[int, str]:
    """``id`` of each of `parameters` that belongs to an attached model -> its name there."""
    wanted, named = list(parameters), dict[int, str]()
    for model, _ in attached_models():
        named |= names_in(model, wanted)
    return named


def attached_models() -> list[tuple[nn.Module, Plan | None]]:
    """Every attached model, with what its attachment's policy means for it."""
    found = [(attachment._model(), attachment.plan) for attachment in list(_living)]
    return [(model, planned) for model, planned in found if model is not None]


class Attachment(Displayed):
    """What `attach` returns: a model whose weights are held, and whose modules follow their rules.

    Attributes:
        plan: what the policy means for the model; None where no policy was given.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        hold: bool = False,
        grad_dtype: torch.dtype | None = None,
        step: Literal["one-pass"] | None = None,
        storage: Storage | None = None,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        """Takes what `attach` has checked; `give_way` is for rules of an installed policy.

        It is called when an attachment of the program's own replaces this one. With it, the plan's tables are not put
        in force, because the installed policy's are already.

        Raises:
            PolicyError: another attachment of the program's own has rules for the same modules.
        """
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._hold = hold
        self._held_parameters: dict[str, HeldParameter] = {}
        self._left_alone: dict[str, str] = {}
        self._modules: frozenset[int] = frozenset()
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = (
            (lambda: None) if optimizer is None else weakref.ref(optimizer)
        )
        self._one_pass: OnePassStep | None = None
        self._without_copies: set[int] = set()
        """``id`` of parameters that are stepped in one pass and not held."""
        self._stored: StoredWeights | None = None
        self._gradients: LowPrecisionGradients | None = None
        self.plan = plan
        self._rules: Applied | None = None
        if plan is not None:  # before weights are changed, because it may raise
            self._rules = apply(model, plan, tables=give_way is None, give_way=give_way)
        try:
            if optimizer is not None:
                self._listen(model, optimizer, grad_dtype, step, storage)
        except BaseException:
            if self._rules is not None:
                self._rules.remove()
            raise
        self._find_parameters()
        _living.add(self)
        if hold:
            held.attached.append(self)
            _watch()
        self._end = weakref.finalize(model, self._detach)
        self._end.atexit = False

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Name of each parameter that is not held -> why."""
        return MappingProxyType(self._left_alone)

    def memory(self) -> Memory:
        """The bytes of all copies that exist now: 2 for each number of a parameter, in each dtype that was used."""
        return Memory(sum(copy.tensor.nbytes for copy in self._copies()))

    def refresh(self) -> None:
        """Renews all copies, whatever the version counters say. Call it after a write through `.data`."""
        with held.lock:
            self._find_parameters()
            for held_parameter in self._held_parameters.values():
                held_parameter.drop_unfit()
            for copy in self._copies():
                copy.evict()
            held.renew(self._copies())
        self._invalidate_in_this_thread()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips the norm of the gradients of all that `optimizer` trains, as `torch.nn.utils.clip_grad_norm_` does.

        What a step in one pass reads is multiplied there, by float32 numbers in float32, and not in memory before:
        `.grad` stays as it is. Call it after the last backward and after `scaler.unscale_`, just before the step.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: which norm: 2.0, 1.0, ``math.inf`` ...
            error_if_nonfinite: whether a norm that is not finite raises a RuntimeError.

        Returns:
            The norm before clipping, shape ().

        Raises:
            AttachError: the attachment has no optimizer.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise AttachError(
                "attachment.clip_grad_norm_() needs the optimizer whose step is to read the clipped gradients: "
                'attach(model, optimizer=optimizer, step="one-pass"); or call torch.nn.utils.clip_grad_norm_.'
            )
        if self._one_pass is not None and self._end.alive:
            return self._one_pass.clip(optimizer, max_norm, norm_type, error_if_nonfinite)
        return Clipping().clip(
            parameters_of(optimizer), set(), max_norm, norm_type, error_if_nonfinite
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Opens a block that may write parameters through `.data`.

        Regions inside cast the weights again, and all copies are renewed when the block ends.
        """
        some = list(self._held_parameters.values())
        held.suspend(some, 1)
        self._invalidate_in_this_thread()
        try:
            yield
        finally:
            held.suspend(some, -1)
            self.refresh()

    def detach(self) -> None:
        """Ends the attachment: the model runs as it did before. A second call does nothing."""
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
        # A model that is copied may have its attachment as an attribute. The copy of the model is not attached.
        return _ended, ()

    def _listen(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        grad_dtype: torch.dtype | None,
        step: Literal["one-pass"] | None,
        storage: Storage | None,
    ) -> None:
        """Has the optimizer's steps be taken as they were asked for."""
        if grad_dtype is not None:
            check_takes_one_gradient(optimizer, grad_dtype)
        if step is not None or storage is not None:
            self._one_pass = OnePassStep(optimizer)  # its hook comes first
        if storage is not None:
            self._stored = storage.apply(model, optimizer)
            if self._stored is not None and self._one_pass is not None:
                self._one_pass.ask_for_stored(self._stored)
        if grad_dtype is not None:
            self._gradients = LowPrecisionGradients(optimizer, grad_dtype)

    def _copies(self) -> Iterator[Copy]:
        for held_parameter in self._held_parameters.values():
            yield from held_parameter.copies.values()

    def _invalidate_in_this_thread(self) -> None:
        """Makes a region that is open in this thread cast its weights again, whatever it has in its own cache."""
        parameters = [
            held_parameter.parameter() for held_parameter in self._held_parameters.values()
        ]
        regions.cache.invalidate([p for p in parameters if p is not None])

    def _find_parameters(self) -> None:
        """Holds the parameters that the model has now, and releases those that it had before."""
        with held.lock:
            model = self._model()
            if model is None or not self._hold:
                return
            self._modules = frozenset(map(id, model.modules()))
            managed = managed_by_fsdp(model)
            optimizer = self._optimizer()
            stepped = set() if optimizer is None else set(map(id, parameters_of(optimizer)))
            before, held_parameters, left_alone = self._held_parameters, {}, {}
            for name, parameter in named_parameters(model):
                reason = managed.get(id(parameter)) or held.reason_not_held(parameter)
                if reason is not None:
                    left_alone[name] = reason
                    continue
                held_parameters[name] = held.hold(name, parameter)
                if optimizer is not None and id(parameter) in stepped:
                    held_parameters[name].optimizer = held.steps_of(optimizer)
            self._held_parameters, self._left_alone = held_parameters, left_alone
            for held_parameter in before.values():
                held.release(held_parameter)
            if self._gradients is not None:
                self._gradients.ask_for(self._held_parameters.values())
            if self._one_pass is not None:
                its = (
                    []
                    if optimizer is None
                    else stepped_without_copies(model, optimizer, self._without_copies)
                )
                self._without_copies = set(map(id, its))
                self._one_pass.ask_for(self._held_parameters.values(), its)

    def _detach(self) -> None:
        """Ends the attachment; the model may be gone already."""
        if self._rules is not None:
            self._rules.remove()
            self._rules = None
        if self._one_pass is not None:
            self._one_pass.end()
        for its in (self._stored, self._gradients):
            if its is not None:
                its.end()
        with held.lock:
            self._hold = False  # a search for parameters that is still to come finds none
            for held_parameter in self._held_parameters.values():
                held.release(held_parameter)
            self._held_parameters, self._left_alone = {}, {}
        _living.discard(self)
        held.before_next_region.pop(id(self), None)
        if self in held.attached:
            held.attached.remove(self)
            _watch()


def _ended() -> Attachment:
    return Attachment(nn.Module())


_registrations: Final[list[Callable[[], None]]] = []
"""What ends the listening of `_watch`."""


def _watch() -> None:
    """Starts or stops listening, which is done while weights are held.

    Modules report the parameters and modules that they get, optimizers their steps, and process groups what they write:
    fused optimizers and collectives move no version counter (2.13).
    """
    if held.attached and not _registrations:
        _registrations.append(register_module_parameter_registration_hook(_registered).remove)
        _registrations.append(register_module_module_registration_hook(_registered).remove)
        _registrations.append(on_optimizer_step(after=_stepped))
        _registrations.append(on_collectives(held.note_unversioned_writes))
        held.parameter_freed_hooks.append(_find_parameters_again)
    elif not held.attached:
        while _registrations:
            _registrations.pop()()
        held.parameter_freed_hooks.clear()


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    parameters = parameters_of(optimizer)
    if parameters and is_captured(parameters[0]):
        held.leave_to_cuda_graphs(parameters)
        for attachment in held.attached:
            attachment._find_parameters()
    renewed: set[int] = set()
    for attachment in list(held.attached):
        if attachment._optimizer() is optimizer:
            for its in (attachment._one_pass, attachment._stored, attachment._gradients):
                renewed |= set() if its is None else its.after_step()
    held.stepped(optimizer, (p for p in parameters if id(p) not in renewed))


@runs_uncompiled
def _registered(module: nn.Module, _name: str, _value: object) -> None:
    _find_parameters_again(a for a in held.attached if id(module) in a._modules)


def _find_parameters_again(attachments: Iterable[Attachment] = held.attached) -> None:
    """Makes attachments look for parameters before the next region; a module does not have the new one yet."""
    for attachment in attachments:
        held.before_next_region[id(attachment)] = attachment._find_parameters


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
    if set(map(id, parameters_of(optimizer))).isdisjoint(map(id, model.parameters())):
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


def _check_step(step: object, optimizer: object, *, hold: bool) -> None:
    if step is None:
        return
    if step != "one-pass":
        raise AttachError(
            f'attach(step={step!r}): give "one-pass", which compiles the optimizer\'s step, or None, which leaves it.'
        )
    if optimizer is None or not hold:
        raise AttachError(
            'attach(step="one-pass") needs the optimizer whose step it is, and weights that are held: '
            'attach(model, optimizer=optimizer, step="one-pass").'
        )
