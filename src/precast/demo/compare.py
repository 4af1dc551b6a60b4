"""Trains a task twice from the same seed, in float32 and in mixed precision, side by side.

Invariants: both runs start from identical weights and see the same batches. They take turns at each step, and who is
first changes, so that other load on the machine slows both alike. The first steps warm up and the last ones are
profiled; neither are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from precast.autocast_mode.region import autocast
from precast.demo.profile import StepProfile, profile_steps
from precast.demo.settings import DTYPES, Settings
from precast.demo.steps import float32_step, mixed_step
from precast.demo.task import Batch, Panel, Task
from precast.demo.threads import fastest_threads
from precast.diagnostics.hardware.machine import DtypeReport, measure, synchronize
from precast.grad_scaler.scaler import GradScaler

__all__ = ["Comparison", "Run", "compare"]

_WARM_UP = 3  # TorchScript specializes a graph in its first runs
_PROFILED = 3


@dataclass(frozen=True)
class Run:
    """What one training run did.

    Attributes:
        label: "float32", or the dtype of the mixed run.
        losses: the loss of every step.
        step_seconds: the time of each timed step.
        profile: memory and where the time goes.
        scales: the scaler's scale after every step; empty where no scaler was used.
        initial_scale: the scaler's scale before the first step.
        accuracy: on held-out data, where the task has it.
    """

    label: str
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    profile: StepProfile
    scales: tuple[float, ...]
    initial_scale: float
    accuracy: float | None

    @property
    def name(self) -> str:
        """As a person reads it: "float32", or "bfloat16 mixed"."""
        return self.label if self.label == "float32" else f"{self.label} mixed"

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.step_seconds)

    @property
    def skipped(self) -> int:
        """Steps that the scaler skipped: it backs off after each of them, and only then."""
        befores = (self.initial_scale, *self.scales)
        return sum(after < before for before, after in zip(befores, self.scales, strict=False))


@dataclass(frozen=True)
class Comparison:
    """Both runs, what they learnt, and what the machine can do in the mixed run's dtype.

    `threads` is the number of CPU threads that they were trained on; None on a GPU.
    """

    settings: Settings
    summary: str
    float32: Run
    mixed: Run
    panels: tuple[Panel, ...]
    machine: DtypeReport
    threads: int | None

    @property
    def speedup(self) -> float:
        """Steps of the mixed run in the time of one in float32; above 1 is faster."""
        return self.float32.seconds / self.mixed.seconds


def compare(settings: Settings, advance: Callable[[], None] = lambda: None) -> Comparison:
    """Runs the demo.

    Args:
        settings: what to train.
        advance: called after each of the `settings.steps` steps.
    """
    task = settings.make_task()
    if settings.device.type != "cpu":
        return _compare(task, settings, None, advance)
    batch, trial = task.batch(0), trainers(task, settings)
    with fastest_threads(lambda: [trainer.step(batch) for trainer in trial]) as threads:
        return _compare(task, settings, threads, advance)


def _compare(
    task: Task, settings: Settings, threads: int | None, advance: Callable[[], None]
) -> Comparison:
    float32, mixed = trainers(task, settings)
    pair = (float32, mixed)
    timed = settings.steps - _PROFILED
    for step in range(timed):
        batch = task.batch(step)
        for trainer in pair if step % 2 else reversed(pair):
            trainer.train(batch, timed=step >= _WARM_UP)
        advance()
    batches = [task.batch(step) for step in range(timed, settings.steps)]
    profiles = [trainer.profile(batches) for trainer in pair]
    for _ in batches:
        advance()
    outputs = {trainer.label: trainer.output(task.examples) for trainer in pair}
    accuracies = [task.accuracy(output) for output in outputs.values()]
    return Comparison(
        settings,
        task.summary,
        float32.finish(profiles[0], accuracies[0]),
        mixed.finish(profiles[1], accuracies[1]),
        task.panels(outputs),
        measure(settings.device, settings.dtype),
        threads,
    )


def trainers(task: Task, settings: Settings) -> tuple[Trainer, Trainer]:
    """The float32 and the mixed trainer, ready for their first step, with identical weights."""
    dtype, device = DTYPES[settings.dtype], settings.device.type
    # bfloat16 has float32's range: its gradients need no scale, so the scaler is off.
    scaler = GradScaler(device, enabled=dtype == torch.float16)
    mixed = partial(mixed_step, dtype=dtype, scaler=scaler)
    region = partial(autocast, device, dtype=dtype)

    def trainer(label: str, step: Callable[..., Tensor], *parts: Any) -> Trainer:
        model = seeded_model(task, settings)
        adam = torch.optim.Adam(model.parameters(), task.learning_rate)
        return Trainer(label, model, adam, partial(step, model, adam, task.loss), *parts)

    off = GradScaler(device, enabled=False)
    return (
        trainer("float32", float32_step, off, nullcontext),
        trainer(settings.dtype, mixed, scaler, region),
    )


def seeded_model(task: Task, settings: Settings) -> nn.Module:
    """The model with the weights of `settings.seed`; the global generators stay as they were."""
    devices = [settings.device] if settings.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(settings.seed)
        return task.model()


@dataclass
class Trainer:
    """One run while it is trained: it takes steps, and records what happened."""

    label: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Batch], Tensor]
    scaler: GradScaler
    region: Callable[[], AbstractContextManager[object]]
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.initial_scale = self.scaler.get_scale()

    def train(self, batch: Batch, timed: bool) -> None:
        """Takes one step; what is recorded is read after the time was taken."""
        device = batch[0].device
        synchronize(device)
        start = time.perf_counter()
        loss = self.step(batch)
        synchronize(device)
        if timed:
            self.seconds.append(time.perf_counter() - start)
        self._record(loss)

    def profile(self, batches: Sequence[Batch]) -> StepProfile:
        """Takes one step on each of `batches` under a profiler."""
        losses: list[Tensor] = []
        profile = profile_steps(
            lambda batch: losses.append(self.step(batch)), batches, self.model, self.optimizer
        )
        for loss in losses:
            self._record(loss)
        return profile

    def output(self, inputs: Tensor) -> Tensor:
        """What the trained model makes of `inputs` in its own precision; as float32, on the CPU."""
        self.model.eval()
        with torch.no_grad(), self.region():
            output: Tensor = self.model(inputs)
        return output.float().cpu()

    def finish(self, profile: StepProfile, accuracy: float | None) -> Run:
        """The run, now that it has ended."""
        losses = tuple(loss.item() for loss in self.losses)
        seconds, scales = tuple(self.seconds), tuple(self.scales)
        return Run(self.label, losses, seconds, profile, scales, self.initial_scale, accuracy)

    def _record(self, loss: Tensor) -> None:
        self.losses.append(loss)
        if self.scaler.is_enabled():
            self.scales.append(self.scaler.get_scale())
