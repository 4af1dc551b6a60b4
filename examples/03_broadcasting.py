"""Broadcasting that nobody asked for: wrong numbers without an error, in every precision."""

from __future__ import annotations

import torch
from showing import Region, mixed, plain, say, table
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 100


def silent_sum(dtype: torch.dtype) -> Tensor:
    """All of a column, (2, 1), plus a row, (2,): it has four elements, not two."""
    column = torch.tensor([[1.0], [2.0]], dtype=dtype)
    row = torch.tensor([1.0, 2.0], dtype=dtype)
    return (column + row).sum()


def sum_over_the_columns(dtype: torch.dtype) -> Tensor:
    """The same with the dimension named: two numbers, where one was expected, show the mistake."""
    column = torch.tensor([[1.0], [2.0]], dtype=dtype)
    row = torch.tensor([1.0, 2.0], dtype=dtype)
    return (column + row).sum(0)


def slope_found(target_is_a_column: bool, region: Region, seed: int = 0) -> float:
    """What a linear layer, whose output is (batch, 1), learns about y = 5 x.

    With targets of shape (batch,) the difference has shape (batch, batch): each output is compared
    with every target, so the best it can learn is their mean.
    """
    torch.manual_seed(seed)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(STEPS):
        x = torch.rand(64, 1) * 2 - 1
        target = 5 * x if target_is_a_column else 5 * x[:, 0]
        optimizer.zero_grad()
        with region():
            loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    return model.weight.item()


def refused(output: Tensor, target: Tensor) -> str:
    """What does see it: a loss of PyTorch's that insists on one shape, or sizes that are named."""
    try:
        F.binary_cross_entropy_with_logits(output, target)
    except ValueError as error:
        return str(error)
    return "nothing"


def main() -> None:
    """Prints the silent sums, and the model that does not learn."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    table(
        ("[[1], [2]] + [1, 2]", *dtypes),
        ("sum()", *(silent_sum(dtype).item() for dtype in dtypes)),
        ("sum(0)", *(sum_over_the_columns(dtype).tolist() for dtype in dtypes)),
    )
    table(
        ("slope learnt from y = 5 x", "float32", "bfloat16 region"),
        *(
            (f"target {shape}", *(slope_found(column, region) for region in (plain, mixed)))
            for shape, column in (("(64, 1)", True), ("(64,)", False))
        ),
    )
    say("A region looks at dtypes alone: no precision makes a wrong shape visible.")
    say(f"A loss that insists on one shape does: {refused(torch.zeros(64, 1), torch.zeros(64))}")


if __name__ == "__main__":
    main()
