"""Dynamic loss scaling: keeps small float16 gradients from vanishing, and bad ones off the weights.

A loss is multiplied by the scale, so that gradients stay inside float16's range; before the
optimizer's step the gradients are divided by it again, and checked. If one is infinite or NaN the
step is skipped and the scale shrinks; after `growth_interval` good iterations in a row it grows.

Invariants:
- nothing waits for a device but `step` (once, not at all with a fused optimizer), steps that are
  skipped, the search for a first scale, `get_scale`, `state_dict`, pickling and loading: while nothing
  overflows, exactly where `torch.amp.GradScaler` waits;
- no optimizer steps on gradients that are not finite, or that are scaled;
- the scale is finite and between its limits after every `update`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from precast import _torch
from precast._internal.events import StepEvent, emit, witnesses
from precast._internal.pytree import map_tensors
from precast.errors import BrokenModelError, ScalerError
from precast.grad_scaler.base import off
from precast.grad_scaler.closures import closure_in
from precast.grad_scaler.findings import Findings, noted
from precast.grad_scaler.gradients import clipped, moved
from precast.grad_scaler.ledger import Counters
from precast.grad_scaler.settings import LARGEST_SCALE, OnVerdict, new_scale_from
from precast.grad_scaler.steps import Steps
from precast.grad_scaler.turns import Record, verdict_on
from precast.grad_scaler.verdicts import judge

__all__ = ["GradScaler"]

T = TypeVar("T")
_MOST_LOSSES = 1024  # of one iteration that are remembered


class GradScaler(Steps):
    """Scales losses, unscales and checks gradients, and adapts the scale, like `torch.amp.GradScaler`.

    In addition, it reports what each step did (`last_step`, `history`, `counters`), keeps the scale
    within limits, and raises an error when neither a lower scale nor the next batch can help, where
    PyTorch's scaler would skip steps for ever.

    Args:
        device: Device type of the gradients. With ``"cuda"`` and no CUDA, the scaler warns and is off.
        init_scale: First scale, above 0. With ``2**16``, as in PyTorch, the first iterations skip
            steps until the scale suits the model. ``"auto"`` finds it from the size of the first
            gradients; those iterations wait for the device.
        growth_factor: What the scale grows by after `growth_interval` good iterations, above 1.
        backoff_factor: What the scale is multiplied by after a skipped step, between 0 and 1.
        growth_interval: Good iterations in a row until the scale grows, at least 1.
        enabled: If False, `scale` returns what it gets and `step` is the optimizer's.
        reduce_found_inf: Called whenever gradients of an optimizer are checked (in `unscale_`, and in
            `step`) with its verdicts, one float32 tensor of shape () a device, nonzero where one was
            not finite; while a first scale is searched for, also with the largest gradient. Replaces
            each in place by the largest over processes, so that all skip the same steps: a
            `precast.grad_scaler.distributed.Reduction` or a function. None: chosen from what the optimizer's
            parameters are.
        min_scale: The scale never falls below it; at least ``2**-126``. None is ``2**-48``, or
            `init_scale` where that is lower.
        max_scale: The scale never grows above it. None is float32's largest number.
        max_consecutive_skips: This many skipped iterations in a row are a verdict. None: any
            number may be skipped while the scale falls.
        max_nonfinite_losses: Skipped iterations in a row whose loss itself was not finite that are
            let pass; 0 lets none. None: as many as it takes to know that no lower scale helps.
        on_verdict: What happens where neither a lower scale nor the next batch helps: the parameters
            hold NaN, 40 steps in a row were skipped while the scale could not fall, or one of the two
            limits above was passed (docs/scaler.md has the exact rules). ``"raise"`` a
            `BrokenModelError` from `update`, ``"warn"``, or ``"ignore"``.
        history: How many steps `history` keeps.

    Raises:
        ScalerError: A setting is out of its range, or the device is unknown.

    Examples:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(parameter * 3).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> parameter.item()
        -0.5
        >>> scaler.last_step(optimizer).skipped
        False
    """

    def __init__(  # noqa: PLR0917 -- the signature is PyTorch's
        self,
        device: str = "cuda",
        init_scale: float | str = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        reduce_found_inf: Callable[[list[Tensor]], None] | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = None,
        max_nonfinite_losses: int | None = None,
        on_verdict: OnVerdict = "raise",
        history: int = 100,
    ) -> None:
        settings = {k: v for k, v in locals().items() if k not in {"self", "__class__"}}
        super().__init__(device, enabled, settings)

    @off(lambda outputs: outputs)
    def scale(self, outputs: T) -> T:
        """Multiplies the floating-point tensors in `outputs`, in any nesting, by the scale.

        Args:
            outputs: A loss of any shape, or containers of losses; other tensors and leaves stay as
                they are. Iterators and sets become lazy ``map`` objects, as in PyTorch.

        Returns:
            The same structure; a product has the dtype of ``loss * float32_scalar``.

        Raises:
            ScalerError: `outputs` holds something, but no tensor.
        """
        scale_on = functools.cache(self._scale_on)
        others = []

        def scaled(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            self._note(tensor)
            return tensor * scale_on(tensor.device)

        def other(leaf: Any) -> Any:
            others.append(leaf)
            return map(self.scale, leaf) if isinstance(leaf, Iterator | AbstractSet) else leaf

        result = map_tensors(outputs, scaled, other)
        if others and result is outputs:
            raise ScalerError(
                f"scale() found no tensor in a {type(outputs).__name__}: give it the loss itself, "
                "not loss.item(), or losses in lists, tuples, dicts or dataclasses."
            )
        return result

    @off(lambda *_, **__: None)
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale in place, to clip them before `step`.

        Gradients of every dtype and layout: sparse, complex, `DTensor`. The quotient is computed in
        float32 and rounded once to the gradient's dtype; in float16, which keeps nothing below
        6e-8, that may lose what the scale preserved, so keep parameters in float32.

        Raises:
            ScalerError: Called twice, or after `step`, in this iteration; nothing was scaled yet.
        """
        self._started("unscale_")
        record = self._record_of(optimizer)
        record.allow("unscale_")
        self._unscale(record)
        record.watch()

    @off(lambda *_, **__: True)
    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of `optimizer` were unscaled in this iteration; True for a scaler that is off."""
        record = self._records.get(id(optimizer))
        return record is not None and record.stage is OptState.UNSCALED

    @_torch.never_compiled
    def clip_grad_norm_(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Unscales the gradients of `optimizer`, if that was not done, and clips their total norm.

        Args:
            optimizer: Whose gradients; call it after the last backward, and before `step`.
            max_norm: The largest norm that is left as it is, in units of unscaled gradients.
            norm_type: Which norm: 2.0, 1.0, ``math.inf`` ...
            error_if_nonfinite: Whether a norm that is not finite is an error; the step is skipped
                in any case.
            foreach: As for `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm of the unscaled gradients before clipping, shape (); over all processes where
            the parameters are `DTensor`. Gradients that are not finite are left as they are, so that
            `last_step` names the ones that were bad; PyTorch's clipping makes all of them NaN.
            Finite ones whose norm overflows become 0, as in PyTorch.
        """
        if not self.is_unscaled(optimizer):
            self.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        how = max_norm, norm_type, error_if_nonfinite, foreach
        return clipped(parameters, *how, verdicts=self._found_inf_per_device(optimizer))

    @off(lambda optimizer, *args, **kwargs: optimizer.step(*args, **kwargs))
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Runs ``optimizer.step(*args, **kwargs)`` on unscaled gradients if all are finite.

        A closure zeroes the gradients, computes a loss, calls ``scaler.scale(loss).backward()`` and
        returns the loss unscaled. Each time it has run its gradients are unscaled and checked; if
        some are not finite, parameters and the optimizer's state are put back as they were. Where a
        later call's loss is not finite either, the optimizer sees it, as a line search has to.

        Returns:
            What the optimizer's step returns; None if it was skipped.

        Raises:
            ScalerError: A second step in this iteration; nothing was scaled yet; no parameter of
                `optimizer` has a gradient; backward ran between `unscale_` and `step`.
        """
        begun = time.perf_counter()
        with_closure = closure_in(args, kwargs) is not None
        if not with_closure:
            self._started("step")
        record = self._record_of(optimizer)
        record.allow("step")
        if with_closure:
            result, record.skipped = self._step_with_closure(record, args, kwargs)
        elif _torch.handles_scaling(optimizer):
            result, record.skipped = self._step_on_device(record, args, kwargs)
        else:
            result, record.skipped = self._step_if_finite(record, args, kwargs)
        record.stage = OptState.STEPPED
        self._tell(record, time.perf_counter() - begun)
        return result

    @off(lambda *_, **__: None)
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends the iteration: adapts the scale to what its steps found, or sets it to `new_scale`.

        Args:
            new_scale: A number between the limits, or a tensor of one element on the scaler's
                device type, which is moved between them.

        Raises:
            BrokenModelError: Neither a lower scale nor the next batch mends what was found; the scale
                is left as it is.
            ScalerError: No gradients were checked in this iteration, or `new_scale` is neither.
        """
        scale, _ = self._started("update")
        records = list(self._records.values())
        if new_scale is not None:
            new_scale = new_scale_from(new_scale, self._device, self._limits)
        found = None
        if new_scale is None:
            found = verdict_on(scale.device, records, "prior to update.")
        searching, measured = self._searching, self._measures()
        known = self._end_iteration(records, found, wait=measured)
        if new_scale is not None:
            self._set(new_scale)
            return
        if not searching:
            self._adapt(found, known)
        if measured:
            self._set(self._found(records))

    @_torch.never_compiled
    def last_step(self, optimizer: Optimizer) -> StepEvent | None:
        """What the latest `step` of `optimizer` did; None before the first, and if the scaler is off."""
        return self._ledger.latest(optimizer)

    @property
    @_torch.never_compiled
    def history(self) -> Sequence[StepEvent]:
        """The latest steps of all optimizers, the oldest first; as many as the argument `history` says."""
        return tuple(self._ledger.history)

    @property
    @_torch.never_compiled
    def counters(self) -> Counters:
        """Steps, skipped steps, skipped iterations in a row, growths and backoffs; waits for open verdicts."""
        self._judge(wait=True)
        return self._ledger.counters

    @_torch.never_compiled
    def advance(self, scheduler: Any) -> bool:
        """Calls ``scheduler.step()`` if the optimizer that it schedules did its latest step.

        Args:
            scheduler: One from `torch.optim.lr_scheduler`; its attribute ``optimizer`` says whose.

        Returns:
            Whether the scheduler was advanced; waits for the verdict of a fused optimizer.
        """
        event = self.last_step(scheduler.optimizer)
        if event is not None and event.skipped:
            return False
        scheduler.step()
        return True

    # From here on the names are ours alone.

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        return moved(self._started("scale")[0], device)

    def _note(self, loss: Tensor) -> None:
        if len(self._losses) < _MOST_LOSSES and not _torch.is_functorch_active():
            self._losses = (*self._losses, noted(loss))

    def _tell(self, record: Record, seconds: float) -> None:
        scale, skipped = record.scale, record.skipped
        assert skipped is not None
        if scale is None:
            scale = self._started("step")[0].clone()
        number = list(self._records).index(id(record.optimizer))
        findings = record.findings or Findings(record.optimizer, self._losses)
        event = StepEvent(number, self._iterations, scale, skipped, seconds, findings)
        self._ledger.write(record.optimizer, event)
        for witness in tuple(witnesses):
            witness.stepped(record.optimizer, event)
        emit(event)

    def _end_iteration(
        self, records: list[Record], found: Tensor | None, wait: bool
    ) -> bool | None:
        """Writes the iteration down and judges it: whether it was skipped, None if that is not known."""
        checked = [record for record in records if record.found_inf]
        decided = [record.skipped for record in checked]
        known = any(decided) if all(isinstance(d, bool) for d in decided) else None
        now = self._started("update")[0]
        if _torch.is_captured(now) or not checked:
            self._ledger.drop_iteration()
        else:
            scale = checked[0].scale if checked[0].scale is not None else now.clone()
            interval = 0 if found is None or self._searching else self._growth_interval
            skipped = verdict_on(scale.device, checked) if known is None else known
            self._ledger.end_iteration(self._iterations, scale, skipped, interval)
        self._records.clear()
        self._losses = ()
        self._iterations += 1
        for record in records:
            record.end()
        if not _torch.is_captured(now):
            self._judge(wait)
        return known

    def _judge(self, wait: bool) -> None:
        for iteration in self._ledger.closed(wait):
            try:
                judge(iteration, self._ledger, self._limits)
            except BrokenModelError:
                self._started("update")[1].zero_()  # the iteration was no good one
                raise

    def _set(self, value: float | Tensor) -> None:
        scale, _ = self._started("update")
        limits = self._limits
        scale.copy_(value)  # type: ignore[arg-type]
        if isinstance(value, Tensor):
            scale.nan_to_num_(nan=limits.min_scale).clamp_(limits.min_scale, limits.max_scale)

    def _found(self, records: list[Record]) -> float:
        """The scale after an iteration whose gradients were measured."""
        scale, _ = self._started("update")
        assert self._search is not None
        peaks = [record.peak for record in records if record.peak is not None]
        done = self._iterations - 1
        return self._search.after(done, float(scale), peaks, self._ledger, self._limits)

    def _adapt(self, found: Tensor | None, known: bool | None) -> None:
        assert found is not None
        scale, tracker = self._started("update")
        growth, limits = self._growth_factor, self._limits
        _torch.update_scale_(
            scale,
            tracker,
            found,
            growth=growth,
            backoff=self._backoff_factor,
            interval=self._growth_interval,
        )
        if known is not False or growth < 1.0 or limits.max_scale < LARGEST_SCALE:
            scale.clamp_(limits.min_scale, limits.max_scale)
