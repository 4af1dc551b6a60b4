"""Steps with a closure: an optimizer (LBFGS, a line search) computes gradients several times in one step.

After each backward pass of the closure, the gradients are unscaled and checked. If some are not finite, the step is
aborted, because the scale may be too high. But if the loss of a later call is not finite either, the optimizer has
tried a point too far away, and gets that loss as it would without a scaler.

Invariants:
- the closure returns its loss unscaled, and each gradient is divided once, even if later calls do not change it;
- an aborted step, and one that puts infinity or NaN into a parameter or into the optimizer's state, changes nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from precast import _torch
from precast._internal.pytree import tensors_in
from precast.errors import ScalerError
from precast.grad_scaler.checks import GradientChecks
from precast.grad_scaler.memory import is_finite
from precast.grad_scaler.optimizer_state import BackwardWatch, OptimizerState
from precast.optim.partial_steps import parameters_of

__all__ = ["closure_in", "step_with_closure"]

_NO_LOSS = (
    "the closure returned None. Let it zero the gradients, compute the loss, call scaler.scale(loss).backward(), and "
    "return the loss, unscaled."
)
_NOT_ZEROED = (
    "the closure added scaled gradients to those of its last call, which are unscaled already: their sum has no "
    "meaning, and the step was undone. Call optimizer.zero_grad() in the closure before backward()."
)


class _AbortError(Exception):
    """Aborts a step from inside a closure; it is always caught in this file."""


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among a step's arguments, by position or by name; None if there is none."""
    closures = [value for value in (*args[:1], kwargs.get("closure")) if callable(value)]
    return closures[0] if closures else None


def step_with_closure(  # noqa: PLR0917 -- two are the step's own, two the scaler's
    state: OptimizerState,
    closure: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unscale: Callable[[OptimizerState], None],
    checks: GradientChecks,
) -> tuple[Any, bool]:
    """Step an optimizer with a closure, which is also among the arguments of its `step`, `args` and `kwargs`.

    `unscale` unscales the optimizer's gradients and checks them; `checks` combines the results of all processes.

    Returns:
        The result of the step, and True if it was skipped, that is, undone.
    """
    optimizer, checked = state.optimizer, _CheckedClosure(state, closure, unscale, checks)
    if args:
        args = (checked.call, *args[1:])
    else:
        kwargs = {**kwargs, "closure": checked.call}
    result, skipped = None, True
    with suppress(_AbortError), _restored_on_error(optimizer):
        result = optimizer.step(*args, **kwargs)
        if checked.tried_too_far and checks.is_true_anywhere(state, not _is_sound(optimizer)):
            raise _AbortError
        skipped = False
    state.conclude(skipped)
    return None if skipped else result, skipped


@dataclass
class _CheckedClosure:
    """The closure that the optimizer gets: it calls the user's, and unscales and checks the gradients that are new.

    The others are unscaled already: a line search may need only a loss, without a backward pass. At the first call all
    gradients count as new.
    """

    state: OptimizerState
    closure: Callable[[], Any]
    unscale: Callable[[OptimizerState], None]
    checks: GradientChecks
    was_called: bool = False
    tried_too_far: bool = False
    """True if a later call's loss was not finite, and the optimizer got it."""

    def call(self) -> Any:
        """Run the closure and check its gradients; raise `_AbortError` if the scale may be too high for them."""
        unscaled = parameters_of(self.state.optimizer) if self.was_called else []
        before = [
            (p, p.grad, _torch.version_if_counted(p.grad) or 0)
            for p in unscaled
            if p.grad is not None
        ]
        watch = BackwardWatch(parameter for parameter, _, _ in before)
        try:
            loss = self.closure()
        finally:
            watch.end()
        if loss is None:
            raise ScalerError(_NO_LOSS)
        old = [p for p, grad, version in before if _is_unchanged(p, grad, version, watch)]
        with _without_gradients(old):
            self._check(loss)
        self.was_called = True
        return loss

    def _check(self, loss: Any) -> None:
        state, checks = self.state, self.checks
        if self.was_called and all(p.grad is None for p in parameters_of(state.optimizer)):
            return
        state["found_inf_per_device"] = {}
        state["stage"] = OptState.READY
        self.unscale(state)
        if not checks.is_bad(state):
            return
        value = loss.detach() if isinstance(loss, Tensor) else loss
        if not self.was_called or not checks.is_true_anywhere(
            state, not math.isfinite(float(value))
        ):
            raise _AbortError
        self.tried_too_far = True


def _is_unchanged(parameter: Tensor, gradient: Tensor, version: int, watch: BackwardWatch) -> bool:
    """Return True if a closure has neither replaced nor written the gradient of a parameter."""
    if parameter.grad is not gradient:
        return False
    writes = (_torch.version_if_counted(gradient) or 0) - version
    if writes == watch.added[id(parameter)] > 0:
        raise ScalerError(_NOT_ZEROED)
    return not writes


@contextmanager
def _without_gradients(parameters: list[Tensor]) -> Iterator[None]:
    """Remove the gradients of some parameters until the `with` block ends."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _restored_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Restore an optimizer's parameters, state and settings if an exception ends the `with` block."""
    parameters = [(p, p.detach().clone()) for p in parameters_of(optimizer)]
    state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
    settings = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]  # some optimizers count their steps there
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        raise


def _is_sound(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's parameters and state are finite; wait for the device."""
    state = tensors_in(list(optimizer.state.values()))
    return all(map(is_finite, [*parameters_of(optimizer), *state]))
