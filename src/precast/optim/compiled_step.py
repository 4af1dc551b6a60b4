"""A compiled optimizer step for weights that are stored in bfloat16.

Invariants:

- the optimizer's own `step` defines the result: it is called for one weight, recorded, and compiled. No list of
  supported optimizers exists;
- states and groups stay in the optimizer, so its `state_dict` is the same as without this;
- a weight is stepped once, by the compiled program or by `LowPrecisionWeights`. The first step of a weight is never
  compiled, because it creates the states;
- off the CPU a program steps several weights of the same size. Nothing waits for the device, but for step counts that
  are on it and that another function has written. An optimizer whose step was captured is not compiled, because a
  replay changes the counts unseen; neither is a step that the device may skip;
- a step that cannot be recorded or compiled has changed nothing. A warning is issued once for each optimizer.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._internal import cures
from precast._internal.callers import callers_level
from precast._torch import dispatch_modes, is_capturing, is_dtensor, step_without_hooks
from precast.errors import AttachError, PrecastWarning
from precast.optim.host_counts import HostCounts
from precast.optim.low_precision_weights import MIN_ELEMENTS, LowPrecisionWeights
from precast.optim.partial_steps import (
    closure_of,
    outside_autocast,
    parameters_of,
    set_gradient,
    without_scaler,
)
from precast.optim.rounding import REST, seeds
from precast.optim.step_program import ProgramKey, StepProgram, program, row
from precast.optim.step_recorder import NotElementwiseError
from precast.optim.step_recording import OptimizerRecording, alike
from precast.weights.view_cache import is_dense

__all__ = ["CompiledStep"]

_PART: Final = 1 << 20
"""Elements that are written to separate memory at a time: 2 MiB, 4 MiB with the rounding errors."""
_AT_ONCE: Final = (16, 4, 1)
"""Numbers of weights that one call of a program steps on a device, where a call takes longer than a kernel."""
_ALIGNMENT: Final = 16
"""Of the memory that a program for a device reads, bytes: Inductor assumes it."""


class CompiledStep:
    """A compiled step of an optimizer for the large weights in `weights`.

    `before_step` has to run before that of `LowPrecisionWeights`, which steps the other weights.
    """

    def __init__(self, optimizer: Optimizer, weights: LowPrecisionWeights) -> None:
        self._name = type(optimizer).__name__
        self._weights = weights
        self._refused: set[int] = set()
        self._gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters that were stepped, and their gradients, during a step."""
        self._warns = True
        self._was_captured = False
        self._counts = HostCounts()

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Step all weights that can be compiled, and remove their gradients until `after_step`."""
        self._gradients = []  # an earlier step may have raised
        self._was_captured |= is_capturing()
        self._weights.check_writes(optimizer)
        parameters = parameters_of(optimizer)
        if closure_of(args, kwargs) is not None:
            self._warn("a closure computes the gradients during the step")
            return
        if self._has_sparse_gradient(parameters) or not any(map(self._is_compiled, parameters)):
            return
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and (not found_inf.is_cpu or found_inf.item()):
            return  # the optimizer or the device skips this step
        factor = None if scale is None else 1.0 / scale.double().item()
        groups, step = optimizer.param_groups, step_without_hooks(optimizer)
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            for group in groups:
                alone = {**group}
                alone |= {
                    name: False for name in ("foreach", "fused", "capturable") if name in group
                }
                chosen = [p for p in group["params"] if self._takes(optimizer, p)]

                def call(parameter: Tensor, alone: dict[str, Any] = alone) -> None:
                    optimizer.param_groups = [{**alone, "params": [parameter]}]
                    try:
                        step()
                    finally:
                        optimizer.param_groups = groups

                off_cpu = [p for p in chosen if not p.is_cpu]
                counts = self._counts.in_states(optimizer, off_cpu) if off_cpu else nullcontext()
                with counts:
                    for similar in alike(optimizer, chosen):
                        step_all = self._step if similar[0].is_cpu else self._step_together
                        step_all(optimizer, similar, call, factor)

    def after_step(self) -> None:
        """Restore the gradients of the weights that were stepped."""
        gradients, self._gradients = self._gradients, []
        for parameter, gradient in gradients:
            set_gradient(parameter, gradient)

    def _has_sparse_gradient(self, parameters: Iterable[Tensor]) -> bool:
        """Return True if some gradient is sparse: then the optimizer has to see all of them, as it may refuse it.

        Raises:
            AttachError: a weight in bfloat16 has a sparse gradient.
        """
        sparse = [
            p for p in parameters if p.grad is not None and p.grad.layout is not torch.strided
        ]
        for parameter in sparse:
            if self._weights.stores(parameter):
                raise AttachError(
                    f"{self._name}.step(): a weight in bfloat16 of shape {tuple(parameter.shape)} has a sparse "
                    f"gradient. precast.optim.bfloat16_weights supports dense gradients: {cures.BFLOAT16_DENSE.text}"
                )
        if sparse:
            self._warn("a gradient is sparse")
        return bool(sparse)

    def _takes(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        gradient = parameter.grad
        if gradient is None or not self._is_compiled(parameter):
            return False
        if not optimizer.state.get(
            parameter
        ):  # also in a checkpoint: so both go on with the same bits
            return False
        reason = _obstacle(parameter, gradient)
        if reason is not None:
            self._refuse(parameter, reason)
        return reason is None

    def _is_compiled(self, parameter: Tensor) -> bool:
        """Return True if the weight is large enough, not sharded, was not refused, and its device has a compiler."""
        return (
            self._weights.stores(parameter)
            and id(parameter) not in self._refused
            and not is_dtensor(parameter)
            and parameter.numel() >= MIN_ELEMENTS
            and (parameter.is_cpu or (_can_compile(parameter) and not self._was_captured))
        )

    def _step(
        self,
        optimizer: Optimizer,
        parameters: list[Tensor],
        call: Callable[[Tensor], None],
        factor: float | None,
    ) -> None:
        """Step parameters for which the optimizer does the same. A parameter that is refused is unchanged."""
        recording: OptimizerRecording | None = None
        runs: dict[Any, _Run] = {}
        for parameter in parameters:
            try:
                if recording is None or not recording.serves_others:
                    recording, runs = OptimizerRecording(optimizer, parameter, call), {}
                self._run(optimizer, [parameter], recording, factor, runs)
                recording.count_for(parameter)
            except Exception as error:  # any: a compiler can raise anything
                if recording is not None and recording.parameter is parameter:
                    recording.undo()
                    recording = None
                self._refuse(parameter, _reason(error))
            else:
                self._hide_gradient(parameter)

    def _step_together(
        self,
        optimizer: Optimizer,
        parameters: list[Tensor],
        call: Callable[[Tensor], None],
        factor: float | None,
    ) -> None:
        """Step parameters of a device for which the optimizer does the same. Those that are refused are unchanged."""
        done: list[Tensor] = []
        recording: OptimizerRecording | None = None
        try:
            recording = OptimizerRecording(optimizer, parameters[0], call)
            if len(parameters) > 1 and not recording.serves_others:
                raise NotElementwiseError("its step reads tensors that are not in its states")
            runs: dict[Any, _Run] = {}
            for batch in _batches(parameters, recording):
                self._run(optimizer, batch, recording, factor, runs)
                for parameter in batch:
                    recording.count_for(parameter)
                    self._hide_gradient(parameter)
                done += batch
        except Exception as error:  # any: a compiler can raise anything
            if recording is not None and not done:
                recording.undo()
            for parameter in parameters:
                if all(parameter is not each for each in done):
                    self._refuse(parameter, _reason(error))

    def _hide_gradient(self, parameter: Tensor) -> None:
        """Remove the gradient of a weight that was stepped: the optimizer's own step then leaves it out."""
        assert parameter.grad is not None
        self._gradients.append((parameter, parameter.grad))
        parameter.grad = None

    def _run(
        self,
        optimizer: Optimizer,
        batch: list[Tensor],
        recording: OptimizerRecording,
        factor: float | None,
        runs: dict[Any, _Run],
    ) -> None:
        """Step parameters of the same size and dtypes, one of the CPU or several of a device.

        `runs` has the programs of earlier parameters of the same recording.
        """
        rounding, tensors, low = self._weights.rounding, list[Tensor](), list[Tensor]()
        own = [optimizer.state.get(parameter, {}) for parameter in batch]
        for parameter, states in zip(batch, own, strict=True):
            stored = _stored(parameter, recording)
            rest = [states[REST]] if rounding == "kahan" else []
            tensors += [*stored, *rest]
            low += [*rest, parameter]
            # The program writes raw memory. Version counters move before the write, as PyTorch's operations do.
            torch.autograd.graph.increment_version([*stored[2:], *rest, parameter])
        dtypes, device = tuple([each.dtype for each in stored]), batch[0].device
        key_of_run = dtypes, factor, len(batch), device
        run = runs.get(key_of_run)
        if run is None:
            scaled, is_low = factor is not None, dtypes[1] is not torch.float32
            key = ProgramKey(
                recording.recorded, dtypes, scaled, is_low, rounding, device.type, len(batch)
            )
            scalars = recording.scalars if factor is None else [factor, *recording.scalars]
            numbers = _to_device(torch.tensor(scalars or [0.0], dtype=torch.float32), device)
            run = runs[key_of_run] = _Run(key, program(key), numbers)
        count = batch[0].numel()
        parts = list(_parts(count, _PART if run.key.writes_elsewhere else count))
        chances: Sequence[tuple[Tensor, ...]] = [()] * len(parts)
        if run.key.seeds and batch[0].is_cpu:
            chances = [*zip(seeds(own[0], run.key.seeds, len(parts)))]
        elif run.key.seeds:
            drawn = torch.cat([seeds(each, run.key.seeds)[0] for each in own])
            chances = [(_to_device(drawn, device),)]
        if run.key.writes_elsewhere:
            for part, chance in zip(parts, chances, strict=True):
                rows = [row(each, part) for each in low]
                elsewhere = [torch.empty_like(each) for each in rows]
                inputs = [row(each, part) for each in tensors]
                run.run((run.numbers, *chance, *inputs, *elsewhere), len(part))
                for each, result in zip(rows, elsewhere, strict=True):
                    each.copy_(result)
        else:
            run.run((run.numbers, *chances[0], *tensors), count)

    def _refuse(self, parameter: Tensor, reason: str) -> None:
        self._refused.add(id(parameter))
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if self._warns:
            self._warns = False
            text = f"The step of {self._name} is not compiled for all weights in bfloat16, and slower: {reason}."
            warnings.warn(text, PrecastWarning, stacklevel=callers_level())


