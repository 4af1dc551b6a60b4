"""Checks of gradients, as a scaler makes them: unscaled, measured, combined over all processes, and looked into.

Invariants:
- what one check of an optimizer's gradients has found, a later check in the same iteration does not take back;
- names are looked up only for steps that are skipped.
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

_MOST_LOSSES = 1024  # of one iteration that are kept

Reduce = Callable[[list[Tensor]], None]


class GradientChecks:
    """Checks gradients, and keeps the losses of the iteration, to say later whether they were finite.

    Args:
        reduce_found_inf: What the user gave the scaler to combine checks over processes; None if each optimizer's
            parameters decide.
    """

    def __init__(self, reduce_found_inf: Reduce | None) -> None:
        self._reduce_found_inf = reduce_found_inf
        self._chosen = WeakIdKeyDictionary()
        """For each optimizer how many parameter groups it had, and the reduction chosen then."""
        self._losses: tuple[Tensor, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, and a pickle, has no losses, and chooses reductions again."""
        return GradientChecks, (self._reduce_found_inf,)

    def keep_loss(self, loss: Tensor) -> None:
        """Keeps what says whether an unscaled loss is finite."""
        if len(self._losses) < _MOST_LOSSES and not _torch.is_functorch_active():
            self._losses = (*self._losses, loss_to_keep(loss))

    def forget_losses(self) -> None:
        """The iteration is over."""
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
        """Multiplies an optimizer's gradients by `inverse`, float32 of shape (), and checks them, in all processes.

        Args:
            state: Of the optimizer; what is found is added to its `found_inf`.
            inverse: 1.0 to check alone.
            unscale: The scaler's `_unscale_grads_`, which programs may have replaced.
            allow_fp16: Whether float16 gradients are checked without a warning.
            measure: Whether the largest gradient is looked for, too; only by the first check, as the gradients may be
                clipped after it.
        """
        before = found_inf_so_far(inverse, state.found_inf)
        found = unscale(state.optimizer, inverse, before, allow_fp16)
        measure = measure and state.largest_gradient is None
        if measure:
            state.largest_gradient = largest(state.optimizer, inverse)
        reduce = self._reduction(state.optimizer)
        if reduce is not None:
            found.setdefault(inverse.device, before)  # a process without gradients takes part, too
            reduce(sorted(found.values(), key=lambda number: number.device != inverse.device))
            if measure and state.largest_gradient is not None:
                reduce([state.largest_gradient])
        state.found_inf = state.found_inf | found
        return state.found_inf

    def is_bad(self, state: OptimizerState) -> bool:
        """Whether a gradient was not finite; waits for the device. If so, the details are looked up."""
        is_bad = bool(total_found_inf(state.device, [state.found_inf]))
        if is_bad:
            self.look_up_details(state)
        return is_bad

    def look_up_details(self, state: OptimizerState) -> None:
        """Looks up what was not finite in a step that is skipped, together with all processes that skip it."""
        details = state.details = NonfiniteDetails(state.optimizer, self._losses)
        details.look_up()
        gather = getattr(self._reduction(state.optimizer), "gather", None)
        if gather is not None:
            details.combine(gather)

    def details_of(self, state: OptimizerState) -> NonfiniteDetails:
        """The details that were looked up, or that are when somebody reads them."""
        return state.details or NonfiniteDetails(state.optimizer, self._losses)

    def is_true_anywhere(self, state: OptimizerState, flag: bool) -> bool:
        """Whether `flag` is true in any process; all processes have to call this."""
        reduce = self._reduction(state.optimizer)
        if reduce is None:
            return flag
        number = torch.full((), float(flag), dtype=torch.float32, device=state.device)
        reduce([number])
        return bool(number)

    def _reduction(self, optimizer: Optimizer) -> Reduce | None:
        """How an optimizer's checks are combined over processes; None if each process decides for itself."""
        if self._reduce_found_inf is not None:
            return self._reduce_found_inf
        groups = len(optimizer.param_groups)
        if self._chosen.get(optimizer, (None, None))[0] != groups:
            self._chosen[optimizer] = groups, chosen_for(optimizer)
        chosen: Reduce | None = self._chosen[optimizer][1]
        return chosen
