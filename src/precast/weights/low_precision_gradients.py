"""Gradients of held weights that stay in 16 bits until the step of an optimizer, which goes from weight to weight.

Invariants:

- the optimizer sees gradients in float32, and is called as before;
- one of PyTorch's that treats each parameter by itself takes its step for a few weights at a time, so that their
  gradients are read and the weights and their copies written while they are in the processor's cache; any other
  takes it for all at once;
- after the step each parameter has the gradient that it had before, the same tensor. Where a step raises, it has what
  that step saw, or none;
- what a gradient scaler divides is never a float16 gradient, which would lose what the scale protects, but the float32
  one that the step sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from precast._torch import fused_copy, step_without_hooks
from precast.errors import AttachError
from precast.weights import held
from precast.weights.held import Copy, HeldParameter
from precast.weights.held_copy import unless_python_ends
from precast.weights.partial_steps import (
    called_before,
    closure_of,
    parameters_of,
    set_gradient,
    treats_each_parameter_by_itself,
)

__all__ = ["LowPrecisionGradients", "check_takes_one_gradient", "factors_of", "of"]

_PART: Final = 1 << 20
"""Numbers in a part: 4 MiB of gradients in float32. A larger weight is a part of its own."""

Group = dict[str, Any]
"""One of the optimizer's `param_groups`."""


def check_takes_one_gradient(optimizer: Optimizer, dtype: torch.dtype) -> None:
    """Refuses an optimizer for gradients in 16 bits.

    Raises:
        AttachError: the optimizer takes several gradients in one step.
    """
    if isinstance(optimizer, LBFGS):
        raise AttachError(
            f"attach(grad_dtype={dtype}) got a {type(optimizer).__name__}, which computes many gradients in a "
            "step, and keeps them. Leave grad_dtype out, or train with an optimizer that takes one gradient a step."
        )


