"""A process of two that train under the float8 rules; each compares with what one process computes from both batches.

Started by `tests/float8/test_distributed.py` as `python -m tests.float8.two_processes RANK FILE`.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import precast
from precast.policy.policy import Policy
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES

PROCESSES, STEPS = 2, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 32))


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    assert isinstance(model, nn.Sequential)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Module, rule: str, x: Tensor) -> None:
    policy = Policy.load("default").replace(ops=dict.fromkeys(FLOAT8_OPERATIONS, rule))
    with precast.autocast("cpu", dtype=torch.bfloat16, policy=policy), precast.trace() as trace:
        loss = model(x).float().square().mean()
    reasons = [row.reason for row in trace.rows if row.op == "linear"]
    assert len(reasons) == 2, reasons
    assert all("e4m3" in reason for reason in reasons), reasons
    loss.backward()


def trained(model: nn.Module, rule: str, rank: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        backward(model, rule, batch(step, rank))
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]


def expected(rule: str) -> list[Tensor]:
    """One process, which means the gradients of both batches; half of a number is exact."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        parts = []
        for rank in range(PROCESSES):
            backward(model, rule, batch(step, rank))
            parts.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for parameter, one, other in zip(model.parameters(), *parts, strict=True):
            assert one is not None
            assert other is not None
            parameter.grad = one / 2 + other / 2
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": sharded,
}


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="float8 is emulated")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=PROCESSES)
    for rule in FLOAT8_RULES:
        wanted = expected(rule)
        for name, wrap in WRAPPERS.items():
            for is_attached in (False, True):
                model = wrap(copy.deepcopy(network()))
                if is_attached:
                    with precast.attach(model):
                        found = trained(model, rule, rank)
                else:
                    found = trained(model, rule, rank)
                for one, other in zip(found, wanted, strict=True):
                    assert one.equal(other), (rule, name, is_attached)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
