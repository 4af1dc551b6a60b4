"""Error messages that people meet on the way from old spellings to new ones, and what they mean."""

from __future__ import annotations

import textwrap
import warnings
from typing import NamedTuple

import torch

NAMES = {"torch": torch, "nn": torch.nn}


class Mistake(NamedTuple):
    """A program that fails, what its message means, and what to write."""

    program: str
    meaning: str
    instead: str


HALF_MODEL = """
model, scaler = nn.Linear(1, 1).half(), torch.amp.GradScaler("cpu")
optimizer = torch.optim.SGD(model.parameters())
scaler.scale(model(torch.ones(1, 1).half())).backward()
scaler.unscale_(optimizer)
"""

MISTAKES = (
    Mistake(
        "import torch.cuda.amp.autocast",
        "it is a class, not a module: installing PyTorch again does not help",
        "from torch.amp import autocast",
    ),
    Mistake(
        "with torch.autocast(): pass",
        "the device type is missing; only the old names knew it",
        'torch.autocast("cuda")',
    ),
    Mistake(
        'with torch.autocast("cpu", False): pass',
        "the second argument is dtype, and was enabled",
        'torch.autocast("cpu", enabled=False)',
    ),
    Mistake(
        "torch.cuda.amp.autocast(device_type='cuda')",
        "a new argument, to the old name",
        'torch.autocast("cuda")',
    ),
    Mistake(
        "torch.autocast(lambda x: x)",
        "decorated without a call: the function is taken for the device",
        '@torch.autocast("cuda")',
    ),
    Mistake(
        "torch.amp.custom_fwd(lambda ctx, x: x)(None, 1)",
        "the new name wants the device type, by its keyword",
        '@torch.amp.custom_fwd(device_type="cuda")',
    ),
    Mistake(
        'optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())\ntorch.amp.GradScaler("cpu").step(optimizer)',
        "no loss was scaled before the step",
        "scaler.scale(loss).backward()",
    ),
    Mistake(
        HALF_MODEL,
        "the parameters are 16-bit, and their gradients with them",
        "no model.half(): the region casts, and weights stay float32",
    ),
    Mistake(
        "nn.Linear(2, 2)(torch.ones(1, 2).half())",
        "a 16-bit result meets float32 weights outside of its region",
        "x.float(), or go on in the region",
    ),
    Mistake("torch.ones(1).bfloat16().numpy()", "NumPy has no bfloat16", "x.float().numpy()"),
)


def message(program: str) -> str:
    """The error that a program ends with, its first line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(program, dict(NAMES))
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def main() -> None:
    """Prints the line that each program fails in, the message that this PyTorch gives, and what it means."""
    for mistake in MISTAKES:
        print(">>>", mistake.program.splitlines()[-1])
        print(*textwrap.wrap(message(mistake.program), 80), sep="\n")
        print(f"  means: {mistake.meaning}")
        print(f"  write: {mistake.instead}\n")


if __name__ == "__main__":
    main()
