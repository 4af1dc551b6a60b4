"""The checkerboard: a scripted network learns an image, in float32 and in mixed precision, side by side.

`precast demo checkerboard` is the long version, with a picture and a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from showing import Region, mixed, plain, table
from torch import Tensor, nn

import precast
from precast.demo.checkerboard import Checkerboard
from precast.demo.steps import float32_step, mixed_step

SIZE, STEPS = 16, 100


@dataclass(frozen=True)
class Learnt:
    """Losses of all steps, the image that was learnt, (1, 1, size, size), and the shortest step's time."""

    losses: list[float]
    image: Tensor
    seconds: float


def learn(task: Checkerboard, dtype: torch.dtype, seed: int = 0) -> Learnt:
    """Trains from the weights of `seed`: float32 without a region, bfloat16 in one."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step: Callable[[tuple[Tensor, Tensor]], Tensor]
    if dtype == torch.float32:
        step = partial(float32_step, model, optimizer, task.loss)
    else:
        scaler = precast.GradScaler("cpu", enabled=False)  # bfloat16 needs none
        mixed_steps = partial(mixed_step, model, optimizer, task.loss)
        step = partial(mixed_steps, dtype=dtype, scaler=scaler)
    losses, times = [], []
    for number in range(STEPS):
        start = perf_counter()
        losses.append(step(task.batch(number)).item())
        times.append(perf_counter() - start)
    region = plain if dtype == torch.float32 else mixed
    return Learnt(losses, look(model, task, region), min(times))


def look(model: nn.Module, task: Checkerboard, region: Region) -> Tensor:
    """What the network draws, float32."""
    model.eval()
    with torch.no_grad(), region():
        image: Tensor = model(task.examples)
    return image.float()


def drawn(image: Tensor) -> list[str]:
    """An image in characters, a row of fields as one line: dark, middling, bright."""
    fields = torch.nn.functional.adaptive_avg_pool2d(image, 8)[0, 0]
    return [
        "".join(" .:#"[min(3, max(0, int(4 * value)))] * 2 for value in row)
        for row in fields.tolist()
    ]


def main() -> None:
    """Prints losses, times, and the images."""
    task = Checkerboard(SIZE, torch.device("cpu"))
    runs = {dtype: learn(task, dtype) for dtype in (torch.float32, torch.bfloat16)}
    table(
        ("trained in", "first loss", f"after {STEPS} steps", "a step"),
        *((d, r.losses[0], r.losses[-1], f"{1e3 * r.seconds:.1f} ms") for d, r in runs.items()),
    )
    images = {
        "target": task.target,
        **{str(d).removeprefix("torch."): r.image for d, r in runs.items()},
    }
    print("   ".join(f"{name:16}" for name in images).rstrip())
    for line in zip(*map(drawn, images.values()), strict=True):
        print("   ".join(line).rstrip())


if __name__ == "__main__":
    main()
