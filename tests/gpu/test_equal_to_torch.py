"""On a GPU: outputs, gradients, trained weights and scales are those of torch.amp to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from benchmarks.cuda_graphs import counted_waits, graph_of
from precast.optim import bfloat16_weights
from tests.gpu.networks import (
    NETWORKS,
    OPTIMIZERS,
    Region,
    equal,
    loss_of,
    network,
    scaled_step,
    train,
)

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16


def torchs(dtype: torch.dtype = BF16) -> Region:
    return partial(torch.autocast, "cuda", dtype)


def ours(dtype: torch.dtype = BF16, policy: str = "torch") -> Region:
    return partial(precast.autocast, "cuda", dtype, policy=policy)


USES: dict[str, tuple[Callable[[torch.dtype], Region], Callable[[Any], Any]]] = {
    "region": (ours, nullcontext),
    "default": (partial(ours, policy="default"), nullcontext),
    "installed": (torchs, lambda _: precast.install()),
    "attached": (ours, precast.attach),
}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients(name: str, use: str, dtype: torch.dtype) -> None:
    def run(region: Region, use: Callable[[Any], AbstractContextManager[object]]) -> list[Tensor]:
        model, x = network(name)
        with use(model):
            with region():
                output = model(x)
            loss_of(output).backward()
        return [output, *(p.grad for p in model.parameters() if p.grad is not None)]

    region, entered = USES[use]
    expected, found = run(torchs(dtype), nullcontext), run(region(dtype), entered)
    assert len(expected) > 3
    assert [equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_lean_is_near(name: str) -> None:
    model, x = network(name)
    with torch.autocast("cuda", BF16):
        expected = model(x).float()
    with precast.autocast("cuda", BF16, policy="lean"):
        found = model(x).float()
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_recurrent_networks_of_cudnn() -> None:
    def run(region: Region) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.LSTM(32, 64, 2, batch_first=True).cuda()
        x = torch.randn(4, 10, 32).cuda()
        with region():
            output = model(x)[0]
        loss_of(output).backward()
        return [output, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected, found = run(torchs(F16)), run(ours(F16))
    assert expected[0].dtype is F16
    assert all(equal(a, b) for a, b in zip(expected, found, strict=True))


def test_checkpointed_layers() -> None:
    from torch.utils.checkpoint import checkpoint

    def run(region: Region) -> list[Tensor]:
        model, x = network("perceptron")
        with region():
            output = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
        loss_of(output).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(equal(a, b) for a, b in zip(run(torchs()), run(ours()), strict=True))


def test_threads_with_streams_of_their_own() -> None:
    model, x = network("perceptron")
    with torch.no_grad(), ours()():
        expected = model(x)
    outputs = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(20):
                with ours()():
                    output = model(x)
            stream.synchronize()
        outputs.append(output)

    torch.cuda.synchronize()
    with precast.attach(model):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [equal(output, expected) for output in outputs] == [True] * 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_of_an_attached_model(optimizer: str) -> None:
    expected = train("decoder", torchs(), optimizer)
    found = train("decoder", ours(), optimizer, prepare=lambda model, _: precast.attach(model))
    found.assert_equal(expected)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_a_scaler(optimizer: str, clip: float | None) -> None:
    expected, found = (
        train(
            "decoder",
            torchs(F16),
            optimizer,
            scaler=scaler("cuda", init_scale=2.0**40, growth_interval=2),
            clip=clip,
            steps=12,
        )
        for scaler in (torch.amp.GradScaler, precast.GradScaler)
    )
    assert expected.scale is not None
    assert expected.scale < 2.0**40
    found.assert_equal(expected)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("masters", ["kahan", "stochastic", "float32"])
def test_weights_stored_in_16_bits_learn(masters: Any, scaled: bool) -> None:
    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if masters == "float32":
            model.bfloat16()
        bfloat16_weights(model, optimizer, masters=masters)

    scaler = precast.GradScaler("cuda", init_scale=1024.0) if scaled else None
    found = train("decoder", ours(), "AdamW foreach", prepare=prepare, steps=8, scaler=scaler)
    plain = train("decoder", torchs(), "AdamW foreach", steps=8)
    assert found.losses[-1] < found.losses[0]
    assert abs(found.losses[-1] - plain.losses[-1]) < 0.1 * plain.losses[-1]


@pytest.mark.filterwarnings("ignore:gradients are float16")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_gradients_in_16_bits_are_unscaled_and_checked(dtype: torch.dtype) -> None:
    """CUDA's own kernel for it takes float16, and no bfloat16."""
    parameter = nn.Parameter(torch.ones(1000, device="cuda", dtype=dtype))
    scaler = precast.GradScaler("cuda", init_scale=8.0)
    optimizer = torch.optim.SGD([parameter], 0.5)
    for factor, expected in ((1.0, 0.5), (torch.inf, 0.5), (torch.nan, 0.5), (1.0, 0.0)):
        optimizer.zero_grad()
        scaler.scale((parameter.float() * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.eq(expected).all()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW foreach", "AdamW fused"])
def test_a_scaler_waits_no_more_often_than_pytorchs(optimizer: str) -> None:
    counts = []
    for scaler in (torch.amp.GradScaler("cuda"), precast.GradScaler("cuda")):
        model, x = network("perceptron")
        chosen = OPTIMIZERS[optimizer](model.parameters())
        step = scaled_step(model, x, chosen, scaler, torchs(F16))
        step()
        step()
        with counted_waits() as waits:
            step()
        counts += waits
    assert counts[1] <= counts[0]


CAPTURED: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "region": lambda model, optimizer: None,
    "attached": lambda model, optimizer: precast.attach(model),
    "kahan": lambda model, optimizer: bfloat16_weights(model, optimizer, masters="kahan"),
}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("use", CAPTURED)
def test_captured_training(use: str, dtype: torch.dtype) -> None:
    def run(region: Region, prepare: Callable[..., object], scaler: Any) -> list[Tensor]:
        model, x = network("perceptron")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True, capturable=True)
        kept = prepare(model, optimizer)
        step = scaled_step(model, x, optimizer, scaler, region)
        graph = graph_of(step)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        del kept
        return [p.detach() for p in model.parameters()]

    expected = run(torchs(dtype), CAPTURED["region"], torch.amp.GradScaler(init_scale=64.0))
    found = run(ours(dtype), CAPTURED[use], precast.GradScaler(init_scale=64.0))
    for a, b in zip(expected, found, strict=True):
        if use == "kahan":
            assert (a.float() - b.float()).norm() < 0.02 * a.float().norm()
        else:
            assert equal(a, b)


