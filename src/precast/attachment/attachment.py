"""`attach`, which holds the 16-bit copies of a model's weights and sets the precision of its modules.

Invariants:

- only hooks are added to the model, and `detach` removes them; the copies are in no state dict, pickle or deepcopy;
- a parameter that is added or replaced is held from the next region on, and a removed one is released;
- a parameter that cannot be held is listed with the reason, and is cast as without an attachment.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from precast._internal.display import Card, Displayed, plural
from precast._torch import is_captured, on_collectives, runs_uncompiled
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.attachment.module_hooks import AppliedPlan, apply
from precast.engine.thread_state import regions
from precast.errors import AttachError, PrecastWarning
from precast.optim.partial_steps import parameters_of
from precast.policy.module_names import named_parameters
from precast.policy.module_plan import Plan, attachments, plan
from precast.policy.policy import Policy, as_policy
from precast.weights import held
from precast.weights.held import Copy, HeldParameter

__all__ = ["Attachment", "Memory", "attach"]


class Memory(int):
    """A number of bytes, printed with its unit."""

    def __repr__(self) -> str:
        return f"{int(self):,} bytes"

    __str__ = __repr__


def attach(
    model: nn.Module, policy: Policy | str | os.PathLike[str] | None = None, *, hold: bool = True
) -> Attachment:
    """Keep the 16-bit copies of a model's weights between regions, and set the precision of its modules by name.

    Optimizers need no change: their steps are observed, and the copies updated at the next use. To store the weights in
    16 bits alone, see `precast.optim.bfloat16_weights`.

    Args:
        model: the model, or a part of one. Several attachments of one model share the copies.
        policy: the policy of the model, which replaces that of every enabled region, PyTorch's included: its tables,
            and its rules for modules by name. A `Policy`, the name of a preset, or the path of a policy file. With
            None the region's policy holds.
        hold: hold the copies. With False every region casts the weights again.

    Returns:
        The attachment, which lasts as long as the model, or until its `detach`.

    Raises:
        PolicyError: the policy cannot be read or carried out, because two patterns disagree on a module or a rule is
            for a part of a scripted module.
        AttachError: `model` is no module.

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
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach(model) got {type(model).__name__}. It takes a torch.nn.Module: the model, or a part of it."
        )
    planned = None
    if policy is not None:
        planned = plan(model, as_policy(policy))
        for complaint in planned.complaints():
            warnings.warn(complaint, PrecastWarning, stacklevel=2)
    return Attachment(model, planned, hold=hold)


