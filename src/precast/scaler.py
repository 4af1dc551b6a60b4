"""Dynamic loss scaling: keeps small float16 gradients from vanishing, and bad ones off the weights.

A loss is multiplied by the scale, so that gradients stay inside float16's range; before the
optimizer's step the gradients are divided by it again, and checked. If one is infinite or NaN the
step is skipped and the scale shrinks; after `growth_interval` good iterations in a row it grows.

Invariants:
- scale and growth tracker live on the device of the first scaled loss; nothing waits for a device
  but `step` (once a device that has gradients, not at all with a fused optimizer), `get_scale`,
  `state_dict` and pickling: exactly where `torch.amp.GradScaler` waits;
- what a method answers when the scaler is off stands above it (`_off`), not inside;
- observers (`precast.events.observe`) hear of each step; without one nothing is made for them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from precast import _torch
from precast._scaling import (
    Record,
    Verdicts,
    checked_settings,
    device_type_of,
    is_usable,
    lent,
    moved,
    new_scale_from,
    reciprocal,
    refuse_closures,
    require_count,
    require_number,
    step_given,
    unscaled,
    verdict_on,
    verdict_so_far,
)
from precast._tree import map_tensors
from precast.errors import ScalerError
from precast.events import StepEvent, emit, observed

__all__ = ["GradScaler"]

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


def _off(answer: Callable[..., Any]) -> Callable[[Method], Method]:
    """Gives a method its answer for a scaler that is off: called with the method's arguments."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def chosen(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs) if self._enabled else answer(*args, **kwargs)

        return cast(Method, chosen)

    return decorate


