"""Helpers of the scenarios: bits, models, programs in other processes, and interruptions."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "DTYPES",
    "Net",
    "equal",
    "flags",
    "net",
    "program",
    "same_state",
    "together",
    "trained",
]

ROOT = Path(__file__).parents[2]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def equal(found: Any, expected: Any, what: str = "") -> None:
    """Assert that two results have the same dtypes and bits; NaN equals NaN."""
    if isinstance(expected, Tensor):
        assert found.dtype is expected.dtype, f"{what}: {found.dtype} for {expected.dtype}"
        same = torch.equal(found, expected) or torch.equal(
            torch.nan_to_num(found, 1e5, 2e5, -2e5), torch.nan_to_num(expected, 1e5, 2e5, -2e5)
        )
        assert same, f"{what}: {found} for {expected}"
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for mine, theirs in zip(found, expected, strict=True):
            equal(mine, theirs, what)
    else:
        assert found == expected, f"{what}: {found} for {expected}"


def same_state(mine: nn.Module, theirs: nn.Module) -> None:
    """Assert that two models have the same parameters, bit for bit."""
    for (name, ours), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        equal(ours.detach(), other.detach(), name)


def flags() -> tuple[object, ...]:
    """All that PyTorch says of autocast in this thread."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("ipu"),
        torch.is_autocast_enabled("maia"),
    )


class Net(nn.Module):
    """Something of everything: a convolution, a norm, a tied weight, an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.mix.weight
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x = torch.relu_(self.mix(x)) + self.tied(x)
        return self.head(x.flatten(1))  # type: ignore[no-any-return]


def net(seed: int | None = None) -> Net:
    """The same one for the same seed; any without."""
    if seed is not None:
        torch.manual_seed(seed)
    return Net()


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    region: Callable[[], Any],
    batches: Iterable[Tensor],
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> list[Tensor]:
    """The losses of a training in which each forward runs in a region."""
    losses = []
    for x in batches:
        optimizer.zero_grad()
        with region():
            loss = call(model, x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def program(
    text: str, *arguments: str, under: tuple[str, ...] = (), seconds: float = 120, **files: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as `main.py` in a new folder, with other files beside it."""
    folder = Path(tempfile.mkdtemp())
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    (folder / "main.py").write_text(text, encoding="utf-8")
    command = [sys.executable, *under, "main.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    vars(done)["folder"] = folder
    return done


def together(*functions: Callable[[], None]) -> None:
    """Runs functions in threads of their own; raises what the first to fail raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    random.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
