"""The edges of each format, found by trying, and what x * y / y gives beyond them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from showing import say, table
from torch import Tensor, nn
from torch.nn import functional as F

import precast

FORMATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)


def rounded(value: float, dtype: torch.dtype) -> float:
    """The value of `dtype` that stands for a number."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).double().item()


@dataclass(frozen=True)
class Limits:
    """What a format holds: all positive, as plain numbers."""

    largest: float
    smallest: float
    smallest_normal: float
    epsilon: float


def measured(dtype: torch.dtype) -> Limits:
    """Looks for the limits with nothing but rounding.

    Epsilon: the step from 1 to the next number. The largest number: doubled while it
    stays what it is, then each next bit is added that stays. The smallest: halved until
    it is zero. The smallest normal one: the last that is told apart from a number that
    is larger by one part in 1/epsilon.
    """
    epsilon = 1.0
    while rounded(1 + epsilon / 2, dtype) == 1 + epsilon / 2:
        epsilon /= 2
    largest = 1.0
    while rounded(2 * largest, dtype) == 2 * largest:
        largest *= 2
    bit = largest / 2
    while rounded(largest + bit, dtype) == largest + bit:
        largest, bit = largest + bit, bit / 2
    smallest = smallest_normal = 1.0
    while rounded(smallest / 2, dtype) == smallest / 2:
        smallest /= 2
        if rounded(smallest * (1 + epsilon), dtype) == smallest * (1 + epsilon):
            smallest_normal = smallest
    return Limits(largest, smallest, smallest_normal, epsilon)


def there_and_back(x: float, y: float, dtype: torch.dtype) -> float:
    """X * y / y, rounded to `dtype` after each operation: what hardware of that format would give.

    float8 has no arithmetic of its own in PyTorch, so it is computed in float64 and then rounded.
    """
    x, y = rounded(x, dtype), rounded(y, dtype)
    product = rounded(x * y, dtype)
    quotient = torch.tensor(product, dtype=torch.float64) / y  # a float would raise at 0 / 0
    return rounded(quotient.item(), dtype)


def square_of_a_layer(x: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """The mean square of what a layer gives in a region, written in three ways."""
    layer = nn.Linear(x.shape[1], 1, bias=False)
    nn.init.ones_(layer.weight)
    with torch.no_grad(), precast.autocast("cpu", dtype=dtype):
        output = layer(x)
        wide = output.float()
        return {
            "(y * y).mean()": (output * output).mean().item(),
            "(y.float() * y.float()).mean()": (wide * wide).mean().item(),
            "F.mse_loss(y, 0)": F.mse_loss(output, torch.zeros_like(output)).item(),
        }


def main() -> None:
    """Prints the limits, the edges, and what a region does about them."""
    found = {dtype: measured(dtype) for dtype in FORMATS}
    table(
        ("measured", "largest", "smallest normal", "smallest", "1 to the next"),
        *((d, x.largest, x.smallest_normal, x.smallest, x.epsilon) for d, x in found.items()),
    )
    table(
        ("1 * y / y with y =", *("smallest", "smallest / 2", "largest", "4 x largest")),
        *(
            (
                d,
                *(
                    there_and_back(1, y, d)
                    for y in (x.smallest, x.smallest / 2, x.largest, 4 * x.largest)
                ),
            )
            for d, x in found.items()
        ),
    )
    say(
        "Below the smallest number y is 0, and 0 / 0 is nan. Beyond the largest it is inf, and "
        "inf / inf is nan. float8_e4m3fn has no infinity: what is beyond it becomes nan in PyTorch "
        "2.11, and its largest number in 2.13. No step says so."
    )
    x = torch.full((4, 4), 100.0)
    columns = [square_of_a_layer(x, dtype) for dtype in (torch.float16, torch.bfloat16)]
    table(
        ("y = layer(x) = 400, in a region of", "float16", "bfloat16"),
        *((way, *(column[way] for column in columns)) for way in columns[0]),
    )
    say(
        "A region has no rule for `*`: it runs in the 16 bits that the layer gave, and 160000 "
        "is beyond float16. Losses have one: they run in float32."
    )


if __name__ == "__main__":
    main()
