"""The gradient checks of a scaler: unscaling, measuring, combination over processes, and details of failures.

Invariants:
- a later check in the same iteration does not undo the result of an earlier one;
- names are looked up only for skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast.grad_scaler.distributed import chosen_for
from precast.grad_scaler.gradients import FoundInf, found_inf_so_far, largest, total_found_inf
from precast.grad_scaler.nonfinite import NonfiniteDetails, loss_to_keep
from precast.grad_scaler.optimizer_state import OptimizerState

__all__ = ["GradientChecks"]

_MOST_LOSSES = 1024  # stored in one iteration

Reduce = Callable[[list[Tensor]], None]


class GradientChecks:
    """Checks gradients, and stores the losses of the iteration, to tell later if they were finite."""

    def __init__(self, reduce_found_inf: Reduce | None) -> None:
        self._reduce_found_inf = reduce_found_inf
        self._chosen = WeakIdKeyDictionary()
        """Maps an optimizer to its number of parameter groups and the reduction chosen for them."""
        self._losses: tuple[Tensor, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or pickle has no losses, and chooses reductions again."""
        return GradientChecks, (self._reduce_found_inf,)

    def keep_loss(self, loss: Tensor) -> None:
        """Store the part of an unscaled loss that tells if it is finite."""
        if len(self._losses) < _MOST_LOSSES and not _torch.is_functorch_active():
            self._losses = (*self._losses, loss_to_keep(loss))

    def forget_losses(self) -> None:
        """End the iteration."""
        self._losses = ()

    def check(
        self,
        state: OptimizerState,
        inverse: Tensor,
        unscale: Callable[[Optimizer, Tensor, Tensor, bool], FoundInf],
        *,
        allow_fp16: bool,
        measure: bool,
    ) -> FoundInf:
        """Multiply an optimizer's gradients by `inverse`, float32 of shape (), and check them, in all processes.

        The results are added to the `found_inf` of `state`. `unscale` is the scaler's `_unscale_grads_`, which programs
        may have replaced. With `measure`, the first check of an iteration computes the largest gradient, too: the
        gradients may be clipped after it.
        """
        before = found_inf_so_far(inverse, state.found_inf)
        results = unscale(state.optimizer, inverse, before, allow_fp16)
        measure = measure and state.largest_gradient is None
        if measure:
            state.largest_gradient = largest(state.optimizer, inverse)
        reduce = self._reduction(state.optimizer)
        if reduce is not None:
            results.setdefault(
                inverse.device, before
            )  # a process without gradients takes part, too
            reduce(sorted(results.values(), key=lambda number: number.device != inverse.device))
            if measure and state.largest_gradient is not None:
                reduce([state.largest_gradient])
        state["found_inf_per_device"] = state.found_inf | results
        return state.found_inf

    def is_bad(self, state: OptimizerState) -> bool:
        """Return True if a gradient was not finite, and look up the details then; wait for the device."""
        is_bad = bool(total_found_inf(state.device, [state.found_inf]))
        if is_bad:
            self.look_up_details(state)
        return is_bad

    def look_up_details(self, state: OptimizerState) -> None:
        """Look up the details of a skipped step, together with all processes that skip it."""
        details = state.details = NonfiniteDetails(state.optimizer, self._losses)
        details.look_up()
        gather = getattr(self._reduction(state.optimizer), "gather", None)
        if gather is not None:
            details.combine(gather)

    def details_of(self, state: OptimizerState) -> NonfiniteDetails:
        """Return the details that were looked up, or ones that are computed when they are read."""
        return state.details or NonfiniteDetails(state.optimizer, self._losses)

    def is_true_anywhere(self, state: OptimizerState, flag: bool) -> bool:
        """Return True if `flag` is true in any process; all processes have to call this."""
        reduce = self._reduction(state.optimizer)
        if reduce is None:
            return flag
        number = torch.full((), float(flag), dtype=torch.float32, device=state.device)
        reduce([number])
        return bool(number)

    def _reduction(self, optimizer: Optimizer) -> Reduce | None:
        """Return the function that combines an optimizer's checks over processes; None for no combination."""
        if self._reduce_found_inf is not None:
            return self._reduce_found_inf
        groups = len(optimizer.param_groups)
        if self._chosen.get(optimizer, (None, None))[0] != groups:
            self._chosen[optimizer] = groups, chosen_for(optimizer)
        chosen: Reduce | None = self._chosen[optimizer][1]
        return chosen
