"""The current step: receives calls of modules, gradients and parameters, and writes them to a record.

Calls wait in a queue, and are examined in batches: between two modules of a training step the caches of the processor
are full of weights, so that to examine one call by itself costs 100 µs, in a batch half of that.

Invariants, beside those of a record:

- calls are examined in order; those that a checkpoint repeats in backward are recorded once;
- at most `_MOST` calls wait, with about `_ELEMENTS` values;
- a tensor that is written in place while it waits is not examined, and later calls of its key do not wait.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence, Set
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast import _torch
from precast._internal import pytree
from precast._internal.locks import ForkSafeLock
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.step_record import StepRecord
from precast.diagnostics.numerics.tally import TensorKey, countable
from precast.diagnostics.numerics.underflow_zeros import (
    LostGradients,
    OutputSource,
    repeatable_call,
)
from precast.optim.partial_steps import parameters_of
from precast.policy.module_names import named_parameters

__all__ = ["RunningStep", "may_write", "unseen_by_modes"]

P = ParamSpec("P")
R = TypeVar("R")

_MOST: Final = 64
_ELEMENTS: Final = 1 << 22

_Examine = Callable[[Any, Sequence[Tensor], Set[int]], None]
"""Examines a call. Its arguments are the call, the call's tensors, and the ids of those written while they waited."""
_Entry = tuple[TensorKey, Sequence[Tensor], Sequence[int], _Examine | None, Any]
"""The key, the tensors, their versions at arrival, the function that examines them (None if done), and the call."""
_Call = tuple[str, nn.Module, Any, Any, Any, bool]
"""A call of a module: its name, the module, arguments, keyword arguments, output, and if gradients were enabled."""


