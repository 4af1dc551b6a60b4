"""Float8 rules under DDP and FSDP2, one and two processes on gloo: they train what is trained without a wrapper."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import precast
from precast.engine import float8_kernels
from precast.policy.policy import Policy
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_kernels, "_warned", {"cpu"})


def trained(model: nn.Module, rule: str) -> list[Tensor]:
    policy = Policy.load("default").replace(ops=dict.fromkeys(FLOAT8_OPERATIONS, rule))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    x = torch.randn(4, 64)
    for _ in range(3):
        with precast.autocast("cpu", dtype=torch.bfloat16, policy=policy), precast.trace() as trace:
            loss = model(x).float().square().mean()
        reasons = [row.reason for row in trace.rows if row.op == "linear"]
        assert len(reasons) == 2
        assert all("e4m3" in reason for reason in reasons), reasons
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach(), *(getattr(p, "full_tensor", p.detach)() for p in model.parameters())]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 32))


@pytest.mark.parametrize("rule", FLOAT8_RULES)
@pytest.mark.parametrize("is_attached", [False, True])
def test_ddp(rule: str, is_attached: bool) -> None:
    plain = network()
    wrapped = DistributedDataParallel(copy.deepcopy(plain))
    if is_attached:
        with precast.attach(wrapped):
            found = trained(wrapped, rule)
    else:
        found = trained(wrapped, rule)
    for one, other in zip(found, trained(plain, rule), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("rule", FLOAT8_RULES)
def test_fsdp2(rule: str) -> None:
    plain = network()
    sharded = copy.deepcopy(plain)
    for module in (*sharded, sharded):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    for one, other in zip(trained(sharded, rule), trained(plain, rule), strict=True):
        assert one.equal(other)


def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.float8.two_processes"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "".join(said)[-3000:]
