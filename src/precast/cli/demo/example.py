"""An example of mixed precision training: one network is trained in float32 and in 16 bits, and the two are compared.

`mixed_step` is the function to copy: it is `float32_step` with four changes. The forward pass and the loss run in a
region; the scaler scales the loss, steps the optimizer, and updates its scale.

Invariants: both runs start from identical weights and train on the same batches. They alternate at each step, and the
order alternates too, so that other load on the machine slows both alike.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from precast._internal.display import dtype_name
from precast._torch import storage_sizes
from precast.autocast_mode.region import autocast
from precast.diagnostics.hardware.machine import DtypeReport, measure, synchronize
from precast.grad_scaler.scaler import GradScaler

__all__ = ["DemoResult", "DemoRun", "DemoTask", "demo_task", "peak_bytes", "train_both"]

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""
LossFunction = Callable[[Tensor, Tensor], Tensor]


def float32_step(
    model: nn.Module, optimizer: Optimizer, loss_of: LossFunction, batch: Batch
) -> Tensor:
    """Train one step in float32. Return the loss, detached."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = loss_of(model(inputs), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mixed_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: LossFunction,
    batch: Batch,
    *,
    dtype: torch.dtype,
    scaler: GradScaler,
) -> Tensor:
    """Train one step in mixed precision. Return the loss, detached."""
    inputs, target = batch
    optimizer.zero_grad()
    with autocast(inputs.device.type, dtype=dtype):
        loss = loss_of(model(inputs), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


# --- the task ---


@dataclass(frozen=True)
class DemoTask:
    """The task of learning the image of an 8 x 8 checkerboard from the coordinates of its pixels.

    Sharp edges are hard to learn from smooth coordinates, so a picture shows the progress of the training.

    Attributes:
        size: pixels along a side; a step trains on all pixels.
        coordinates: shape (1, 2, size, size), from -1 to 1.
        image: shape (1, 1, size, size), of zeros and ones.
        loss: returns the loss of an output and a target.
    """

    size: int
    coordinates: Tensor
    image: Tensor
    loss: LossFunction = F.mse_loss

    @property
    def device(self) -> torch.device:
        """The device of data and model."""
        return self.image.device

    @property
    def batch(self) -> Batch:
        """The batch of each step."""
        return self.coordinates, self.image

    def seeded_model(self, seed: int = 0) -> nn.Module:
        """Return a model on the task's device with weights drawn from `seed`. Global generators keep their state."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            model = _coordinate_network().to(self.device)
        # 16-bit convolutions are fastest in this memory layout, and float32 is not slower.
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _coordinate_network(width: int = 256) -> nn.Module:
    """Return a scripted network of 1x1 convolutions, as an example of the modules in older programs."""
    layers: list[nn.Module] = []
    for channels in (2, width, width):
        layers += [nn.Conv2d(channels, width, 1), nn.BatchNorm2d(width), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Conv2d(width, 1, 1))
    with warnings.catch_warnings():
        # TorchScript is deprecated (since 2.14 with a FutureWarning).
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        scripted: nn.Module = torch.jit.script(network)
    return scripted


SIZES: Final = (16, 4096)
"""The smallest and the largest size."""

# (size, steps) on CUDA, and on a CPU for each dtype, where they take about a minute on 2 cores. The task for float16 is
# smaller, because PyTorch has no fast backward of float16 convolutions on a CPU.
_DEFAULTS: Final = {"cuda": (512, 500), "bfloat16": (48, 1200), "float16": (16, 300)}


def demo_task(
    device: str | None = None, dtype: str | None = None, size: int | None = None
) -> tuple[DemoTask, torch.dtype, int]:
    """Return the task, the dtype of its mixed run, and the default number of steps.

    Raises:
        ValueError: the device or the size is not allowed.
    """
    cuda = torch.cuda.is_available()
    device = device or ("cuda" if cuda else "cpu")
    allowed = ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if device not in allowed[: None if cuda else 1]:
        raise ValueError(
            f"expected a device of this machine (cpu{', cuda' * cuda}), got {device!r}"
        )
    dtype = dtype or ("bfloat16" if device == "cpu" else "float16")  # the defaults of autocast
    default_size, steps = _DEFAULTS[dtype if device == "cpu" else "cuda"]
    size = default_size if size is None else size
    if not SIZES[0] <= size <= SIZES[1]:
        raise ValueError(
            f"expected a size (pixels along a side) from {SIZES[0]} to {SIZES[1]}, got {size}"
        )
    axis, fields = torch.linspace(-1, 1, size), torch.arange(size) * 8 // size
    coordinates = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))[None]
    image = ((fields[:, None] + fields) % 2).float()[None, None]
    coordinates = coordinates.to(device, memory_format=torch.channels_last)
    return DemoTask(size, coordinates, image.to(device)), getattr(torch, dtype), steps


# --- training ---

_WARM_UP: Final = 3  # TorchScript specializes a graph in its first runs


@dataclass
class DemoRun:
    """One training run.

    Attributes:
        dtype: "float32", or the dtype of the mixed run.
        losses: the loss of each step.
        step_seconds: the time of each step after the first ones.
        scales: the scale before the first step and after each step; empty without a scaler.
        peak_bytes: the peak of tensor memory in one step, including model, optimizer state and batch.
        output: the output of the trained model; float32, on the CPU.
    """

    dtype: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    output: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def name(self) -> str:
        """The label in tables and pictures: "float32", or "bfloat16 mixed"."""
        return self.dtype if self.dtype == "float32" else f"{self.dtype} mixed"

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        return statistics.median(self.step_seconds)

    @property
    def skipped(self) -> int:
        """The number of steps that the scaler skipped. Only these lower the scale."""
        return sum(after < before for before, after in itertools.pairwise(self.scales))


@dataclass(frozen=True)
class DemoResult:
    """Both runs of a task, and the measured speeds of the mixed run's dtype on this machine."""

    task: DemoTask
    seed: int
    steps: int
    float32: DemoRun
    mixed: DemoRun
    machine: DtypeReport

    @property
    def threads(self) -> int | None:
        """The number of CPU threads; None on a GPU."""
        return torch.get_num_threads() if self.task.device.type == "cpu" else None

    @property
    def speedup(self) -> float:
        """The step time in float32 divided by the step time in mixed precision; above 1 is faster."""
        return self.float32.seconds / self.mixed.seconds


def train_both(
    task: DemoTask,
    dtype: torch.dtype,
    steps: int,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> DemoResult:
    """Train the task in float32 and in mixed precision.

    The first three steps are not timed. The last step measures memory.
    """
    trainers = [_Trainer(task, each, seed) for each in (torch.float32, dtype)]
    for step in range(steps - 1):
        for trainer in trainers if step % 2 else trainers[::-1]:
            seconds = trainer.train()
            if step >= _WARM_UP:
                trainer.run.step_seconds.append(seconds)
        progress()
    for trainer in trainers:
        trainer.finish()
    progress()
    float32, mixed = (trainer.run for trainer in trainers)
    return DemoResult(task, seed, steps, float32, mixed, measure(task.device, mixed.dtype))


class _Trainer:
    """The training of one model in one dtype."""

    def __init__(self, task: DemoTask, dtype: torch.dtype, seed: int) -> None:
        self.run = DemoRun(dtype_name(dtype))
        self._task = task
        self._model = task.seeded_model(seed)
        self._optimizer = torch.optim.Adam(self._model.parameters(), 1e-3)
        # Gradients in bfloat16 have the range of float32 and need no scale.
        self._scaler = GradScaler(task.device.type, enabled=dtype is torch.float16)
        self._region = partial(autocast, task.device.type, dtype=dtype)
        self._step: Callable[..., Tensor] = partial(mixed_step, dtype=dtype, scaler=self._scaler)
        if dtype is torch.float32:
            self._step, self._region = float32_step, nullcontext  # type: ignore[assignment]
        self._losses: list[Tensor] = []
        self._record_scale()

    def train(self) -> float:
        """Train one step, and return its time. Values are read after the measurement."""
        task = self._task
        synchronize(task.device)
        start = time.perf_counter()
        self._losses.append(self._step(self._model, self._optimizer, task.loss, task.batch))
        synchronize(task.device)
        seconds = time.perf_counter() - start
        self._record_scale()
        return seconds

    def finish(self) -> None:
        """Train the last step, which measures memory, and run the trained model."""
        self.run.peak_bytes = peak_bytes(self.train, self._model, self._optimizer, self._task.batch)
        self._model.eval()
        with torch.no_grad(), self._region():
            output: Tensor = self._model(self._task.coordinates)
        self.run.losses = [loss.item() for loss in self._losses]
        self.run.output = output.float().cpu()

    def _record_scale(self) -> None:
        if self._scaler.is_enabled():
            self.run.scales.append(self._scaler.get_scale())


def peak_bytes(
    step: Callable[[], object], model: nn.Module, optimizer: Optimizer, batch: Batch
) -> int:
    """Return the peak of tensor memory during `step`, in bytes. Earlier gradients are freed first.

    It is the size of model, optimizer state and batch plus the peak of the allocations during the step.
    """
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states, *batch]
    resident = sum(storage_sizes(t for t in tensors if isinstance(t, Tensor)).values())
    gc.collect()  # a tensor allocated earlier and freed during the step would count as negative
    device = batch[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return resident + torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler's library prints on stderr
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        step()
    # Only an exported trace has each allocation, in order.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    changes = (event["args"] for event in events if event.get("name") == "[memory]")
    sizes = (change["Bytes"] for change in changes if change["Device Type"] == 0)
    peak: int = max(itertools.accumulate(sizes, initial=0))
    return resident + peak
