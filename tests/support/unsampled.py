"""Writes that the samples of a held copy do not show, so that only the comparison of whole weights finds them."""

from __future__ import annotations

import torch
from torch import Tensor

from precast.weights import held

__all__ = ["write_unsampled"]


def write_unsampled(weight: Tensor, value: float = 100.0) -> None:
    """Write one value of a weight through `.data`, at a position that no copy has sampled."""
    copies = held.held_parameters[id(weight)].copies.values()
    assert copies
    elements = weight.data.view(-1)
    for position in range(elements.numel()):
        before = elements[position].clone()
        elements[position] = value
        if all(copy.has_sampled_values(weight, compares_all=True) for copy in copies):
            assert torch.count_nonzero(before != elements[position])
            return
        elements[position] = before
    raise AssertionError("every value is sampled")
