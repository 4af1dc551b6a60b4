"""Recipes of the float8 rules: the format of each operand, and the elements that share a scale.

Invariants:

- these are plain values; no tensor is read;
- the three recipes are those of torchao (`tensorwise`, `rowwise` and `rowwise_with_gw_hp`). The tests compare the
  results with torchao's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

__all__ = [
    "BY_ROW",
    "BY_TENSOR",
    "E4M3",
    "E5M2",
    "EXACT_WEIGHT_GRADIENT",
    "POWERS_OF_TWO",
    "Recipe",
    "Scaling",
]

E4M3: Final = torch.float8_e4m3fn
"""4 exponent bits, 3 mantissa bits: values up to 448, no infinities."""
E5M2: Final = torch.float8_e5m2
"""5 exponent bits, 2 mantissa bits: values up to 57344. For gradients, which have a wider range."""


class Scaling(NamedTuple):
    """The format of a quantised matrix, and the elements that share a scale.

    Attributes:
        dtype: the 8-bit dtype.
        dim: the dimension along which elements share a scale: -1 for one scale per row, 0 for one per column, None for
            one per matrix.
        powers_of_two: round scales down to powers of two, so that scaling is exact.
    """

    dtype: torch.dtype
    dim: int | None
    powers_of_two: bool

    @property
    def transposed(self) -> Scaling:
        """Return the scaling of the transposed matrix."""
        return self if self.dim is None else Scaling(self.dtype, -1 - self.dim, self.powers_of_two)

    def __str__(self) -> str:
        shared = {None: "one scale", -1: "a scale a row", 0: "a scale a column"}[self.dim]
        return f"{_NAMES[self.dtype]} with {shared}"


_NAMES: Final = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
_WITHOUT_NEGATIVE_ZERO: Final = {E4M3: torch.float8_e4m3fnuz, E5M2: torch.float8_e5m2fnuz}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats and scales with which `x @ w.T` and its gradients are computed in 8 bits.

    Attributes:
        by_row: use one scale per row of `x` and of `w` in the forward product; otherwise one per matrix.
        powers_of_two: round scales down to powers of two.
        gradient: the format of the incoming gradient.
        exact_weight_gradient: compute the gradient of `w` from the 16-bit operands. The gradient of `x` is then
            computed with one scale for all of `w`.
        without_negative_zero: use the `fnuz` formats of AMD's MI300 GPUs.
    """

    by_row: bool = False
    powers_of_two: bool = False
    gradient: torch.dtype = E5M2
    exact_weight_gradient: bool = False
    without_negative_zero: bool = False

    @property
    def rule(self) -> str:
        """The name of the rule that computes with this recipe."""
        if self.exact_weight_gradient:
            return "float8_hp_grad"
        if self.by_row:
            return "float8_rowwise"
        return "float8_pow2" if self.powers_of_two else "float8"

    @property
    def input(self) -> Scaling:
        """Scaling of `x` (m, k) in `x @ w.T`."""
        return self._scaling(E4M3, -1)

    @property
    def weight(self) -> Scaling:
        """Scaling of `w` (n, k) in `x @ w.T`."""
        return self._scaling(E4M3, -1)

    @property
    def gradient_for_input(self) -> Scaling:
        """Scaling of `g` (m, n) in `g @ w`."""
        return self._scaling(self.gradient, -1)

    @property
    def weight_for_input(self) -> Scaling:
        """Scaling of `w` (n, k) in `g @ w`."""
        return self._scaling(E4M3, None if self.exact_weight_gradient else 0)

    @property
    def gradient_for_weight(self) -> Scaling:
        """Scaling of `g` (m, n) in `g.T @ x`."""
        return self._scaling(self.gradient, 0)

    @property
    def input_for_weight(self) -> Scaling:
        """Scaling of `x` (m, k) in `g.T @ x`."""
        return self._scaling(E4M3, 0)

    def _scaling(self, dtype: torch.dtype, dim: int | None) -> Scaling:
        if self.without_negative_zero:
            dtype = _WITHOUT_NEGATIVE_ZERO[dtype]
        return Scaling(dtype, dim if self.by_row else None, self.powers_of_two)


BY_TENSOR: Final = Recipe()
POWERS_OF_TWO: Final = Recipe(powers_of_two=True)
BY_ROW: Final = Recipe(by_row=True, powers_of_two=True, gradient=E4M3)
EXACT_WEIGHT_GRADIENT: Final = Recipe(
    by_row=True, powers_of_two=True, gradient=E4M3, exact_weight_gradient=True
)
