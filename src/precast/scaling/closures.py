"""Steps with a closure: an optimizer (LBFGS) computes gradients several times in one step.

Each time the closure has run backward, the gradients are unscaled and checked. If some are not
finite, the step ends there, and parameters and the optimizer's state are put back as they were.

Invariants: the closure returns its loss unscaled; a step that was ended changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast.errors import ScalerError

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
    gradients_are_good: Callable[[], bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, bool]:
    """Runs a step with a closure: what it returned, and whether it was ended and undone."""
    keep = _Keep(optimizer)

    def checked() -> Any:
        loss = closure()
        if loss is None:
            raise ScalerError(
                "the closure returned None. Let it zero the gradients, compute the loss, call "
                "scaler.scale(loss).backward(), and return the loss, unscaled."
            )
        if not gradients_are_good():
            raise _EndError
        return loss

    try:
        if args:
            return optimizer.step(checked, *args[1:], **kwargs), False
        return optimizer.step(**{**kwargs, "closure": checked}), False
    except _EndError:
        keep.put_back()
        return None, True
    except BaseException:
        keep.put_back()
        raise


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

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, value in self._parameters:
            parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
