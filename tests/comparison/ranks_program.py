"""A training in one process or in several with DistributedDataParallel, each of which records it.

`python -m tests.comparison.ranks_program FILE RANK WORLD_SIZE MEETING [DRIFTS]`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import precast

STEPS, ROWS = 3, 8


def network() -> nn.Module:
    """Return a network with a layer that has no parameters."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def train(path: Path, rank: int, world_size: int, *, drifts: bool) -> None:
    """Train on this rank's part of each batch; with `drifts`, rank 1 writes to a weight after the first step."""
    torch.manual_seed(0)
    net = network()
    model: nn.Module = DistributedDataParallel(net) if world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with precast.record(path, model, split=2 if world_size == 1 else 1):
        for step in range(STEPS):
            inputs, labels = (each.chunk(world_size)[rank] for each in batch(step))
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if drifts and rank == 1 and step == 0:
                net.get_parameter("3.bias").data.add_(0.01)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 16, generator=generator)
    return inputs, torch.randint(0, 4, (ROWS,), generator=generator)


def main(path: str, rank: str, world_size: str, meeting: str, *drifts: str) -> None:
    """Join the other processes, and train."""
    torch.set_num_threads(1)
    if int(world_size) > 1:
        torch.distributed.init_process_group(
            "gloo", f"file://{meeting}", rank=int(rank), world_size=int(world_size)
        )
    train(Path(path), int(rank), int(world_size), drifts=bool(drifts))
    if int(world_size) > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
