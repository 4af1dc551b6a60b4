"""Broadcasting that saves: one vector joined to every step of a sequence, by tiling and by adding.

A linear layer of [sequence, vector] is the sum of two linear layers, one of each. The second form
never builds the joined tensor, and multiplies with the vector once, not once a step.
"""

from __future__ import annotations

from functools import partial

import torch
from showing import Region, mixed, plain, say, seconds, table
from torch import Tensor, nn
from torch.nn import functional as F

from precast.cli.demo.example import peak_bytes

BATCH, STEPS, LONG, SHORT, UNITS = 16, 128, 64, 192, 64


class Tiled(nn.Module):
    """Repeats the vector for each step, concatenates, and multiplies once."""

    def __init__(self, long: int, short: int, units: int) -> None:
        super().__init__()
        self.joined = nn.Linear(long + short, units)

    def forward(self, sequence: Tensor, vector: Tensor) -> Tensor:
        """(batch, steps, long) and (batch, short) -> (batch, steps, units)."""
        tiled = vector[:, None].expand(-1, sequence.shape[1], -1)
        result: Tensor = self.joined(torch.cat([sequence, tiled], dim=-1))
        return result


class Merge(nn.Module):
    """Multiplies each by itself, and lets broadcasting add."""

    def __init__(self, long: int, short: int, units: int) -> None:
        super().__init__()
        self.of_sequence = nn.Linear(long, units)
        self.of_vector = nn.Linear(short, units, bias=False)

    def forward(self, sequence: Tensor, vector: Tensor) -> Tensor:
        """(batch, steps, long) and (batch, short) -> (batch, steps, units)."""
        result: Tensor = self.of_sequence(sequence) + self.of_vector(vector)[:, None]
        return result


def same_weights(tiled: Tiled, merge: Merge) -> None:
    """Copies the columns of the one matrix into the two."""
    long = merge.of_sequence.in_features
    with torch.no_grad():
        merge.of_sequence.weight.copy_(tiled.joined.weight[:, :long])
        merge.of_vector.weight.copy_(tiled.joined.weight[:, long:])
        merge.of_sequence.bias.copy_(tiled.joined.bias)


def step(model: nn.Module, region: Region, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Forward and backward; returns the output."""
    with region():
        output = model(*batch)
        loss = F.mse_loss(output, torch.zeros_like(output))
    loss.backward()
    return output.detach()  # type: ignore[no-any-return]


def peak(model: nn.Module, region: Region, batch: tuple[Tensor, Tensor]) -> float:
    """Return the peak of tensor memory in a step, with weights, gradients and the batch, in MiB."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, region, batch)  # PyTorch allocates some memory once
    return peak_bytes(partial(step, model, region, batch), model, optimizer, batch) / 2**20


def main() -> None:
    """Prints that both give the same, and what each needs."""
    torch.manual_seed(0)
    tiled, merge = Tiled(LONG, SHORT, UNITS), Merge(LONG, SHORT, UNITS)
    same_weights(tiled, merge)
    batch = torch.randn(BATCH, STEPS, LONG), torch.randn(BATCH, SHORT)
    rows = []
    for name, region in (("float32", plain), ("bfloat16 region", mixed)):
        difference = (step(tiled, region, batch) - step(merge, region, batch)).abs().max().item()
        times = seconds(*(partial(step, model, region, batch) for model in (tiled, merge)))
        peaks = [peak(model, region, batch) for model in (tiled, merge)]
        rows.append((name, difference, *peaks, peaks[0] / peaks[1], times[0] / times[1]))
    joined = BATCH * STEPS * (LONG + SHORT) * 4 / 2**20
    print(f"sequence {tuple(batch[0].shape)}, vector {tuple(batch[1].shape)}, {UNITS} units")
    print(f"joined by tiling: {joined:g} MiB of float32\n")
    table(
        ("a step in", "difference", "tiled MiB", "merged MiB", "memory", "time"),
        *((*row[:-2], *(f"{ratio:.2f}x" for ratio in row[-2:])) for row in rows),
    )
    say(
        "memory and time: tiled beside merged; above 1, the merge needs less. A region adds "
        "16-bit copies of what comes in, which one layer does not earn back. Its two forms "
        "round in other places, and differ by that."
    )


if __name__ == "__main__":
    main()