def test_captured_inference_follows_its_input() -> None:
    model, x = network("decoder")
    model.eval().requires_grad_(False)
    output = None

    def iteration() -> None:
        nonlocal output
        with ours()():
            output = model(x)

    with precast.attach(model), torch.no_grad():
        graph = graph_of(iteration)
        x.copy_(torch.randint(256, x.shape, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        with torch.autocast("cuda", BF16):
            expected = model(x)
    assert output is not None
    assert equal(output, expected)


# PyTorch warns so, once in a process, of its own backward of graphed callables (2.11 and 2.13).
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables() -> None:
    def run(region: Region) -> list[Tensor]:
        model, x = network("perceptron")
        with precast.attach(model):
            with region():
                graphed = torch.cuda.make_graphed_callables(model, (x.clone(),))
                output = graphed(x)
            loss_of(output).backward()
        return [output, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = run(partial(torch.autocast, "cuda", BF16, cache_enabled=False))
    found = run(partial(precast.autocast, "cuda", BF16, policy="torch", cache_enabled=False))
    assert found[0].dtype is BF16
    assert len(found) > 1
    assert all(equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", "FSDP2 mixed"])
def test_distributed_training_in_one_process(wrapper: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = network("decoder")
        if wrapper == "DDP":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        else:
            lowered = MixedPrecisionPolicy(param_dtype=F16 if "mixed" in wrapper else None)
            model = fully_shard(model, mp_policy=lowered)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        scaler = precast.GradScaler("cuda", init_scale=1024.0)
        losses = []
        with precast.attach(model):
            for _ in range(3):
                optimizer.zero_grad()
                with precast.autocast("cuda", F16):
                    loss = loss_of(model(x))
                scaler.scale(loss).backward()
                scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert scaler.counters.skipped == 0
    finally:
        dist.destroy_process_group()
