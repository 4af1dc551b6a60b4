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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from precast._internal.display import dtype_name
from precast.autocast_mode.region import autocast
from precast.diagnostics.hardware.machine import DtypeReport, measure, synchronize
from precast.grad_scaler.scaler import GradScaler
from precast.policy.values import canonical_dtype

__all__ = [
    "DemoResult",
    "DemoRun",
    "DemoTask",
    "demo_task",
    "float32_step",
    "mixed_step",
    "peak_bytes",
    "train_both",
]

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
    """The image of a checkerboard of 8 x 8 fields, learnt from the coordinates of its pixels.

    Smooth coordinates make sharp edges hard to learn, so a picture shows how far training came.

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
        """Return a model on the task's device with the weights of `seed`. The global generators do not advance."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            model = _coordinate_network().to(self.device)
        # The memory layout that 16-bit convolutions are written for; float32 loses nothing by it.
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def checkerboard_task(size: int, device: torch.device) -> DemoTask:
    """Return the task for an image of `size` x `size` pixels."""
    axis, field_ = torch.linspace(-1, 1, size), torch.arange(size) * 8 // size
    coordinates = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))[None]
    image = ((field_[:, None] + field_[None, :]) % 2).float()[None, None]
    return DemoTask(
        size, coordinates.to(device, memory_format=torch.channels_last), image.to(device)
    )


def _coordinate_network(width: int = 256) -> nn.Module:
    """Return scripted 1x1 convolutions: older programs have such modules, and they train unchanged."""
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

# (size, steps) on CUDA, and on a CPU in each dtype: about a minute on 2 cores. PyTorch has no fast backward pass of
# float16 convolutions on a CPU, so that one is small.
_DEFAULTS: Final = {"cuda": (512, 500), "bfloat16": (48, 1200), "float16": (16, 300)}


def demo_task(
    device: str | None = None, dtype: str | None = None, size: int | None = None
) -> tuple[DemoTask, torch.dtype, int]:
    """Return the task, the dtype of its mixed run, and the default number of steps.

    Args:
        device: "cpu", "cuda" or "cuda:1". Default: "cuda" if there is one.
        dtype: "bfloat16" or "float16". Default: float16 on CUDA, bfloat16 on a CPU.
        size: pixels along a side.

    Raises:
        ValueError: a value is not allowed.
    """
    place = _device(device)
    on_cuda = place.type == "cuda"
    dtype = dtype or ("float16" if on_cuda else "bfloat16")  # the defaults of autocast
    dtype = canonical_dtype(dtype) or dtype
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"expected dtype bfloat16 or float16, got {dtype!r}")
    default_size, steps = _DEFAULTS["cuda" if on_cuda else dtype]
    size = default_size if size is None else size
    smallest, largest = SIZES
    if not smallest <= size <= largest:
        raise ValueError(
            f"expected a size (pixels along a side) from {smallest} to {largest}, got {size}"
        )
    return checkerboard_task(size, place), getattr(torch, dtype), steps


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    allowed += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if name not in allowed:
        raise ValueError(f"expected a device of this machine ({', '.join(allowed)}), got {name!r}")
    return torch.device(name)


# --- training ---

_WARM_UP: Final = 3  # TorchScript specializes a graph in its first runs
_TIMED: Final = 5  # steps, to choose the number of threads


@dataclass
class DemoRun:
    """One training run.

    Attributes:
        dtype: "float32", or the dtype of the mixed run.
        losses: the loss of each step.
        step_seconds: the time of each step after the first ones.
        scales: the scale before the first step and after each step; empty without a scaler.
        peak_bytes: the peak of tensor memory in one step: model, optimizer state, batch, and what is allocated.
        output: the image that the trained model gives; float32, on the CPU.
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
        """The number of steps that the scaler skipped: the scale falls after each of them, and only then."""
        return sum(after < before for before, after in itertools.pairwise(self.scales))


@dataclass(frozen=True)
class DemoResult:
    """Both runs of a task, and the measured speeds of the mixed run's dtype on this machine.

    `threads` is the number of CPU threads; None on a GPU.
    """

    task: DemoTask
    seed: int
    steps: int
    float32: DemoRun
    mixed: DemoRun
    machine: DtypeReport
    threads: int | None

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

    Args:
        task: a result of `demo_task`.
        dtype: `torch.bfloat16` or `torch.float16`.
        steps: training steps of each run; the first three are not timed, the last one is used to count memory.
        seed: the seed of the weights.
        progress: called after each step.
    """
    threads = torch.get_num_threads()
    on_cpu = task.device.type == "cpu"
    try:
        if on_cpu and threads > 1:
            _set_faster_threads(
                [trainer.step for trainer in _trainers(task, dtype, seed)], task.batch, threads
            )
        pair = _trainers(task, dtype, seed)
        for step in range(steps):
            for trainer in pair if step % 2 else pair[::-1]:
                trainer.train(
                    task.batch, timed=_WARM_UP <= step < steps - 1, counts_memory=step == steps - 1
                )
            progress()
        float32, mixed = (trainer.finish(task) for trainer in pair)
        machine = measure(task.device, mixed.dtype)
        return DemoResult(
            task, seed, steps, float32, mixed, machine, torch.get_num_threads() if on_cpu else None
        )
    finally:
        torch.set_num_threads(threads)