class LowPrecisionGradients:
    """Has the gradients of the weights that an optimizer trains stay in `dtype` until its step.

    Raises:
        AttachError: the optimizer takes several gradients in one step.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype) -> None:
        check_takes_one_gradient(optimizer, dtype)
        self._dtype = dtype
        here = weakref.ref(self)
        self._optimizer = weakref.ref(
            optimizer, unless_python_ends(lambda _: _end_with_optimizer(here))
        )
        self._held_parameters: list[HeldParameter] = []
        self._goes_by_parts = treats_each_parameter_by_itself(optimizer)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients in 16 bits, while a step lasts."""
        self._memory: Tensor | None = None
        self.factor: Tensor | None = None
        """What float16 gradients are multiplied by when the next step sees them in float32; shape ()."""
        _living.add(self)
        self._hook = optimizer.register_step_pre_hook(_Before(self))

    def ask_for(self, held_parameters: Iterable[HeldParameter]) -> None:
        """Has the gradients of these weights stay in 16 bits, as far as the optimizer trains them."""
        optimizer = self._optimizer()
        trained = set() if optimizer is None else set(map(id, parameters_of(optimizer)))
        self._held_parameters = [h for h in held_parameters if id(h.parameter()) in trained]
        for held_parameter in self._held_parameters:
            held_parameter.grad_dtype = self._dtype
            held_parameter.take_back()

    def end(self) -> None:
        """Casts the gradients of these weights, and has those to come be float32."""
        self._hook.remove()
        _living.discard(self)
        for held_parameter in self._held_parameters:
            parameter = held_parameter.parameter()
            held_parameter.grad_dtype = None
            if parameter is not None and parameter.grad_dtype is self._dtype:
                gradient = parameter.grad
                set_gradient(parameter, None if gradient is None else gradient.to(torch.float32))

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether that is the optimizer whose step reads these gradients."""
        return self._optimizer() is optimizer

    def in_float16(self) -> Iterator[Tensor]:
        """The parameters that have a gradient in float16 now."""
        for held_parameter in self._held_parameters if self._dtype is torch.float16 else ():
            parameter = held_parameter.parameter()
            if parameter is not None and _is_in(parameter, torch.float16):
                yield parameter

    def show_in_float16(self) -> None:
        """Has them have it in float32 from now on, for who reads gradients before the step."""
        for parameter in list(self.in_float16()):
            assert parameter.grad is not None
            set_gradient(parameter, parameter.grad.to(torch.float32))

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Takes the step for the weights whose gradients are in 16 bits, or has it see them in float32."""
        self._waiting = []  # where the last step raised, there may be some
        if closure_of(args, kwargs) is not None and not self._goes_by_parts:
            raise AttachError(
                f"{type(optimizer).__name__}.step(closure) met gradients that attach(grad_dtype={self._dtype}) keeps "
                "in 16 bits: a closure gives them in the middle of the step, which is to see float32. Compute them "
                "before, and call step() without a closure, or attach without grad_dtype."
            )
        args, kwargs = called_before(args, kwargs)
        if self._goes_by_parts:
            groups, step = optimizer.param_groups, step_without_hooks(optimizer)
            for group, parameters in self._parts(groups):
                self._show(parameters)
                optimizer.param_groups = [{**group, "params": parameters}]
                try:
                    step()
                finally:
                    optimizer.param_groups = groups
                for parameter in parameters:
                    parameter.grad = None  # the step that follows leaves it out
                held.renew(copy for p in parameters for copy in _copies(p))
        else:
            for _, parameters in self._parts(optimizer.param_groups):
                self._show(parameters)
        return args, kwargs

    def after_step(self) -> set[int]:
        """Gives back gradients in 16 bits; returns ``id`` of each parameter whose copies are renewed already."""
        waiting, self._waiting, self.factor = self._waiting, [], None
        for parameter, gradient in waiting:
            set_gradient(parameter, gradient)
        return {id(parameter) for parameter, _ in waiting} if self._goes_by_parts else set()

    def _parts(self, groups: list[Group]) -> Iterator[tuple[Group, list[Tensor]]]:
        """Parameters with gradients in 16 bits, a few at a time."""
        for group in groups:
            part: list[Tensor] = []
            numbers = 0
            for parameter in group["params"]:
                if not _is_in(parameter, self._dtype):
                    continue
                if part and numbers + parameter.numel() > _PART:
                    yield group, part
                    part, numbers = [], 0
                part.append(parameter)
                numbers += parameter.numel()
            if part:
                yield group, part

    def _show(self, parameters: list[Tensor]) -> None:
        """Has these parameters have their gradients in float32."""
        low: list[Any] = [parameter.grad for parameter in parameters]
        full = list(self._in_float32(low))
        fused_copy(full, low)
        if self.factor is not None:
            for gradient in full:
                gradient.mul_(self.factor.to(gradient.device))
        self._waiting += zip(parameters, low, strict=True)
        for parameter, gradient in zip(parameters, full, strict=True):
            set_gradient(parameter, gradient)

    def _in_float32(self, gradients: list[Tensor]) -> Iterator[Tensor]:
        """Uninitialised tensors for these gradients; in memory that each part uses again."""
        device = gradients[0].device
        numbers = sum(gradient.numel() for gradient in gradients)
        if not self._goes_by_parts or any(gradient.device != device for gradient in gradients):
            yield from (torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients)
            return
        memory = self._memory
        if memory is None or memory.numel() < numbers or memory.device != device:
            memory = self._memory = torch.empty(numbers, dtype=torch.float32, device=device)
        start = 0
        for gradient in gradients:
            yield memory.as_strided(gradient.shape, gradient.stride(), start)
            start += gradient.numel()


_living: Final[weakref.WeakSet[LowPrecisionGradients]] = weakref.WeakSet()


def of(optimizer: Optimizer) -> list[LowPrecisionGradients]:
    """All whose gradients the step of this optimizer reads."""
    return [each for each in tuple(_living) if each.is_of(optimizer)] if _living else []


def factors_of(optimizer: Optimizer) -> dict[int, Tensor]:
    """``id`` of each parameter whose float16 gradient is still to be multiplied -> by what."""
    return {
        id(parameter): each.factor
        for each in of(optimizer)
        if each.factor is not None
        for parameter in each.in_float16()
    }


def _is_in(parameter: Tensor, dtype: torch.dtype) -> bool:
    return parameter.grad is not None and parameter.grad.dtype is dtype


def _end_with_optimizer(gradients: weakref.ref[LowPrecisionGradients]) -> None:
    its = gradients()
    if its is not None:  # no step is to come that would see them in float32
        its.end()


class _Before:
    """What an optimizer calls before its step; it belongs to the optimizer, and copies of that to nobody."""

    def __init__(self, gradients: LowPrecisionGradients) -> None:
        self._gradients = weakref.ref(gradients)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        gradients = self._gradients()
        return None if gradients is None else gradients.before_step(optimizer, args, kwargs)


def _copies(parameter: Tensor) -> Iterable[Copy]:
    held_parameter = held.held_parameters.get(id(parameter))
    return () if held_parameter is None else held_parameter.copies.values()
