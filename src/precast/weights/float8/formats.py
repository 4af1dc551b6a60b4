"""What a float8 rule means in numbers: the formats of the operands, how they share scales, and which product is which.

Invariants:

- these are values; nothing here looks at tensors;
- the three kinds of scales and formats are those of torchao's recipes `tensorwise`, `rowwise` and `rowwise_with_gw_hp`,
  whose numbers the tests compare with these.
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
"""4 bits of exponent, 3 of mantissa: up to 448, no infinities."""
E5M2: Final = torch.float8_e5m2
"""5 bits of exponent, 2 of mantissa: up to 57344; for gradients, which differ more in size."""


class Scaling(NamedTuple):
    """How a matrix becomes 8-bit numbers and scales.

    Attributes:
        dtype: the 8-bit dtype.
        dim: the dimension along which numbers share a scale: -1 gives each row its own, 0 each column; None gives the
            whole matrix one.
        powers_of_two: whether scales are rounded down to powers of two, so that scaling rounds no number.
    """

    dtype: torch.dtype
    dim: int | None
    powers_of_two: bool

    @property
    def transposed(self) -> Scaling:
        """The same for the transposed matrix."""
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
    """How `x @ w.T` and its gradients are computed in 8 bits.

    Attributes:
        by_row: whether the operands of forward have a scale for each row (of `x`, and of `w`), or one for all.
        powers_of_two: whether scales are powers of two.
        gradient: the format of the gradient that comes from above.
        exact_weight_gradient: whether the gradient of `w` is computed from the 16-bit operands; the gradient of `x` is
            then computed with one scale for all of `w`.
        without_negative_zero: whether the formats are those of GPUs of AMD's MI300 series, which end in `fnuz`.
    """

    by_row: bool = False
    powers_of_two: bool = False
    gradient: torch.dtype = E5M2
    exact_weight_gradient: bool = False
    without_negative_zero: bool = False

    @property
    def input(self) -> Scaling:
        """That of `x` (m, k) in `x @ w.T`."""
        return self._scaling(E4M3, -1)

    @property
    def weight(self) -> Scaling:
        """That of `w` (n, k) in `x @ w.T`."""
        return self._scaling(E4M3, -1)

    @property
    def gradient_for_input(self) -> Scaling:
        """That of `g` (m, n) in `g @ w`."""
        return self._scaling(self.gradient, -1)

    @property
    def weight_for_input(self) -> Scaling:
        """That of `w` (n, k) in `g @ w`."""
        return self._scaling(E4M3, None if self.exact_weight_gradient else 0)

    @property
    def gradient_for_weight(self) -> Scaling:
        """That of `g` (m, n) in `g.T @ x`."""
        return self._scaling(self.gradient, 0)

    @property
    def input_for_weight(self) -> Scaling:
        """That of `x` (m, k) in `g.T @ x`."""
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
