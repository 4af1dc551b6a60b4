"""A scale for each of several losses whose gradients meet in the same parameters.

With one scale, the loss with the largest gradients determines it, and the smallest gradients underflow. Here each loss
has its backward pass under a separate scale; its gradients are checked, unscaled and added to those of the others.

Invariants: `.grad` is unscaled after `backward`; a step is skipped if the gradients of any loss were not finite, and
only the scales of those losses are lowered.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from precast import _torch
from precast._internal.display import Card, Displayed, plural
from precast.errors import BrokenModelError, ScalerError
from precast.grad_scaler.buffers import BufferGuard, guarded
from precast.grad_scaler.disabled import when_disabled
from precast.grad_scaler.gradients import total_found_inf
from precast.grad_scaler.optimizers import temporary_attributes
from precast.grad_scaler.scaler import GradScaler
from precast.grad_scaler.state_dict import read
from precast.optim.partial_steps import parameters_of

__all__ = ["LossScalers"]


class LossScalers(Displayed, Mapping[str, GradScaler]):
    """Gradient scalers by the name of a loss, for losses that train the same parameters.

    Args:
        device_type: Device type of the gradients.
        names: The losses.
        restore_buffers: As for `GradScaler`: a step is skipped if the gradients of any loss are not finite.
        settings: Further arguments of each `GradScaler`.

    Raises:
        ScalerError: No name, or a name twice; a setting is out of its range.

    Examples:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> scalers = LossScalers("cpu", ["fit", "penalty"], init_scale=1024.0)
        >>> scalers.backward("fit", parameter.sum() * 3, optimizer)
        >>> scalers.backward("penalty", parameter.sum() * 1e-9, optimizer)
        >>> scalers.step(optimizer)
        >>> scalers.update()
        >>> scalers["penalty"].last_step(optimizer).skipped
        False
    """

    def __init__(
        self,
        device_type: str,
        names: Iterable[str],
        *,
        restore_buffers: nn.Module | Iterable[nn.Module] | None = None,
        **settings: Any,
    ) -> None:
        checked = _checked_names(names)
        self._scalers = {name: _LossScaler(device_type, **settings) for name in checked}
        self._buffers, self._skipped = BufferGuard(), list[bool | Tensor]()
        if any(scaler.is_enabled() for scaler in self.values()):
            self._buffers = guarded(restore_buffers)

    def __getitem__(self, name: str) -> GradScaler:
        return self._of(name)

    def __iter__(self) -> Any:
        return iter(self._scalers)

    def __len__(self) -> int:
        return len(self._scalers)

    @_torch.never_compiled
    def backward(
        self, name: str, loss: Tensor, *optimizers: Optimizer, retain_graph: bool = False
    ) -> None:
        """Run backward of one loss under its scale, and add its unscaled gradients to `.grad`.

        Args:
            name: Name of the loss.
            loss: Of shape ().
            optimizers: All optimizers with parameters that get gradients from the loss.
            retain_graph: As for `torch.Tensor.backward`: for a graph that another loss shares.

        Raises:
            ScalerError: An unknown name, no optimizer, an optimizer that has stepped in this iteration, or a parameter
                in two optimizers. After any exception `.grad` is unchanged.
        """
        scaler = self._of(name)
        if not optimizers:
            raise ScalerError(
                f"backward({name!r}, loss) needs the optimizers whose parameters the loss trains: "
                "their gradients are unscaled at once."
            )
        every = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        parameters = list({id(parameter): parameter for parameter in every}.values())
        if len(parameters) < len(every) and scaler.is_enabled():
            raise ScalerError(
                "backward() got optimizers that share a parameter, whose gradient would be unscaled "
                "twice. Give each parameter to one optimizer."
            )
        scaler.allow_backward(optimizers)
        before = [_put_aside(parameter) for parameter in parameters]
        try:
            scaler.take(loss, optimizers, retain_graph)
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        _add(parameters, before)

    @_torch.never_compiled
    def step(self, optimizer: Optimizer) -> float | None:
        """Run ``optimizer.step()`` if the gradients of all losses are finite; return its result.

        Raises:
            ScalerError: No loss had its `backward` for `optimizer` in this iteration.
        """
        start = time.perf_counter()
        taking = [s for s in self._scalers.values() if s.has_gradients_of(optimizer)]
        if not taking:
            if any(scaler.is_enabled() for scaler in self.values()):
                raise ScalerError(
                    "step() was called for an optimizer that was not passed to backward(name, loss, optimizer) "
                    "in this iteration, or got no gradients there."
                )
            return optimizer.step()  # type: ignore[return-value, no-any-return, unused-ignore]
        flags = torch.stack([scaler.found_inf_of(optimizer) for scaler in taking])
        decided: list[Any]
        result: float | None = None
        if _torch.handles_scaling(optimizer):
            decided = list(flags.unbind())
            with temporary_attributes(optimizer, grad_scale=None, found_inf=flags.amax()):
                result = optimizer.step()
        else:
            decided = [value != 0 for value in flags.tolist()]
            if not any(decided):
                result = optimizer.step()
        self._skipped += decided
        for scaler, skipped in zip(taking, decided, strict=True):
            scaler.report(optimizer, skipped, time.perf_counter() - start)
        return result

    @_torch.never_compiled
    def update(self) -> None:
        """End the iteration: adapt the scale of each loss that had its `backward`.

        Raises:
            BrokenModelError: As in `GradScaler.update`, for the first of the losses; the iteration has ended for all.
        """
        skipped, self._skipped = self._skipped, []
        if skipped:
            is_tensor = any(isinstance(each, Tensor) for each in skipped)
            whole = torch.stack([torch.as_tensor(each).float() for each in skipped]).amax()
            self._buffers.end_iteration(whole if is_tensor else any(skipped))
        broken = []
        for scaler in self._scalers.values():
            try:
                if scaler.is_used():
                    scaler.update()
            except BrokenModelError as error:
                broken.append(error)
        if broken:
            raise broken[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each scaler by the name of its loss."""
        return {name: scaler.state_dict() for name, scaler in self._scalers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ScalerError: It has other losses; or as in `GradScaler.load_state_dict`. Then nothing has changed.
        """
        names = list(state_dict) if isinstance(state_dict, Mapping) else []
        if set(names) != set(self._scalers):
            raise ScalerError(
                f"load_state_dict() got the states of {', '.join(map(str, names)) or 'nothing'}; "
                f"the losses here are {', '.join(self._scalers)}."
            )
        every = [scaler.read(state_dict[name]) for name, scaler in self._scalers.items()]
        for take_over in every:
            take_over()

    def _card(self) -> Card:
        columns = ("loss", "scale", "steps", "skipped", "")
        cards = [(name, *scaler._card().facts) for name, scaler in self._scalers.items()]
        rows = [(*row, *[None] * (len(columns) - len(row))) for row in cards]
        return Card("LossScalers", [plural(len(rows), "loss", "losses")], columns, rows)

    def _of(self, name: str) -> _LossScaler:
        if name not in self._scalers:
            raise ScalerError(f"unknown loss {name!r}; expected one of {', '.join(self._scalers)}.")
        return self._scalers[name]


_ONE_SCALER = (
    "{}() was called for one scaler of a LossScalers, whose backward(name, loss, optimizer) has "
    "already unscaled the gradients of all losses: clip the gradients directly, and call "
    "step(optimizer) and update() of the LossScalers."
)


class _LossScaler(GradScaler):
    """The scaler of one loss."""

    def is_unscaled(self, optimizer: Optimizer) -> bool:  # noqa: ARG002 -- `backward` unscales for all
        return True

    @when_disabled(lambda *_: None)
    def unscale_(self, optimizer: Optimizer) -> None:  # noqa: ARG002
        raise ScalerError(_ONE_SCALER.format("unscale_"))

    @when_disabled(lambda optimizer, *args, **kwargs: optimizer.step(*args, **kwargs))
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:  # noqa: ARG002
        raise ScalerError(_ONE_SCALER.format("step"))

    def allow_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise an error for a backward pass after the step of an optimizer in the same iteration."""
        for optimizer in filter(self.has_gradients_of, optimizers):
            self._state_of(optimizer).allow("backward")

    def take(self, loss: Tensor, optimizers: tuple[Optimizer, ...], retain_graph: bool) -> None:
        """Run backward under this scale, and unscale and check the gradients."""
        torch.autograd.backward(self.scale(loss), retain_graph=retain_graph)
        for optimizer in optimizers if self.is_enabled() else ():
            state = self._state_of(optimizer)
            self._unscale(state)
            state["stage"] = OptState.READY  # the same loss may come again, in accumulation
            if not state.found_inf:  # the loss does not reach its parameters
                del self._optimizer_states[id(optimizer)]

    def read(self, state: Any) -> Callable[[], None]:
        """Read and check a state; return a function that loads it."""
        checked = read(state, self._limits) if self.is_enabled() else None
        return functools.partial(self._take_over, checked)

    def has_gradients_of(self, optimizer: Optimizer) -> bool:
        """Return True if the loss gave gradients for an optimizer in this iteration."""
        return id(optimizer) in self._optimizer_states

    def is_used(self) -> bool:
        """Return True if the loss gave gradients for any optimizer in this iteration."""
        return bool(self._optimizer_states)

    def found_inf_of(self, optimizer: Optimizer) -> Tensor:
        """Return a tensor of shape (), nonzero if a gradient of this loss was not finite."""
        scale, _ = self._check_scale_growth_tracker("step")
        return total_found_inf(scale.device, [self._state_of(optimizer).found_inf])

    def report(self, optimizer: Optimizer, skipped: bool | Tensor, seconds: float) -> None:
        """Report the step that was taken or skipped for all losses."""
        state = self._state_of(optimizer)
        state.allow("step")
        state["stage"], state.skipped = OptState.STEPPED, skipped
        if skipped is True:
            self._checks.look_up_details(state)
        self._report_step(state, seconds)


def _checked_names(names: object) -> list[str]:
    checked: list[Any] = []
    if isinstance(names, Iterable) and not isinstance(names, str | Tensor):
        checked = list(names)
    if all(isinstance(name, str) for name in checked) and 0 < len(set(checked)) == len(checked):
        return checked
    raise ScalerError(
        "LossScalers needs a list of strings, with a different name for each loss: "
        f'LossScalers("cpu", ["fit", "penalty"]); got {names!r}.'
    )


@torch.no_grad()
def _put_aside(parameter: Tensor) -> Tensor | None:
    """Remove the gradient from its parameter and return it; a copy if backward may write into its memory."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None or _torch.is_dtensor(gradient) or gradient.layout is not torch.strided:
        return gradient
    return gradient.clone() if _torch.is_shared(gradient) else gradient  # DDP's buckets


@torch.no_grad()
def _add(parameters: list[Tensor], before: list[Tensor | None]) -> None:
    """Add earlier gradients to the current ones."""
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is None:
            continue
        new = parameter.grad
        if new is None:
            parameter.grad = gradient
        else:  # a dense gradient takes a sparse one, not the reverse
            parameter.grad = new.add_(gradient) if gradient.is_sparse else gradient.add_(new)
