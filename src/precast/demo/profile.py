"""What one training step needs: peak memory, and where its time goes, by kind of operation.

Invariants: memory is PyTorch's own count of tensor bytes, never the process's size. It is what the model, the optimizer
and the batch hold when the step begins, plus the most that the allocator hands out on top during the step, on every
device alike. Gradients are dropped before, so that they are part of the latter.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity

from precast.demo.task import Batch
from precast.diagnostics.hardware.machine import synchronize

__all__ = ["KINDS", "StepProfile", "profile_steps"]

KINDS = ("convolutions and products", "casts and copies", "everything else")
"""The kinds of operation that time is counted by."""

_PRODUCTS = ("conv", "mm", "matmul", "linear", "dot")
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous")


@dataclass(frozen=True)
class StepProfile:
    """The mean of a few profiled steps.

    Attributes:
        peak_bytes: tensor memory at the worst moment of a step.
        seconds: kind of operation (`KINDS`) -> time of a step in it, on the device that computes.
    """

    peak_bytes: int
    seconds: dict[str, float]


def profile_steps(
    step: Callable[[Batch], object],
    batches: Sequence[Batch],
    model: nn.Module,
    optimizer: Optimizer,
) -> StepProfile:
    """Runs `step` on each of `batches` under `torch.profiler`.

    The CPU's bytes come from the profiler's record of every allocation, CUDA's from its allocator.
    """
    device = batches[0][0].device
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    optimizer.zero_grad()
    resident = _bytes_of([*_state(model, optimizer), *batches[0]])
    before = _start_counting(device)
    # One cycle: all its events are kept either way, but until 2.12 the default warns that others would not be.
    profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with _quiet_profiler(), profiler as p:
        for batch in batches:
            step(batch)
        synchronize(device)
    growth = torch.cuda.max_memory_allocated(device) - before if on_cuda else _cpu_growth(p)
    return StepProfile(resident + growth, _seconds_by_kind(p, on_cuda, len(batches)))


def _state(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _start_counting(device: torch.device) -> int:
    gc.collect()  # what an earlier profile saw allocated would count as given back in this one
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _cpu_growth(profile: Any) -> int:
    """The highest running sum of bytes allocated and freed; only an exported trace has these one by one, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    changes = [event["args"] for event in events if event.get("name") == "[memory]"]
    on_cpu = (change["Bytes"] for change in changes if change["Device Type"] == 0)
    highest: int = max(itertools.accumulate(on_cpu, initial=0))
    return highest


def _seconds_by_kind(profile: Any, on_cuda: bool, count: int) -> dict[str, float]:
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in profile.key_averages():
        if event.device_type != DeviceType.CPU:
            continue  # a kernel: its time is already with the operation that launched it
        time = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        seconds[_kind(event.key)] += time / 1e6 / count
    return seconds


def _kind(operation: str) -> str:
    if operation in _COPIES:
        return KINDS[1]
    return KINDS[0] if any(word in operation for word in _PRODUCTS) else KINDS[2]


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    # Kineto reports its start and end on stderr, through a progress bar, unless told not to.
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
