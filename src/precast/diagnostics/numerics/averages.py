"""Detection of moving averages (EMA) of parameters that are stored in 16 bits and do not move.

An update moves an average by a small share of its distance to the parameter, often a thousandth or less, and 16 bits
round that to nothing. PyTorch has no hook for such updates, because programs implement them by their own operations. So
tensors of the process are compared from one optimizer step to the next forward pass. A 16-bit tensor with the shape of
a parameter that was written, but whose values that differ from the parameter mostly stayed the same, does not follow
it.

Invariants: tensors are only read, and referenced weakly. Frozen copies, which are not written, and casts of the
parameter, which equal it, are not averages; nor are parameters and states of optimizers.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast import _torch
from precast.diagnostics.numerics.host_transfer import on_host
from precast.diagnostics.numerics.lost_updates import sample
from precast.optim.partial_steps import parameters_of

__all__ = ["Averages"]

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
    """Compares averages of parameters before and after their update."""

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
                name, *references, sample(tensor).clone(), _torch.version_if_counted(tensor)
            )
            self._candidates.append(candidate)

    def after(self) -> None:
        """Compare the recorded tensors, after the program has had time to update its averages."""
        candidates, self._candidates = self._candidates, []
        for each in candidates:
            tensor, parameter = each.reference(), each.parameter()
            if tensor is None or parameter is None:
                continue
            values = sample(tensor)
            differs = sample(parameter).to(values) != each.values
            changed = values != each.values
            is_written = changed.any() | (_torch.version_if_counted(tensor) != each.version)
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
    candidates = {
        shape: [each for each in of_shape if id(each) not in others]
        for shape, of_shape in tensors.items()
    }
    shapes = [shape for shape, of_shape in candidates.items() if of_shape]
    compared = [
        [*candidates[shape], *(parameters[name] for name in by_shape[shape])] for shape in shapes
    ]
    heads = iter(on_host(_head(tensor) for of_shape in compared for tensor in of_shape))
    for shape, of_shape in zip(shapes, compared, strict=True):
        number = len(candidates[shape])
        values = torch.stack([next(heads) for _ in of_shape])
        nearest = torch.cdist(values[:number], values[number:])
        for tensor, place in zip(candidates[shape], nearest.argmin(1).tolist(), strict=True):
            yield by_shape[shape][place], tensor


def _tensors_of_process(
    shapes: Collection[torch.Size],
) -> tuple[dict[torch.Size, list[Tensor]], set[int]]:
    """Return the 16-bit tensors of some shapes, and the ids of all tensors that belong to optimizers."""
    tensors: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    of_optimizers: set[int] = set()
    for each in gc.get_objects():
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            if (
                each.dtype in _torch.SIXTEEN_BIT
                and each.layout is torch.strided
                and each.shape in shapes
            ):
                tensors[each.shape].append(each)
        elif issubclass(kind, Optimizer):
            of_optimizers.update(map(id, parameters_of(each)))
            for state in each.state.values():
                of_optimizers.update(map(id, state.values()))
    return tensors, of_optimizers


def _head(tensor: Tensor) -> Tensor:
    """Return the first values of a sample of a tensor."""
    return sample(tensor)[:_HEAD].float()
