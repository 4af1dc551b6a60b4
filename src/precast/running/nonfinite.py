"""Infinity and NaN in a run that no step shows: in parameters and buffers at its end, and in outputs of evaluations.

Invariants: nothing waits for the device while the program runs; models are referenced weakly; at most `_MOST` names are
kept.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from precast import _torch
from precast._internal.pytree import tensors_in
from precast.diagnostics.numerics.tally import NARROW, countable
from precast.diagnostics.schema import NonfiniteState, Run
from precast.policy.module_names import named_parameters

__all__ = ["NonfiniteOutputs", "NonfiniteStates"]

_MOST = 16
_MOST_TENSORS = 64  # of one output that are examined


class NonfiniteStates:
    """Finds parameters and buffers that became infinite or NaN during a run.

    A buffer may hold infinity by design, as an attention mask does. So the buffers of each model are examined before
    its first call, too.
    """

    def __init__(self) -> None:
        self._finite: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        """By model and buffer: whether it was finite at the first call, on its device."""

    def first_call(self, model: nn.Module) -> None:
        """Examine the buffers of a model that is about to be called for the first time."""
        with torch.no_grad(), _torch.without_dispatch():
            self._finite[model] = {
                name: memory.isfinite().all() for name, memory in _memory(model.named_buffers())
            }

    def at_the_end(self, models: Iterable[nn.Module]) -> list[NonfiniteState]:
        """Return the parameters and buffers of `models` that are not finite; waits for the device."""
        states: dict[str, NonfiniteState] = {}
        with torch.no_grad(), _torch.without_dispatch():
            for model in models:
                for state in _nonfinite(model, self._finite.get(model, {})):
                    states.setdefault(state.name, state)
        return sorted(states.values(), key=lambda state: state.kind != "parameter")[:_MOST]


def _nonfinite(model: nn.Module, before: dict[str, Tensor]) -> Iterator[NonfiniteState]:
    for name, memory in _memory(named_parameters(model)):
        if not math.isfinite(float(memory.sum())) and not bool(memory.isfinite().all()):
            yield NonfiniteState(name, "parameter", "nan" if memory.isnan().any() else "inf")
    for name, memory in _memory(model.named_buffers()):
        was_finite = before.get(name)
        if not bool(memory.isfinite().all()) and (was_finite is None or bool(was_finite)):
            yield NonfiniteState(name, "buffer", "nan" if memory.isnan().any() else "inf")


def _memory(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of each floating-point tensor."""
    for name, tensor in named:
        memory = countable(tensor) if _torch.is_plain(type(tensor)) else None
        if memory is not None:
            yield name, memory


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

    def describe(self, run: Run) -> None:
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
    if memory is None or not memory.numel() or (memory.is_cuda and _torch.is_captured(memory)):
        return
    memory = memory.float() if memory.dtype in NARROW else memory
    peak = memory.abs() if memory.numel() == 1 else memory
    yield ~(peak.amax() < math.inf)  # NaN is not below it either
