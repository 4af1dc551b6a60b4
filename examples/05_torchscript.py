"""TorchScript and vectorising: one gather as a loop, scripted, and vectorised; a scripted model in a region."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from showing import Region, mixed, plain, say, seconds, table
from torch import Tensor, nn
from torch.nn import functional as F


def gather_by_loop(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of each sample that its indices name.

    (batch, n, ...) and (batch, k) -> (batch, k, ...).
    """
    rows = []
    for i in range(x.shape[0]):
        rows.append(x[i].index_select(0, indices[i]))
    return torch.stack(rows)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The same in one call: each sample's number, made where x is, beside its indices."""
    samples = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[samples, indices]


def script(what: Any) -> Any:
    """`torch.jit.script`, quietly: it is deprecated, and programs of today still have it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        return torch.jit.script(what)


class Perceptron(nn.Module):
    """Two layers, with weights of its own."""

    def __init__(self, inside: int, hidden: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(hidden, inside) / inside**0.5)
        self.second = nn.Parameter(torch.randn(outside, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inside) -> (batch, outside)."""
        return F.linear(F.linear(x, self.first).relu(), self.second)


def outputs_and_gradients(
    model: nn.Module, x: Tensor, region: Region
) -> tuple[Tensor, list[Tensor]]:
    """What a model computes, and the gradients of the sum of its squares."""
    with region():
        output = model(x)
        loss = output.float().square().sum()
    return output, list(torch.autograd.grad(loss, list(model.parameters())))


def main() -> None:
    """Prints that the gathers are equal and what each costs; then the scripted model beside the other."""
    torch.manual_seed(0)
    x, indices = torch.randn(256, 20, 8), torch.randint(20, (256, 5))
    gathers: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "loop": gather_by_loop,
        "loop, scripted": script(gather_by_loop),
        "vectorised": gather,
    }
    times = seconds(*(partial(way, x, indices) for way in gathers.values()))
    with mixed():
        found = [way(x.bfloat16(), indices) for way in gathers.values()]
    table(
        ("batch gather", "time", "as the loop", "in a region, of bfloat16"),
        *(
            (
                name,
                f"{time * 1e3:.3f} ms",
                "equal" if torch.equal(way(x, indices), gather_by_loop(x, indices)) else "not",
                lower.dtype,
            )
            for (name, way), time, lower in zip(gathers.items(), times, found, strict=True)
        ),
    )
    model = Perceptron(8, 32, 4)
    scripted = script(model)
    rows = []
    for name, region in (("float32", plain), ("bfloat16 region", mixed)):
        for _ in range(3):  # TorchScript looks at the first calls, and compiles what it saw
            outputs, gradients = outputs_and_gradients(scripted, x[:, 0], region)
        expected, of_model = outputs_and_gradients(model, x[:, 0], region)
        worst = max((a - b).abs().max().item() for a, b in zip(gradients, of_model, strict=True))
        rows.append((name, outputs.dtype, (outputs - expected).abs().max().item(), worst))
    table(("a scripted model in", "output", "from the model", "its gradients"), *rows)
    say("The region reaches the operations of a scripted model: nothing to change in it.")


if __name__ == "__main__":
    main()
