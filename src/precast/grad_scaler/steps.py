"""How an optimizer is stepped under a scale: plain, on the device, or with a closure.

Invariants:
- gradients are checked before each step, and once more where `unscale_` let others at them;
- a step that was skipped, or broken off by a closure, has changed no parameter and no state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast.errors import ScalerError
from precast.grad_scaler.base import Scale
from precast.grad_scaler.closures import closure_in, step_with
from precast.grad_scaler.distributed import Reduction, chosen_for
from precast.grad_scaler.findings import Findings
from precast.grad_scaler.gradients import Verdicts, largest, reciprocal, unscaled
from precast.grad_scaler.settings import require_function
from precast.grad_scaler.turns import Record, lent, step_given, verdict_on, verdict_so_far
from precast.weights import low_precision_gradients

__all__ = ["Steps"]

Result = tuple[float | None, bool | Tensor]
"""What the optimizer's step returned, and whether it was skipped."""


class Steps(Scale):
    """A scale under which optimizers are stepped; `GradScaler` has the public methods."""

    def __init__(self, device: str, enabled: bool, settings: dict[str, Any]) -> None:
        super().__init__(device, enabled, settings)
        reduce = require_function("reduce_found_inf", settings["reduce_found_inf"])
        self._reduce_found_inf: Callable[[list[Tensor]], None] | None = reduce
        self._chosen = WeakIdKeyDictionary()
        """By optimizer how many groups it had, and its reduction."""
        self._losses: tuple[Tensor, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_chosen": None, "_losses": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._chosen = WeakIdKeyDictionary()

    # These keep names of torch.amp.GradScaler that optimizers with a scaling of their own
    # (`_get_scale_async`, `_check_inf_per_device`, `_found_inf_per_device`) and programs call or
    # replace: fine-tuning scripts put a function of their own in the place of `_unscale_grads_`.

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Verdicts:
        return unscaled(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(self, optimizer: Optimizer) -> Verdicts:  # type: ignore[override]
        scale, _ = self._started("step")
        record = self._record_of(optimizer)
        record.scale = scale.clone()
        verdicts = self._check_gradients(record, torch.ones_like(scale), allow_fp16=True)
        if record.peak is not None and record.stage is OptState.READY:
            record.peak /= scale
        return verdicts

    def _found_inf_per_device(self, optimizer: Optimizer) -> Verdicts:  # type: ignore[override]
        record = self._records.get(id(optimizer))
        return record.found_inf if record else {}

    # From here on the names are ours alone.

    def _record_of(self, optimizer: Optimizer) -> Record:
        record = self._records.setdefault(id(optimizer), Record(optimizer))
        record.optimizer = optimizer
        return record

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> float | None:
        if any(bool(found) for found in optimizer_state["found_inf_per_device"].values()):
            return None
        return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return, unused-ignore]

    def _unscale(self, record: Record) -> None:
        scale, _ = self._started("unscale_")
        inverse, record.scale = reciprocal(scale)
        for each in low_precision_gradients.of(record.optimizer):
            if record.is_stepping:  # the step itself makes float32 of them
                each.factor = inverse
            else:
                each.show_in_float16()
        self._check_gradients(record, inverse, allow_fp16=False)
        if record.found_inf:  # else there was nothing to unscale, and what comes later still is
            record.stage = OptState.UNSCALED

    def _check_gradients(self, record: Record, inverse: Tensor, allow_fp16: bool) -> Verdicts:
        """Multiplies gradients by `inverse`; what was found before, if anything, stays found."""
        found_before = verdict_so_far(inverse, record)
        found = self._unscale_grads_(record.optimizer, inverse, found_before, allow_fp16)
        measured = record.peak is None and self._measures()  # not again when they were clipped
        if measured:
            record.peak = largest(record.optimizer, inverse)
        reduce = self._reduction_for(record.optimizer)
        if reduce is not None:
            found.setdefault(inverse.device, found_before)  # one without gradients takes part too
            reduce(sorted(found.values(), key=lambda verdict: verdict.device != inverse.device))
            if measured and record.peak is not None:
                reduce([record.peak])
        record.found_inf = record.found_inf | found
        return record.found_inf

    def _recheck(self, record: Record) -> None:
        """Whoever called `unscale_` may have written to the gradients since."""
        scale, _ = self._started("step")
        self._check_gradients(record, torch.ones_like(scale), allow_fp16=True)

    def _step_if_finite(self, record: Record, args: Any, kwargs: dict[str, Any]) -> Result:
        if record.stage is OptState.READY:
            record.is_stepping = True
            self.unscale_(record.optimizer)
        else:
            self._recheck(record)
        if self._is_bad(record):
            return None, True
        return record.optimizer.step(*args, **kwargs), False

    def _step_on_device(self, record: Record, args: Any, kwargs: dict[str, Any]) -> Result:
        """A fused optimizer gets scale and verdict as tensors: nothing waits for the device."""
        optimizer = record.optimizer
        scale, _ = self._started("step")
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return step_given(self, optimizer, args, kwargs), verdict_so_far(scale, record)
        grad_scale = getattr(optimizer, "grad_scale", None)  # the user's own divisor
        if record.stage is OptState.READY:
            self._check_inf_per_device(optimizer)
            grad_scale = scale if grad_scale is None else scale * grad_scale
        else:
            self._recheck(record)
        verdict = verdict_so_far(scale, record)
        with lent(optimizer, grad_scale=grad_scale, found_inf=verdict):
            return optimizer.step(*args, **kwargs), verdict

    def _step_with_closure(self, record: Record, args: Any, kwargs: dict[str, Any]) -> Result:
        closure = closure_in(args, kwargs)
        assert closure is not None
        if record.stage is not OptState.READY:
            raise ScalerError(
                "step() got a closure after unscale_(): the closure computes new gradients, which "
                "step() unscales itself. Leave unscale_() out; clip inside the closure on scaled "
                "gradients, with max_norm times scaler.get_scale()."
            )

        def good() -> bool:
            record.found_inf, record.stage = {}, OptState.READY
            self._unscale(record)
            return not self._is_bad(record)

        def in_any_process(flag: bool) -> bool:
            reduce = self._reduction_for(record.optimizer)
            if reduce is None:
                return flag
            number = torch.full_like(self._started("step")[0], float(flag))
            reduce([number])
            return bool(number)

        try:
            result, skipped = step_with(
                record.optimizer,
                closure,
                args,
                kwargs,
                gradients_are_good=good,
                in_any_process=in_any_process,
            )
        except BaseException:  # all is as it was before: the step may be tried again
            record.end()
            self._records.pop(id(record.optimizer), None)
            raise
        self._settle(record, skipped)
        return result, skipped

    def _settle(self, record: Record, skipped: bool) -> None:
        """A step with a closure as a whole: what one of its calls found need not be what is found of the step."""
        record.found_inf = {d: torch.full_like(v, skipped) for d, v in record.found_inf.items()}
        record.findings = record.findings if skipped else None

    def _is_bad(self, record: Record) -> bool:
        """Whether the step is to be skipped; waits for the device. If so, what there is to know is noted."""
        scale, _ = self._started("step")
        if not verdict_on(scale.device, [record]):
            return False
        self._look(record)
        return True

    def _look(self, record: Record) -> None:
        """Notes what there is to know of a step that is skipped, with all processes that skip it."""
        findings = record.findings = Findings(record.optimizer, self._losses)
        findings.look()
        gather = getattr(self._reduction_for(record.optimizer), "gather", None)
        if gather is not None:
            findings.combine(gather)

    def _reduction_for(self, optimizer: Optimizer) -> Callable[[list[Tensor]], None] | None:
        if self._reduce_found_inf is not None:
            return self._reduce_found_inf
        groups = len(optimizer.param_groups)
        known, reduction = self._chosen.get(optimizer, (None, None))
        if known != groups:
            reduction = chosen_for(optimizer)
            self._chosen[optimizer] = groups, reduction
        chosen: Reduction | None = reduction
        return chosen
