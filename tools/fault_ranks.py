"""The faults of `tools/faults.py` that need two processes: this file runs in each.

Each process has a parameter of its own, as a stage of a pipeline has. The first writes what it saw.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import precast
from precast.grad_scaler.distributed import Reduction

__all__ = ["main"]


class _Stage:
    def __init__(self, kind: str) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.5)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if kind == "precast":
            self.scaler = precast.GradScaler("cpu", init_scale=1024.0, reduce_found_inf=Reduction())

    def step(self, factor: float = 1.0) -> None:
        self.scaler.scale((self.parameter * factor).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _inf(kind: str) -> tuple[str, bool]:
    stage = _Stage(kind)
    stage.step(float("inf") if dist.get_rank() == 1 else 1.0)
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, (stage.parameter.tolist() != [1.0] * 3, stage.scaler.get_scale()))
    stepped = [rank for rank, (changed, _) in enumerate(parts) if changed]
    scales = " and ".join(f"{scale:g}" for _, scale in parts)
    if stepped:
        return f"rank {stepped[0]} steps, the other skips; scales {scales}", False
    event = stage.scaler.last_step(stage.optimizer)
    return f"both skip, and know it was {event.names[0]}; scales {scales}", True


def _killed(kind: str) -> tuple[str, bool]:
    """The second process ends between backward and step; the first sums its gradient with it."""
    stage = _Stage(kind)
    stage.scaler.scale(stage.parameter.sum()).backward()
    if dist.get_rank() == 1:
        os._exit(9)
    began = time.monotonic()
    try:
        if kind == "torch":  # nothing else in PyTorch's scaler speaks to other processes
            dist.all_reduce(stage.parameter.grad)
        stage.scaler.step(stage.optimizer)
    except RuntimeError as error:
        quick = "at once" if time.monotonic() - began < 30 else "late"
        where = "of the sum of gradients" if kind == "torch" else "of step()"
        what = f"`{type(error).__name__}` {where}, {quick}"
        return what, stage.parameter.tolist() == [1.0] * 3
    return "steps alone", False


def main(name: str, kind: str, folder: Path, rank: int) -> None:
    """Runs one fault in this process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    seen = {"inf": _inf, "killed": _killed}[name](kind)
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")
    if name != "killed":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
