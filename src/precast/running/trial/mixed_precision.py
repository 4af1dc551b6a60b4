"""Mixed precision in a program without code for it: regions around the calls of models, and scaled losses.

Invariants:

- a region is opened around each outermost call of a module that has parameters. Once the program trains, a call that
  records gradients needs a parameter that an optimizer steps. Losses, metrics and transforms run outside;
- the program gets float32 outputs, and gradients without the scale: a backward pass multiplies its roots by the scale,
  a power of two, and divides the gradients of all leaves by it when it ends;
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
_GROWTH_INTERVAL: Final = 2000
_WALKS: Final = 8
"""The first backward passes whose graphs are searched for leaves; later ones only if the last of these had new ones."""


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
        self.scale = _FIRST_SCALE
        self._on_skip = on_skip
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._walks = 0
        self._is_bad = False
        """True if a gradient was not finite after the latest backward pass."""
        self._in_backward = False
        self._stepping: Optimizer | None = None
        self._gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients, while an optimizer steps without them."""
        self._finite_steps = 0
        self._unscaled: set[int] = set()
        """The ids of leaves whose gradients were divided by the scale during the backward pass."""

    def start(self) -> None:
        """Start to scale."""
        _torch.around_backward(self._backward)
        on_optimizer_step(before=self._before_step, after=self._after_step)

    def _backward(self, run: Callable[[Any], None], roots: Any, gradients: Any) -> None:
        if self._in_backward:  # a backward pass inside of another, as in a checkpoint
            run(gradients)
            return
        several = list(roots) if isinstance(roots, list | tuple) else [roots]
        values = [gradients] * len(several) if isinstance(gradients, Tensor | None) else gradients
        self._find_leaves(several)
        self._multiply_existing()
        stops = [
            _torch.hook_before_others(leaf, lambda gradient: gradient / self.scale)
            for leaf in self._live_leaves()
        ]
        hooked = {id(leaf) for leaf, stop in zip(self._live_leaves(), stops, strict=True) if stop}
        self._in_backward = True
        try:
            run([self._scaled(root, value) for root, value in zip(several, values, strict=True)])
        finally:
            self._in_backward = False
            for stop in filter(None, stops):
                stop()
        self._unscale(hooked)
        if self._is_bad and self._stepping is not None:  # a closure
            self._skip(self._stepping)

    def _scaled(self, root: Tensor, value: Tensor | None) -> Tensor:
        return torch.full_like(root, self.scale) if value is None else value * self.scale

    def _unscale(self, hooked: set[int]) -> None:
        """Divide the gradients of all leaves by the scale, and look for gradients that are not finite."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        bad = False
        with torch.no_grad():
            for leaf in self._live_leaves():
                gradient = leaf.grad
                if gradient is None or not gradient.is_floating_point():
                    continue
                if id(leaf) in hooked or id(leaf) in self._unscaled:
                    bad = bad or not bool(_values(gradient).isfinite().all())
                    continue
                values = _values(gradient)
                by_kind.setdefault((values.device, values.dtype), []).append(values)
            flags = []
            for (device, _), values_of_kind in by_kind.items():
                flag = torch.zeros((), device=device)
                inverse = torch.full((), 1 / self.scale, device=device)
                _torch.check_and_unscale_(values_of_kind, flag, inverse)
                flags.append(flag)
        self._unscaled.clear()
        self._is_bad = bad or any(bool(flag) for flag in flags)

    def _multiply_existing(self) -> None:
        """Multiply gradients of earlier passes by the scale: new ones are added to them."""
        with torch.no_grad():
            gradients = [leaf.grad for leaf in self._live_leaves() if leaf.grad is not None]
            for gradient in gradients:
                if gradient.is_floating_point():
                    _values(gradient).mul_(self.scale)

    # --- leaves ---

    def _find_leaves(self, roots: Iterable[Tensor]) -> None:
        if self._walks > _WALKS:
            return
        is_new = [self._add(leaf) for leaf in _leaves_of(roots)]
        if not any(is_new) or self._walks < _WALKS:
            self._walks += 1

    def _add(self, leaf: Tensor) -> bool:
        reference = self._leaves.get(id(leaf))
        if reference is not None and reference() is leaf:
            return False
        self._leaves[id(leaf)] = weakref.ref(leaf)
        return True

    def _live_leaves(self) -> list[Tensor]:
        pairs = [(key, reference()) for key, reference in self._leaves.items()]
        for key, leaf in pairs:
            if leaf is None:
                del self._leaves[key]
        return [leaf for _, leaf in pairs if leaf is not None]

    # --- steps ---

    def _before_step(self, optimizer: Optimizer) -> None:
        self._stepping = optimizer
        if self._in_backward:  # the optimizer steps as soon as a gradient is complete
            self._unscale_now(optimizer)
            return
        parameters = [each for each in parameters_of(optimizer) if each.grad is not None]
        new = [parameter for parameter in parameters if self._add(parameter)]
        if new:  # found by no walk; their gradients may still be multiplied
            self._walks = 0
        if self._is_bad:
            self._skip(optimizer)
        elif parameters:
            self._grow()

    def _unscale_now(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and id(parameter) not in self._unscaled:
                parameter.grad.div_(self.scale)
                self._unscaled.add(id(parameter))
                self._is_bad = self._is_bad or not bool(_values(parameter.grad).isfinite().all())
        if self._is_bad:
            self._skip(optimizer)

    def _skip(self, optimizer: Optimizer) -> None:
        """Take the gradients away from an optimizer, if one of them is not finite."""
        gradients = [
            (each, each.grad) for each in parameters_of(optimizer) if each.grad is not None
        ]
        if self._gradients or all(bool(_values(each).isfinite().all()) for _, each in gradients):
            return
        self._gradients = gradients
        for parameter, _ in gradients:
            parameter.grad = None
        self.scale = max(self.scale / 2, 2.0**-16)
        self._finite_steps = 0
        self._on_skip()

    def _grow(self) -> None:
        self._finite_steps += 1
        if self._finite_steps % _GROWTH_INTERVAL == 0:
            self.scale *= 2

    def _after_step(self, _: Optimizer) -> None:
        self._stepping = None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []


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