def _set_faster_threads(steps: list[Callable[[Batch], Tensor]], batch: Batch, threads: int) -> None:
    """Choose one thread where it is faster than all by 10%.

    Threads that share a small step wait for each other after every operation. On cores that other programs use, one
    thread can be ten times as fast as two.
    """
    seconds = {}
    for count in (1, threads):
        torch.set_num_threads(count)
        moments = []
        for _ in range(_WARM_UP + _TIMED):
            moments.append(time.perf_counter())
            for step in steps:
                step(batch)
        seconds[count] = statistics.median(b - a for a, b in itertools.pairwise(moments[_WARM_UP:]))
    torch.set_num_threads(threads if seconds[threads] < seconds[1] * 1.1 else 1)


def _trainers(task: DemoTask, dtype: torch.dtype, seed: int) -> tuple[_Trainer, _Trainer]:
    """Return the float32 and the mixed trainer with identical weights."""
    device = task.device.type

    def trainer(
        name: str, step: Callable[..., Tensor], scaler: GradScaler, region: Any
    ) -> _Trainer:
        model = task.seeded_model(seed)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        return _Trainer(
            DemoRun(name),
            model,
            optimizer,
            partial(step, model, optimizer, task.loss),
            scaler,
            region,
        )

    # The gradients of bfloat16 have float32's range and need no scale.
    scaler = GradScaler(device, enabled=dtype == torch.float16)
    mixed = partial(mixed_step, dtype=dtype, scaler=scaler)
    return (
        trainer("float32", float32_step, GradScaler(device, enabled=False), nullcontext),
        trainer(dtype_name(dtype), mixed, scaler, partial(autocast, device, dtype=dtype)),
    )


@dataclass
class _Trainer:
    """A run while it is trained."""

    run: DemoRun
    model: nn.Module
    optimizer: Optimizer
    step: Callable[[Batch], Tensor]
    scaler: GradScaler
    region: Callable[[], AbstractContextManager[object]]
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._record_scale()

    def train(self, batch: Batch, *, timed: bool, counts_memory: bool) -> None:
        """Train one step. Values are read after the time was taken."""
        if counts_memory:
            self.run.peak_bytes = peak_bytes(
                lambda: self.losses.append(self.step(batch)), self.model, self.optimizer, batch
            )
        else:
            synchronize(batch[0].device)
            start = time.perf_counter()
            self.losses.append(self.step(batch))
            synchronize(batch[0].device)
            if timed:
                self.run.step_seconds.append(time.perf_counter() - start)
        self._record_scale()

    def finish(self, task: DemoTask) -> DemoRun:
        """Run the trained model on the coordinates, and return the run."""
        self.model.eval()
        with torch.no_grad(), self.region():
            output: Tensor = self.model(task.coordinates)
        self.run.losses = [loss.item() for loss in self.losses]
        self.run.output = output.float().cpu()
        return self.run

    def _record_scale(self) -> None:
        if self.scaler.is_enabled():
            self.run.scales.append(self.scaler.get_scale())


def peak_bytes(
    step: Callable[[], object], model: nn.Module, optimizer: Optimizer, batch: Batch
) -> int:
    """Return the peak of tensor memory during `step`, in bytes. Gradients of the step before are freed first.

    It is the size of model, optimizer state and batch, and the peak of what PyTorch allocates on top.
    """
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states, *batch]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if isinstance(t, Tensor)
    }
    resident = sum(storages.values())
    gc.collect()  # a tensor allocated earlier and freed during the step would count as negative
    device = batch[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return resident + torch.cuda.max_memory_allocated(device) - before
    with _no_kineto_log(), torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
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


@contextmanager
def _no_kineto_log() -> Iterator[None]:
    # The profiler's library prints its start and end on stderr, through a progress bar, at the default level.
    level = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = level or "99"
    try:
        yield
    finally:
        if level is None:
            del os.environ["KINETO_LOG_LEVEL"]
