"""Products among operations, whatever their names: they multiply two tensors, and add the results up.

An operation is a product of two tensors if

- a value of its result depends on several elements of both, but is no sum of a function of each;
- an element of both is used for several values of the result. So a kernel reads it once for several multiplications,
  and can be faster in 16 bits. A dot product and the weight of a norm are not used so.

All of this is measured: some elements are changed, and the results compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from precast._internal.pytree import tensors_in

__all__ = ["has_product"]

_SEVERAL: Final = 3
_Run = Callable[[Sequence[Tensor]], object]


def has_product(run: _Run, tensors: Sequence[Tensor]) -> bool:
    """Return True if a function of floating-point tensors multiplies two of them, with sums."""
    plain = _values(run, tensors)
    if plain.numel() < _SEVERAL or not torch.equal(plain, _values(run, tensors)):
        return False  # the latter draws random numbers
    return any(
        _interact(run, tensors, pair, plain)
        and all(_is_summed_and_reused(run, tensors, i, plain) for i in pair)
        for pair in itertools.combinations(range(len(tensors)), 2)
    )


def _interact(run: _Run, tensors: Sequence[Tensor], pair: tuple[int, int], plain: Tensor) -> bool:
    """Return True if the result is no sum of a function of each tensor of a pair."""

    def scaled(*places: int) -> Tensor:
        return _values(run, [t * 1.5 if i in places else t for i, t in enumerate(tensors)])

    a, b = pair
    return bool(_differ(scaled(a, b) + plain, scaled(a) + scaled(b)).any())


def _is_summed_and_reused(run: _Run, tensors: Sequence[Tensor], place: int, plain: Tensor) -> bool:
    """Return True if a value depends on several elements of a tensor, and an element is used for several values."""
    count = tensors[place].numel()
    if count < _SEVERAL:
        return False
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))

    def changed(elements: Tensor) -> Tensor:
        change = torch.zeros(count).index_fill_(0, elements, 1.0).view(tensors[place].shape)
        changes = {place: tensors[place] + change.to(tensors[place].dtype)}
        return _differ(_values(run, [changes.get(i, t) for i, t in enumerate(tensors)]), plain)

    # A value that every part changes depends on an element of each.
    parts = [changed(part) for part in order.chunk(_SEVERAL)]
    return bool(torch.stack(parts).all(0).any()) and int(changed(order[:1]).sum()) >= _SEVERAL


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return ~torch.isclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def _values(run: _Run, tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of the first floating-point tensor of a result."""
    results = [t for t in tensors_in(run(tensors)) if t.is_floating_point()]
    return results[0].double().flatten() if results else torch.empty(0)
