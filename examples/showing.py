"""What all programs here share: tables in 80 columns, times taken in turns, and the region they compare with."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

import precast

__all__ = ["Region", "mixed", "plain", "say", "seconds", "short", "table"]

torch.set_num_threads(1)  # tensors are tiny here: threads would wait longer than they compute

Region = Callable[[], AbstractContextManager[object]]
"""What is entered around the part of a program that mixed precision changes."""

plain: Region = nullcontext
"""No region: everything runs in the dtype that it has."""


def mixed() -> AbstractContextManager[object]:
    """A region in bfloat16, which needs no gradient scaler. On a GPU: `precast.autocast("cuda")`."""
    return precast.autocast("cpu", dtype=torch.bfloat16)


def table(header: Sequence[object], *rows: Sequence[object]) -> None:
    """Prints rows under a header: the first column to the left, the others to the right."""
    lines = [[short(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        others = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join([line[0].ljust(widths[0]), *others]).rstrip())
    print()


def say(text: str) -> None:
    """Prints what follows from a table, in lines of 80 columns."""
    print(*textwrap.wrap(text, 80), "", sep="\n")


def short(value: object) -> str:
    """A value in few characters: four digits of a number, a dtype without `torch.`."""
    if isinstance(value, float) and value and math.isfinite(value):
        return f"{value:.4g}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def seconds(*functions: Callable[[], object], repeat: int = 15) -> list[float]:
    """The shortest time of each function, so that a busy machine says the same as an idle one.

    They take turns: a moment in which something else runs hits all of them.
    """
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repeat + 1):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if turn:  # the first turn is a warm-up
                own.append(time.perf_counter() - start)
    return [min(own) for own in times]
