"""Mixed precision in a program without code for it: regions around the calls of models, and scaled losses.

Invariants:

- a region is opened around each outermost call of a module that has parameters. Once the program trains, a call that
  records gradients needs a parameter that an optimizer steps. Losses, metrics and transforms run outside;
- the program gets float32 outputs, and gradients without the scale: a backward pass multiplies its roots by the scale,
  a power of two, and the first hook of each leaf divides its gradient by it;
- a step on gradients that are not finite is made without gradients, so that the optimizer changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast import _torch
from precast._internal.pytree import map_tensors
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.autocast_mode.region import autocast
from precast.optim.partial_steps import parameters_of
from precast.policy.policy import Policy

__all__ = ["LossScaling", "ModelRegions"]

_FIRST_SCALE: Final = 2.0**16
_WALKS: Final = 8
"""The number of backward passes without a new leaf after which graphs are not searched for leaves any more."""


class ModelRegions:
    """Runs models in regions, from `start` until the process ends.

    Args:
        policy: the policy of the regions.
        dtype: the 16-bit dtype.
        prepare: called with each model before its first call.
    """

    def __init__(
        self, policy: Policy, dtype: torch.dtype, prepare: Callable[[nn.Module], None]
    ) -> None:
        self._policy, self._dtype, self._prepare = policy, dtype, prepare
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stepped: set[int] = set()
        """The ids of parameters that an optimizer has stepped."""

    def start(self) -> None:
        """Start to open regions."""
        _torch.on_module_call(self._call)
        on_optimizer_step(after=self._after_step)

    def _call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        device = self._device_of(module)
        if device is None or _torch.is_tracing() or torch.is_autocast_enabled(device):
            return run()
        if module not in self._prepared:
            self._prepared.add(module)
            self._prepare(module)
        with autocast(device, dtype=self._dtype, policy=self._policy):
            output = run()
        return map_tensors(output, self._to_float32)

    def _device_of(self, module: nn.Module) -> str | None:
        """Return the device type of a model to run in a region; None for another module."""
        device = None
        for parameter in module.parameters():
            device = device or parameter.device.type
            is_trained = id(parameter) in self._stepped
            if is_trained or not self._stepped or not torch.is_grad_enabled():
                return device
        return None

    def _to_float32(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is self._dtype else tensor

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepped.update(map(id, parameters_of(optimizer)))


class LossScaling:
    """Scales the loss of each backward pass, as float16 needs it, from `start` until the process ends.

    Args:
        on_skip: called for each step of an optimizer that is skipped.
    """

    def __init__(self, on_skip: Callable[[], None]) -> None:
        self._on_skip = on_skip
        self._scale = _FIRST_SCALE
        self._is_scaled = False
        """True while a backward pass runs whose roots were multiplied by the scale."""
        self._leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """The tensors whose gradients a hook divides by the scale, by their ids."""
        self._walks = 0
        self._has_scaled = False
        self._nonfinite: set[int] = set()
        """The ids of leaves with a gradient that was not finite after the latest backward pass."""
        self._stepping: Optimizer | None = None
        self._gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients, while an optimizer steps without them."""

    def start(self) -> None:
        """Start to scale."""
        _torch.around_backward(self._backward)
        on_optimizer_step(before=self._before_step, after=self._after_step)

    def _backward(self, run: Callable[[Any], None], roots: Any, gradients: Any) -> None:
        if self._is_scaled:  # a backward pass inside of another, as in a checkpoint
            run(gradients)
            return
        several = list(roots) if isinstance(roots, list | tuple) else [roots]
        values = [gradients] * len(several) if isinstance(gradients, Tensor | None) else gradients
        if self._walks < _WALKS:
            new = [leaf for leaf in _leaves_of(several) if self._hook(leaf)]
            self._walks = 0 if new else self._walks + 1
        self._is_scaled = self._has_scaled = True
        try:
            run([self._scaled(root, value) for root, value in zip(several, values, strict=True)])
        finally:
            self._is_scaled = False
        self._nonfinite = _with_nonfinite_gradients(self._leaves.values())
        if self._stepping is not None:  # a closure, whose gradients replace those before the step
            self._gradients = []
            self._check(self._stepping)

    def _scaled(self, root: Tensor, value: Tensor | None) -> Tensor:
        return torch.full_like(root, self._scale) if value is None else value * self._scale

    def _hook(self, leaf: Tensor) -> bool:
        """Divide the gradients of a leaf by the scale, before they are added up. Return True for a new leaf."""
        if self._leaves.get(id(leaf)) is leaf or not leaf.requires_grad:
            return False
        self._leaves[id(leaf)] = leaf
        _torch.hook_before_others(leaf, lambda x: x / self._scale if self._is_scaled else x)
        return True

    def _before_step(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if self._hook(parameter) and parameter.grad is not None and self._has_scaled:
                parameter.grad.div_(self._scale)  # no walk has seen the parameter
        self._stepping = optimizer
        self._check(optimizer)

    def _check(self, optimizer: Optimizer) -> None:
        """Take the gradients away from an optimizer for this step, if one of them is not finite."""
        parameters = [each for each in parameters_of(optimizer) if each.grad is not None]
        if self._is_scaled:  # the optimizer steps as soon as a gradient is complete
            self._nonfinite = _with_nonfinite_gradients(parameters)
        if self._nonfinite.isdisjoint(map(id, parameters)):
            return
        self._gradients = [(each, each.grad) for each in parameters if each.grad is not None]
        for parameter in parameters:
            parameter.grad = None

    def _after_step(self, _: Optimizer) -> None:
        self._stepping = None
        if self._gradients:
            self._scale /= 2
            self._on_skip()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []


def _with_nonfinite_gradients(leaves: Iterable[Tensor]) -> set[int]:
    """Return the ids of leaves whose gradients are not finite."""
    gradients = {
        id(leaf): _values(leaf.grad)
        for leaf in leaves
        if leaf.grad is not None and leaf.grad.is_floating_point()
    }
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for values in gradients.values():
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    flags = []
    with torch.no_grad():
        for (device, _), values_of_kind in by_kind.items():
            flag, one = torch.zeros((), device=device), torch.ones((), device=device)
            _torch.check_and_unscale_(values_of_kind, flag, one)
            flags.append(flag)
    if not any(map(bool, flags)):
        return set()
    return {key for key, values in gradients.items() if not bool(values.isfinite().all())}


def _values(gradient: Tensor) -> Tensor:
    """Return the memory of a gradient's values, also of a sparse one."""
    return _torch.sparse_values(gradient) if gradient.is_sparse else gradient


def _leaves_of(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of the graphs of tensors."""
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    yield from (root for root in roots if root.grad_fn is None and root.requires_grad)
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            yield leaf
        waiting += [following for following, _ in node.next_functions if following is not None]
