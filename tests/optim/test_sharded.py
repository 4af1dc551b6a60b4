"""Weights in bfloat16 under FSDP2, tensor parallelism and DDP: programs of two and four processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.optim.sharded_cases import CASES

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)


def start(processes: int, folder: Path) -> list[dict[str, str]]:
    """What the cases raised in each process."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.optim.sharded_cases"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(processes), str(folder)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    files = [folder / f"{rank}.json" for rank in range(processes)]
    assert all(file.exists() for file in files), "".join(said)[-3000:]
    return [json.loads(file.read_text()) for file in files]


def test_in_two_and_four_processes(tmp_path: Path) -> None:
    """One test, as a process takes seconds to start; those of four load what those of two have saved."""
    for processes in (2, 4):
        names = [name for name, (size, _) in CASES.items() if size == processes]
        for rank, found in enumerate(start(processes, tmp_path / str(processes))):
            raised = [f"{name}, rank {rank}: {error}" for name, error in found.items() if error]
            assert not raised, raised[0]
            assert list(found) == names


REPLICA = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import precast.optim

rank, how = int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
torch.compile = lambda function, **_: function  # the same operations, one by one
torch.manual_seed(rank)  # of the data, as each process has its own
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(160, 160), nn.GELU(), nn.Linear(160, 160))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
precast.optim.bfloat16_weights(model, optimizer, masters=how)
wrapped = DistributedDataParallel(model)
for _ in range(4):
    optimizer.zero_grad()
    with precast.autocast("cpu", dtype=torch.bfloat16):
        loss = wrapped(torch.randn(4, 160)).float().square().mean()
    loss.backward()
    optimizer.step()
assert model[0].weight.grad.dtype is torch.bfloat16
print([p.double().sum().item() for p in model.parameters()])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["kahan", "stochastic"])
def test_replicas_without_masters_stay_equal(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", REPLICA, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank), how], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    assert said[0] == said[1] != ""
