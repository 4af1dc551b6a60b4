"""Overloaded operators: why slicing in a loop is slow, and what each operator is short for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from showing import mixed, say, seconds, table
from torch import Tensor

ROWS, COLUMNS = 500, 10

# An operator, the function that it is short for, and arguments that both take.
OPERATORS: list[tuple[str, Callable[..., Tensor], Callable[..., Tensor], str]] = [
    ("-x", operator.neg, torch.neg, "x"),
    ("x + y", operator.add, torch.add, "xy"),
    ("x - y", operator.sub, torch.sub, "xy"),
    ("x * y", operator.mul, torch.mul, "xy"),
    ("x / y", operator.truediv, torch.div, "xy"),
    ("x // y", operator.floordiv, torch.floor_divide, "xy"),
    ("x % y", operator.mod, torch.remainder, "xy"),
    ("x ** y", operator.pow, torch.pow, "py"),
    ("x @ y", operator.matmul, torch.matmul, "xy"),
    ("abs(x)", operator.abs, torch.abs, "x"),
    ("x < y", operator.lt, torch.lt, "xy"),
    ("x <= y", operator.le, torch.le, "xy"),
    ("x > y", operator.gt, torch.gt, "xy"),
    ("x >= y", operator.ge, torch.ge, "xy"),
    ("x == y", operator.eq, torch.eq, "xy"),
    ("x != y", operator.ne, torch.ne, "xy"),
    ("~a", operator.invert, torch.logical_not, "a"),
    ("a & b", operator.and_, torch.logical_and, "ab"),
    ("a | b", operator.or_, torch.logical_or, "ab"),
    ("a ^ b", operator.xor, torch.logical_xor, "ab"),
]


def by_slices(x: Tensor) -> Tensor:
    """Adds the rows one by one; each `x[i]` is a call of its own."""
    total = torch.zeros_like(x[0])
    for i in range(x.shape[0]):
        total = total + x[i]
    return total


def by_unbind(x: Tensor) -> Tensor:
    """Adds the rows one by one, all taken out by one call."""
    total = torch.zeros_like(x[0])
    for row in x.unbind():
        total = total + row
    return total


def by_sum(x: Tensor) -> Tensor:
    """Adds the rows by one call."""
    return x.sum(0)


def error(add_rows: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> float:
    """The largest relative error of the sums of x in `dtype`, beside float64 of the same numbers."""
    rounded = x.to(dtype)
    exact = rounded.double().sum(0)
    return ((add_rows(rounded).double() - exact) / exact).abs().max().item()


def arguments(letters: str, dtype: torch.dtype) -> list[Tensor]:
    """Fresh tensors: x and y of any numbers, p of positive ones, a and b of truth values."""
    draw = {
        "x": lambda: torch.randn(4, 4, dtype=dtype),
        "y": lambda: torch.randn(4, 4, dtype=dtype),
        "p": lambda: torch.rand(4, 4, dtype=dtype) + 0.1,
        "a": lambda: torch.rand(4, 4) < 0.5,
        "b": lambda: torch.rand(4, 4) < 0.5,
    }
    return [draw[letter]() for letter in letters]


def dtype_in_a_region(
    function: Callable[..., Tensor], letters: str, dtype: torch.dtype
) -> torch.dtype:
    """What an operator gives inside a bfloat16 region."""
    with mixed():
        return function(*arguments(letters, dtype)).dtype


def main() -> None:
    """Prints times, errors, and the table of operators."""
    torch.manual_seed(0)
    x = torch.rand(ROWS, COLUMNS)
    ways = {"x[i] in a loop": by_slices, "x.unbind()": by_unbind, "x.sum(0)": by_sum}
    times = seconds(*(partial(way, x) for way in ways.values()))
    table(
        (f"{ROWS} rows added by", "time", "error in float32", "in float16", "in bfloat16"),
        *(
            (
                name,
                f"{time * 1e6:.0f} us",
                *(error(way, x, d) for d in (torch.float32, torch.float16, torch.bfloat16)),
            )
            for (name, way), time in zip(ways.items(), times, strict=True)
        ),
    )
    say(
        "In 16 bits a loop also rounds after every row. The one call adds in float32 inside "
        "and rounds once."
    )
    rows = []
    for text, symbol, function, letters in OPERATORS:
        dtypes = [dtype_in_a_region(symbol, letters, d) for d in (torch.float32, torch.bfloat16)]
        rows.append((text, f"torch.{function.__name__}", *dtypes))
    table(("in a region", "is short for", "of float32", "of bfloat16"), *rows)
    say("Of all operators a region lowers one, `@`. On a GPU `**` runs in float32.")


if __name__ == "__main__":
    main()
