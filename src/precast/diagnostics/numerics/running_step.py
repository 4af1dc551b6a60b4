"""The current step: receives calls of modules, gradients and parameters, and writes them to a record.

Invariants: those of a record; calls that a checkpoint repeats in backward are recorded once.
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
from precast.diagnostics.numerics.step_record import StepRecord, tensors_in
from precast.diagnostics.numerics.tally import TensorKey, countable
from precast.diagnostics.numerics.underflow_zeros import (
    LostGradients,
    OutputSource,
    repeatable_call,
)
from precast.optim.partial_steps import parameters_of
from precast.policy.module_names import named_parameters

__all__ = ["RunningStep", "may_write"]


_Call = tuple[str, nn.Module, Any, Any, Any, bool]
"""A call of a module: its name, the module, arguments, keyword arguments, output, and if gradients were enabled."""


class RunningStep:
    """The step that is being recorded.

    Args:
        record: the record of this step.
        urgent: keys of tensors that must be examined at once, of all steps. Keys are added here.
        mutex: held by the thread that calls a method.
        failures: counts calls that could not be examined.
    """

    def __init__(
        self, record: StepRecord, urgent: set[TensorKey], mutex: ForkSafeLock, failures: Failures
    ) -> None:
        self.record = record
        self._lost = LostGradients()
        self._queue = DeferredCalls(urgent, failures, counts=record.tallies is not None)
        self._failures = failures
        self._mutex = mutex
        self._thread: int | None = None
        self.is_over = False
        self.examine = self._queue.examine

    def is_called_here(self) -> bool:
        """Return True if this step can be a call of the model in this thread; it then belongs to the thread."""
        self._thread = self._thread or threading.get_ident()
        return self._thread == threading.get_ident()

    def on_module_end(
        self,
        key: TensorKey,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
        *,
        now: bool = False,
    ) -> None:
        """Record the inputs and outputs of a module, and wait for their gradients.

        The call is examined `now`, or else by `examine`, which is called before backward begins.
        """
        call = key[1], module, args, kwargs, output, torch.is_grad_enabled()
        if now:
            self._queue.examine_now(key, (), self._examine_call, call)
        elif type(output) is Tensor and len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            self._queue.add(key, (args[0], output), self._examine_call, call)
        else:
            tensors = *tensors_in((args, kwargs)), *tensors_in(output)
            self._queue.add(key, tensors, self._examine_call, call)

    def on_module_start(self, name: str, args: Any, kwargs: Any, *, now: bool = False) -> None:
        """A module of this name is about to run that may write its arguments; `now` as in `called`."""
        tensors = tensors_in((args, kwargs) if kwargs else args)
        if not tensors or all(map(self._queue.is_latest, tensors)):
            return
        take = self._queue.examine_now if now else self._queue.add
        take(("input", name), tensors, self._examine_arguments, name)

    def on_recomputed(self, name: str, output: Any) -> None:
        """Wait for the gradients of a module that a checkpoint repeats, if it first ran without a graph."""
        for tensor in tensors_in(output):
            if not self.record.without_gradient[name]:
                return
            self.record.without_gradient[name] -= 1
            self._follow(tensor, OutputSource(name))

    def count_parameters(
        self, model: nn.Module, optimizer: Optimizer | None, *, scaled: bool
    ) -> None:
        """Count the gradients of an optimizer's parameters once per step; without an optimizer those of all parameters.

        Gradients of fused optimizers are `scaled`: they still contain the loss scale.
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

    def so_far(self) -> StepRecord:
        """Return the record with all calls until now."""
        self.examine()
        return self.record.pack()

    def end(self) -> StepRecord:
        """Return the final record; gradients that arrive later are not recorded."""
        self.is_over = True
        self.examine()
        return self.record.end()

    def _examine_arguments(self, name: str, tensors: Sequence[Tensor], stale: Set[int]) -> None:
        for tensor in tensors:
            if id(tensor) in stale:
                self.record.miss(name, tensor)
            elif self.record.place_of(tensor) is None:
                self._note_input(name, tensor)

    def _examine_call(self, call: _Call, _tensors: Sequence[Tensor], stale: Set[int]) -> None:
        record, (name, module, args, kwargs, output, learns) = self.record, call
        repeatable = (
            None if record.tallies is None else repeatable_call(module, args, kwargs, output)
        )
        arguments = tensors_in((args, kwargs) if kwargs else args)
        inputs = self._inputs(name, arguments, stale, was_examined=may_write(module))
        for tensor in tensors_in(output):
            if id(tensor) in stale:
                record.miss(name, tensor)
                continue
            if record.place_of(tensor) is not None:
                continue  # the output of another module, returned unchanged
            memory = record.note("output", name, tensor, inputs)
            if memory is None:
                continue
            if record.tallies is not None:
                self._count(
                    ("output", name), memory, repeatable.lost(memory) if repeatable else None
                )
            if tensor.requires_grad:
                before = inputs[0] if len(inputs) == 1 else None
                self._follow(tensor, OutputSource(name, len(record.slots) - 1, repeatable, before))
            elif not learns:
                record.without_gradient[name] += 1

    def _inputs(
        self,
        name: str,
        arguments: list[Tensor],
        stale: Set[int],
        *,
        was_examined: bool,
    ) -> tuple[int, ...]:
        """Return the places of a module's arguments; `was_examined` if they were examined before it ran."""
        places = []
        for tensor in arguments:
            place = self.record.place_of(tensor, unchanged=not was_examined)
            if place is None and id(tensor) not in stale and not was_examined:
                place = self._note_input(name, tensor)
            if place is not None:
                places.append(place)
        return tuple(places)

    def _note_input(self, name: str, tensor: Tensor) -> int | None:
        """Record a tensor that was computed between modules; return its place, or None if it is not recorded."""
        before = self.record.place_of(tensor, unchanged=False)
        inputs = () if before is None else (before,)
        memory = self.record.note("input", name, tensor, inputs)
        return None if memory is None else len(self.record.slots) - 1

    def _follow(self, tensor: Tensor, source: OutputSource) -> None:
        """Record the gradient of a tensor when backward reaches it."""
        if tensor.grad_fn is None:
            return  # a leaf would keep the hook
        key, add, examine = ("gradient", source.name), self._queue.add, self._examine_gradient
        mutex, failures = self._mutex, self._failures

        def reached(gradient: Tensor | None) -> None:
            if gradient is None or _torch.is_functorch_active():
                return
            with mutex.lock:
                if not self.is_over:
                    failures.call(source.name, add, key, (gradient,), examine, source)

        _torch.hook_gradient(tensor, reached)

    def _examine_gradient(
        self, source: OutputSource, tensors: Sequence[Tensor], stale: Set[int]
    ) -> None:
        [gradient] = tensors
        memory = None if stale else self.record.note("gradient", source.name, gradient)
        if memory is not None and self.record.tallies is not None:
            self._count(("gradient", source.name), memory, self._lost.back(source, memory))

    def _count(self, key: TensorKey, memory: Tensor, lost: Tensor | None) -> None:
        tally = self.record.tally(key)
        tally.add(memory)
        tally.add_lost(lost)


def may_write(module: nn.Module) -> bool:
    """Return True if a module may write its arguments: all except PyTorch's own without children."""
    is_pytorchs = type(module).__module__.startswith("torch.nn.modules.")
    is_in_place = bool(getattr(module, "inplace", False))
    return not is_pytorchs or is_in_place or any(True for _ in module.children())
