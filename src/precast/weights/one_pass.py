"""An optimizer's step in one pass over memory: gradients are read, and weights, states and copies written, once.

Invariants:

- what is computed is what the optimizer's own `step` says, which is called for each weight, recorded and compiled; no
  list says which optimizers that goes with;
- states and groups stay the optimizer's, so its `state_dict` is what it would be without this;
- a weight is stepped once: in the pass, or by the optimizer as before. A weight's first step is the optimizer's own,
  which makes its states;
- what cannot be recorded or compiled has changed nothing, is stepped as before, and is said once for each optimizer.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._internal.callers import callers_level
from precast._torch import dispatch_modes, step_without_hooks
from precast.errors import PrecastWarning
from precast.weights import held
from precast.weights.held import HeldParameter
from precast.weights.low_precision_gradients import factors_of, set_gradient
from precast.weights.step_program import ProgramKey, program
from precast.weights.step_recorder import NotElementwiseError, StepRecorder

__all__ = ["OnePassStep"]

_PLAIN: Final = (int, float, bool, str, type(None))
"""What an optimizer may count in; whether a step changes it is looked at."""


class OnePassStep:
    """Has the steps of an optimizer go through the memory of its large weights once.

    Its hook has to come before that of `LowPrecisionGradients`, which casts the gradients that are left.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._name = type(optimizer).__name__
        self._held_parameters: dict[int, HeldParameter] = {}
        self._begun: set[int] = set()
        """What has been stepped once by the optimizer itself, which then has all the states that it wants."""
        self._refused: set[int] = set()
        self._taken: list[tuple[Tensor, Tensor]] = []
        """Parameters that were stepped, and their gradients, while a step lasts."""
        self._unseen: Tensor | None = None
        self._says = True
        self._hook = optimizer.register_step_pre_hook(_Before(self))

    def ask_for(self, held_parameters: Iterable[HeldParameter]) -> None:
        """Has these weights be stepped so, as far as the optimizer trains them."""
        self._held_parameters = {id(h.parameter()): h for h in held_parameters}
        for known in (self._begun, self._refused):
            known.intersection_update(self._held_parameters)

    def end(self) -> None:
        """Has the optimizer take its steps itself."""
        self._hook.remove()

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Steps all weights that can be, and hides them from the step that follows."""
        self._taken = []  # where the last step raised, there may be some
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            self._say("a closure computes the gradients in the middle of the step")
            return
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and found_inf.item():
            return  # the step that follows is skipped
        factors = factors_of(optimizer)
        if scale is not None:
            factors = dict.fromkeys(self._held_parameters, 1.0 / scale.double())
        groups, step = optimizer.param_groups, step_without_hooks(optimizer)
        with torch.no_grad(), _outside_autocast(), _without_scaler(optimizer):
            for group in groups:
                alone = {**group}
                alone |= {name: False for name in ("foreach", "fused") if name in group}
                for parameter in group["params"]:
                    if not self._is_taken(optimizer, parameter):
                        continue
                    optimizer.param_groups = [{**alone, "params": [parameter]}]
                    try:
                        is_done = self._step(optimizer, parameter, step, factors.get(id(parameter)))
                    finally:
                        optimizer.param_groups = groups
                    if is_done:
                        self._taken.append((parameter, parameter.grad))
                        parameter.grad = None  # the step that follows leaves it out

    def after_step(self) -> set[int]:
        """Gives gradients back; returns ``id`` of each parameter whose copies are renewed already."""
        taken, self._taken = self._taken, []
        for parameter, gradient in taken:
            set_gradient(parameter, gradient)
        return {id(parameter) for parameter, _ in taken}

    def _is_taken(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        held_parameter, gradient = self._held_parameters.get(id(parameter)), parameter.grad
        if (
            held_parameter is None
            or held_parameter.overlapping
            or held_parameter.suspended
            or gradient is None
            or id(parameter) in self._refused
            or parameter.numel() < held.MIN_ELEMENTS_FOR_NODE
        ):
            return False
        if not optimizer.state.get(parameter) and id(parameter) not in self._begun:
            self._begun.add(id(parameter))
            return False
        reason = _why_not(parameter, gradient)
        if reason is not None:
            self._refuse(parameter, reason)
        return reason is None

    def _step(self, optimizer: Optimizer, parameter: Tensor, step: Any, factor: Any) -> bool:
        """Steps one parameter; False where that has to be done as before, and nothing has been changed."""
        gradient = parameter.grad
        assert gradient is not None
        seen = gradient if gradient.dtype is parameter.dtype else self._unseen_like(parameter)
        recorder = StepRecorder(parameter, seen)
        state, counts = dict(optimizer.state.get(parameter, {})), _counts(optimizer)
        had_state = parameter in optimizer.state
        try:
            if seen is not gradient:
                set_gradient(parameter, seen)
            with recorder:
                step()
            if _counts(optimizer) != counts:
                raise NotElementwiseError("its step counts in attributes of the optimizer")
            if any(_is_new(v, state.get(k)) for k, v in optimizer.state.get(parameter, {}).items()):
                raise NotElementwiseError("its step makes new states")
            set_gradient(parameter, gradient)
            self._run(parameter, gradient, recorder, factor)
        except Exception as error:  # whatever a compiler raises; the step as before raises its own
            recorder.undo()
            vars(optimizer).update(counts)
            if had_state:
                now = optimizer.state[parameter]
                now.clear()
                now.update(state)
            else:
                optimizer.state.pop(parameter, None)
            set_gradient(parameter, gradient)
            self._refuse(parameter, _reason(error))
            return False
        return True

    def _run(
        self, parameter: Tensor, gradient: Tensor, recorder: StepRecorder, factor: Any
    ) -> None:
        scalars = recorder.scalars if factor is None else [float(factor), *recorder.scalars]
        tensors = [parameter, gradient, *recorder.tensors[2:]]
        with held.written_together(parameter) as copies:
            key = ProgramKey(
                recorder.recorded(),
                gradient.dtype,
                factor is not None,
                gradient.dtype is not parameter.dtype,
                tuple(copy.tensor.dtype for copy in copies),
            )
            program(key, self._name)(
                *map(_numbers, tensors),
                torch.tensor(scalars or [0.0], dtype=torch.float32),
                *(_numbers(copy.tensor) for copy in copies),
            )
            torch.autograd.graph.increment_version(recorder.tensors[2:])

    def _unseen_like(self, parameter: Tensor) -> Tensor:
        """A gradient in float32 that is never written nor read: its memory is asked for, and not used."""
        numbers = parameter.numel()
        if self._unseen is None or self._unseen.numel() < numbers:
            self._unseen = torch.empty(numbers)
        return self._unseen.as_strided(parameter.shape, parameter.stride())

    def _refuse(self, parameter: Tensor, reason: str) -> None:
        self._refused.add(id(parameter))
        self._say(reason)

    def _say(self, reason: str) -> None:
        if self._says:
            self._says = False
            text = f"{self._name} steps as before, not in one pass, where it has to: {reason}."
            warnings.warn(text, PrecastWarning, stacklevel=callers_level())


class _Before:
    """What an optimizer calls before its step; it belongs to the optimizer, and copies of that to nobody."""

    def __init__(self, steps: OnePassStep) -> None:
        self._steps = weakref.ref(steps)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps = self._steps()
        if steps is not None:
            steps.before_step(optimizer, args, kwargs)


def _why_not(parameter: Tensor, gradient: Tensor) -> str | None:
    if not parameter.is_cpu:
        return f"it has been tried on the CPU alone, and a weight is on {parameter.device}"
    if gradient.layout is not torch.strided:
        return f"a gradient is {gradient.layout}"
    if type(gradient) is not Tensor or gradient.stride() != parameter.stride():
        return "a gradient has another layout than its weight"
    if parameter.untyped_storage().nbytes() == 0 or not _is_dense(parameter):
        return "the numbers of a weight do not lie side by side"
    if dispatch_modes():
        return "a mode watches its operations"
    return None


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _numbers(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in a row, as they lie in memory; no view, of which a program would see the base."""
    row = torch.empty(0, dtype=tensor.dtype)
    return row.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,))


def _counts(optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if type(value) in _PLAIN and name not in ("grad_scale", "found_inf")
    }


def _is_new(value: Any, before: Any) -> bool:
    return isinstance(value, Tensor) and value is not before and value.numel() > 1


def _reason(error: Exception) -> str:
    if isinstance(error, NotElementwiseError):
        return str(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def _outside_autocast() -> Iterator[None]:
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield
    else:
        yield


@contextmanager
def _without_scaler(optimizer: Optimizer) -> Iterator[None]:
    """Hides what a scaler has told a fused step, which the pass does itself."""
    its, names = vars(optimizer), ("grad_scale", "found_inf")
    told: dict[str, Any] = {name: its.pop(name) for name in names if name in its}
    try:
        yield
    finally:
        its.update(told)