class _Run(NamedTuple):
    """A program and its scalars, for similar parameters."""

    key: ProgramKey
    run: StepProgram
    numbers: Tensor
    """The scalars, float32 (k,)."""


def _obstacle(parameter: Tensor, gradient: Tensor) -> str | None:
    """Return the reason why a weight cannot be stepped by a compiled program; None if it can."""
    if type(gradient) is not Tensor or gradient.stride() != parameter.stride():
        return "a gradient has another layout than its weight"
    if parameter.untyped_storage().nbytes() == 0 or not is_dense(parameter):
        return "the elements of a weight are not contiguous in memory"
    if dispatch_modes():
        return "a dispatch mode is active"
    if not parameter.is_cpu and parameter.numel() >= 2**31:
        return "a weight has 2**31 elements or more"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _can_compile(parameter: Tensor) -> bool:
    """Return True if PyTorch compiles programs for the device of a parameter."""
    return parameter.is_cuda and _has_triton()


def _stored(parameter: Tensor, recording: OptimizerRecording) -> list[Tensor]:
    """Return the tensors of a recorded step for a parameter."""
    assert parameter.grad is not None
    return [parameter, parameter.grad, *recording.states_of(parameter)]


def _batches(parameters: list[Tensor], recording: OptimizerRecording) -> Iterator[list[Tensor]]:
    """Yield parameters that one call of a program steps: of the same size and dtypes, those of the recording first.

    Raises:
        NotElementwiseError: memory is not aligned, which a compiled program would not notice.
    """
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        stored = _stored(parameter, recording)
        if any(each.data_ptr() % _ALIGNMENT for each in stored):
            raise NotElementwiseError("the memory of a weight or of its states is not aligned")
        key = parameter.numel(), parameter.device, *(each.dtype for each in stored)
        alike.setdefault(key, []).append(parameter)
    for batch in alike.values():
        rest = iter(batch)
        left = len(batch)
        while left:
            count = next(size for size in _AT_ONCE if size <= left)
            yield list(itertools.islice(rest, count))
            left -= count


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the CPU on a device, without a wait."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _parts(count: int, size: int) -> Iterator[range]:
    """Yield the index ranges, of `size` elements each, for which a program is called."""
    for start in range(0, count, size):
        yield range(start, min(count, start + size))


def _reason(error: Exception) -> str:
    if isinstance(error, NotElementwiseError):
        return str(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