class Attachment(Displayed):
    """A model with held weights and with rules for its modules; returned by `attach`.

    Printed, it lists the modules with rules and the parameters that are not held.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        hold: bool = False,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        """Create an attachment from arguments that `attach` has checked.

        An installed policy passes `give_way`, which is called when an attachment by the program replaces this one. The
        tables of the plan are then not applied, because the installed policy already is.

        Raises:
            PolicyError: another attachment by the program has rules for the same modules.
        """
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._hold = hold
        self._held_parameters: dict[str, HeldParameter] = {}
        self._left_alone: dict[str, str] = {}
        self._modules: frozenset[int] = frozenset()
        self._plan = plan
        self._rules: AppliedPlan | None = None
        if plan is not None:
            self._rules = apply(model, plan, tables=give_way is None, give_way=give_way)
        self._find_parameters()
        attachments[self] = self._model, plan
        if hold:
            held.attached.append(self)
            _update_observation()
        self._end = weakref.finalize(model, self._detach)
        self._end.atexit = False

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Return a mapping from the name of each parameter that is not held to the reason."""
        return MappingProxyType(self._left_alone)

    def memory(self) -> int:
        """Return the bytes of all copies: 2 for each element of a parameter and each dtype in use."""
        return Memory(sum(copy.tensor.nbytes for copy in self._copies()))

    def refresh(self) -> None:
        """Rewrite all copies, regardless of version counters. Call it after a write through `.data`."""
        with held.lock:
            self._find_parameters()
            for copy in self._copies():
                copy.evict()
            held.renew(self._copies())
        self._invalidate_in_this_thread()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open a block that may write parameters through `.data`.

        Regions inside cast the weights again, and all copies are rewritten at the end of the block.
        """
        parameters = list(self._held_parameters.values())
        held.suspend(parameters, 1)
        self._invalidate_in_this_thread()
        try:
            yield
        finally:
            held.suspend(parameters, -1)
            self.refresh()

    def detach(self) -> None:
        """End the attachment, so that the model runs as before it. A second call does nothing."""
        self._end()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    def _card(self) -> Card:
        title, rules = f"Attachment of {self._name}", () if self._plan is None else self._plan.rules
        if not self._end.alive:
            return Card(title, ["ended"])
        facts = [f"{plural(len(self._held_parameters), 'parameter')} held"]
        if self._left_alone:
            facts.append(f"{len(self._left_alone)} left alone")
        not_held = [(name, f"not held: {reason}") for name, reason in self._left_alone.items()]
        return Card(title, facts, ("name", "how it runs"), [*rules, *not_held])

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is copied may have its attachment as an attribute. The copy of the model is not attached.
        return _detached_attachment, ()

    def _copies(self) -> Iterator[Copy]:
        for held_parameter in self._held_parameters.values():
            yield from held_parameter.copies.values()

    def _invalidate_in_this_thread(self) -> None:
        """Make a region that is open in this thread cast its weights again."""
        parameters = [
            held_parameter.parameter() for held_parameter in self._held_parameters.values()
        ]
        regions.cache.invalidate([p for p in parameters if p is not None])

    def _find_parameters(self) -> None:
        """Hold the current parameters of the model, and release the previous ones."""
        with held.lock:
            model = self._model()
            if model is None or not self._hold:
                return
            self._modules = frozenset(map(id, model.modules()))
            managed = _managed_by_fsdp(model)
            before, held_parameters, left_alone = self._held_parameters, {}, {}
            for name, parameter in named_parameters(model):
                reason = managed.get(id(parameter)) or held.reason_not_held(parameter)
                if reason is not None:
                    left_alone[name] = reason
                    continue
                held_parameters[name] = held.hold(name, parameter)
            self._held_parameters, self._left_alone = held_parameters, left_alone
            for held_parameter in before.values():
                held.release(held_parameter)

    def _detach(self) -> None:
        """End the attachment; the model may already be freed."""
        if self._rules is not None:
            self._rules.remove()
            self._rules = None
        with held.lock:
            self._hold = False  # a pending search for parameters then does nothing
            for held_parameter in self._held_parameters.values():
                held.release(held_parameter)
            self._held_parameters, self._left_alone = {}, {}
        attachments.pop(self, None)
        held.before_next_region.pop(id(self), None)
        if self in held.attached:
            held.attached.remove(self)
            _update_observation()


def _managed_by_fsdp(model: nn.Module) -> dict[int, str]:
    """Map the ``id`` of each parameter whose memory FSDP manages to the reason for not holding it."""
    # FSDP is not imported here: a program that has not imported it has no such parameters.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    kinds = fsdp.FullyShardedDataParallel, fsdp.FSDPModule
    return {
        id(parameter): "FSDP allocates, frees and writes its memory"
        for module in model.modules()
        if isinstance(module, kinds)
        for parameter in module.parameters()
    }


def _detached_attachment() -> Attachment:
    return Attachment(nn.Module())


_registrations: Final[list[Callable[[], None]]] = []
"""Functions that end the observation."""


def _update_observation() -> None:
    """Start the observation of writes if weights are held, else stop it.

    Observed are new parameters and submodules, steps of optimizers, and the tensors that collectives write: fused
    optimizers and collectives do not increment version counters (2.13).
    """
    if held.attached and not _registrations:
        _registrations.append(register_module_parameter_registration_hook(_on_registration).remove)
        _registrations.append(register_module_module_registration_hook(_on_registration).remove)
        _registrations.append(on_optimizer_step(after=_on_step))
        _registrations.append(on_collectives(held.record_unversioned_writes))
        held.parameter_freed_hooks.append(_refresh_parameters_later)
    elif not held.attached:
        while _registrations:
            _registrations.pop()()
        held.parameter_freed_hooks.clear()


def _on_step(optimizer: torch.optim.Optimizer) -> None:
    parameters = parameters_of(optimizer)
    if parameters and is_captured(parameters[0]):
        held.leave_to_cuda_graphs(parameters)
        for attachment in held.attached:
            attachment._find_parameters()
    held.invalidate_after_step(optimizer, parameters)


@runs_uncompiled
def _on_registration(module: nn.Module, _name: str, _value: object) -> None:
    _refresh_parameters_later(a for a in held.attached if id(module) in a._modules)


def _refresh_parameters_later(attachments: Iterable[Attachment] = held.attached) -> None:
    """Search the models for parameters before the next region, because a module does not have the new one yet."""
    for attachment in attachments:
        held.before_next_region[id(attachment)] = attachment._find_parameters