def unseen_by_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Hide the operations of a function from the program's dispatch modes."""

    @functools.wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _torch.dispatch_modes():
            return function(*args, **kwargs)
        with _torch.without_dispatch():
            return function(*args, **kwargs)

    return hidden


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
        self.is_over = False
        self._counts = record.tallies is not None
        """Examine every call at once. It still waits, to detect that one of its tensors is written meanwhile."""
        self._lost = LostGradients()
        self._urgent = urgent
        self._mutex = mutex
        self._failures = failures
        self._thread: int | None = None
        self._queue: list[_Entry] = []
        self._elements = 0
        """The number of values in the queue."""

    def is_called_here(self) -> bool:
        """Return True if this step can be a call of the model in this thread; it then belongs to the thread."""
        self._thread = self._thread or threading.get_ident()
        return self._thread == threading.get_ident()

    def on_module_start(self, name: str, args: Any, kwargs: Any, *, now: bool = False) -> None:
        """A module of this name is about to run that may write its arguments; `now` as in `on_module_end`."""
        tensors = _tensors_in((args, kwargs) if kwargs else args)
        if tensors and not all(map(self._is_latest, tensors)):
            self._take(("input", name), tensors, self._examine_arguments, name, now=now)

    def on_module_end(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any, *, now: bool
    ) -> None:
        """Record the inputs and outputs of a module, and wait for their gradients.

        The call is examined `now`, or else by `examine`, which is called before backward begins.
        """
        call = name, module, args, kwargs, output, torch.is_grad_enabled()
        if now:
            tensors = []
        elif type(output) is Tensor and len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            tensors = [args[0], output]
        else:
            tensors = [*_tensors_in((args, kwargs)), *_tensors_in(output)]
        self._take(("output", name), tensors, self._examine_call, call, now=now)

    def on_recomputed(self, name: str, output: Any) -> None:
        """Wait for the gradients of a module that a checkpoint repeats, if it first ran without a graph."""
        for tensor in _tensors_in(output)[: self.record.without_gradient[name]]:
            self.record.without_gradient[name] -= 1
            self._follow(tensor, OutputSource(name))

    def count_parameters(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Count the gradients of an optimizer's parameters once per step; without an optimizer those of all parameters.

        Gradients of fused optimizers still contain the loss scale.
        """
        scaled = getattr(optimizer, "grad_scale", None) is not None
        mine = None if optimizer is None else set(map(id, parameters_of(optimizer)))
        for name, parameter in named_parameters(model) if self._counts else ():
            key, gradient = ("parameter", name), parameter.grad
            if gradient is None or key in (self.record.tallies or ()):
                continue
            memory = countable(gradient)
            if memory is not None and (mine is None or id(parameter) in mine):
                lost = self._lost.of_parameter(parameter, memory)
                self._count(key, memory, lost, scaled=scaled)

    def so_far(self) -> StepRecord:
        """Return the record with all calls until now."""
        self.examine()
        return self.record.pack()

    def end(self) -> StepRecord:
        """Return the final record; gradients that arrive later are not recorded."""
        self.is_over = True
        self.examine()
        return self.record.end()

    def examine(self) -> None:
        """Examine all calls in the queue."""
        if self._queue:
            entries, self._queue, self._elements = self._queue, [], 0
            self._examine_all(entries)

    # --- the queue ---

    def _is_latest(self, tensor: Tensor) -> bool:
        """Return True if a tensor is the latest in the queue, and was not written since."""
        if not self._queue:
            return False
        _, tensors, versions, _, _ = self._queue[-1]
        return bool(tensors) and tensors[-1] is tensor and versions[-1] == _torch.version_of(tensor)

    def _take(
        self,
        key: TensorKey,
        tensors: Sequence[Tensor],
        examine: _Examine | None,
        call: Any,
        *,
        now: bool = False,
    ) -> None:
        """Examine a call soon, or now."""
        # Every function call and attribute here is slow (see above), so there are few.
        versions = []
        elements = self._elements
        for tensor in () if now else tensors:
            if type(tensor) is not Tensor or (tensor.is_cuda and _torch.is_captured(tensor)):
                break
            try:
                versions.append(_torch.version_of(tensor))
            except RuntimeError:  # PyTorch does not count the writes of inference tensors
                break
            elements += tensor.numel()
        waits = not now and len(versions) == len(tensors)
        if self._counts or not waits or key in self._urgent:
            if not self._counts:
                self.examine()
            self._examine_all([(key, tensors, (), examine, call)])
            examine = None
        if waits:
            self._queue.append((key, tensors, versions, examine, call))
            self._elements = elements
            if elements >= _ELEMENTS or len(self._queue) >= _MOST:
                self.examine()

    @unseen_by_modes
    @torch.no_grad()
    def _examine_all(self, entries: list[_Entry]) -> None:
        with _torch.without_torch_function():
            for entry in entries:
                self._failures.call(entry[0][1], self._examine_entry, *entry)

    def _examine_entry(
        self,
        key: TensorKey,
        tensors: Sequence[Tensor],
        versions: Sequence[int],
        examine: _Examine | None,
        call: Any,
    ) -> None:
        pairs = zip(tensors, versions, strict=False)  # a call that did not wait has no versions
        stale = {id(tensor) for tensor, version in pairs if _torch.version_of(tensor) != version}
        if stale:
            self._urgent.add(key)
        if examine is not None:
            examine(call, tensors, stale)

    # --- the functions that examine a call ---

    def _examine_arguments(self, name: str, tensors: Sequence[Tensor], stale: Set[int]) -> None:
        for tensor in tensors:
            if id(tensor) in stale:
                self.record.miss(name, tensor)
            elif self.record.place_of(tensor) is None:
                self._note_input(name, tensor)

    def _examine_call(self, call: _Call, _tensors: Sequence[Tensor], stale: Set[int]) -> None:
        record, (name, module, args, kwargs, output, learns) = self.record, call
        repeatable = repeatable_call(module, args, kwargs, output) if self._counts else None
        inputs = self._inputs(name, module, _tensors_in((args, kwargs) if kwargs else args), stale)
        for tensor in _tensors_in(output):
            if id(tensor) in stale:
                record.miss(name, tensor)
                continue
            if record.place_of(tensor) is not None:
                continue  # the output of another module, returned unchanged
            memory = record.note("output", name, tensor, inputs)
            if memory is None:
                continue
            lost = None if repeatable is None else repeatable.lost(memory)
            self._count(("output", name), memory, lost)
            if tensor.requires_grad:
                before = inputs[0] if len(inputs) == 1 else None
                self._follow(tensor, OutputSource(name, len(record.slots) - 1, repeatable, before))
            elif not learns:
                record.without_gradient[name] += 1

    def _inputs(
        self, name: str, module: nn.Module, arguments: list[Tensor], stale: Set[int]
    ) -> tuple[int, ...]:
        """Return the places of a module's arguments, which were examined before it ran if it may write them."""
        was_examined = may_write(module)
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
        key, take, examine = ("gradient", source.name), self._take, self._examine_gradient

        def reached(gradient: Tensor | None) -> None:
            if gradient is None or _torch.is_functorch_active():
                return
            with self._mutex.lock:
                if not self.is_over:
                    self._failures.call(source.name, take, key, (gradient,), examine, source)

        _torch.hook_gradient(tensor, reached)

    def _examine_gradient(
        self, source: OutputSource, tensors: Sequence[Tensor], stale: Set[int]
    ) -> None:
        [gradient] = tensors
        memory = None if stale else self.record.note("gradient", source.name, gradient)
        if memory is not None and self._counts:
            lost = self._lost.back(source, memory)
            self._count(("gradient", source.name), memory, lost, scaled=True)

    def _count(
        self, key: TensorKey, memory: Tensor, lost: Tensor | None, *, scaled: bool = False
    ) -> None:
        if self._counts:
            tally = self.record.tally(key, scaled=scaled)
            tally.add(memory)
            tally.add_lost(lost)


def may_write(module: nn.Module) -> bool:
    """Return True if a module may write its arguments: all except PyTorch's own without children."""
    is_pytorchs = type(module).__module__.startswith("torch.nn.modules.")
    is_in_place = bool(getattr(module, "inplace", False))
    return not is_pytorchs or is_in_place or any(True for _ in module.children())


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a module's arguments or output, in any nesting, with a fast path for common cases."""
    if type(value) is Tensor:
        return [value]
    if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
        return [value[0]]
    return pytree.tensors_in(value)
