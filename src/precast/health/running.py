"""The step that runs: takes calls of modules, gradients and parameters, and notes what they say.

Invariants: as of a record; what a checkpoint runs again in backward is noted once.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast.health.lost import Lost, Operation, operation
from precast.health.record import Record, Step, tensors_in
from precast.health.tally import memory_of
from precast.health.watching import gradient_hook, plain_name

__all__ = ["Running"]


class Running:
    """A record that is being written."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._lost = Lost()
        self._is_over = False

    def called(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module has ended: notes its inputs and outputs, and waits for their gradients."""
        record = self.record
        outputs = list(tensors_in(output))
        inputs = self._inputs(name, (args, kwargs) if kwargs else args, outputs)
        known = None
        if record.tallies is not None and isinstance(output, Tensor) and not kwargs:
            known = operation(module, args, output)
        for tensor in outputs:
            if record.place_of(tensor) is None:  # else another module's, handed on
                self._output(name, tensor, inputs, known)

    def called_again(self, name: str, output: Any) -> None:
        """A checkpoint runs a module again: gradients come only now where it first ran without a graph."""
        for tensor in tensors_in(output):
            if not self.record.without_gradient[name]:
                return
            self.record.without_gradient[name] -= 1
            gradient_hook(tensor, partial(self._gradient, name, None, None, None))

    def count_parameters(
        self, model: nn.Module, optimizer: Optimizer | None, *, scaled: bool
    ) -> None:
        """Counts the gradients of an optimizer's parameters, once a step; of all where none is given.

        Args:
            model: whose parameters.
            optimizer: whose of these.
            scaled: whether the gradients still have the loss's scale, as those of fused optimizers do.
        """
        record = self.record
        if record.tallies is None:
            return
        mine = None
        if optimizer is not None:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            key = "parameter", plain_name(name)
            if parameter.grad is None or key in record.tallies:
                continue
            memory = memory_of(parameter.grad)
            if memory is None or (mine is not None and id(parameter) not in mine):
                continue
            record.tally(*key).add(memory)
            record.tally(*key).add_lost(self._lost.of_parameter(parameter, memory))
            if scaled:
                record.scaled.add(key)

    def so_far(self) -> Step:
        """The step as it would be if it ended now."""
        return self.record.close(time.perf_counter() - self.record.begun)

    def end(self) -> Step:
        """The step; what backward still reaches of it is not noted."""
        self._is_over = True
        return self.so_far()

    def _inputs(self, name: str, given: Any, outputs: list[Tensor]) -> tuple[int, ...]:
        places = []
        for tensor in tensors_in(given):
            place = self.record.place_of(tensor, unchanged=False)
            if place is None and not any(tensor is output for output in outputs):
                memory = self.record.note("input", name, tensor)
                place = None if memory is None else len(self.record.slots) - 1
            if place is not None:
                places.append(place)
        return tuple(places)

    def _output(
        self, name: str, tensor: Tensor, inputs: tuple[int, ...], known: Operation | None
    ) -> None:
        record = self.record
        memory = record.note("output", name, tensor, inputs)
        if memory is None:
            return
        place = len(record.slots) - 1
        if record.tallies is not None:
            record.tally("output", name).add(memory)
            record.tally("output", name).add_lost(None if known is None else known.lost(memory))
        if tensor.requires_grad:
            before = inputs[0] if len(inputs) == 1 else None
            gradient_hook(tensor, partial(self._gradient, name, place, known, before))
        elif not torch.is_grad_enabled():
            record.without_gradient[name] += 1

    def _gradient(
        self,
        name: str,
        place: int | None,
        known: Operation | None,
        before: int | None,
        gradient: Tensor,
    ) -> None:
        if self._is_over:
            return
        memory = self.record.note("gradient", name, gradient)
        if memory is None or self.record.tallies is None:
            return
        tally = self.record.tally("gradient", name)
        tally.add(memory)
        tally.add_lost(self._lost.back(place, known, before, memory))
