"""The recorded step of one parameter, and the other parameters of its group that it applies to.

Invariants:

- an optimizer of PyTorch does the same to all parameters of a group whose states have the same names, dtypes and single
  values. For other optimizers this is not certain, so each of their parameters is recorded alone;
- a step is recorded in float32, whatever the dtypes of the parameter, its gradient and its states;
- a recording that fails or is undone leaves the optimizer and the parameter's states unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast.optim.partial_steps import PLAIN, counts_of, is_large
from precast.optim.rounding import OF_ROUNDING
from precast.optim.step_recorder import NotElementwiseError, RecordedStep, StepRecorder

__all__ = ["OptimizerRecording", "group_by_step"]


def group_by_step(optimizer: Optimizer, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Group parameters for which the optimizer's step is the same, except for the values of elements."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return [[parameter] for parameter in parameters]
    if len(parameters) < 2:
        return [parameters] if parameters else []
    by_likeness: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        by_likeness.setdefault(_likeness(optimizer, parameter), []).append(parameter)
    return list(by_likeness.values())


def _likeness(optimizer: Optimizer, parameter: Tensor) -> Any:
    """Return everything that a step of PyTorch's reads of a parameter, except the values of its elements."""
    states = optimizer.state.get(parameter, {})
    geometry = parameter.shape, parameter.stride()
    described = [(k, _described(v, geometry)) for k, v in states.items() if k not in OF_ROUNDING]
    return parameter.dtype, *described


def _described(value: Any, geometry: tuple[Any, ...]) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value.dtype, value.item()
        return value.dtype, (value.shape, value.stride()) == geometry
    return value if isinstance(value, PLAIN) else id(value)


class OptimizerRecording:
    """One recorded step of one parameter; its single values (step counts) are already those after the step.

    `call` calls the optimizer's step for that parameter alone.
    """

    def __init__(
        self, optimizer: Optimizer, parameter: Tensor, call: Callable[[Tensor], None]
    ) -> None:
        self.parameter = parameter
        self._optimizer = optimizer
        self._states, self._counts = dict(optimizer.state.get(parameter, {})), counts_of(optimizer)
        self._had_state = parameter in optimizer.state
        self._undo: Callable[[], None] = _nothing
        try:
            with _in_float32(optimizer, parameter) as (stand_in, states):
                assert stand_in.grad is not None
                recorder = StepRecorder(stand_in, stand_in.grad)
                self._undo = recorder.undo
                with recorder:
                    call(stand_in)
                after = optimizer.state.get(stand_in, {})
                if any(is_large(v) and v is not states.get(name) for name, v in after.items()):
                    raise NotElementwiseError("its step makes new states")
            if counts_of(optimizer) != self._counts:
                raise NotElementwiseError("its step counts in attributes of the optimizer")
        except BaseException:
            self.undo()
            raise
        names = {v.data_ptr(): name for name, v in states.items() if is_large(v)}
        self._tensors = [(names.get(each.data_ptr()), each) for each in recorder.tensors[2:]]
        """The states that the step reads and writes: names (None for other tensors) and tensors."""
        self._counts_after = [
            (name, value)
            for name, value in optimizer.state.get(parameter, {}).items()
            if not is_large(value) and name not in OF_ROUNDING
        ]
        self.recorded: RecordedStep = recorder.recorded()
        self.scalars: list[float] = recorder.scalars

    @property
    def is_reusable(self) -> bool:
        """True if the recording applies to similar parameters."""
        return all(name is not None for name, _ in self._tensors)

    def states_of(self, parameter: Tensor) -> list[Tensor]:
        """Return the states that the step reads and writes, in the order of `recorded`, of a similar parameter."""
        states = self._optimizer.state.get(parameter, {})
        return [tensor if name is None else states[name] for name, tensor in self._tensors]

    def write_counts(self, parameter: Tensor) -> None:
        """Write the single values after the step to the states of a similar parameter."""
        if parameter is self.parameter or not self._counts_after:
            return
        states = self._optimizer.state[parameter]
        for name, value in self._counts_after:
            if not isinstance(value, Tensor):
                states[name] = value
            elif value is self._states.get(name):
                states[name].copy_(value)
            else:
                states[name] = value.clone()

    def undo(self) -> None:
        """Restore the optimizer and the states."""
        self._undo()
        vars(self._optimizer).update(self._counts)
        if self._had_state:
            states = self._optimizer.state[self.parameter]
            states.clear()
            states.update(self._states)
        else:
            self._optimizer.state.pop(self.parameter, None)


@contextmanager
def _in_float32(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield a parameter and its states in float32, with which a step can be recorded.

    Tensors of another dtype are replaced by uninitialized memory, which is neither written nor read.
    The parameter gets a stand-in, because a change of its dtype would remove the hooks on its gradient.
    """
    gradient, states = parameter.grad, optimizer.state.get(parameter, {})
    assert gradient is not None
    real = {k: v for k, v in states.items() if k not in OF_ROUNDING}
    wide = {k: _uninitialized(v) if is_large(v) else v for k, v in real.items()}
    replaced = {k for k in real if wide[k] is not real[k]}
    stand_in = torch.nn.Parameter(_uninitialized(parameter))
    stand_in.grad = _uninitialized(gradient)
    optimizer.state[stand_in] = dict(wide)
    try:
        yield stand_in, wide
    finally:
        after = optimizer.state.pop(stand_in)
        states.update((k, v) for k, v in after.items() if k not in replaced)


def _uninitialized(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float32:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)


def _nothing() -> None:
    pass
