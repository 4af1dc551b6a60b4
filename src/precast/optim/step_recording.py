"""What an optimizer's step does to one parameter, and to which others of its group it does the same.

Invariants:

- an optimizer of PyTorch does the same to all parameters of a group whose states have the same names, dtypes and single
  numbers; of any other that is not known, and each of its parameters is recorded alone;
- a step is recorded as one in float32, whatever the parameter, its gradient and its states are stored in; and as one
  of the whole parameter where this process has a part of it, as a step may ask for the shape;
- a recording that fails, or is taken back, leaves the optimizer and the parameter's states as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._torch import is_dtensor
from precast.optim.partial_steps import PLAIN, counts_of, is_large, set_gradient
from precast.optim.rounding import OF_ROUNDING
from precast.optim.step_recorder import NotElementwiseError, Recorded, StepRecorder

__all__ = ["Recording", "alike", "has_states"]


def alike(optimizer: Optimizer, parameters: list[Tensor]) -> list[list[Tensor]]:
    """Parameters of one group, together where a step does the same to them."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return [[parameter] for parameter in parameters]
    if len(parameters) < 2:
        return [parameters] if parameters else []
    by_likeness: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        by_likeness.setdefault(_likeness(optimizer, parameter), []).append(parameter)
    return list(by_likeness.values())


def has_states(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether an optimizer has made the states of a parameter."""
    return any(name not in OF_ROUNDING for name in optimizer.state.get(parameter, {}))


def _likeness(optimizer: Optimizer, parameter: Tensor) -> Any:
    """All that a step of PyTorch's asks of a parameter, besides the numbers that it treats one by one."""
    states = optimizer.state.get(parameter, {})
    geometry = parameter.shape, parameter.stride()
    its = [(k, _seen(v, geometry)) for k, v in states.items() if k not in OF_ROUNDING]
    return parameter.dtype, *its


def _seen(value: Any, geometry: tuple[Any, ...]) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value.dtype, value.item()
        return value.dtype, (value.shape, value.stride()) == geometry
    return value if isinstance(value, PLAIN) else id(value)


class Recording:
    """One step of one parameter, recorded; its single numbers (step counts) are already those after the step.

    Args:
        optimizer: whose step it is.
        parameter: what is stepped; it has a gradient.
        call: takes a step of the optimizer for that parameter alone.

    Raises:
        NotElementwiseError: the step does something that is not done to each number by itself.
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
            with _seen_in_float32(optimizer, parameter) as (seen, states):
                assert seen.grad is not None
                recorder = StepRecorder(seen, seen.grad)
                self._undo = recorder.undo
                with recorder:
                    call(seen)
                now = optimizer.state.get(seen, {})
                if any(is_large(v) and v is not states.get(name) for name, v in now.items()):
                    raise NotElementwiseError("its step makes new states")
            if counts_of(optimizer) != self._counts:
                raise NotElementwiseError("its step counts in attributes of the optimizer")
        except BaseException:
            self.undo()
            raise
        places = {v.data_ptr(): name for name, v in states.items() if is_large(v)}
        self._met = [(places.get(each.data_ptr()), each) for each in recorder.tensors[2:]]
        """The states that the step reads and writes: names, None for what is no state; and the tensors."""
        self._now = [
            (name, value)
            for name, value in optimizer.state.get(parameter, {}).items()
            if not is_large(value) and name not in OF_ROUNDING
        ]
        self.recorded: Recorded = recorder.recorded()
        self.scalars: list[float] = recorder.scalars

    @property
    def serves_others(self) -> bool:
        """Whether it says of parameters that are alike what is done to them."""
        return all(name is not None for name, _ in self._met)

    def states_of(self, parameter: Tensor) -> list[Tensor]:
        """The states that the step reads and writes, in the order of `recorded`; of its own or of one that is alike."""
        states = self._optimizer.state.get(parameter, {})
        return [tensor if name is None else states[name] for name, tensor in self._met]

    def count_for(self, parameter: Tensor) -> None:
        """Gives a parameter that is alike the single numbers that it has after the step."""
        if parameter is self.parameter or not self._now:
            return
        states = self._optimizer.state[parameter]
        for name, value in self._now:
            if not isinstance(value, Tensor):
                states[name] = value
            elif value is self._states.get(name):
                states[name].copy_(value)
            else:
                states[name] = value.clone()

    def undo(self) -> None:
        """Gives the optimizer and the states what they were before the step."""
        self._undo()
        vars(self._optimizer).update(self._counts)
        if self._had_state:
            now = self._optimizer.state[self.parameter]
            now.clear()
            now.update(self._states)
        else:
            self._optimizer.state.pop(self.parameter, None)


@contextmanager
def _seen_in_float32(
    optimizer: Optimizer, parameter: Tensor
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """A block in which a step sees a parameter, its gradient and its large states in float32.

    Gives the parameter and the states that it sees.

    What is stored in another dtype, or sharded, is replaced by memory that is asked for, and neither written nor read.
    A parameter that is float32 and plain is seen itself; of another one the step sees a stand-in, as a parameter that
    changes its dtype would lose the hooks that wait for its gradient.
    """
    gradient, states = parameter.grad, optimizer.state.get(parameter, {})
    assert gradient is not None
    shown = _unread(gradient)
    real = {k: v for k, v in states.items() if k not in OF_ROUNDING}
    seen = {k: _unread(v) if is_large(v) else v for k, v in real.items()}
    replaced = {k for k in real if seen[k] is not real[k]}
    its: Tensor = parameter
    if parameter.dtype is not torch.float32 or is_dtensor(parameter):
        its = torch.nn.Parameter(_unread(parameter))
        optimizer.state[its] = dict(seen)
    elif replaced:
        states.update(seen)
    if its.grad is not shown:
        set_gradient(its, shown)
    try:
        yield its, seen
    finally:
        if its is not parameter:
            states.update((k, v) for k, v in optimizer.state.pop(its).items() if k not in replaced)
        else:
            states.update((k, real[k]) for k in replaced if states.get(k) is seen[k])
            if parameter.grad is not gradient:
                set_gradient(parameter, gradient)


def _unread(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float32 and not is_dtensor(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float32)


def _nothing() -> None:
    pass
