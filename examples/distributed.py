"""Mixed precision in several processes: the recipe to copy.

    torchrun --nproc-per-node 2 examples/distributed.py          # FSDP2: parameters are spread
    torchrun --nproc-per-node 2 examples/distributed.py --ddp    # DDP: every process has all of them

Runs on the CPU with gloo, on GPUs with NCCL. One process gets a broken gradient on purpose: all skip
that step, and say whose it was.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import precast
from precast import Reduction, check_same

STEPS, BROKEN = 8, 5


def network() -> nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def main(ddp: bool) -> None:
    """Trains in all processes, and ends what they share."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    train(device, ddp)
    # Not before the model is gone: DistributedDataParallel, ended as the last, may wait for gloo forever (2.13).
    dist.destroy_process_group()


def train(device: str, ddp: bool) -> None:
    """Trains for a few steps, and prints what the first process sees."""
    rank, size = dist.get_rank(), dist.get_world_size()

    model: nn.Module = network().to(device)
    if ddp:
        model = DistributedDataParallel(model)
    else:
        lower = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh(device, (size,)), mp_policy=lower)
    precast.attach(model)  # names for the scaler; under DDP it holds the weights' copies too
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    # FSDP2's parameters say over which processes they are spread; DDP's do not, so it is given.
    reduction = Reduction() if ddp else None
    scaler = precast.GradScaler(device, init_scale="auto", reduce_found_inf=reduction)
    check_same(scaler, steps=STEPS)  # an error that names the rank that differs

    torch.manual_seed(rank)  # each process has data of its own
    for number in range(STEPS):
        x = torch.randn(32, 64, device=device)
        optimizer.zero_grad()
        with precast.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x), x)
        scaler.scale(loss).backward()
        if number == BROKEN and rank == size - 1:
            next(model.parameters()).grad.mul_(float("nan"))  # type: ignore[union-attr]
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scaler.advance(scheduler)  # only if the optimizer stepped
        event = scaler.last_step(optimizer)
        assert event is not None
        if rank == 0:
            did = f"skipped: {', '.join(event.names)}" if event.skipped else "stepped"
            print(f"step {number}  loss {loss.item():.4f}  scale {float(event.scale):g}  {did}")
    check_same(scaler)
    if rank == 0:
        print(scaler.counters)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel, not FSDP2")
    main(parser.parse_args().ddp)
