"""attach in a distributed program, one process on gloo: DDP as without it, FSDP's parameters left alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import precast

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(160, 160), nn.GELU(), nn.Linear(160, 160))


def trained(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with precast.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach(), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("hook", [None, default_hooks.fp16_compress_hook])
@pytest.mark.parametrize("order", ["attached, then wrapped", "wrapped, then attached"])
def test_ddp_trains_as_without_it(hook: object, order: str) -> None:
    ours, theirs = (network_ := network()), copy.deepcopy(network_)
    attachment = precast.attach(ours) if order.startswith("attached") else None
    wrapped = [DistributedDataParallel(model) for model in (ours, theirs)]
    for model in wrapped:
        if hook is not None:
            model.register_comm_hook(None, hook)  # type: ignore[arg-type]
    attachment = attachment or precast.attach(wrapped[0])
    x = torch.randn(4, 160)
    with attachment:
        for a, b in zip(trained(wrapped[0], x), trained(wrapped[1], x), strict=True):
            assert torch.equal(a, b)
        assert attachment.memory() == 2 * 2 * 160 * 160, "biases are smaller than a node"
        assert not attachment.left_alone


def test_parameters_of_fsdp_are_left_alone_and_named() -> None:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    x = torch.randn(4, 160)
    with precast.attach(model) as attachment:
        assert set(attachment.left_alone) == {name for name, _ in model.named_parameters()}
        assert all("FSDP" in reason for reason in attachment.left_alone.values())
        trained(model, x)
        assert attachment.memory() == 0


SETUP = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import precast

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(rank)
model = nn.Linear(160, 160).requires_grad_(sys.argv[3] == "trained")
attachment, x = precast.attach(model), torch.ones(1, 160)

def run():
    with precast.autocast("cpu", dtype=torch.bfloat16):
        return model(x)

def expected():
    return F.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
"""

WRITTEN_BY_COLLECTIVES = """
def broadcast():
    for p in model.parameters():
        dist.broadcast(p.data if rank else p, 0)

def broadcast_later():
    for work in [dist.broadcast(p.data, 0, async_op=True) for p in model.parameters()]:
        work.wait()

def average():
    for p in model.parameters():
        dist.all_reduce(p.data, op=dist.ReduceOp.SUM)

def gather():
    dist.all_gather([torch.empty(160), model.bias.data], torch.randn(160))

for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
    for write in (broadcast, broadcast_later, average, gather):
        with torch.no_grad():
            model.weight.mul_(0.01 * (rank + 1))
        with mode():
            for _ in range(3):
                run()
            with torch.no_grad():
                write()
            for _ in range(5):
                assert torch.equal(run(), expected()), write
dist.destroy_process_group()
"""

ONE_RAISES = """
try:
    with torch.no_grad():
        for _ in range(3):
            run()
        if rank:
            model.weight.data[0, 1] += 100  # no sample shows it
        for _ in range(20):
            dist.all_reduce(run().float())
except precast.errors.StaleWeightError:
    assert rank == 1
    try:
        dist.barrier()
    except Exception:
        sys.exit(3)
except RuntimeError:
    assert rank == 0
    dist.destroy_process_group()  # one that lost its peer aborts a sixth of the processes that end with it (2.13)
    sys.exit(4)
"""


def two_processes(program: str, folder: Path, kind: str) -> list[int]:
    """How each ends."""
    command = [sys.executable, "-c", SETUP + program]
    started = [
        subprocess.Popen([*command, str(rank), str(folder / "store"), kind]) for rank in range(2)
    ]
    try:
        return [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_what_a_collective_writes_is_seen(tmp_path: Path, kind: str) -> None:
    assert two_processes(WRITTEN_BY_COLLECTIVES, tmp_path, kind) == [0, 0]


def test_an_error_in_one_process_ends_the_waiting_of_the_others(tmp_path: Path) -> None:
    assert two_processes(ONE_RAISES, tmp_path, "frozen") == [4, 3]


def test_process_groups_are_as_before_when_nothing_is_attached() -> None:
    before = dict(vars(dist.ProcessGroup))
    precast.attach(network()).detach()
    assert dict(vars(dist.ProcessGroup)) == before
