"""One process of a distributed program on gloo: DDP and its hooks, FSDP2, DTensor, tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.conformance.compare import amp, assert_same, in_both_dtypes, tensors_in
from tests.conformance.systems import MakeRegion, System, on_all_systems

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(F.gelu(self.first(x))))  # type: ignore[no-any-return]


class Checkpointed(Network):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


Wrap = Callable[[nn.Module], nn.Module]


def _ddp(**options: Any) -> Wrap:
    return lambda module: DistributedDataParallel(module, **options)


def _ddp_hooked(hook: Any, make_state: Callable[[], Any] = lambda: None) -> Wrap:
    def wrap(module: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(module)
        wrapped.register_comm_hook(make_state(), hook)
        return wrapped

    return wrap


def _doubled(state, bucket):  # type: ignore[no-untyped-def] # DDP asks what annotations are, not what they say
    work = dist.all_reduce(bucket.buffer().mul_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _sharded(whole: bool = False, **options: Any) -> Wrap:
    def wrap(module: nn.Module) -> nn.Module:
        if not whole:
            for part in module.children():
                fully_shard(part, mesh=mesh(), **options)
        return fully_shard(module, mesh=mesh(), **options)

    return wrap


def _tensor_parallel(module: nn.Module) -> nn.Module:
    plan = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "last": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(module, mesh(), plan)


def _sequence_parallel(module: nn.Module) -> nn.Module:
    plan = {
        "first": ColwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "norm": SequenceParallel(sequence_dim=0),
        "last": RowwiseParallel(input_layouts=Shard(0)),
    }
    return parallelize_module(module, mesh(), plan)


LOWER = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
WRAPS: dict[str, Wrap] = {
    "DDP": _ddp(),
    "DDP, static graph": _ddp(static_graph=True),
    "DDP, gradients as views": _ddp(gradient_as_bucket_view=True, find_unused_parameters=True),
    "DDP, float16 hook": _ddp_hooked(default_hooks.fp16_compress_hook),
    "DDP, own hook": _ddp_hooked(_doubled),
    "FSDP": _sharded(),
    "FSDP, whole": _sharded(whole=True),
    "FSDP, not resharded": _sharded(reshard_after_forward=False),
    "FSDP, mixed": _sharded(mp_policy=MixedPrecisionPolicy(**LOWER)),
    "FSDP, mixed outputs": _sharded(
        mp_policy=MixedPrecisionPolicy(**LOWER, output_dtype=torch.float32)
    ),
    "FSDP, offloaded": _sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "tensor parallel": _tensor_parallel,
    "sequence parallel": _sequence_parallel,
}


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@in_both_dtypes
@pytest.mark.parametrize("name", WRAPS)
@on_all_systems
def test_training(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, _trained, Network, name, dtype)


@pytest.mark.parametrize("name", ["DDP", "DDP, static graph", "FSDP", "FSDP, mixed"])
@on_all_systems
def test_checkpoints(system: System, name: str) -> None:
    assert_same(system, _trained, Checkpointed, name, torch.bfloat16)


def _trained(region: MakeRegion, make: Any, name: str, dtype: torch.dtype) -> Any:
    """A region for each step, with two forwards; one with FSDP, which gathers weights anew without counting it."""
    model = WRAPS[name](make())
    forwards = 1 if name.startswith("FSDP") else 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    result = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with region("cpu", dtype=dtype):
            losses = [
                F.mse_loss(model(torch.randn(2, 4)), torch.ones(2, 4)) for _ in range(forwards)
            ]
            plain = torch.mm(
                torch.randn(2, 2), torch.ones(2, 2)
            )  # where FSDP leaves autocast nothing to cast
            loss = sum(losses)
        loss.backward()  # type: ignore[union-attr]
        gradients = [_whole(p.grad) for p in model.parameters()]
        optimizer.step()
        with torch.no_grad(), region("cpu", dtype=dtype):
            result.append((plain, _whole(loss), gradients, _whole(model(torch.ones(2, 4)))))
    return result, [_whole(p) for p in model.parameters()]


@pytest.mark.parametrize("name", ["DDP", "FSDP", "sequence parallel"])
@on_all_systems
def test_scaled_training(system: System, name: str) -> None:
    """In float16 with a scaler; accumulated over two steps, without synchronising in the first; clipped."""
    assert_same(system, _scaled, name)


def _scaled(region: MakeRegion, name: str) -> Any:
    model = WRAPS[name](Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp(region).GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
    result = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for last in (False, True):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last
            with region("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(torch.randn(2, 4)), torch.ones(2, 4)) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        result.append((_whole(loss), _whole(norm), scaler.get_scale()))
    return result, [_whole(p) for p in model.parameters()]


TENSORS: dict[str, Callable[[DTensor, Tensor], Any]] = {
    "linear": lambda w, x: F.linear(distribute_tensor(x, mesh()), w),
    "matmul": lambda w, x: distribute_tensor(x, mesh(), [Shard(0)]) @ w,
    "twice": lambda w, x: F.linear(F.linear(distribute_tensor(x, mesh()), w), w),
    "einsum": lambda w, x: torch.einsum("ij,kj->ik", distribute_tensor(x, mesh()), w),
    "softmax": lambda w, x: F.softmax(distribute_tensor(x, mesh()) @ w, -1),
    "local": lambda w, x: F.linear(x, w.to_local()),
    "redistributed": lambda w, x: F.linear(
        distribute_tensor(x, mesh()), w.redistribute(mesh(), [Replicate()])
    ),
    "cross_entropy": lambda w, x: F.cross_entropy(
        F.linear(distribute_tensor(x, mesh()), w).full_tensor(), torch.tensor([0, 1])
    ),
}


@in_both_dtypes
@pytest.mark.parametrize("name", TENSORS)
@on_all_systems
def test_tensors(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, _tensors, name, dtype)


def _tensors(region: MakeRegion, name: str, dtype: torch.dtype) -> Any:
    weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh(), [Shard(0)]))
    x = torch.randn(2, 4)
    with region("cpu", dtype=dtype):
        results = [_whole(TENSORS[name](weight, x * i)) for i in (1, 2)]  # type: ignore[arg-type]
        with torch.no_grad():
            quiet = _whole(TENSORS[name](weight, x))  # type: ignore[arg-type]
    sum(t.float().square().sum() for t in tensors_in(results)).backward()  # type: ignore[union-attr]
    return results, quiet, _whole(weight.grad)
