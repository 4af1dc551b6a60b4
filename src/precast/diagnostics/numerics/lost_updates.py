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
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

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

__all__ = ["Averages", "LostUpdates", "UpdateLoss"]

_SAMPLE: Final = 1 << 16
"""The approximate maximum of values of an optimizer's state, or of an average, that are compared."""
_SMALLEST_MOVE: Final = 1 / 128
"""A share of the distance between two 16-bit values: a state that should move by less has converged."""


class UpdateLoss(NamedTuple):
    """The effect of rounding on the update of a parameter in one step."""

    rounded_away: float
    """The share of values that should move and stayed."""
    lost: float
    """Their share in the size of the whole update, the sum of all distances."""
    with_kahan: float
    """The share of values that would have stayed with `precast.optim.bfloat16_weights`."""
    states: Mapping[str, float]
    """Maps each optimizer state in 16 bits to the share of its values that should move and stayed."""


_NOTHING_LOST: Final = UpdateLoss(0.0, 0.0, 0.0, {})


class _StateSample(NamedTuple):
    name: str
    memory: Tensor
    """The state itself, which the step writes in place."""
    previous: Tensor
    exact: Tensor
    """The values after the step, computed in float32."""


class LostUpdates:
    """Compares parameters and optimizer states before and after a step of an optimizer."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, Tensor, Tensor, list[_StateSample]]] = {}
        """Maps a name to the parameter, its values before the step, the exact new values in float32, and its states."""
        self.sums: dict[str, Tensor] = {}
        """Maps a name to the results of `_compare`."""
        self.state_sums: dict[tuple[str, str], Tensor] = {}
        """Maps parameter and state to the numbers of values that should move, and that stayed."""
        self._lose_nothing: set[str] = set()

    def before(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """Compute the exact values of the next step; `names` has the watched parameters by ``id``."""
        trained = [p for g in optimizer.param_groups for p in g["params"] if id(p) in names]
        self._lose_nothing.update(names[id(p)] for p in trained if _loses_nothing(p))
        for parameter in trained:
            weights = learns_by_rounding(parameter)
            discarded = None if weights is None else weights.pop_discarded(parameter)
            if discarded is not None:
                self.sums[names[id(parameter)]] = discarded[[0, 1, 2, 3, 1]]
        if not treats_each_parameter_by_itself(optimizer) or isinstance(optimizer, LBFGS):
            return
        scale = getattr(optimizer, "grad_scale", None)
        groups = optimizer.param_groups
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            for group in groups:
                for parameter in group["params"]:
                    if id(parameter) not in names or not _may_lose(parameter):
                        continue
                    name = names[id(parameter)]
                    copy = _copied(optimizer, parameter, scale)
                    optimizer.param_groups = [{**group, "params": [copy]}]
                    try:
                        step_without_hooks(optimizer)()
                        states = _states(optimizer, parameter, copy)
                    finally:
                        optimizer.param_groups = groups
                        optimizer.state.pop(copy, None)
                    previous = parameter.detach().clone()
                    self._before[name] = parameter, previous, copy.detach(), states

    def after(self) -> None:
        """Compare the values after the step."""
        before, self._before = self._before, {}
        for name, (parameter, previous, exact, states) in before.items():
            self.sums[name] = _compare(previous, parameter.detach(), exact)
            for state in states:
                self.state_sums[name, state.name] = _count_stuck(state)

    def read(self) -> dict[str, UpdateLoss]:
        """Return the losses by name. Waits for the device."""
        losses = dict.fromkeys(self._lose_nothing, _NOTHING_LOST)
        states: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (name, state), sums in self.state_sums.items():
            moving, stayed = sums.tolist()
            if moving:
                states[name][state] = stayed / moving
        for name, sums in self.sums.items():
            moving, stayed, size, lost, with_kahan = sums.tolist()
            if moving:
                part = lost / size if size else 0.0
                losses[name] = UpdateLoss(stayed / moving, part, with_kahan / moving, states[name])
        return losses


def _sample(tensor: Tensor) -> Tensor:
    """Return evenly spread values of a tensor: all of a small one, about `_SAMPLE` of a larger one."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLE)]


def _loses_nothing(parameter: Tensor) -> bool:
    is_wide = parameter.dtype in (torch.float32, torch.float64)
    return is_wide or learns_by_rounding(parameter) is not None


def _may_lose(parameter: Tensor) -> bool:
    """Return True if updates of a parameter may round to nothing, and can be repeated."""
    gradient = parameter.grad
    return (
        parameter.dtype in SIXTEEN_BIT
        and type(parameter) in (Tensor, nn.Parameter)
        and gradient is not None
        and gradient.layout is torch.strided
        and not _loses_nothing(parameter)
    )


