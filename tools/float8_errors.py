"""How much a product of matrices loses in 8 and in 16 bits, by the length of its sums; it prints the table of a page.

    python -m tools.float8_errors

The error is that of the whole product, against the product of the same float32 operands in float64:
`norm(got - exact) / norm(exact)`. Operands are 64 rows of normal numbers. In the second table there is one more row in
`x`, of smaller numbers, as a token may be whose activations are small: the error is that row's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from precast.engine.float8_kernels import RECIPES
from precast.policy.policy import Rule
from precast.weights.float8.formats import Recipe
from precast.weights.float8.linear import linear
from precast.weights.float8.support import Way

__all__ = ["by_length", "by_size_of_a_row", "error", "operands"]

LENGTHS: Final = (64, 256, 1024, 4096, 16384)
_ROWS: Final = 64
SIZES: Final = (1.0, 1e-2, 1e-4, 1e-5, 1e-6)
_LENGTH: Final = 1024
_Product = Callable[[Tensor, Tensor], Tensor]


def operands(length: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`x` and `w` of `x @ w.T`, both (64, length)."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(_ROWS, length, generator=generator) for _ in range(2))
    return x, w


def error(product: _Product, x: Tensor, w: Tensor, row: slice = slice(None)) -> float:
    """The relative error of a product, or of one row of it."""
    exact = (x.double() @ w.double().t())[row]
    found: float = ((product(x, w).double()[row] - exact).norm() / exact.norm()).item()
    return found


def by_length() -> str:
    """The errors of all rules, by the length of the sums."""
    rows = {}
    for length in LENGTHS:
        x, w = operands(length)
        rows[str(length)] = [error(product, x, w) for product in _PRODUCTS.values()]
    return _table("length of the sums", rows)


def by_size_of_a_row() -> str:
    """The errors of one row, by how large its numbers are beside those of the others."""
    rows = {}
    for size in SIZES:
        x, w = operands(_LENGTH)
        x[-1] *= size
        last = slice(-1, None)
        rows[f"{size:g}"] = [error(product, x, w, last) for product in _PRODUCTS.values()]
    return _table("size of the row", rows)


def _table(head: str, rows: dict[str, list[float]]) -> str:
    lines = [f"| {head} | " + " | ".join(f"`{name}`" for name in _PRODUCTS) + " |"]
    lines.append("|---" * (len(_PRODUCTS) + 1) + "|")
    for name, errors in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{each:.1%}" for each in errors) + " |")
    return "\n".join(lines)


def _in_8_bits(recipe: Recipe) -> _Product:
    return lambda x, w: linear(x.bfloat16(), w, recipe, Way.EMULATED)


def _in_16_bits(dtype: torch.dtype) -> _Product:
    return lambda x, w: x.to(dtype) @ w.to(dtype).t()


_PRODUCTS: Final[dict[str, _Product]] = {
    "bfloat16": _in_16_bits(torch.bfloat16),
    **{
        str(rule): _in_8_bits(RECIPES[rule])
        for rule in (Rule.FLOAT8, Rule.FLOAT8_POW2, Rule.FLOAT8_ROWWISE)
    },
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"{by_length()}\n\n{by_size_of_a_row()}\n")
