"""Random tensors and the table that sample builders write themselves into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Build", "Builders", "Draw"]


class Draw:
    """Random float32 tensors from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self._generator)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform values."""
        return torch.rand(shape, generator=self._generator) * (high - low) + low

    def below(self, bound: int, *shape: int) -> Tensor:
        """Integers from 0 to `bound - 1`."""
        return torch.randint(bound, shape, generator=self._generator)

    def signs(self, *shape: int) -> Tensor:
        """1 and -1 as floats."""
        return self.below(2, *shape) * 2.0 - 1

    def permutation(self, n: int) -> Tensor:
        """A permutation of 0 to n - 1."""
        return torch.randperm(n, generator=self._generator)

    def positive_definite(self, *shape: int) -> Tensor:
        """Symmetric matrices of the shape (..., n, n) with eigenvalues from 1 up."""
        a = self(*shape)
        return a @ a.mT / shape[-1] + torch.eye(shape[-1])

    def well_conditioned(self, *shape: int) -> Tensor:
        """Matrices of the shape (..., n, n) far from singular."""
        return self(*shape) / shape[-1] + 2 * torch.eye(shape[-1])


Build = Callable[[Draw], list[tuple[Any, ...]]]
"""Draws the positional arguments of some calls; a dict at the end holds keywords."""


class Builders(dict[str, Build]):
    """Overload, as in `softmax.int`, -> what builds its samples."""

    def add(self, names: str, build: Build) -> None:
        """Set the builder of one or more overloads, separated by spaces."""
        for name in names.split():
            assert name not in self, f"two builders for {name}"
            self[name] = build

    def add_all(self, builds: dict[str, Build]) -> None:
        """`add` for each item."""
        for names, build in builds.items():
            self.add(names, build)
