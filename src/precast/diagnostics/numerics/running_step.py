"""The step that runs: takes calls of modules, gradients and parameters, and notes them in a record.

Invariants: those of a record; what a checkpoint runs again in backward is noted once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast import _torch
from precast._internal.locks import ForkSafeLock
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.deferred_calls import DeferredCalls
from precast.diagnostics.numerics.record import Record, tensors_in
from precast.diagnostics.numerics.tally import Key, countable
from precast.diagnostics.numerics.underflow_zeros import Lost, Made, operation
from precast.optim.partial_steps import parameters_of
from precast.policy.module_names import named_parameters

__all__ = ["RunningStep", "may_write"]


_Call = tuple[str, nn.Module, Any, Any, Any, bool]
"""A module that has ended: its name, it, arguments, keyword arguments, output, and whether a graph was made."""


class RunningStep:
    """A record that is being written.

    Args:
        record: the record of this step.
        hurried: the keys of what may not wait to be looked at, of all steps; added to.
        mutex: held by the thread that calls a method of this.
        failures: counts what could not be looked at.
    """

    def __init__(
        self, record: Record, hurried: set[Key], mutex: ForkSafeLock, failures: Failures
    ) -> None:
        self.record = record
        self._lost = Lost()
        self._waiting = DeferredCalls(hurried, failures, counts=record.tallies is not None)
        self._failures = failures
        self._mutex = mutex
        self._thread: int | None = None
        self.is_over = False
        self.look = self._waiting.look

    def is_called_here(self) -> bool:
        """Whether the call of the whole model that this step is can be this thread's; from now on it is."""
        self._thread = self._thread or threading.get_ident()
        return self._thread == threading.get_ident()

    def called(
        self, key: Key, module: nn.Module, args: Any, kwargs: Any, output: Any, *, now: bool = False
    ) -> None:
        """A module has ended: notes its inputs and outputs, and waits for their gradients.

        The call is looked at `now`, or else by `look`, which is called before backward begins.
        """
        call = key[1], module, args, kwargs, output, torch.is_grad_enabled()
        if now:
            self._waiting.look_now(key, (), self._look_at_call, call)
        elif type(output) is Tensor and len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            self._waiting.add(key, (args[0], output), self._look_at_call, call)
        else:
            tensors = *tensors_in((args, kwargs)), *tensors_in(output)
            self._waiting.add(key, tensors, self._look_at_call, call)

    def given(self, name: str, args: Any, kwargs: Any, *, now: bool = False) -> None:
        """A module of this name is about to run that may write its arguments; `now` as in `called`."""
        tensors = tensors_in((args, kwargs) if kwargs else args)
        if not tensors or all(map(self._waiting.is_latest, tensors)):
            return
        take = self._waiting.look_now if now else self._waiting.add
        take(("input", name), tensors, self._look_at_given, name)

    def called_again(self, name: str, output: Any) -> None:
        """A checkpoint runs a module again: gradients come only now where it first ran without a graph."""
        for tensor in tensors_in(output):
            if not self.record.without_gradient[name]:
                return
            self.record.without_gradient[name] -= 1
            self._follow(tensor, Made(name))

    def count_parameters(
        self, model: nn.Module, optimizer: Optimizer | None, *, scaled: bool
    ) -> None:
        """Counts the gradients of an optimizer's parameters, once a step; of all where none is given.

        Those of fused optimizers are `scaled`: they still have the loss's scale.
        """
        record = self.record
        if record.tallies is None:
            return
        mine = None if optimizer is None else set(map(id, parameters_of(optimizer)))
        for name, parameter in named_parameters(model):
            key = "parameter", name
            if parameter.grad is None or key in record.tallies:
                continue
            memory = countable(parameter.grad)
            if memory is None or (mine is not None and id(parameter) not in mine):
                continue
            self._count(key, memory, self._lost.of_parameter(parameter, memory))
            if scaled:
                record.scaled.add(key)

    def so_far(self) -> Record:
        """The record, in which all calls until now are noted."""
        self.look()
        return self.record.pack()

    def end(self) -> Record:
        """The whole record; what backward still reaches of the step is not noted."""
        self.is_over = True
        self.look()
        return self.record.end()

    def _look_at_given(self, name: str, tensors: Sequence[Tensor], stale: Set[int]) -> None:
        """Notes the arguments of a module that no module gave as they are: those were made between modules."""
        number = self.record.calls[name] + 1
        for tensor in tensors:
            if id(tensor) in stale:
                self.record.miss(name, tensor)
            elif self.record.place_of(tensor) is None:
                self._note_input(name, number, tensor)

    def _look_at_call(self, call: _Call, _tensors: Sequence[Tensor], stale: Set[int]) -> None:
        record, (name, module, args, kwargs, output, learns) = self.record, call
        record.calls[name] += 1
        number = record.calls[name]
        known = None if record.tallies is None else operation(module, args, kwargs, output)
        given = tensors_in((args, kwargs) if kwargs else args)
        inputs = self._inputs(name, number, given, stale, was_given=may_write(module))
        for tensor in tensors_in(output):
            if id(tensor) in stale:
                record.miss(name, tensor)
                continue
            if record.place_of(tensor) is not None:
                continue  # the output of another module, handed on
            memory = record.note("output", name, tensor, inputs, number)
            if memory is None:
                continue
            if record.tallies is not None:
                self._count(("output", name), memory, known.lost(memory) if known else None)
            if tensor.requires_grad:
                before = inputs[0] if len(inputs) == 1 else None
                self._follow(tensor, Made(name, len(record.slots) - 1, known, before, number))
            elif not learns:
                record.without_gradient[name] += 1

    def _inputs(
        self, name: str, number: int, given: list[Tensor], stale: Set[int], *, was_given: bool
    ) -> tuple[int, ...]:
        """The places of a module's arguments; `was_given` where these were looked at before it ran."""
        places = []
        for tensor in given:
            place = self.record.place_of(tensor, unchanged=not was_given)
            if place is None and id(tensor) not in stale and not was_given:
                place = self._note_input(name, number, tensor)
            if place is not None:
                places.append(place)
        return tuple(places)

    def _note_input(self, name: str, number: int, tensor: Tensor) -> int | None:
        """Notes a tensor that was made between modules; returns its place, if it is looked at."""
        before = self.record.place_of(tensor, unchanged=False)
        inputs = () if before is None else (before,)
        memory = self.record.note("input", name, tensor, inputs, number)
        return None if memory is None else len(self.record.slots) - 1

    def _follow(self, tensor: Tensor, made: Made) -> None:
        """Has the gradient of a tensor noted when backward reaches it."""
        if tensor.grad_fn is None:
            return  # a leaf would keep the hook
        key, add, look = ("gradient", made.name), self._waiting.add, self._look_at_gradient
        mutex, failures = self._mutex, self._failures

        def reached(gradient: Tensor | None) -> None:
            if gradient is None or _torch.is_functorch_active():
                return
            with mutex.lock:
                if not self.is_over:
                    failures.call(made.name, add, key, (gradient,), look, made)

        _torch.hook_gradient(tensor, reached)

    def _look_at_gradient(self, made: Made, tensors: Sequence[Tensor], stale: Set[int]) -> None:
        [gradient] = tensors
        memory = None if stale else self.record.note("gradient", made.name, gradient, (), made.call)
        if memory is not None and self.record.tallies is not None:
            self._count(("gradient", made.name), memory, self._lost.back(made, memory))

    def _count(self, key: Key, memory: Tensor, lost: Tensor | None) -> None:
        tally = self.record.tally(key)
        tally.add(memory)
        tally.add_lost(lost)


def may_write(module: nn.Module) -> bool:
    """Whether a module may write its arguments, itself or by what it calls: all but PyTorch's that call no other."""
    known = type(module).__module__.startswith("torch.nn.modules.")
    return (
        not known or bool(getattr(module, "inplace", False)) or any(True for _ in module.children())
    )
