"""From `torch.cuda.amp` to `torch.amp` and to precast: each spelling, and the first PyTorch that has it."""

from __future__ import annotations

import warnings

import torch
from showing import say, table

import precast

NAMES = {"torch": torch, "precast": precast}

# The old spelling, what it is called since, and precast's, each with the first PyTorch that has it.
SPELLINGS = (
    ("torch.cuda.amp.autocast()", "1.6"),
    ('  torch.autocast("cuda")', "1.10"),
    ('  precast.autocast("cuda")', "2.11"),
    ("torch.cuda.amp.autocast(False)", "1.6"),
    ('  torch.amp.autocast("cuda", enabled=False)', "1.12"),
    ('  precast.autocast("cuda", enabled=False)', "2.11"),
    ("torch.cpu.amp.autocast()", "1.10"),
    ('  torch.autocast("cpu")', "1.10"),
    ('  precast.autocast("cpu")', "2.11"),
    ("torch.cuda.amp.GradScaler(2.0)", "1.6"),
    ('  torch.amp.GradScaler("cuda", 2.0)', "2.3"),
    ('  precast.GradScaler("cuda", 2.0)', "2.11"),
    ("torch.cuda.amp.custom_fwd(print)", "1.6"),
    ('  torch.amp.custom_fwd(print, device_type="cuda")', "2.4"),
    ('  precast.custom_fwd(print, device_type="cuda")', "2.11"),
    ("torch.cuda.amp.custom_bwd(print)", "1.6"),
    ('  torch.amp.custom_bwd(print, device_type="cuda")', "2.4"),
    ('  precast.custom_bwd(print, device_type="cuda")', "2.11"),
)


def works(spelling: str) -> str:
    """What the PyTorch at hand makes of a spelling: "yes", "deprecated", or the name of its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            eval(spelling.strip(), dict(NAMES))
        except (AttributeError, TypeError, ValueError) as error:
            return type(error).__name__
    old = any(w.category in (FutureWarning, DeprecationWarning) for w in caught)
    return "deprecated" if old else "yes"


def main() -> None:
    """Prints the spellings."""
    rows = ((spelling, since, works(spelling)) for spelling, since in SPELLINGS)
    table(("before, and since", "from PyTorch", f"in {torch.__version__}"), *rows)
    say(
        "`precast-lint check --fix` turns the first of each three lines into torch.amp's spelling of today: see "
        "09_fix.py. The third is precast's, which needs PyTorch 2.11."
    )


if __name__ == "__main__":
    main()
