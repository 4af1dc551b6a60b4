"""Steps with a closure: an optimizer (LBFGS, a line search) computes gradients several times in one step.

Each time the closure has run backward, the gradients are unscaled and checked. If some are not finite although the
loss is, or at the first call, the scale may be too high, and the step is aborted. If the loss of a later call is not
finite either, the optimizer has tried a point too far away, and sees that as it would without a scaler.

Invariants:
- the closure returns its loss unscaled, and each gradient is divided once, however often a closure leaves it alone;
- a step that was aborted, or that leaves infinity or NaN in a parameter or in the optimizer's state, changes nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    "the closure added scaled gradients to those of its last call, which are unscaled by now: their sum means nothing, "
    "and the step was undone. Call optimizer.zero_grad() in the closure before backward()."
)


class _AbortError(Exception):
    """Aborts a step from inside a closure; it never leaves this file."""


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among a step's arguments, by position or by name; None if there is none."""
    found = [value for value in (*args[:1], kwargs.get("closure")) if callable(value)]
    return found[0] if found else None


def step_with_closure(  # noqa: PLR0917 -- two are the step's own, two the scaler's
    state: OptimizerState,
    closure: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unscale: Callable[[OptimizerState], None],
    checks: GradientChecks,
) -> tuple[Any, bool]:
    """Steps an optimizer with a closure, which is also among the arguments of its `step`, `args` and `kwargs`.

    `unscale` unscales the optimizer's gradients and checks them; `checks` says what was found, in all processes.

    Returns:
        What the step returned, and whether it was skipped, that is, undone.

    Raises:
        ScalerError: The closure returned None, or did not zero the gradients; the step is undone then, too.
    """
    optimizer, checked = state.optimizer, _CheckedClosure(state, closure, unscale, checks)
    if args:
        args = (checked.call, *args[1:])
    else:
        kwargs = {**kwargs, "closure": checked.call}
    result, skipped = None, True
    with suppress(_AbortError), _undone_on_error(optimizer):
        result = optimizer.step(*args, **kwargs)
        if checked.tried_too_far and checks.is_true_anywhere(state, not _is_sound(optimizer)):
            raise _AbortError
        skipped = False
    state.conclude(skipped)
    return None if skipped else result, skipped


class _CheckedClosure:
    """What the optimizer calls in place of the user's closure: it unscales and checks the gradients that are new.

    The others are unscaled already: a line search may ask for a loss alone, without a backward pass. At the first call
    all gradients count as new.
    """

    def __init__(
        self,
        state: OptimizerState,
        closure: Callable[[], Any],
        unscale: Callable[[OptimizerState], None],
        checks: GradientChecks,
    ) -> None:
        self._state, self._closure = state, closure
        self._unscale, self._checks = unscale, checks
        self._parameters = parameters_of(state.optimizer)
        self._called = False
        self.tried_too_far = False
        """Whether a later call's loss was not finite, and the optimizer was to see that."""

    def call(self) -> Any:
        """Runs the closure and checks its gradients; raises `_AbortError` if the scale may be too high for them."""
        known = self._parameters if self._called else []
        before = [(p, p.grad, _version(p.grad)) for p in known if p.grad is not None]
        watch = BackwardWatch(parameter for parameter, _, _ in before)
        try:
            loss = self._closure()
        finally:
            watch.end()
        if loss is None:
            raise ScalerError(_NO_LOSS)
        old = [p for p, was, version in before if _is_left_alone(p, was, version, watch)]
        with _taken_off(old):
            self._check(loss)
        self._called = True
        return loss

    def _check(self, loss: Any) -> None:
        if self._called and all(parameter.grad is None for parameter in self._parameters):
            return
        self._state.found_inf, self._state.stage = {}, OptState.READY
        self._unscale(self._state)
        if not self._checks.is_bad(self._state):
            return
        if not self._called or not self._checks.is_true_anywhere(self._state, not _is_finite(loss)):
            raise _AbortError
        self.tried_too_far = True


def _is_left_alone(parameter: Tensor, gradient: Tensor, version: int, watch: BackwardWatch) -> bool:
    """Whether a closure has left the gradient of a parameter as it was before: the same tensor, and not written.

    Raises:
        ScalerError: The closure added to it.
    """
    if parameter.grad is not gradient:
        return False
    written = _version(gradient) - version
    if written == watch.added[id(parameter)] > 0:
        raise ScalerError(_NOT_ZEROED)
    return not written


@contextmanager
def _taken_off(parameters: list[Tensor]) -> Iterator[None]:
    """Takes the gradients off some parameters until the `with` ends."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _undone_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Puts an optimizer's parameters, state and settings back as they were if an exception ends the `with`."""
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
    """Whether the optimizer's parameters and state have neither infinity nor NaN; waits for the device."""
    state = tensors_in(list(optimizer.state.values()))
    return all(map(is_finite, [*parameters_of(optimizer), *state]))


def _is_finite(loss: Any) -> bool:
    return math.isfinite(float(loss.detach() if isinstance(loss, Tensor) else loss))


def _version(tensor: Tensor) -> int:
    return _torch.version_of(tensor) if _torch.counts_versions(tensor) else 0