def _copied(optimizer: Optimizer, parameter: Tensor, scale: Tensor | None) -> Tensor:
    assert parameter.grad is not None
    copy = nn.Parameter(parameter.detach().float())
    gradient = parameter.grad.detach().to(torch.float32, copy=True)
    copy.grad = gradient if scale is None else gradient.div_(scale)
    states = optimizer.state.get(parameter)
    if states:
        optimizer.state[copy] = {name: _copy(value) for name, value in states.items()}
    return copy


def _copy(state: Any) -> Any:
    """Return a copy of a state; one in 16 bits, or as large as a parameter, becomes float32."""
    if not isinstance(state, Tensor):
        return state
    is_widened = state.dtype in SIXTEEN_BIT or (is_large(state) and state.is_floating_point())
    return state.to(torch.float32, copy=True) if is_widened else state.clone()


def _states(optimizer: Optimizer, parameter: Tensor, copy: Tensor) -> list[_StateSample]:
    """Return the 16-bit states of a parameter, with the values of the step that `copied` has taken in float32."""
    return [
        _StateSample(name, value, _sample(value).clone(), _sample(optimizer.state[copy][name]))
        for name, value in (optimizer.state.get(parameter) or {}).items()
        if is_large(value) and value.dtype in SIXTEEN_BIT and type(value) is Tensor
    ]


def _count_stuck(state: _StateSample) -> Tensor:
    """Return the numbers of values of a state that should move, and of those that stayed."""
    previous = state.previous.float()
    least = previous.abs() * (torch.finfo(state.memory.dtype).eps * _SMALLEST_MOVE)
    moves = (state.exact - previous).abs() > least
    stays = moves & (_sample(state.memory) == state.previous)
    return torch.stack([moves.sum(), stays.sum()])


def _compare(previous: Tensor, current: Tensor, exact: Tensor) -> Tensor:
    """Return counts and sizes: values that should move, those that stayed, both sizes, and stayed with Kahan."""
    full = previous.float()
    distance = (exact - full).abs().nan_to_num_(0.0, 0.0, 0.0)
    moves = distance > 0
    stays = moves & (current == previous)
    nearest = rounding.nearest(exact.contiguous())
    rest = rounding.nearest((exact - nearest).contiguous())
    stays_with_kahan = moves & (nearest + rest == full)
    sums = (
        moves.sum(),
        stays.sum(),
        distance.sum(),
        (distance * stays).sum(),
        stays_with_kahan.sum(),
    )
    return torch.stack([each.double() for each in sums])


# --- averages of parameters ---


_HEAD: Final = 64
"""The number of values that are compared to find the nearest of several parameters of one shape."""


class _Candidate(NamedTuple):
    """A tensor in 16 bits that may be an average of a parameter, right after a step of the optimizer."""

    name: str
    """The parameter's name."""
    reference: weakref.ref[Tensor]
    parameter: weakref.ref[Tensor]
    values: Tensor
    """A sample of its values."""
    version: int | None


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
        self._candidates: list[_Candidate] = []
        self.sums: dict[tuple[str, int], Tensor] = {}
        """Maps a parameter and the number of an average to the numbers of values that differ, and that stayed."""

    def before(self, parameters: Mapping[str, Tensor]) -> None:
        """Record the tensors that may be averages of `parameters`, by name."""
        self._candidates = []
        for name, tensor in _candidates(parameters):
            references = weakref.ref(tensor), weakref.ref(parameters[name])
            candidate = _Candidate(
                name, *references, _sample(tensor).clone(), version_if_counted(tensor)
            )
            self._candidates.append(candidate)

    def after(self) -> None:
        """Compare the recorded tensors, after the program has had time to update its averages."""
        candidates, self._candidates = self._candidates, []
        for each in candidates:
            tensor, parameter = each.reference(), each.parameter()
            if tensor is None or parameter is None:
                continue
            values = _sample(tensor)
            differs = _sample(parameter).to(values) != each.values
            changed = values != each.values
            is_written = changed.any() | (version_if_counted(tensor) != each.version)
            stays = differs & ~changed & is_written
            # A tensor that equals the parameter in most of its values is a cast of it.
            is_average = differs.sum() * 2 > differs.numel()
            counts = torch.stack([differs.sum(), stays.sum() * is_average])
            self.sums[each.name, len(self.sums)] = counts

    def read(self) -> dict[str, float]:
        """Return for each parameter the share of an average's values that stayed. Waits for the device."""
        shares: dict[str, float] = {}
        for (name, _), counts in self.sums.items():
            differing, stayed = counts.tolist()
            if stayed:
                shares[name] = max(stayed / differing, shares.get(name, 0.0))
        return shares


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


def _tensors_of_process(
    shapes: Collection[torch.Size],
) -> tuple[list[Tensor], set[int]]:
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
