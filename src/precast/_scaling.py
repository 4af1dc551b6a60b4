"""What loss scaling is made of: settings checked, gradients unscaled, an optimizer's turn recorded.

Invariants: the scale and the decisions are the scaler's, not known here; nothing waits for a
device, but for copies to the CPU; every refusal says what to do.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from precast import _torch
from precast.errors import PrecastWarning, ScalerError

__all__ = [
    "Record",
    "Verdicts",
    "checked_settings",
    "device_type_of",
    "is_usable",
    "lent",
    "moved",
    "new_scale_from",
    "reciprocal",
    "refuse_closures",
    "require_count",
    "require_number",
    "step_given",
    "unscaled",
    "verdict_on",
    "verdict_so_far",
]

_LARGEST_SCALE = torch.finfo(torch.float32).max  # the scale is a float32 tensor

Verdicts = dict[torch.device, Tensor]
"""For each device with gradients a float32 tensor of shape (): nonzero if one was not finite."""


@dataclass(eq=False)
class Record:
    """What one optimizer has done in this iteration."""

    optimizer: Optimizer  # held, so that no other optimizer gets its id before the iteration ends
    stage: OptState = OptState.READY
    found_inf: Verdicts = field(default_factory=dict)

    def allow(self, call: str) -> None:
        """Refuses a call of the scaler ("unscale_", "step") that comes too late."""
        if (call, self.stage) in _TOO_LATE:
            raise ScalerError(_TOO_LATE[call, self.stage])


_TOO_LATE = {
    ("unscale_", OptState.UNSCALED): (
        "unscale_() was called twice for an optimizer since the last update(): its gradients are "
        "unscaled already. Call it once, after the last backward() and before step()."
    ),
    ("unscale_", OptState.STEPPED): (
        "unscale_() was called after step() for the same optimizer: its gradients are used up. "
        "Call unscale_() before step(), and update() at the end of the iteration."
    ),
    ("step", OptState.STEPPED): (
        "step() was called twice for an optimizer since the last update(): call update() once, at "
        "the end of each iteration, after the steps of all optimizers."
    ),
}


def require_number(name: str, value: Any, above: float = 0.0, below: float = math.inf) -> float:
    """`value` as a float strictly between two bounds; an error that names `name` otherwise."""
    if isinstance(value, numbers.Real) and above < float(value) < below:
        return float(value)
    bounds = f"above {above}" + (f" and below {below:.4g}" if below < math.inf else " and finite")
    raise ScalerError(f"{name} must be a number {bounds}; got {value!r}.")


def require_count(name: str, value: Any) -> int:
    """`value` as an int of at least 1; an error that names `name` otherwise."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ScalerError(f"{name} must be a whole number, 1 or more; got {value!r}.")
    return count


def checked_settings(init_scale: Any, growth: Any, backoff: Any, interval: Any) -> dict[str, Any]:
    """A scaler's settings as attributes, each in its range."""
    return {
        "_init_scale": require_number("init_scale", init_scale, below=_LARGEST_SCALE),
        "_growth_factor": require_number("growth_factor", growth, above=1.0),
        "_backoff_factor": require_number("backoff_factor", backoff, below=1.0),
        "_growth_interval": require_count("growth_interval", interval),
    }


def device_type_of(device: Any) -> str:
    """The type of a device or of its name; an error for a name that PyTorch does not know."""
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ScalerError(
            f"GradScaler's first argument is the device; {device!r} is none that PyTorch knows. "
            "Write GradScaler('cuda'), GradScaler('cpu') or another device type."
        ) from error


def is_usable(device_type: str) -> bool:
    """Whether to scale there at all: not for CUDA on a machine without it, which gets a warning."""
    if device_type != "cuda" or torch.cuda.is_available() or find_spec("torch_xla"):
        return True
    warnings.warn(
        "GradScaler('cuda') is off: there is no CUDA here. Write GradScaler('cpu') to scale on the "
        "CPU, or enabled=False to silence this.",
        PrecastWarning,
        stacklevel=3,
    )
    return False


