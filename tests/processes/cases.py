"""What several processes do together, one function a case; `torchrun -m tests.processes.cases` runs them all.

Each returns what `tests/processes/test_processes.py` looks at, the same way in every process; it is
written as JSON, one file a rank, into the folder that is the argument.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import precast
import precast.fsdp
from precast.errors import BrokenModelError, ScalerError
from precast.grad_scaler.distributed import Reduction, check_same
from precast.policy.policy import Policy

CASES: dict[str, Callable[[], Any]] = {}
CUDA = torch.cuda.is_available() and os.environ.get("PRECAST_TEST_NCCL") == "1"
DEVICE = "cuda" if CUDA else "cpu"
HALF = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(
        model, mesh(), {"first": ColwiseParallel(), "last": RowwiseParallel()}
    )


def mixed(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh(), mp_policy=HALF)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP": lambda model: fully_shard(model, mesh=mesh()),
    "FSDP, mixed": mixed,
    "tensor parallel": tensor_parallel,
}


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().tolist()


def inputs(everywhere: bool = False) -> Tensor:
    """A batch of this process's own, or the same in all."""
    generator = torch.Generator().manual_seed(7 if everywhere else dist.get_rank())
    return torch.randn(4, 8, generator=generator).to(DEVICE)


def gathered(value: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def broken(model: nn.Module) -> None:
    """Infinity in one number of the last rank's part of a gradient."""
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient: Any = dict(model.named_parameters())[_bias(model)].grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        with torch.no_grad():
            local.flatten()[0] = float("inf")


def _bias(model: nn.Module) -> str:
    return "module.first.bias" if isinstance(model, DistributedDataParallel) else "first.bias"


def step(model: nn.Module, scaler: Any, optimizer: Any, damage: bool, same: bool) -> None:
    optimizer.zero_grad()
    with precast.autocast(DEVICE, dtype=torch.float16):
        loss = F.mse_loss(model(inputs(same)), torch.ones(4, 8, device=DEVICE))
    scaler.scale(loss).backward()
    if damage:
        broken(model)
    scaler.step(optimizer)
    scaler.update()


def skipped_together(name: str, **settings: Any) -> Any:
    """A good iteration, one with a bad gradient in one process, a good one."""
    model = WRAPS[name](Network())
    attachment = precast.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = precast.GradScaler(DEVICE, init_scale=1024.0, **settings)
    found = []
    for damage in (False, True, False):
        before = [whole(p) for p in model.parameters()]
        step(model, scaler, optimizer, damage, same=name == "tensor parallel")
        event = scaler.last_step(optimizer)
        assert event is not None
        changed = before != [whole(p) for p in model.parameters()]
        found.append((bool(event.skipped), changed, scaler.get_scale(), event.names))
    attachment.detach()
    check_same(scaler)
    return {"steps": found, "parameters": [whole(p) for p in model.parameters()]}


@case
def fsdp() -> Any:
    return skipped_together("FSDP")


@case
def fsdp_mixed() -> Any:
    return skipped_together("FSDP, mixed")


@case
def tensor_parallelism() -> Any:
    return skipped_together("tensor parallel")


@case
def ddp_with_a_reduction() -> Any:
    """The gradient is broken after it was reduced, so only one process sees it."""
    return skipped_together("DDP", reduce_found_inf=Reduction())


@case
def ddp_alone() -> Any:
    """A bad input in one process: all get its gradient, and decide alike."""
    model = WRAPS["DDP"](Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = precast.GradScaler(DEVICE, init_scale=1024.0)
    x = inputs()
    if dist.get_rank() == 0:
        x[0, 0] = float("inf")
    with precast.autocast(DEVICE, dtype=torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    event = scaler.last_step(optimizer)
    scaler.update()
    return {"skipped": event and event.skipped, "scale": scaler.get_scale()}


@case
def stages_of_a_pipeline() -> Any:
    """Each process has parameters of its own; the first has no gradient in one iteration."""
    stage = nn.Linear(3, 3).to(DEVICE)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    scaler = precast.GradScaler(DEVICE, init_scale=64.0, reduce_found_inf=Reduction())
    rank, found = dist.get_rank(), []
    for turn in range(3):
        before = whole(stage.weight)
        optimizer.zero_grad()
        factor = float("nan") if turn == 1 and rank == 1 else 1.0
        loss = scaler.scale(stage(torch.ones(2, 3, device=DEVICE)).sum() * factor)
        if not (turn == 2 and rank == 0):
            loss.backward()
        scaler.step(optimizer)
        event = scaler.last_step(optimizer)
        assert event is not None
        scaler.update()
        found.append((event.skipped, scaler.get_scale(), event.names, event.loss_finite))
        found.append(before != whole(stage.weight))
    return gathered(found)


@case
def one_bad_loss_is_everybodys_verdict() -> Any:
    stage = nn.Linear(3, 3).to(DEVICE)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    scaler = precast.GradScaler(
        DEVICE, init_scale=64.0, reduce_found_inf=Reduction(), max_nonfinite_losses=0
    )
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    scaler.scale(stage(torch.ones(2, 3, device=DEVICE)).sum() * factor).backward()
    scaler.step(optimizer)
    try:
        scaler.update()
    except BrokenModelError as error:
        return [error.diagnosis.reason, list(error.diagnosis.names)]  # type: ignore[attr-defined]
    return "no verdict"


@case
def the_first_scale() -> Any:
    """Gradients of very different size; all find the same scale, that of the largest."""
    stage = nn.Linear(3, 1, bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    scaler = precast.GradScaler(DEVICE, "auto", reduce_found_inf=Reduction())
    scaler.scale(stage(torch.ones(3, device=DEVICE)).sum() * 4.0 ** -dist.get_rank()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@case
def parameters_that_are_spread_come_later() -> Any:
    """A group that is added after the first step has its gradients on one process broken."""
    plain = nn.Parameter(torch.ones(2, device=DEVICE))
    spread = nn.Parameter(distribute_tensor(torch.ones(4, device=DEVICE), mesh(), [Shard(0)]))
    optimizer = torch.optim.SGD([plain], lr=0.1, foreach=False)
    scaler = precast.GradScaler(DEVICE, init_scale=64.0)
    for turn in range(2):
        scaler.scale(plain.sum()).backward()
        if turn:
            optimizer.add_param_group({"params": [spread]})
            spread.grad = torch.ones_like(spread) * (1.0 if dist.get_rank() else float("inf"))
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@case
def losses_apart_and_buckets() -> Any:
    """DDP writes gradients of the next backward into the memory of those that are there."""
    found = []
    for is_view in (True, False):
        model = DistributedDataParallel(Network(), gradient_as_bucket_view=is_view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scalers = precast.LossScalers(DEVICE, ["near", "far"], init_scale=64.0)
        for _ in range(2):
            optimizer.zero_grad()
            for name, target in (("near", 1.0), ("far", 9.0)):
                loss = (model(inputs()) - target).square().mean()
                scalers.backward(name, loss, optimizer)
            scalers.step(optimizer)
            scalers.update()
        found.append([whole(p) for p in model.parameters()])
    return found[0] == found[1]


@case
def one_of_the_losses_is_bad_in_one_process() -> Any:
    stage = nn.Linear(3, 3).to(DEVICE)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    settings = {"reduce_found_inf": Reduction(), "max_nonfinite_losses": 0}
    scalers = precast.LossScalers(DEVICE, ["good", "bad"], init_scale=64.0, **settings)
    for name in scalers:
        factor = float("nan") if name == "bad" and dist.get_rank() == 1 else 1.0
        scalers.backward(name, stage(torch.ones(2, 3, device=DEVICE)).sum() * factor, optimizer)
    scalers.step(optimizer)
    try:
        scalers.update()
    except BrokenModelError as error:
        return [error.diagnosis.reason, list(error.diagnosis.names)]  # type: ignore[attr-defined]
    return "no verdict"


@case
def settings_that_differ() -> Any:
    last = dist.get_rank() == dist.get_world_size() - 1
    check_same(precast.GradScaler(DEVICE), policy=precast.Policy.load("default"))
    errors = []
    for arguments in (
        {"scaler": precast.GradScaler(DEVICE, growth_interval=7 if last else 2000)},
        {"policy": precast.Policy.load("torch" if last else "default")},
    ):
        try:
            check_same(**arguments)
        except ScalerError as error:
            errors.append(str(error)[:300])
    return errors


@case
def accumulation_without_synchronising() -> Any:
    """Two micro-batches under `no_sync`, then one that reduces; with `attach` and without."""
    found = []
    for attached in (True, False):
        model = DistributedDataParallel(Network(), gradient_as_bucket_view=True, bucket_cap_mb=1)
        attachment = precast.attach(model) if attached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = precast.GradScaler(DEVICE, init_scale=256.0)
        for _ in range(2):
            optimizer.zero_grad()
            for micro in range(3):
                model.require_backward_grad_sync = micro == 2  # what `no_sync` sets
                with precast.autocast(DEVICE, dtype=torch.float16):
                    loss = model(inputs() * (micro + 1)).square().mean() / 3
                scaler.scale(loss).backward()
            norm = scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
        found.append([whole(norm), *(whole(p) for p in model.parameters())])
        if attachment is not None:
            attachment.detach()
    return {"same": found[0] == found[1], "parameters": found[0]}


@case
def clipping_is_over_all_processes() -> Any:
    model = WRAPS["FSDP"](Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = precast.GradScaler(DEVICE, init_scale=256.0)
    scaler.scale(model(inputs(everywhere=True)).square().mean()).backward()
    plain = Network()
    plain(inputs(everywhere=True)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    return abs(float(scaler.clip_grad_norm_(optimizer, 0.1)) - float(expected)) < 1e-5


@dataclass
class Inputs:
    values: dict[str, list[Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs.values["x"][0]
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture of two experts, each of which takes half of the tokens."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, inner) / 3)
        self.down = nn.Parameter(torch.randn(2, inner, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        count = len(tokens)
        ends = torch.tensor([count // 2, count], dtype=torch.int32, device=x.device)
        inner = F.gelu(F.grouped_mm(tokens, self.up, offs=ends))
        return F.grouped_mm(inner, self.down, offs=ends).view_as(x)


class Language(nn.Module):
    """Two blocks with experts, an embedding, whose weight the head shares, and a router in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.experts, self.odd_experts = Experts(16), Experts(12)
        self.router, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(1 + 2**-12))
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) * self.scale
        for block in self.blocks:
            x = block(Inputs({"x": [x]}))
        x = x + self.odd_experts(x + self.experts(x))
        return self.head(x * self.router(x).softmax(-1))  # type: ignore[no-any-return]


SHARDED = {"router": "fp32", "blocks.1": "bfloat16", "blocks.0.down": "lower_out_fp32"}


def _train(model: nn.Module, parts: list[int], policy: Policy) -> list[Any]:
    """Parameters after some steps on parts of a batch, in regions of the policy with its rules attached."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with precast.attach(model, policy):
        for number in range(3):
            for part in parts:
                generator = torch.Generator().manual_seed(10 * number + part)
                x = torch.randint(0, 16, (4, 6), generator=generator).to(DEVICE)
                with precast.autocast(DEVICE, torch.bfloat16, policy=policy):
                    loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.roll(1).flatten())
                (loss / len(parts)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [whole(each) for each in model.parameters()]


@case
def sharded_by_policy() -> Any:
    policy = Policy.load("default").replace(modules=SHARDED)
    model = Language()
    ops: dict[type[nn.Module], str] = {Experts: "_grouped_mm"}
    precast.fsdp.shard(model, policy, units=model.blocks, ops=ops, mesh=mesh())
    dtypes: dict[str, str] = {}
    for name in (
        "embedding",
        "router",
        "blocks.0.norm",
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "experts",
        "odd_experts",
    ):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(
            lambda m, _args, name=name: dtypes.update({name: str(next(m.parameters()).dtype)})
        )
    model.get_submodule("blocks.1.norm").register_forward_pre_hook(
        lambda _, args: dtypes.update({"input": str(args[0].dtype)})
    )
    together = _train(model, [dist.get_rank()], policy)
    alone = _train(Language(), list(range(dist.get_world_size())), policy)
    dtypes["buffer"] = str(model.scale.dtype)
    return {"equal": together == alone, "dtypes": dtypes}


def save(folder: Path) -> Any:
    """Trains for two steps, and writes a checkpoint that any number of processes can read."""
    model, optimizer, scaler = _sharded()
    for _ in range(2):
        step(model, scaler, optimizer, damage=False, same=True)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}
    checkpoint.save(state, checkpoint_id=folder)
    step(model, scaler, optimizer, damage=False, same=True)
    return [scaler.get_scale(), *(whole(p) for p in model.parameters())]


def resume(folder: Path) -> Any:
    """Reads it, and takes the third step."""
    model, optimizer, scaler = _sharded()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    scaler.load_state_dict(state["scaler"])
    step(model, scaler, optimizer, damage=False, same=True)
    return [scaler.get_scale(), *(whole(p) for p in model.parameters())]


def _sharded() -> Any:
    model = WRAPS["FSDP, mixed"](Network())
    precast.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, precast.GradScaler(DEVICE, init_scale=64.0, growth_interval=1)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo", timeout=timeout)
    size, found = dist.get_world_size(), {}
    saved = folder.parent / "checkpoint"
    cases = CASES | {"resumed": lambda: resume(saved)} if saved.exists() else CASES
    if size == 2:
        cases = CASES | {"saved": lambda: save(saved)}
    for name, function in cases.items():
        try:
            found[name] = function()
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    # Threads of PyTorch's that are still about at exit abort the process now and then: "terminate called without an
    # active exception" (gloo, 2.13). All is written by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
