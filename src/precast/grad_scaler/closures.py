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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from precast.grad_scaler.optimizer_state import OptimizerState

__all__ = ["closure_in", "step_with_closure"]


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
    """Steps an optimizer with a closure.

    Args:
        state: Of the optimizer.
        closure: The user's closure, which `args` or `kwargs` hold, too.
        args: Of the optimizer's `step`.
        kwargs: Of the optimizer's `step`.
        unscale: Unscales the optimizer's gradients and checks them.
        checks: Says what was found, in all processes.

    Returns:
        What the step returned, and whether it was skipped, that is, undone.

    Raises:
        ScalerError: The closure returned None, or did not zero the gradients; the step is undone then, too.
    """
    optimizer = state.optimizer

    def unscale_and_check() -> bool:
        state.found_inf, state.stage = {}, OptState.READY
        unscale(state)
        return not checks.is_bad(state)

    def in_any_process(flag: bool) -> bool:
        return checks.is_true_anywhere(state, flag)

    before = _Snapshot(optimizer)
    called = tried_too_far = False

    def checked() -> Any:
        nonlocal called, tried_too_far
        with _NewGradients(optimizer, all_are=not called) as new:
            loss = closure()
        if loss is None:
            raise ScalerError(
                "the closure returned None. Let it zero the gradients, compute the loss, call "
                "scaler.scale(loss).backward(), and return the loss, unscaled."
            )
        with new.alone() as there_are_some:
            if there_are_some and not unscale_and_check():
                if not called or not in_any_process(not _is_finite(loss)):
                    raise _AbortError
                tried_too_far = True
        called = True
        return loss

    try:
        if args:
            result = optimizer.step(checked, *args[1:], **kwargs)
        else:
            result = optimizer.step(**{**kwargs, "closure": checked})
    except _AbortError:
        before.restore()
        return None, True
    except BaseException:
        before.restore()
        raise
    if tried_too_far and in_any_process(not before.is_finite_now()):
        before.restore()
        return None, True
    return result, False


class _NewGradients:
    """The gradients that a closure has made: those that it has written, or that are other tensors afterwards.

    The others are unscaled already: a line search may ask for a loss alone, without a backward pass.

    Args:
        optimizer: Whose gradients.
        all_are: Whether older gradients count as new: before the first call nothing is unscaled.
    """

    def __init__(self, optimizer: Optimizer, all_are: bool) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._all_are = all_are
        self._added: Counter[int] = Counter()
        self._before: list[tuple[Tensor, Tensor, int]] = []

    def __enter__(self) -> _NewGradients:
        added = self._added

        def note(parameter: Tensor) -> None:
            added[id(parameter)] += 1

        if not self._all_are:
            self._before = [
                (p, p.grad, _version(p.grad)) for p in self._parameters if p.grad is not None
            ]
        self._hooks = [
            p.register_post_accumulate_grad_hook(note)
            for p, _, _ in self._before
            if p.is_leaf and p.requires_grad
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Takes old gradients off their parameters until the `with` ends; yields whether there are new ones.

        Raises:
            ScalerError: The closure added to gradients that were unscaled already.
        """
        old = []
        for parameter, gradient, version in self._before:
            if parameter.grad is not gradient:
                continue
            written = _version(gradient) - version
            if written == self._added[id(parameter)] > 0:
                raise ScalerError(_NOT_ZEROED)
            if not written:
                old.append((parameter, gradient))
        for parameter, _ in old:
            parameter.grad = None
        try:
            yield self._all_are or any(p.grad is not None for p in self._parameters)
        finally:
            for parameter, gradient in old:
                parameter.grad = gradient


_NOT_ZEROED = (
    "the closure added scaled gradients to those of its last call, which are unscaled by now: their sum means nothing, "
    "and the step was undone. Call optimizer.zero_grad() in the closure before backward()."
)


class _Snapshot:
    """A copy of an optimizer's parameters, state and settings, to go back to."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [
            (p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]
        ]
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
        self._settings = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in optimizer.param_groups
        ]  # some optimizers count their steps there

    def is_finite_now(self) -> bool:
        """Whether the optimizer's parameters and state have neither infinity nor NaN; waits for the device."""
        tensors = [parameter.detach() for parameter, _ in self._parameters]
        tensors += tensors_in(list(self._optimizer.state.values()))
        return all(map(is_finite, tensors))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back as it was."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


def _is_finite(loss: Any) -> bool:
    return math.isfinite(float(loss.detach() if isinstance(loss, Tensor) else loss))


def _version(tensor: Tensor) -> int:
    return _torch.version_of(tensor) if _torch.counts_versions(tensor) else 0