def new_scale_from(value: Any, device_type: str) -> float | Tensor:
    """What `update` was given, as something that a tensor of shape () can be filled with."""
    if not isinstance(value, Tensor):
        return require_number("new_scale", value, below=_LARGEST_SCALE)
    if value.numel() == 1 and value.device.type == device_type and not value.requires_grad:
        return value.reshape(())
    raise ScalerError(
        f"new_scale must be a number or a tensor of one element on {device_type!r} that does not "
        f"require a gradient; got shape {tuple(value.shape)} on {value.device.type!r}, "
        f"requires_grad={value.requires_grad}."
    )


def refuse_closures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a closure, by position or by name; ``closure=None`` is the absence of one."""
    if any(map(callable, (*args, kwargs.get("closure")))):
        raise ScalerError(
            "GradScaler.step() got a closure, which would compute new gradients after the scaler "
            "has checked the old ones. Call forward, scale(loss).backward() and step(optimizer) in "
            "turn; an optimizer that needs a closure (LBFGS) works without a scaler, in bfloat16."
        )


def reciprocal(scale: Tensor) -> Tensor:
    """``1 / scale`` correctly rounded: computed in float64 where the device has it."""
    return scale.reciprocal() if scale.is_mps else scale.double().reciprocal().float()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; waits only for a copy to the CPU, which could be read too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


@torch.no_grad()
def unscaled(
    optimizer: Optimizer, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
) -> Verdicts:
    """Multiplies all gradients by `inverse` in place; verdicts begin as copies of `found_inf`."""
    verdicts: Verdicts = {}
    for (device, _), group in _gradients(optimizer, allow_fp16).items():
        if device not in verdicts:
            verdicts[device] = moved(found_inf, device).clone()
        _torch.check_and_unscale_(group, verdicts[device], moved(inverse, device))
    return verdicts


def verdict_on(device: torch.device, records: Iterable[Record]) -> Tensor:
    """The sum of the verdicts in `records`, on `device`."""
    found = [moved(v, device) for record in records for v in record.found_inf.values()]
    if found:
        return functools.reduce(torch.add, found)
    raise ScalerError(
        "no gradients were checked in this iteration: no parameter of the optimizer has one, or "
        "step() was not called. Call scale(loss).backward(), step(optimizer), then update(); leave "
        "an optimizer out whose parameters took no part in the loss."
    )


def verdict_so_far(scale: Tensor, record: Record) -> Tensor:
    """As `verdict_on` beside `scale`; good where nothing was checked."""
    return verdict_on(scale.device, [record]) if record.found_inf else torch.zeros_like(scale)


def step_given(
    scaler: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """PyTorch's first contract with optimizers that scale: they take the scaler and ask it."""
    warnings.warn(
        "step(grad_scaler=...) is PyTorch's old contract. Let the optimizer read its attributes "
        "grad_scale and found_inf, which the scaler sets for the time of the step.",
        FutureWarning,
        stacklevel=5,
    )
    result: float | None = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    return result


@contextmanager
def lent(optimizer: Optimizer, **attributes: Any) -> Iterator[None]:
    """Sets attributes that a fused optimizer reads in `step`, and takes them away again."""
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(optimizer, name)


def _gradients(
    optimizer: Optimizer, allow_fp16: bool
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The gradients of an optimizer's parameters by device and dtype; of sparse ones, the values.

    Float16 sparse gradients are summed first (and replaced): the sum is what can overflow.
    """
    groups = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.dtype is torch.float16 and not allow_fp16:
                raise _float16_gradient(number, parameter)
            if gradient.is_sparse:
                if gradient.dtype is torch.float16:
                    gradient = parameter.grad = gradient.coalesce()
                gradient = _torch.sparse_values(gradient)
            groups[gradient.device, gradient.dtype].append(gradient)
    return groups


def _float16_gradient(group: int, parameter: Tensor) -> ScalerError:
    return ScalerError(
        f"cannot unscale a float16 gradient (parameter of shape {tuple(parameter.shape)} in group "
        f"{group}): dividing in float16 loses what the scale preserved. Keep the parameters in "
        "float32 (model.float()) and let autocast lower the computation."
    )
