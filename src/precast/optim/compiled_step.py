"""A compiled optimizer step for weights that are stored in bfloat16.

Invariants:

- the optimizer's own `step` defines the result: it is called for one weight, recorded, and compiled. There is no list
  of supported optimizers;
- states and groups stay in the optimizer, so its `state_dict` is the same as without compilation;
- a weight is stepped once, by the compiled program or by `LowPrecisionWeights`. The first step of a weight is never
  compiled, because it creates the states;
- if a step cannot be recorded or compiled, nothing has changed. There is one warning for each optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._internal import cures
from precast._internal.callers import callers_level
from precast._torch import dispatch_modes, is_dtensor, step_without_hooks
from precast.errors import AttachError, PrecastWarning
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
from precast.optim.step_recording import OptimizerRecording, group_by_step
from precast.weights.view_cache import is_dense

__all__ = ["CompiledStep"]

_PART_ELEMENTS: Final = 1 << 20
"""The number of elements that a program writes to separate memory at once: 2 MiB, or 4 with rounding errors."""


class CompiledStep:
    """The compiled step of an optimizer for the large ones of the weights in bfloat16.

    `before_step` has to run before the method of this name of `weights`, which steps the other weights.
    """

    def __init__(self, optimizer: Optimizer, weights: LowPrecisionWeights) -> None:
        self._name = type(optimizer).__name__
        self._weights = weights
        self._refused: set[int] = set()
        self._gradients: list[tuple[Tensor, Tensor]] = []
        """The parameters stepped in the current step, with their gradients."""
        self._warns = True

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Step all weights for which the step can be compiled, and remove their gradients until `after_step`."""
        self._gradients = []  # an earlier step may have raised
        self._weights.check_writes(optimizer)
        parameters = parameters_of(optimizer)
        if closure_of(args, kwargs) is not None:
            self._warn("a closure computes the gradients during the step")
            return
        if self._has_sparse_gradient(parameters) or not any(map(self._is_candidate, parameters)):
            return
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and found_inf.item():
            return  # the optimizer skips this step
        factor = None if scale is None else 1.0 / scale.double().item()
        groups, step = optimizer.param_groups, step_without_hooks(optimizer)
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            for group in groups:
                single_group = {**group}
                single_group |= {name: False for name in ("foreach", "fused") if name in group}
                selected = [p for p in group["params"] if self._can_step(optimizer, p)]

                def step_parameter(
                    parameter: Tensor, single_group: dict[str, Any] = single_group
                ) -> None:
                    optimizer.param_groups = [{**single_group, "params": [parameter]}]
                    try:
                        step()
                    finally:
                        optimizer.param_groups = groups

                for similar in group_by_step(optimizer, selected):
                    self._step(optimizer, similar, step_parameter, factor)

    def after_step(self) -> None:
        """Restore the gradients of the weights that were stepped."""
        gradients, self._gradients = self._gradients, []
        for parameter, gradient in gradients:
            set_gradient(parameter, gradient)

    def _has_sparse_gradient(self, parameters: Iterable[Tensor]) -> bool:
        """Return True if a gradient is sparse. The optimizer then gets all gradients, as it may raise an error."""
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

    def _can_step(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        gradient = parameter.grad
        if gradient is None or not self._is_candidate(parameter):
            return False
        if not optimizer.state.get(parameter):  # the step that creates the states is never compiled
            return False
        reason = _obstacle(parameter, gradient)
        if reason is not None:
            self._refuse(parameter, reason)
        return reason is None

    def _is_candidate(self, parameter: Tensor) -> bool:
        """Return True for a large weight on the CPU that is not sharded and was not refused.

        On other devices, a fused or foreach kernel of the optimizer steps many weights at once.
        """
        return (
            parameter.is_cpu
            and self._weights.stores(parameter)
            and id(parameter) not in self._refused
            and not is_dtensor(parameter)
            and parameter.numel() >= MIN_ELEMENTS
        )

    def _step(
        self,
        optimizer: Optimizer,
        parameters: list[Tensor],
        step_parameter: Callable[[Tensor], None],
        factor: float | None,
    ) -> None:
        """Step parameters that share a program. A parameter for which this fails is refused and unchanged."""
        recording: OptimizerRecording | None = None
        programs: dict[Any, _BoundProgram] = {}
        for parameter in parameters:
            try:
                if recording is None or not recording.is_reusable:
                    recording, programs = (
                        OptimizerRecording(optimizer, parameter, step_parameter),
                        {},
                    )
                self._step_parameter(optimizer, parameter, recording, factor, programs)
                recording.write_counts(parameter)
            except Exception as error:  # a compiler can raise any error
                if recording is not None and recording.parameter is parameter:
                    recording.undo()
                    recording = None
                self._refuse(parameter, _reason(error))
            else:
                assert parameter.grad is not None
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None  # so the optimizer's own step skips it

    def _step_parameter(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        recording: OptimizerRecording,
        factor: float | None,
        programs: dict[Any, _BoundProgram],
    ) -> None:
        """Step one parameter. `programs` are those of earlier parameters with the same recording."""
        gradient = parameter.grad
        assert gradient is not None
        states, rounding = recording.states_of(parameter), self._weights.rounding
        state = optimizer.state.get(parameter, {})
        tensors = parameter, gradient, *states
        stored = (parameter,) if rounding != "kahan" else (state[REST], parameter)
        # The program writes raw memory. Version counters move before the write, as those of PyTorch's operations do.
        torch.autograd.graph.increment_version([*states, *stored])
        program_key = tuple([tensor.dtype for tensor in tensors]), factor
        bound = programs.get(program_key)
        if bound is None:
            scaled, is_low = factor is not None, gradient.dtype is not torch.float32
            key = ProgramKey(recording.recorded, program_key[0], scaled, is_low, rounding)
            values = recording.scalars if factor is None else [factor, *recording.scalars]
            scalars = torch.tensor(values or [0.0], dtype=torch.float32)
            bound = programs[program_key] = _BoundProgram(key, program(key), scalars)
        count = parameter.numel()
        parts = list(_parts(count, _PART_ELEMENTS if bound.key.writes_elsewhere else count))
        seeds_of_parts: Sequence[tuple[Tensor, ...]] = [()] * len(parts)
        if bound.key.takes_seeds:
            seeds_of_parts = [*zip(seeds(state, (len(bound.key.stored) + 1) // 2, len(parts)))]
        if bound.key.writes_elsewhere:
            for part, part_seeds in zip(parts, seeds_of_parts, strict=True):
                rows = [row(each, part) for each in stored]
                outputs = [torch.empty_like(each) for each in rows]
                inputs = [row(each, part) for each in tensors]
                bound.run((*inputs, bound.scalars, *part_seeds, *rows[:-1], *outputs), len(part))
                for each, output in zip(rows, outputs, strict=True):
                    each.copy_(output)
        else:
            bound.run((*tensors, bound.scalars, *seeds_of_parts[0], *stored[:-1]), count)

    def _refuse(self, parameter: Tensor, reason: str) -> None:
        self._refused.add(id(parameter))
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if self._warns:
            self._warns = False
            text = f"The step of {self._name} is slower: it is not compiled for all weights in bfloat16: {reason}."
            warnings.warn(text, PrecastWarning, stacklevel=callers_level())


class _BoundProgram(NamedTuple):
    """A compiled program with the scalars that it reads, for similar parameters."""

    key: ProgramKey
    run: StepProgram
    scalars: Tensor
    """The single values of the recording, float32 (k,)."""


def _obstacle(parameter: Tensor, gradient: Tensor) -> str | None:
    if type(gradient) is not Tensor or gradient.stride() != parameter.stride():
        return "a gradient has another layout than its weight"
    if parameter.untyped_storage().nbytes() == 0 or not is_dense(parameter):
        return "the elements of a weight are not contiguous in memory"
    if dispatch_modes():
        return "a dispatch mode is active"
    return None


def _parts(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(count, start + size))


def _reason(error: Exception) -> str:
    if isinstance(error, NotElementwiseError):
        return str(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
