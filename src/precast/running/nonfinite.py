"""Infinity and NaN in a run that no step shows: in final parameters and buffers, and in outputs of evaluations.

Invariants: nothing waits for the device while the program runs; models are referenced weakly; at most `_MOST` names are
kept.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from precast import _torch
from precast._internal.pytree import tensors_in
from precast.diagnostics.numerics.tally import comparable, countable
from precast.policy.module_names import name_of_each, named_parameters
from precast.report.schema import NonfiniteState, RunInfo

__all__ = ["NonfiniteOutputs", "NonfiniteStates"]

_MOST = 16
_MOST_FREED = 64  # models
_MOST_TENSORS = 64  # of one output that are examined

_T = TypeVar("_T")


class NonfiniteStates:
    """Finds parameters and buffers that became infinite or NaN during a run.

    A model is examined at the end of the run, or when it is freed: programs build models in functions, which have
    returned by the end. A model that the garbage collector frees as part of a cycle is not examined.

    A buffer may hold infinity by design, as an attention mask does. So the buffers of each model are examined before
    its first call, too.
    """

    def __init__(self) -> None:
        self._finite: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        """By model and buffer: whether it was finite at the first call, on its device."""
        self._freed: deque[list[_Extremes]] = deque(maxlen=_MOST_FREED)

    def first_call(self, model: nn.Module) -> None:
        """Examine the buffers of a model that is about to be called for the first time."""
        with torch.no_grad(), _torch.without_dispatch():
            finite = {
                name: memory.isfinite().all() for name, memory in _memory(model.named_buffers())
            }
        self._finite[model] = finite
        weakref.finalize(model, self._on_free, _References(model), finite).atexit = False

    def at_the_end(self, models: Iterable[nn.Module]) -> list[NonfiniteState]:
        """Return what is not finite in models, and in those that have been freed; waits for the device."""
        states: dict[str, NonfiniteState] = {}
        with torch.no_grad(), _torch.without_dispatch():
            extremes = (
                _extremes(
                    named_parameters(model), model.named_buffers(), self._finite.get(model, {})
                )
                for model in models
            )
            for each in chain.from_iterable(chain(extremes, self._freed)):
                if each.name not in states and (state := each.state()) is not None:
                    states[each.name] = state
        return sorted(states.values(), key=lambda state: state.kind != "parameter")[:_MOST]

    def _on_free(self, references: _References, finite: dict[str, Tensor]) -> None:
        """Examine a model that is being freed: its attributes still exist. Does not wait for the device."""
        if _torch.is_tracing() or _torch.is_capturing():
            return
        with contextlib.suppress(RuntimeError), torch.no_grad(), _torch.without_dispatch():
            extremes = _extremes(references.parameters(), references.buffers(), finite)
            self._freed.append(list(extremes))


@dataclass(frozen=True)
class _Extremes:
    """The smallest and the largest number of one parameter or buffer, on its device. Both are NaN if one number is."""

    name: str
    kind: Literal["parameter", "buffer"]
    smallest: Tensor
    largest: Tensor
    was_finite: Tensor | None

    def state(self) -> NonfiniteState | None:
        """Return the state if it is not finite and was not so before; waits for the device."""
        numbers = float(self.smallest), float(self.largest)
        if all(map(math.isfinite, numbers)) or (
            self.was_finite is not None and not self.was_finite
        ):
            return None
        return NonfiniteState(self.name, self.kind, "nan" if math.isnan(numbers[0]) else "inf")


class _References:
    """Weak references to the modules of a model, and to the tensors of its outermost module.

    While a model is freed, references to itself are dead already, and those to what it holds are not.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = name_of_each(module)
        self._modules = [(name, weakref.ref(each)) for name, each in modules if each is not module]
        own = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        self._parameters, self._buffers = (
            [(name, weakref.ref(tensor)) for name, tensor in tensors] for tensors in own
        )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._alive(self._parameters)
        for name, module in self._alive(self._modules):
            yield from module.named_parameters(name, recurse=False)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._alive(self._buffers)
        for name, module in self._alive(self._modules):
            yield from module.named_buffers(name, recurse=False)

    @staticmethod
    def _alive(references: list[tuple[str, weakref.ref[_T]]]) -> Iterator[tuple[str, _T]]:
        for name, reference in references:
            value = reference()
            if value is not None:
                yield name, value


def _extremes(
    parameters: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]],
    finite: dict[str, Tensor],
) -> Iterator[_Extremes]:
    """Yield the extremes of each floating-point parameter and buffer; `finite` has buffers at the first call."""
    for name, memory in _memory(parameters):
        yield _Extremes(name, "parameter", *memory.aminmax(), None)
    for name, memory in _memory(buffers):
        yield _Extremes(name, "buffer", *memory.aminmax(), finite.get(name))


def _memory(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of each floating-point tensor."""
    for name, tensor in named:
        memory = countable(tensor) if _torch.is_plain(type(tensor)) else None
        if memory is not None and memory.numel():
            yield name, comparable(memory)


class NonfiniteOutputs:
    """Counts the calls without gradients whose output was infinite or NaN.

    An output of several numbers may hold negative infinity by design, as masked scores do: only NaN and positive
    infinity count there.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._counts: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}
        """By class and device: the number of such calls, and the number of the first of them."""

    def add(self, module: nn.Module, output: object) -> None:
        """Examine the output of a call without gradients."""
        if _torch.is_tracing() or not _torch.is_real():
            return
        number, self._calls = self._calls, self._calls + 1
        with torch.no_grad(), _torch.without_dispatch():
            flags = [
                flag for tensor in tensors_in(output)[:_MOST_TENSORS] for flag in _is_bad(tensor)
            ]
            for device in {flag.device for flag in flags}:
                bad = torch.stack([flag for flag in flags if flag.device == device]).any()
                key = type(module).__name__, device
                count, first = self._counts.get(key) or (bad.new_zeros((), dtype=torch.long),) * 2
                first = torch.where(bad & (count == 0), number, first)
                self._counts[key] = count + bad, first

    def describe(self, run: RunInfo) -> None:
        """Write the counts into the record of the run; waits for the device."""
        counts = [
            (int(first), int(count), kind) for (kind, _), (count, first) in self._counts.items()
        ]
        bad = sorted(each for each in counts if each[1])
        run.evaluations = self._calls
        run.nonfinite_outputs = min(self._calls, sum(count for _, count, _ in bad))
        run.first_nonfinite_output = bad[0][2] if bad else None


def _is_bad(tensor: Tensor) -> Iterator[Tensor]:
    memory = countable(tensor.detach())
    if memory is None or not memory.numel() or _torch.is_captured(memory):
        return
    memory = comparable(memory)
    peak = memory.abs() if memory.numel() == 1 else memory
    yield ~(peak.amax() < math.inf)  # NaN is not below it either
