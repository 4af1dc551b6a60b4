"""Steps with a closure: an optimizer (LBFGS, a line search) computes gradients several times in one step.

Each time the closure has run backward, the gradients are unscaled and checked. If some are not finite although the
loss is, or at the first call, the scale may be too high: the step ends there. Where a later call gives a loss that is
not finite, the optimizer has tried a point too far away, and sees that as it would without a scaler.

Invariants:
- the closure returns its loss unscaled, and gradients are divided once, however often a closure leaves them alone;
- a step that was ended, or that leaves infinity or NaN in a parameter or in the optimizer's state, changes nothing.
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
from torch.optim import Optimizer

from precast import _torch
from precast._internal.pytree import tensors_in
from precast.errors import ScalerError
from precast.grad_scaler.gradients import is_finite

__all__ = ["closure_in", "step_with"]


class _EndError(Exception):
    """Ends a step from inside a closure; never leaves this file."""


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among a step's arguments, by position or by name; None where there is none."""
    found = [value for value in (*args[:1], kwargs.get("closure")) if callable(value)]
    return found[0] if found else None


def step_with(
    optimizer: Optimizer,
    closure: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    gradients_are_good: Callable[[], bool],
    in_any_process: Callable[[bool], bool],
) -> tuple[Any, bool]:
    """Runs a step with a closure: what it returned, and whether it was ended and undone."""
    keep = _Keep(optimizer)
    called = tried_too_far = False

    def checked() -> Any:
        nonlocal called, tried_too_far
        with _Fresh(optimizer, all_are=not called) as fresh:
            loss = closure()
        if loss is None:
            raise ScalerError(
                "the closure returned None. Let it zero the gradients, compute the loss, call "
                "scaler.scale(loss).backward(), and return the loss, unscaled."
            )
        with fresh.alone() as there_are_some:
            if there_are_some and not gradients_are_good():
                if not called or not in_any_process(not _is_finite(loss)):
                    raise _EndError
                tried_too_far = True
        called = True
        return loss

    try:
        if args:
            result = optimizer.step(checked, *args[1:], **kwargs)
        else:
            result = optimizer.step(**{**kwargs, "closure": checked})
    except _EndError:
        keep.put_back()
        return None, True
    except BaseException:
        keep.put_back()
        raise
    if tried_too_far and in_any_process(not keep.is_finite_now()):
        keep.put_back()
        return None, True
    return result, False


class _Fresh:
    """Which gradients a closure has made: those that were written, or are other tensors, when it has run.

    The others are unscaled already: a line search may ask for a loss alone.

    Args:
        optimizer: Whose gradients.
        all_are: Whether gradients from before count, too: before the first call nothing is unscaled.
    """

    def __init__(self, optimizer: Optimizer, all_are: bool) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._all_are = all_are
        self._added: Counter[int] = Counter()
        self._before: list[tuple[Tensor, Tensor, int]] = []

    def __enter__(self) -> _Fresh:
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
        """Takes the gradients that the closure left alone off their parameters; whether there are others.

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


class _Keep:
    """Parameters, state and settings of an optimizer as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [
            (p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]
        ]
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
        self._settings = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in optimizer.param_groups
        ]  # some optimizers count there

    def is_finite_now(self) -> bool:
        """Whether parameters and state hold neither infinity nor NaN; waits for the device."""
        tensors = [parameter.detach() for parameter, _ in self._parameters]
        tensors += tensors_in(list(self._optimizer.state.values()))
        return all(map(is_finite, tensors))

    @torch.no_grad()
    def put_back(self) -> None:
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
