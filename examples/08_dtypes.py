"""What `+` and `@` give for each mixture of inputs, outside a region, in PyTorch's, and in precast's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations_with_replacement

import torch
from showing import Region, say, table
from torch import Tensor

import precast

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
REGIONS: dict[str, Region] = {
    "no region": nullcontext,
    "torch.autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "precast": lambda: precast.autocast("cpu", dtype=torch.bfloat16),
}
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"+": operator.add, "@": operator.matmul}


def result(
    operation: Callable[[Tensor, Tensor], Tensor], a: torch.dtype, b: torch.dtype, region: Region
) -> torch.dtype | None:
    """The dtype that an operation gives for inputs of two dtypes; None where PyTorch raises."""
    x, y = torch.randn(4, 4).to(a), torch.randn(4, 4).to(b)
    try:
        with region():
            return operation(x, y).dtype
    except RuntimeError:
        return None


def cell(dtype: torch.dtype | None) -> object:
    """How the table says it."""
    return dtype or "error"


def main() -> None:
    """Prints a table for each operator."""
    for symbol, operation in OPERATORS.items():
        rows = [
            (
                f"{str(a).removeprefix('torch.')} {symbol} {str(b).removeprefix('torch.')}",
                *(cell(result(operation, a, b, region)) for region in REGIONS.values()),
            )
            for a, b in combinations_with_replacement(DTYPES, 2)
        ]
        table((f"a {symbol} b", *REGIONS), *rows)
    say(
        "`+` has no rule: it promotes to the wider input, in a region or not. `@` is lowered. "
        "A region never rounds float64: beside another dtype PyTorch then raises, and precast "
        "promotes."
    )


if __name__ == "__main__":
    main()
