"""Time of a training step of the demos: float32, torch.autocast, precast and pure 16 bits, in turns.

Every variant trains its own copy of the network from the same seed on the same batch, at the size that `precast demo`
uses on this device, with the same optimizer. Ratios are taken within a round, to torch.autocast + torch's scaler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.interleave import Variant, compare
from precast.demo.compare import seeded_model
from precast.demo.settings import DTYPES, TASKS, Settings, settings
from precast.demo.steps import float32_step, mixed_step
from precast.demo.task import Batch, Task
from precast.diagnostics.hardware.machine import synchronize
from precast.grad_scaler.scaler import GradScaler

__all__ = ["ROUNDS", "run"]

ROUNDS = 40

BASELINE = "torch.autocast"
_WARM_UP = 5


def run(*, rounds: int = ROUNDS, calls: int = 2) -> list[dict[str, Any]]:
    """Measures both demos.

    Args:
        rounds: rounds of each comparison.
        calls: steps of each variant in a round.

    Returns:
        One row for each demo and variant: "case", "kind", "dtype", "device", "size", "median_ms", "iqr_ms", and
        "ratio" with "ratio_iqr", to the baseline's time; below 1 is faster.
    """
    return [row for name in TASKS for row in _rows(settings(name), rounds, calls)]


def _rows(chosen: Settings, rounds: int, calls: int) -> list[dict[str, Any]]:
    variants = _variants(chosen)
    for variant in variants.values():
        for _ in range(_WARM_UP):
            variant.work()
    result = compare(variants, rounds=rounds, calls=calls)
    rows = []
    for kind in variants:
        ratio, spread = result.ratio(kind, BASELINE)
        rows.append(
            {
                "benchmark": "demos",
                "case": chosen.task,
                "kind": kind,
                "dtype": chosen.dtype,
                "device": str(chosen.device),
                "size": chosen.size,
                "median_ms": result.median(kind) * 1e3,
                "iqr_ms": result.spread(kind) * 1e3,
                "ratio": ratio,
                "ratio_iqr": spread,
            }
        )
    return rows


def _variants(chosen: Settings) -> dict[str, Variant]:
    task, device, dtype = chosen.make_task(), chosen.device, DTYPES[chosen.dtype]
    batch = task.batch(0)
    pure = (batch[0].to(dtype), batch[1])
    scaled = dtype == torch.float16
    steps: dict[str, Callable[..., Tensor]] = {
        "float32": partial(float32_step, batch=batch),
        BASELINE: partial(
            _torch_step,
            batch=batch,
            dtype=dtype,
            scaler=torch.amp.GradScaler(device.type, enabled=scaled),
        ),
        "precast": partial(
            mixed_step, batch=batch, dtype=dtype, scaler=GradScaler(device.type, enabled=scaled)
        ),
        f"pure {chosen.dtype}": partial(_pure_step, batch=pure),
    }
    return {
        name: Variant(_work(step, task, chosen, dtype if name.startswith("pure") else None))
        for name, step in steps.items()
    }


def _work(
    step: Callable[..., Tensor], task: Task, chosen: Settings, weights: torch.dtype | None
) -> Callable[[], None]:
    model = seeded_model(task, chosen).to(weights)
    optimizer = torch.optim.Adam(model.parameters(), task.learning_rate)

    def work() -> None:
        step(model, optimizer, task.loss)
        synchronize(chosen.device)

    return work


def _torch_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    batch: Batch,
    dtype: torch.dtype,
    scaler: torch.amp.GradScaler,
) -> Tensor:
    """`mixed_step`, line by line, with PyTorch's own region and scaler."""
    inputs, target = batch
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype=dtype):
        loss = loss_of(model(inputs), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def _pure_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    *,
    batch: Batch,
) -> Tensor:
    """Weights, activations and optimizer in 16 bits; only the loss is computed in float32."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = loss_of(model(inputs).float(), target)
    loss.backward()
    optimizer.step()
    return loss.detach()
