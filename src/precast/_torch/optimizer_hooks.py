"""precast's hooks on the steps of all optimizers.

Invariants:

- while there are listeners, two hooks are registered, otherwise none;
- listeners are called in the order of their registration;
- a listener that is added or removed during a step takes effect at the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from precast._torch.patches import SharedPatch, Stop

__all__ = ["on_optimizer_step", "run_next_to_step"]

StepListener = Callable[[Optimizer], Any]


def on_optimizer_step(
    *, before: StepListener | None = None, after: StepListener | None = None
) -> Stop:
    """Call `before` and `after` around each step of each optimizer. Return a function that ends this.

    `before` is called before the optimizer reads the gradients, `after` when it has written its parameters.
    """
    return _steps.add(_StepListeners(before, after))


class _StepListeners(NamedTuple):
    before: StepListener | None
    after: StepListener | None


def _hook_steps(listeners: list[_StepListeners]) -> list[Stop]:
    def call_before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for listener in tuple(listeners):
            if listener.before:
                listener.before(optimizer)

    def call_after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for listener in tuple(listeners):
            if listener.after:
                listener.after(optimizer)

    return [
        register_optimizer_step_pre_hook(call_before).remove,
        register_optimizer_step_post_hook(call_after).remove,
    ]


_steps: Final = SharedPatch(_hook_steps)


def run_next_to_step(optimizer: Optimizer, before: Any, after: Any) -> None:
    """Move two hooks of an optimizer so that no other hook runs between them and the step.

    `before` and `after` are their handles. Call this from a listener of `on_optimizer_step`: PyTorch calls these global
    hooks before it iterates over the dict of an optimizer's hooks (2.13).
    """
    hooks_before: Any = optimizer._optimizer_step_pre_hooks
    hooks_before.move_to_end(before.id)
    hooks_after: Any = optimizer._optimizer_step_post_hooks
    hooks_after.move_to_end(after.id, last=False)
