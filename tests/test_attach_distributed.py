"""attach in a distributed program, one process on gloo: DDP as without it, FSDP's parameters left alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

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


def test_ddp_has_gradients_in_float32_even_where_they_were_asked_to_be_lower() -> None:
    ours, theirs = (network_ := network()), copy.deepcopy(network_)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    x = torch.randn(4, 160)
    with precast.attach(ours, optimizer=optimizer, grad_dtype=torch.bfloat16):
        found = [trained(ours, x, optimizer)]
        found.append(trained(DistributedDataParallel(ours), x, optimizer))
    for expected in (trained(theirs, x), trained(DistributedDataParallel(theirs), x)):
        for a, b in zip(found.pop(0), expected, strict=True):
            assert torch.equal(a, b)


def test_parameters_of_fsdp_are_left_alone_and_named() -> None:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    x = torch.randn(4, 160)
    with precast.attach(model) as attachment:
        assert set(attachment.left_alone) == {name for name, _ in model.named_parameters()}
        assert all("FSDP" in reason for reason in attachment.left_alone.values())
        trained(model, x)
        assert attachment.memory() == 0