class GradScaler(torch.amp.GradScaler):
    """Scales losses, unscales and checks gradients, adapts the scale: as `torch.amp.GradScaler`.

    It is a subclass of PyTorch's class because trainers ask ``isinstance(scaler,
    torch.amp.GradScaler)`` before they call `unscale_`, and that class leaves no other way to be
    recognised. None of its logic runs: all public methods, and the private ones that optimizers
    with a scaling of their own are told to call, are defined here.

    It differs where PyTorch's is wrong or mute: `scale` keeps the type of every container and
    leaves integer tensors alone, a closure is refused however it is passed, a disabled scaler
    answers every getter, arguments are checked, and each step can be observed (`StepEvent`).

    Args:
        device: Device type of the gradients. ``"cuda"`` without CUDA warns and is off.
        init_scale: First scale, above 0. PyTorch's 2**16 is just above float16's largest number:
            the first iterations find the scale that the model bears.
        growth_factor: What the scale grows by after `growth_interval` good iterations, above 1.
        backoff_factor: What the scale is multiplied by after a skipped step, between 0 and 1.
        growth_interval: Good iterations in a row until the scale grows, at least 1.
        enabled: If False, `scale` returns what it gets and `step` is the optimizer's.
        reduce_found_inf: Called once per optimizer and iteration with its verdicts, one float32
            tensor of shape () a device, nonzero where a gradient was not finite. Combines them in
            place over processes, so that all skip the same steps.

    Raises:
        ScalerError: A setting is out of its range, or the device is unknown.

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
    >>> scaler = GradScaler("cpu", init_scale=1024.0)
    >>> scaler.scale(parameter * 3).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> parameter.item()
    -0.5
    """

    def __init__(  # noqa: PLR0917 -- the signature is PyTorch's
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        reduce_found_inf: Callable[[list[Tensor]], None] | None = None,
    ) -> None:
        self._device = device_type_of(device)
        self._enabled = enabled and is_usable(self._device)
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._reduce_found_inf = reduce_found_inf
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._records: dict[int, Record] = {}
        self._iterations = 0
        self._check_settings(init_scale, growth_factor, backoff_factor, growth_interval)

    @_off(lambda outputs: outputs)
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
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            return tensor * scale_on(tensor.device) if differentiable else tensor

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

    @_off(lambda *_, **__: None)
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale in place, to clip them before `step`.

        Raises:
            ScalerError: Called twice, or after `step`, in this iteration; nothing was scaled yet; a
                gradient is float16, where dividing would lose what the scale preserved.
        """
        scale, _ = self._started("unscale_")
        record = self._record_of(optimizer)
        record.allow("unscale_")
        self._check_gradients(record, reciprocal(scale), allow_fp16=False)
        record.stage = OptState.UNSCALED

    @_off(lambda optimizer, *args, **kwargs: optimizer.step(*args, **kwargs))
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Runs ``optimizer.step(*args, **kwargs)`` on unscaled gradients if all are finite.

        Returns:
            What the optimizer's step returns; None if it was skipped.

        Raises:
            ScalerError: A closure was passed; a second step in this iteration; nothing was scaled
                yet; no parameter of `optimizer` has a gradient; or as `unscale_`.
        """
        refuse_closures(args, kwargs)
        self._started("step")
        record = self._record_of(optimizer)
        record.allow("step")
        fused = _torch.handles_scaling(optimizer)
        step = self._step_on_device if fused else self._step_if_finite
        result, skipped = step(record, args, kwargs)
        record.stage = OptState.STEPPED
        if observed():
            emit(self._event(record, skipped))
        return result

    @_off(lambda *_, **__: None)
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends the iteration: adapts the scale to what its steps found, or sets it to `new_scale`.

        Args:
            new_scale: A number above 0, or a tensor of one element on the scaler's device type.

        Raises:
            ScalerError: No gradients were checked in this iteration, or `new_scale` is neither.
        """
        scale, tracker = self._started("update")
        if new_scale is not None:
            scale.copy_(new_scale_from(new_scale, self._device))  # type: ignore[arg-type]
        else:
            _torch.update_scale_(
                scale,
                tracker,
                verdict_on(scale.device, self._records.values()),
                growth=self._growth_factor,
                backoff=self._backoff_factor,
                interval=self._growth_interval,
            )
        self._records = {}
        self._iterations += 1

    @_off(lambda: 1.0)
    def get_scale(self) -> float:
        """The scale now (waits for the device); 1.0 if the scaler is off."""
        return self._init_scale if self._scale is None else float(self._scale.item())

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor of growth, above 0; 1.0 keeps the scale from growing."""
        self._growth_factor = require_number("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after a skipped step."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor of shrinking, above 0; 1.0 keeps the scale from shrinking."""
        self._backoff_factor = require_number("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Good iterations in a row until the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the number of iterations until the scale grows, at least 1."""
        self._growth_interval = require_count("growth_interval", new_interval)

    def is_enabled(self) -> bool:
        """Whether this scaler scales."""
        return self._enabled

    @_off(dict)
    def state_dict(self) -> dict[str, Any]:
        """Five numbers, which `torch.amp.GradScaler` loads too; empty if the scaler is off."""
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    @_off(lambda *_, **__: None)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class or of `torch.amp.GradScaler`; off, it does nothing.

        Raises:
            ScalerError: Entries are missing; all are in the state of a scaler that was off.
        """
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise ScalerError(
                f"load_state_dict() got a state without {', '.join(missing)}. A scaler that was "
                "off has an empty state: do not load it, and this one starts from its init_scale."
            )
        self.set_growth_factor(state_dict["growth_factor"])
        self.set_backoff_factor(state_dict["backoff_factor"])
        self.set_growth_interval(state_dict["growth_interval"])
        self._init_scale = state_dict["scale"]
        self._init_growth_tracker = state_dict["_growth_tracker"]
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(self._init_scale)  # in place: a captured CUDA graph reads it
            self._growth_tracker.fill_(self._init_growth_tracker)

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise ScalerError(
                "a GradScaler was pickled or copied inside an iteration: do it after update()."
            )
        return {**self.__dict__, **self._resting_state()}

    # What follows keeps names of torch.amp.GradScaler that optimizers with a scaling of their own
    # (`_get_scale_async`, `_check_inf_per_device`, `_found_inf_per_device`) and subclasses call.

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    @_off(lambda: 0)
    def _get_growth_tracker(self) -> int:
        tracker = self._growth_tracker
        return self._init_growth_tracker if tracker is None else int(tracker.item())

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Verdicts:
        return unscaled(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(self, optimizer: Optimizer) -> Verdicts:  # type: ignore[override]
        scale, _ = self._started("step")
        return self._check_gradients(self._record_of(optimizer), torch.ones_like(scale), True)

    def _found_inf_per_device(self, optimizer: Optimizer) -> Verdicts:  # type: ignore[override]
        record = self._records.get(id(optimizer))
        return record.found_inf if record else {}

    # From here on the names are ours alone.

    @_off(lambda *_: None)  # settings that are never used may be what a configuration left there
    def _check_settings(self, *settings: Any) -> None:
        vars(self).update(checked_settings(*settings))

    @_off(dict)
    def _resting_state(self) -> dict[str, Any]:
        """Python's numbers for the device's: an unpickled scaler may start on another device."""
        return {
            "_init_scale": self.get_scale(),
            "_init_growth_tracker": self._get_growth_tracker(),
            "_scale": None,
            "_growth_tracker": None,
        }

    def _start_on(self, device: torch.device) -> None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=device)
        tracker = self._init_growth_tracker
        self._growth_tracker = torch.full((), tracker, dtype=torch.int32, device=device)

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._start_on(device)
        return moved(self._started("scale")[0], device)

    def _started(self, call: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise ScalerError(
                f"{call}() was called before any loss was scaled: there is nothing to divide by. "
                "Write scaler.scale(loss).backward() instead of loss.backward()."
            )
        return self._scale, self._growth_tracker

    def _record_of(self, optimizer: Optimizer) -> Record:
        return self._records.setdefault(id(optimizer), Record(optimizer))

    def _check_gradients(self, record: Record, inverse: Tensor, allow_fp16: bool) -> Verdicts:
        good = torch.zeros_like(inverse)
        found = self._unscale_grads_(record.optimizer, inverse, good, allow_fp16)
        if self._reduce_found_inf is not None:
            found.setdefault(inverse.device, good)  # a process without gradients takes part too
            self._reduce_found_inf(list(found.values()))
        record.found_inf = found
        return found

    def _step_if_finite(
        self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float | None, bool]:
        if record.stage is OptState.READY:
            self.unscale_(record.optimizer)
        scale, _ = self._started("step")
        if verdict_on(scale.device, [record]):
            return None, True
        return record.optimizer.step(*args, **kwargs), False

    def _step_on_device(
        self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float | None, Tensor]:
        """A fused optimizer gets scale and verdict as tensors: nothing waits for the device."""
        optimizer = record.optimizer
        scale, _ = self._started("step")
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return step_given(self, optimizer, args, kwargs), verdict_so_far(scale, record)
        grad_scale = getattr(optimizer, "grad_scale", None)  # the user's own divisor
        if record.stage is OptState.READY:
            self._check_inf_per_device(optimizer)
            grad_scale = scale if grad_scale is None else scale * grad_scale
        verdict = verdict_so_far(scale, record)
        with lent(optimizer, grad_scale=grad_scale, found_inf=verdict):
            return optimizer.step(*args, **kwargs), verdict

    def _event(self, record: Record, skipped: bool | Tensor) -> StepEvent:
        scale, _ = self._started("step")
        number = list(self._records).index(id(record.optimizer))
        return StepEvent(number, self._iterations, scale.clone(), skipped)
