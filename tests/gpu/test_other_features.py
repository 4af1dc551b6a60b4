"""On a GPU: watching, converting, exporting, compiling, tuning, float8, and errors of attached weights."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import precast
from precast.optim import rounding
from tests.gpu.networks import equal, loss_of, network, scaled_step

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16


LOWERED = partial(precast.autocast, "cuda", F16)


def test_a_trace_changes_no_bit_of_a_step() -> None:
    results = []
    for traced in (False, True):
        model, x = network("decoder")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = scaled_step(
            model, x, optimizer, precast.GradScaler("cuda", init_scale=64.0), LOWERED
        )
        step()
        if traced:
            with precast.trace(model) as trace:
                step()
        else:
            step()
        results.append([p.detach() for p in model.parameters()])
    assert all(equal(a, b) for a, b in zip(*results, strict=True))
    lowered = sum(row.calls for row in trace.rows if row.rule == "lower")
    assert lowered > 10
    json.dumps(trace.to_dict())


def test_a_monitor_names_the_first_overflow() -> None:
    model, x = network("perceptron")
    monitor = precast.monitor(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = precast.GradScaler("cuda", on_diagnosis="ignore")
    scaled_step(model, x * 1e6, optimizer, scaler, LOWERED)()
    monitor.end_step()
    first = monitor.first
    monitor.detach()
    assert first is not None
    assert "0" in str(first)


def test_rounding_is_that_of_the_cpu() -> None:
    values = torch.randn(4096) * torch.logspace(-30, 30, 4096)
    assert equal(
        rounding.stochastic(values, 12345), rounding.stochastic(values.cuda(), 12345).cpu()
    )
    assert equal(rounding.nearest(values), rounding.nearest(values.cuda()).cpu())


@pytest.mark.parametrize("arguments", [["explain", "softmax", "--device", "cuda"], ["doctor"]])
def test_commands(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "precast", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_write_through_data_is_an_error() -> None:
    model, x = network("perceptron")
    model.requires_grad_(False)

    def repeat(count: int) -> None:
        for _ in range(count):
            with torch.no_grad(), precast.autocast("cuda", BF16):
                model(x)
            torch.cuda.synchronize()

    with precast.attach(model):
        repeat(1)
        model[0].weight.data.mul_(2)  # type: ignore[operator, union-attr]
        with pytest.raises(precast.errors.PrecastError, match="weight"):
            repeat(200)


def test_copies_take_the_memory_that_they_say() -> None:
    model, x = network("decoder")
    with torch.no_grad(), precast.autocast("cuda", BF16):
        model(x)  # a region frees what earlier models held
    gc.collect()
    torch.cuda.synchronize()
    with precast.attach(model) as attachment:
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), precast.autocast("cuda", BF16):
            model(x)
        taken = torch.cuda.memory_allocated() - before
        assert 0 < attachment.memory() <= taken < 1.5 * attachment.memory() + 2**20


def test_converted_and_exported_are_the_region() -> None:
    model, x = network("perceptron")
    model.eval()
    with torch.no_grad():
        with precast.autocast("cuda", BF16):
            expected = model(x)
        exported = precast.export(model, (x,), dtype=BF16)
        assert equal(exported.module()(x), expected)
        assert equal(precast.convert(model, dtype=BF16, example=x)(x), expected)


# PyTorch captures an empty graph first, and would swallow this warning if it were not an error here.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_training(mode: str | None, attached: bool) -> None:
    def run(compiled: bool, region: Any) -> list[float]:
        model, x = network("perceptron")
        kept = precast.attach(model) if attached and compiled else None
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        called = torch.compile(model, mode=mode) if compiled else model
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            with region("cuda", BF16):
                loss = loss_of(called(x))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        del kept
        return losses

    torch.compiler.reset()
    expected, found = run(False, torch.autocast), run(True, precast.autocast)
    assert all(abs(a - b) < 0.02 * a for a, b in zip(expected, found, strict=True))


def test_a_region_inside_a_compiled_function() -> None:
    model, x = network("perceptron")

    @torch.compile(fullgraph=True)
    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cuda", BF16):
            result: Tensor = model(x)
        return result

    torch.compiler.reset()
    with torch.autocast("cuda", BF16):
        expected = model(x).float()
    output = forward(x)
    loss_of(output).backward()
    assert output.dtype is BF16
    assert (output.float() - expected).norm() < 0.02 * expected.norm()


def test_tuning() -> None:
    model, _ = network("perceptron")
    torch.manual_seed(3)
    batches = [torch.randn(64, 256, device="cuda") for _ in range(8)]
    result = precast.tune(
        model,
        lambda model, x: model(x).square().mean(),
        batches,
        budget=15.0,
        options=precast.TuningOptions(candidates=["bfloat16"]),
    )
    assert result.policy is not None
