"""A compiled optimizer step for weights that are stored in bfloat16.

Invariants:

- the optimizer's own `step` defines the result: it is called for one weight, recorded, and compiled. No list of
  supported optimizers exists;
- states and groups stay in the optimizer, so its `state_dict` is the same as without this;
- a weight is stepped once, by the compiled program or by `LowPrecisionWeights`. The first step of a weight is never
  compiled, because it creates the states;
- a step that cannot be recorded or compiled has changed nothing. A warning is issued once for each optimizer.
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
from precast.optim.step_recording import OptimizerRecording, alike
from precast.weights.view_cache import is_dense

__all__ = ["CompiledStep"]

_PART: Final = 1 << 20
"""Elements that are written to separate memory at a time: 2 MiB, 4 MiB with the rounding errors."""


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

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Step all weights that can be compiled, and remove their gradients until `after_step`."""
        self._gradients = []  # an earlier step may have raised
        self._weights.check_writes(optimizer)
        parameters = parameters_of(optimizer)
        if closure_of(args, kwargs) is not None:
            self._warn("a closure computes the gradients during the step")
            return
        if self._has_sparse_gradient(parameters) or not any(map(self._is_compiled, parameters)):
            return
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and found_inf.item():
            return  # the optimizer skips this step
        factor = None if scale is None else 1.0 / scale.double().item()
        groups, step = optimizer.param_groups, step_without_hooks(optimizer)
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            for group in groups:
                alone = {**group}
                alone |= {name: False for name in ("foreach", "fused") if name in group}
                chosen = [p for p in group["params"] if self._takes(optimizer, p)]

                def call(parameter: Tensor, alone: dict[str, Any] = alone) -> None:
                    optimizer.param_groups = [{**alone, "params": [parameter]}]
                    try:
                        step()
                    finally:
                        optimizer.param_groups = groups

                for similar in alike(optimizer, chosen):
                    self._step(optimizer, similar, call, factor)

    def after_step(self) -> None:
        """Restore the gradients of the weights that were stepped."""
        gradients, self._gradients = self._gradients, []
        for parameter, gradient in gradients:
            set_gradient(parameter, gradient)

    def _has_sparse_gradient(self, parameters: Iterable[Tensor]) -> bool:
        """Return True if some gradient is sparse: then the optimizer has to see all of them, as it may refuse it."""
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
        """Return True if the weight is on the CPU, large enough, not sharded, and was not refused.

        Elsewhere one call of an optimizer's fused or foreach kernel steps many weights.
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
                self._run(optimizer, parameter, recording, factor, runs)
                recording.count_for(parameter)
            except Exception as error:  # any: a compiler can raise anything
                if recording is not None and recording.parameter is parameter:
                    recording.undo()
                    recording = None
                self._refuse(parameter, _reason(error))
            else:
                assert parameter.grad is not None
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None  # the optimizer's own step then leaves it out

    def _run(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        recording: OptimizerRecording,
        factor: float | None,
        runs: dict[Any, _Run],
    ) -> None:
        """Step one parameter. `runs` has the programs of earlier parameters of the same recording."""
        gradient = parameter.grad
        assert gradient is not None
        states, rounding = recording.states_of(parameter), self._weights.rounding
        own = optimizer.state.get(parameter, {})
        rest = own[REST] if rounding == "kahan" else None
        tensors = parameter, gradient, *states
        low = (parameter,) if rest is None else (rest, parameter)
        # The program writes raw memory. Version counters move before the write, as those of PyTorch's operations do.
        torch.autograd.graph.increment_version([*states, *low])
        key_of_run = tuple([tensor.dtype for tensor in tensors]), factor
        run = runs.get(key_of_run)
        if run is None:
            scaled, is_low = factor is not None, gradient.dtype is not torch.float32
            key = ProgramKey(recording.recorded, key_of_run[0], scaled, is_low, rounding)
            scalars = recording.scalars if factor is None else [factor, *recording.scalars]
            numbers = torch.tensor(scalars or [0.0], dtype=torch.float32)
            run = runs[key_of_run] = _Run(key, program(key), numbers)
        count = parameter.numel()
        parts = list(_parts(count, _PART if run.key.writes_elsewhere else count))
        chances: Sequence[tuple[Tensor, ...]] = [()] * len(parts)
        if run.key.takes_seeds:
            chances = [*zip(seeds(own, (len(run.key.stored) + 1) // 2, len(parts)))]
        if run.key.writes_elsewhere:
            for part, chance in zip(parts, chances, strict=True):
                rows = [row(each, part) for each in low]
                elsewhere = [torch.empty_like(each) for each in rows]
                inputs = [row(each, part) for each in tensors]
                run.run((*inputs, run.numbers, *chance, *rows[:-1], *elsewhere), len(part))
                for each, result in zip(rows, elsewhere, strict=True):
                    each.copy_(result)
        else:
            run.run((*tensors, run.numbers, *chances[0], *low[:-1]), count)

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
    return None


def _parts(count: int, size: int) -> Iterator[range]:
    """Yield the index ranges, of `size` elements each, for which a program is called."""
    for start in range(0, count, size):
        yield range(start, min(count, start + size))


def _reason(error: Exception) -> str:
    if isinstance(error, NotElementwiseError):
        return str(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
