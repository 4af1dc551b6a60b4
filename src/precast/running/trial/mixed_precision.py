"""Mixed precision in a program without code for it: regions around the calls of models, and scaled losses.

Invariants:

- a region is opened around each outermost call of a module that has parameters. Once the program trains, a call that
  records gradients needs a parameter that an optimizer steps. Losses, metrics and transforms run outside;
- the program gets float32 outputs, and gradients without the scale: a backward pass multiplies its roots by the scale,
  a power of two, and the first hook of each parameter of an optimizer divides its gradient by it;
- a step on gradients that are not finite is made without gradients, so that the optimizer changes nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from precast import _torch
from precast._internal.pytree import map_tensors
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.autocast_mode.region import autocast
from precast.optim.partial_steps import parameters_of
from precast.policy.policy import Policy
from precast.running.trial.plan import TrialOutcome

__all__ = ["LossScaling", "ModelRegions"]


class ModelRegions:
    """Runs models in regions until the process ends; `prepare` gets each before its first call."""

    def __init__(
        self, policy: Policy, dtype: torch.dtype, prepare: Callable[[nn.Module], None]
    ) -> None:
        self._policy, self._dtype, self._prepare = policy, dtype, prepare
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stepped: set[int] = set()
        """The ids of parameters that an optimizer has stepped."""
        _torch.on_module_call(self._call)
        on_optimizer_step(after=lambda each: self._stepped.update(map(id, parameters_of(each))))

    def _call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        device = self._device_of(module)
        if device is None or _torch.is_tracing() or torch.is_autocast_enabled(device):
            return run()
        if module not in self._prepared:
            self._prepared.add(module)
            self._prepare(module)
        with autocast(device, dtype=self._dtype, policy=self._policy):
            output = run()
        return map_tensors(output, lambda x: x.float() if x.dtype is self._dtype else x)

    def _device_of(self, module: nn.Module) -> str | None:
        """Return the device type of a model to run in a region; None for another module."""
        device = None
        for parameter in module.parameters():
            device = device or parameter.device.type
            is_trained = id(parameter) in self._stepped
            if is_trained or not self._stepped or not torch.is_grad_enabled():
                return device
        return None


class LossScaling:
    """Scales the loss of each backward pass, as float16 needs it, until the process ends; counts skipped steps."""

    def __init__(self, outcome: TrialOutcome) -> None:
        self._outcome = outcome
        self._scale = 2.0**16
        self._is_scaled = False
        """True while a backward pass runs whose roots were multiplied by the scale."""
        self._hooked = WeakTensorKeyDictionary()
        """The parameters whose gradients a hook divides by the scale."""
        self._finite: weakref.WeakKeyDictionary[Optimizer, bool | Tensor] | None = None
        """Whether the gradients of an optimizer were finite after the latest backward pass; None before the first."""
        self._stepping: Optimizer | None = None
        self._gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients, while an optimizer steps without them."""
        _torch.around_backward(self._backward)
        on_optimizer_step(before=self._before_step, after=self._after_step)

    def _backward(self, run: Callable[[Any], None], roots: Any, gradients: Any) -> None:
        if self._is_scaled:  # a backward pass inside of another, as in a checkpoint
            run(gradients)
            return
        if self._finite is None:
            self._finite = weakref.WeakKeyDictionary()
            for optimizer in _torch.instances_of(Optimizer):
                self._add(optimizer)
        roots = [roots] if isinstance(roots, Tensor) else [*roots]
        several = isinstance(gradients, list | tuple)
        values = gradients if several else [gradients] * len(roots)
        values = [
            torch.ones_like(x) if y is None else y for x, y in zip(roots, values, strict=True)
        ]
        self._is_scaled = True
        try:
            run([each * self._scale for each in values])
        finally:
            self._is_scaled = False
        for optimizer in self._finite:
            self._finite[optimizer] = _is_finite(optimizer)
        if self._stepping is not None:  # a closure, whose gradients replace those before the step
            self._gradients = []
            self._check(self._stepping)

    def _add(self, optimizer: Optimizer) -> list[Tensor]:
        """Divide the gradients of an optimizer's parameters by the scale; return the parameters that are new."""
        parameters = (each for each in parameters_of(optimizer) if each.requires_grad)
        new = [each for each in parameters if each not in self._hooked]
        for each in new:
            self._hooked[each] = True
            _torch.hook_before_others(each, lambda x: x / self._scale if self._is_scaled else x)
        if self._finite is not None:
            self._finite.setdefault(optimizer, True)
        return new

    def _before_step(self, optimizer: Optimizer) -> None:
        for parameter in self._add(optimizer):
            if parameter.grad is not None and self._finite is not None:
                parameter.grad.div_(self._scale)  # the backward pass did not know the optimizer
        self._stepping = optimizer
        self._check(optimizer)

    def _check(self, optimizer: Optimizer) -> None:
        """Take the gradients away from an optimizer for this step, if one of them is not finite."""
        finite = {} if self._finite is None else self._finite
        # The optimizer may step as soon as a gradient is complete.
        if _is_finite(optimizer) if self._is_scaled else finite.get(optimizer, True):
            return
        parameters = parameters_of(optimizer)
        self._gradients = [(each, each.grad) for each in parameters if each.grad is not None]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _after_step(self, _: Optimizer) -> None:
        self._stepping = None
        if self._gradients:
            self._scale /= 2
            self._outcome.skipped += 1
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []


def _is_finite(optimizer: Optimizer) -> bool | Tensor:
    """Return True if all gradients of an optimizer are finite; the device may still compute that."""
    gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
    values = [_torch.sparse_values(each) if each.is_sparse else each for each in gradients]
    return not values or nn.utils.get_total_norm(values, math.inf).isfinite()
