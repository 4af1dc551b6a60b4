"""What two processes search together, one function a case; `test_ranks.py` runs this file in each of them.

Each result is written as JSON, one file a rank, into the folder that is the first argument; the cases follow it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import precast
from precast.tuning import ranks, tuner
from precast.tuning.tuner import Progress


def folder() -> Path:
    """Where results go."""
    return Path(sys.argv[1])


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())  # each process has its own
    inputs = [torch.randn(64, 8, generator=generator) for _ in range(count)]
    return [(x, x.sum(1, keepdim=True).sin() + 2) for x in inputs]


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def tune(step: Any = step, **options: Any) -> Any:
    given = {"objective": "memory", "tolerance": 0.05, "budget": 60.0, "batches": batches()}
    return precast.tune(Wide(), step, **{**given, **options})


def told(found: Any) -> dict[str, Any]:
    proof = found.evidence.proofs[-1] if found.evidence.proofs else None
    return {
        "name": found.name,
        "policy": found.policy.dump(),
        "because": found.because,
        "interrupted": found.evidence.interrupted,
        "finals": [] if proof is None else [trial.finals for trial in proof.trials],
        "is_saved_here": found.is_saved_here,
    }


def ddp() -> Any:
    kinds = set()

    def prepare(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def seen(model: nn.Module, batch: Any) -> torch.Tensor:
        kinds.add(type(model).__name__)
        return step(model, batch)

    found = tune(seen, prepare=prepare)
    path = folder() / f"tuned{dist.get_rank()}.toml"
    found.save(path, page=False)
    return {**told(found), "is_written": path.exists(), "kinds": sorted(kinds)}


def fsdp() -> Any:
    return told(tune(prepare=fully_shard, candidates=[torch.bfloat16]))


def time_of_the_slowest() -> Any:
    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        if dist.get_rank() == 1 and torch.is_autocast_enabled("cpu"):
            time.sleep(0.004)
        return step(model, batch)

    return told(tune(slow, objective="time", tolerance=0.1))


def inference() -> Any:
    def metric(model: nn.Module, batch: Any) -> torch.Tensor:
        return step(model, batch)

    return told(
        precast.tune(
            Wide().eval(), metric=metric, batches=batches(), objective="memory", tolerance=0.05
        )
    )


def fails_on_one() -> Any:
    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise LookupError("of the program")
        return step(model, batch)

    return error_of(lambda: tune(fails))


def batches_on_one() -> Any:
    return error_of(lambda: tune(batches=batches(3 + dist.get_rank())))


def no_batches_on_one() -> Any:
    return error_of(lambda: tune(batches=batches(1 - dist.get_rank())))


def ctrl_c_on_one() -> Any:
    steps = [0]

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        steps[0] += 1
        if dist.get_rank() == 1 and steps[0] == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return step(model, batch)

    before = signal.getsignal(signal.SIGINT)
    found = tune(counted)
    return {**told(found), "is_restored": signal.getsignal(signal.SIGINT) is before}


def ctrl_c_of_the_first() -> Any:
    def interrupt(progress: Progress) -> None:
        if progress.stage == "prove":
            raise KeyboardInterrupt

    return told(tune(progress=interrupt))


def many_ends() -> Any:
    """How many of their threads outlive searches that end at once: one that Python ends with ends it by an abort."""
    for _ in range(20):
        ranks._Alarm(dist.get_rank(), dist.get_world_size()).close()
    return sum(thread.name == ranks.THREAD_NAME for thread in threading.enumerate())


def stuck() -> Any:
    ranks._GRACE = 1.0

    def waits(model: nn.Module, batch: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise LookupError("of the program")
        dist.barrier()
        return step(model, batch)

    return error_of(lambda: tune(waits))


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main() -> None:
    torch.set_num_threads(1)
    tuner._STEPS = (8, 12)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        said = json.dumps(globals()[name]())
        (folder() / f"{name}.{dist.get_rank()}.json").write_text(said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
