"""Updates that round to nothing: of 16-bit parameters, of optimizer states and of averages of parameters in 16 bits.

Invariants:

- the optimizer's own step defines the exact new values: it runs once more in float32, on copies of the parameter, its
  gradient and its states, before the real step, which it does not change;
- float32 parameters lose nothing, which is reported without a computation. Weights that learn by rounding
  (`precast.optim`) lose the compensation that writes of the program discard. For optimizers that are not PyTorch's, and
  for tensor subclasses, the loss is unknown;
- nothing waits for the device until `read`, except the search for averages.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from precast._torch import SIXTEEN_BIT, step_without_hooks, version_if_counted
from precast.diagnostics.numerics.host_transfer import on_host
from precast.optim import rounding
from precast.optim.low_precision_weights import learns_by_rounding
from precast.optim.partial_steps import (
    is_large,
    outside_autocast,
    parameters_of,
    treats_each_parameter_by_itself,
    without_scaler,
)

__all__ = ["Averages", "LostUpdates"]

_SAMPLE: Final = 1 << 16
"""The approximate maximum of values of an optimizer's state, or of an average, that are compared."""
_SMALLEST_MOVE: Final = 1 / 128
"""A share of the distance between two 16-bit values: a state that should move by less has converged."""


class LostUpdates:
    """Compares parameters and optimizer states before and after a step of an optimizer."""

    def __init__(self) -> None:
        self._comparisons: list[tuple[tuple[str, str], Callable[[], Tensor]]] = []
        """Functions that compare values after the step, and the keys of their results."""
        self.sums: dict[tuple[str, str], Tensor] = {}
        """Maps a parameter and a state, or "" for the parameter itself, to the result of a comparison."""
        self._lose_nothing: set[str] = set()

    def before(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """Compute the exact values of the next step; `names` has the watched parameters by ``id``."""
        for parameter in parameters_of(optimizer):
            if id(parameter) in names:
                self._examine(parameter, names[id(parameter)])
        if not treats_each_parameter_by_itself(optimizer) or isinstance(optimizer, LBFGS):
            return
        groups, scale = optimizer.param_groups, getattr(optimizer, "grad_scale", None)
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            for group in groups:
                for parameter in group["params"]:
                    if id(parameter) in names and _may_lose(parameter):
                        copy = _copied(optimizer, parameter, scale)
                        optimizer.param_groups = [{**group, "params": [copy]}]
                        try:
                            step_without_hooks(optimizer)()
                            self._compare_later(optimizer, parameter, copy, names[id(parameter)])
                        finally:
                            optimizer.param_groups = groups
                            optimizer.state.pop(copy, None)

    def after(self) -> None:
        """Compare the values after the step."""
        comparisons, self._comparisons = self._comparisons, []
        for key, compare in comparisons:
            self.sums[key] = compare()

    def read(self) -> dict[str, dict[str, Any]]:
        """Return a parameter's columns in `Monitor.to_dict`, by name. Waits for the device."""
        nothing: dict[str, Any] = {**UNKNOWN, "updates_rounded_away": 0.0, "updates_lost": 0.0}
        nothing["updates_rounded_away_with_kahan"] = 0.0
        columns = dict.fromkeys(self._lose_nothing, nothing)
        states: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (name, state), sums in self.sums.items():
            moving, stayed, *rest = sums.tolist()
            if state and moving:
                states[name][state] = stayed / moving
            elif moving:
                size, lost, with_kahan = rest
                columns[name] = {
                    "updates_rounded_away": stayed / moving,
                    "updates_lost": lost / size if size else 0.0,
                    "updates_rounded_away_with_kahan": with_kahan / moving,
                    "states_rounded_away": states[name],
                }
        return columns

    def _examine(self, parameter: Tensor, name: str) -> None:
        weights = learns_by_rounding(parameter)
        discarded = None if weights is None else weights.pop_discarded(parameter)
        if discarded is not None:
            self.sums[name, ""] = discarded[[0, 1, 2, 3, 1]]
        if weights is not None or parameter.dtype in (torch.float32, torch.float64):
            self._lose_nothing.add(name)

    def _compare_later(
        self, optimizer: Optimizer, parameter: Tensor, copy: Tensor, name: str
    ) -> None:
        """Note the values before a step; `copy` is the parameter after the same step in float32."""
        was = parameter.detach().clone()
        compare = partial(_compare, was, parameter.detach(), copy.detach())
        self._comparisons.append(((name, ""), compare))
        for state, value in (optimizer.state.get(parameter) or {}).items():
            if is_large(value) and value.dtype in SIXTEEN_BIT and type(value) is Tensor:
                exact = _sample(optimizer.state[copy][state])
                compare = partial(_compare_state, _sample(value).clone(), value, exact)
                self._comparisons.append(((name, state), compare))


UNKNOWN: Final[dict[str, Any]] = {
    "updates_rounded_away": None,
    "updates_lost": None,
    "updates_rounded_away_with_kahan": None,
    "states_rounded_away": {},
}
"""The columns of a parameter whose loss is unknown."""


def _sample(tensor: Tensor) -> Tensor:
    """Return evenly spread values of a tensor: all of a small one, about `_SAMPLE` of a larger one."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLE)]


def _may_lose(parameter: Tensor) -> bool:
    """Return True if updates of a parameter may round to nothing, and can be repeated."""
    gradient = parameter.grad
    return (
        parameter.dtype in SIXTEEN_BIT
        and type(parameter) in (Tensor, nn.Parameter)
        and gradient is not None
        and gradient.layout is torch.strided
        and learns_by_rounding(parameter) is None
    )


def _copied(optimizer: Optimizer, parameter: Tensor, scale: Tensor | None) -> Tensor:
    assert parameter.grad is not None
    copy = nn.Parameter(parameter.detach().float())
    gradient = parameter.grad.detach().to(torch.float32, copy=True)
    copy.grad = gradient if scale is None else gradient.div_(scale)
    states = optimizer.state.get(parameter)
    if states:
        optimizer.state[copy] = {name: _copied_state(value) for name, value in states.items()}
    return copy


def _copied_state(state: Any) -> Any:
    """Return a copy of a state; one in 16 bits, or as large as a parameter, becomes float32."""
    if not isinstance(state, Tensor):
        return state
    is_widened = state.dtype in SIXTEEN_BIT or (is_large(state) and state.is_floating_point())
    return state.to(torch.float32, copy=True) if is_widened else state.clone()


def _compare_state(before: Tensor, state: Tensor, exact: Tensor) -> Tensor:
    """Return the numbers of values of a state that should move, and of those that stayed."""
    least = before.float().abs() * (torch.finfo(state.dtype).eps * _SMALLEST_MOVE)
    moves = (exact - before.float()).abs() > least
    stays = moves & (_sample(state) == before)
    return torch.stack([moves.sum(), stays.sum()])


def _compare(before: Tensor, current: Tensor, exact: Tensor) -> Tensor:
    """Return counts and sizes: values that should move, those that stayed, both sizes, and stayed with Kahan."""
    full = before.float()
    distance = (exact - full).abs().nan_to_num_(0.0, 0.0, 0.0)
    moves = distance > 0
    stays = moves & (current == before)
    nearest = rounding.nearest(exact.contiguous())
    rest = rounding.nearest((exact - nearest).contiguous())
    stays_with_kahan = moves & (nearest + rest == full)
    each = moves, stays, distance, distance * stays, stays_with_kahan
    return torch.stack([values.sum().double() for values in each])


# --- averages of parameters ---


_HEAD: Final = 64
"""The number of values that are compared to find the nearest of several parameters of one shape."""


class Averages:
    """Compares moving averages (EMA) of parameters in 16 bits before and after their update.

    An update moves an average by a small share of its distance to the parameter, often a thousandth or less, and 16
    bits round that to nothing. PyTorch has no hook for such updates, because programs implement them by their own
    operations. So tensors of the process are compared from one optimizer step to the next forward pass. A 16-bit tensor
    with the shape of a parameter that was written, but whose values that differ from the parameter mostly stayed the
    same, does not follow it.

    Tensors are only read, and referenced weakly. Frozen copies, which are not written, and casts of the parameter,
    which equal it, are not averages; nor are parameters and states of optimizers.
    """

    def __init__(self) -> None:
        self._comparisons: list[Callable[[], None]] = []
        self.sums: dict[tuple[str, int], Tensor] = {}
        """Maps a parameter and the number of an average to the numbers of values that differ, and that stayed."""

    def before(self, parameters: Mapping[str, Tensor]) -> None:
        """Record the tensors that may be averages of `parameters`, by name, right after the optimizer's step."""
        self._comparisons = [
            partial(
                self._compare,
                name,
                weakref.ref(parameters[name]),
                weakref.ref(tensor),
                _sample(tensor).clone(),
                version_if_counted(tensor),
            )
            for name, tensor in _candidates(parameters)
        ]

    def after(self) -> None:
        """Compare the recorded tensors, after the program has had time to update its averages."""
        comparisons, self._comparisons = self._comparisons, []
        for compare in comparisons:
            compare()

    def read(self) -> dict[str, float]:
        """Return for each parameter the share of an average's values that stayed. Waits for the device."""
        shares: dict[str, float] = {}
        for (name, _), counts in self.sums.items():
            differing, stayed = counts.tolist()
            if stayed:
                shares[name] = max(stayed / differing, shares.get(name, 0.0))
        return shares

    def _compare(
        self,
        name: str,
        of_parameter: weakref.ref[Tensor],
        of_tensor: weakref.ref[Tensor],
        before: Tensor,
        version: int | None,
    ) -> None:
        parameter, tensor = of_parameter(), of_tensor()
        if parameter is None or tensor is None:
            return
        changed = _sample(tensor) != before
        differs = _sample(parameter).to(before) != before
        is_written = changed.any() | (version_if_counted(tensor) != version)
        # A tensor that equals the parameter in most of its values is a cast of it.
        is_average = differs.sum() * 2 > differs.numel()
        stays = differs & ~changed & is_written & is_average
        self.sums[name, len(self.sums)] = torch.stack([differs.sum(), stays.sum()])


def _candidates(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each 16-bit tensor with the shape of a parameter, and the name of the parameter that it is nearest to."""
    by_shape: defaultdict[torch.Size, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        if type(parameter) is nn.Parameter and parameter.layout is torch.strided:
            by_shape[parameter.shape].append(name)
    tensors, others = _tensors_of_process(by_shape)
    others.update(id(p.grad) for p in parameters.values() if p.grad is not None)
    tensors = [tensor for tensor in tensors if id(tensor) not in others]
    heads = iter(on_host(map(_head, tensors)))
    of_shape = {
        shape: torch.stack(on_host(_head(parameters[name]) for name in by_shape[shape]))
        for shape in {tensor.shape for tensor in tensors}
    }
    for tensor in tensors:
        distances = (of_shape[tensor.shape] - next(heads)).norm(dim=1)
        yield by_shape[tensor.shape][int(distances.argmin())], tensor


def _tensors_of_process(shapes: Collection[torch.Size]) -> tuple[list[Tensor], set[int]]:
    """Return the 16-bit tensors of some shapes, and the ids of all tensors that belong to optimizers."""
    tensors: list[Tensor] = []
    of_optimizers: set[int] = set()
    for each in gc.get_objects():
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            if each.dtype in SIXTEEN_BIT and each.layout is torch.strided and each.shape in shapes:
                tensors.append(each)
        elif issubclass(kind, Optimizer):
            of_optimizers.update(map(id, parameters_of(each)))
            for state in each.state.values():
                of_optimizers.update(map(id, state.values()))
    return tensors, of_optimizers


def _head(tensor: Tensor) -> Tensor:
    return _sample(tensor)[:_HEAD].float()
