"""Tensors and NumPy: the same products and broadcasts, and what happens on the way there and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from showing import Region, mixed, plain, say, table
from torch import Tensor

Array = NDArray[np.float64]


def product(a: Array, b: Array, region: Region) -> Tensor:
    """The matrix product of two NumPy arrays, computed by PyTorch from float32 copies."""
    with region():
        return torch.from_numpy(a).float() @ torch.from_numpy(b).float()


def broadcast(column: Array, row: Array, region: Region) -> Tensor:
    """The sum of each element of a column, (n, 1), with each of a row, (m,): n times m."""
    with region():
        return torch.from_numpy(column).float() + torch.from_numpy(row).float()


def largest_error(result: Tensor, exact: Array) -> float:
    """The distance from NumPy's result in float64; `.float()` because NumPy has no bfloat16."""
    return float(np.abs(result.float().numpy() - exact).max())


def product_dtypes(array: Array) -> dict[str, torch.dtype]:
    """How an array came to PyTorch, and what a product with it gives in a region."""
    ways = {
        "torch.from_numpy(array)": torch.from_numpy(array),
        "torch.tensor(array)": torch.tensor(array),
        "torch.from_numpy(array).float()": torch.from_numpy(array).float(),
        "torch.tensor(array.tolist())": torch.tensor(array.tolist()),
    }
    with mixed():
        return {way: (tensor @ tensor.T).dtype for way, tensor in ways.items()}


def shares_memory(array: Array) -> dict[str, bool]:
    """Which tensors change when the array does."""
    shared, copied = torch.from_numpy(array), torch.from_numpy(array).float()
    array += 1
    return {
        "torch.from_numpy(array)": bool(np.array_equal(shared.numpy(), array)),
        "torch.from_numpy(array).float()": np.allclose(copied.numpy(), array),
    }


def back_to_numpy(tensor: Tensor) -> str:
    """The dtype that NumPy gets, or PyTorch's error."""
    try:
        return str(tensor.numpy().dtype)
    except TypeError as error:
        return str(error)


def main() -> None:
    """Prints errors against float64, and what survives the way to PyTorch and back."""
    numbers = np.random.default_rng(0)
    a, b = numbers.normal(size=(30, 40)), numbers.normal(size=(40, 50))
    column, row = numbers.normal(size=(4, 1)), numbers.normal(size=3)
    table(
        ("largest error against NumPy", "float32", "bfloat16 region"),
        (
            "a @ b, 40 products a sum",
            *(largest_error(product(a, b, r), a @ b) for r in (plain, mixed)),
        ),
        (
            "column + row, (4, 1) + (3,)",
            *(largest_error(broadcast(column, row, r), column + row) for r in (plain, mixed)),
        ),
    )
    say("A region rounds the product's inputs to bfloat16 and leaves the sum alone.")
    table(
        ("an array of float64, in a region", "tensor @ tensor.T"),
        *product_dtypes(a).items(),
    )
    say("NumPy makes float64, which a region leaves alone.")
    table(("memory", "shared with the array"), *shares_memory(a).items())
    result = product(a, b, mixed)
    table(
        ("back to NumPy", "gives"),
        ("(a @ b).numpy()", back_to_numpy(product(a, b, plain))),
        ("  the same in a region", back_to_numpy(result)),
        ("  with .float() before .numpy()", back_to_numpy(result.float())),
    )


if __name__ == "__main__":
    main()
