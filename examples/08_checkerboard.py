"""The checkerboard: a scripted network learns an image, in float32 and in mixed precision, side by side.

`precast demo` is the long version, with a picture.
"""

from __future__ import annotations

import torch
from showing import table
from torch import Tensor

from precast.cli.demo.example import DemoResult, demo_task, train_both

SIZE, STEPS = 16, 100


def drawing(image: Tensor) -> list[str]:
    """An image in characters, a row of fields as one line: dark, middling, bright."""
    fields = torch.nn.functional.adaptive_avg_pool2d(image, 8)[0, 0]
    return [
        "".join(" .:#"[min(3, max(0, int(4 * value)))] * 2 for value in row)
        for row in fields.tolist()
    ]


def train() -> DemoResult:
    """Train the network in float32 and in bfloat16 from the same weights."""
    task, dtype, _ = demo_task("cpu", size=SIZE)
    return train_both(task, dtype, STEPS)


def main() -> None:
    """Print losses, times, and the images."""
    result = train()
    runs = (result.float32, result.mixed)
    table(
        ("trained in", "first loss", f"after {STEPS} steps", "a step"),
        *(
            (run.dtype, run.losses[0], run.losses[-1], f"{1e3 * run.seconds:.1f} ms")
            for run in runs
        ),
    )
    images = {"target": result.task.image, **{run.dtype: run.output for run in runs}}
    print("   ".join(f"{name:16}" for name in images).rstrip())
    for line in zip(*map(drawing, images.values()), strict=True):
        print("   ".join(line).rstrip())


if __name__ == "__main__":
    main()
