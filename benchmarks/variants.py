"""The ways to run a network that `python -m benchmarks models` compares, each ready to be called many times.

Invariants:
    - Every variant of a work has its own model, from the same seed, and sees the same batches in the same order.
    - All train with SGD of the same settings, and compute the loss in float32.
    - Inference is under `no_grad`, not `inference_mode`: what it gives may be used anywhere afterwards, and PyTorch
      still counts the versions of tensors there, which is what a weight that is kept has to be checked by.
    - Generation is one region around many forward passes. It is measured under `inference_mode` as well, as many write
      it so; precast keeps no copies of its own there, because one that PyTorch does not keep could be out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import precast
from benchmarks import by_hand
from benchmarks.by_hand import Update
from benchmarks.networks import MOST_BATCHES, Batch, Network
from precast.engine import registration

__all__ = ["ACCUMULATION", "BASELINE", "BY_HAND", "GENERATION", "INFERENCE", "TRAINING", "WORKS"]
__all__ += ["GENERATION_IN_INFERENCE_MODE", "LEAN", "Prepared", "Setting"]
__all__ += ["SkippedError", "kinds", "prepare"]

BASELINE, BY_HAND = "torch.autocast", "by hand"
INFERENCE, TRAINING, ACCUMULATION = "inference", "training step", "accumulation x4"
GENERATION, GENERATION_IN_INFERENCE_MODE = "generation", "generation, inference_mode"
WORKS = (INFERENCE, GENERATION, GENERATION_IN_INFERENCE_MODE, TRAINING, ACCUMULATION)
_WITHOUT_GRADIENTS = (INFERENCE, GENERATION, GENERATION_IN_INFERENCE_MODE)
_FORWARDS = 16
"""Forward passes in the one region of a generation."""
_SUMMING = "by hand, float32 sums"
LEAN = "attached + lean"
_LEARNING_RATE = 1e-2

Region = Callable[[], AbstractContextManager[object]]


class SkippedError(Exception):
    """Something that is not measured here, and why."""


@dataclass(frozen=True)
class Setting:
    """A device, a 16-bit dtype, and whether models are compiled."""

    device: torch.device
    dtype: torch.dtype
    compiled: bool = False
    backend: str = "inductor"

    def compile(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The model as it is called."""
        if not self.compiled:
            return model
        if isinstance(model, torch.jit.ScriptModule):
            raise SkippedError("torch.compile takes no scripted modules")
        compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=self.backend)
        return compiled


@dataclass(frozen=True)
class Prepared:
    """A variant that is ready: `work` gives a detached output or loss; `close` ends what it set up.

    `before` puts the dispatcher into the state that is the variant's own, before a turn.
    """

    work: Callable[[], Tensor]
    close: Callable[[], object] = lambda: None
    before: Callable[[], object] = lambda: None


def kinds(work: str) -> tuple[str, ...]:
    """The variants of a work."""
    return (*_MIXED, BY_HAND, *([_SUMMING] if work == ACCUMULATION else []))


def _trains(work: str) -> bool:
    return work not in _WITHOUT_GRADIENTS


def prepare(kind: str, network: Network, work: str, setting: Setting) -> Prepared:
    """Makes a variant ready.

    Raises:
        SkippedError: it can't be, here.
    """
    model, batches = network.seeded(setting.device, MOST_BATCHES if work == ACCUMULATION else 1)
    model.train(_trains(work))
    job = _Job(model, batches, network.loss, work, setting)
    return _by_hand(kind, job) if kind in (BY_HAND, _SUMMING) else _mixed(kind, job)


@dataclass(frozen=True)
class _Job:
    model: nn.Module
    batches: list[Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    work: str
    setting: Setting

    @property
    def trains(self) -> bool:
        return _trains(self.work)


@dataclass(frozen=True)
class _Mixed:
    """float32 parameters: the region around the forward pass, and what is done to the model before."""

    region: Callable[[Setting], Region]
    before: Callable[[Region], object] = lambda _: None
    scaler: Callable[..., Any] = torch.amp.GradScaler
    attach: Callable[[nn.Module], Callable[[], object]] = lambda _: lambda: None


def _torch_region(setting: Setting) -> Region:
    return partial(torch.autocast, setting.device.type, dtype=setting.dtype)


def _precast_region(setting: Setting, policy: str | None = None) -> Region:
    region = partial(precast.autocast, setting.device.type, dtype=setting.dtype)
    return region if policy is None else partial(region, policy=precast.Policy.load(policy))


def _attach(model: nn.Module, policy: str | None = None) -> Callable[[], object]:
    try:
        return precast.attach(model, policy).detach
    except precast.errors.PrecastError as error:
        raise SkippedError(str(error)) from error


def _register(region: Region) -> None:
    """Puts precast's kernels on the dispatcher, as the first region after `unregister` does."""
    with region():
        pass


_MIXED: Mapping[str, _Mixed] = {
    "float32": _Mixed(lambda _: nullcontext),
    BASELINE: _Mixed(_torch_region, lambda _: registration.unregister()),
    "precast": _Mixed(partial(_precast_region, policy="torch"), _register, precast.GradScaler),
    "attached": _Mixed(_precast_region, _register, precast.GradScaler, _attach),
    LEAN: _Mixed(_precast_region, _register, precast.GradScaler, partial(_attach, policy="lean")),
}


def _mixed(kind: str, job: _Job) -> Prepared:
    chosen = _MIXED[kind]
    optimizer = _sgd(list(job.model.parameters())) if job.trains else None
    region = chosen.region(job.setting)
    detach = chosen.attach(job.model)
    called, before = job.setting.compile(job.model), partial(chosen.before, region)
    if optimizer is None:
        return Prepared(_inference(called, job.batches, region, job.work), detach, before)
    scaler = None if kind == "float32" else chosen.scaler
    update = _wrapped(job.setting, scaler)(optimizer)
    return Prepared(_training(called, job.batches, region, job.loss, update), detach, before)


def _by_hand(kind: str, job: _Job) -> Prepared:
    dtype = job.setting.dtype
    lowered = [(i.to(dtype) if i.is_floating_point() else i, target) for i, target in job.batches]
    if not job.trains:
        called = job.setting.compile(job.model.to(dtype))
        return Prepared(_inference(called, lowered, nullcontext, job.work))
    make = by_hand.masters if kind == BY_HAND else by_hand.summing_masters
    update = make(job.model, dtype, _sgd, _wrapped(job.setting, torch.amp.GradScaler))
    called = job.setting.compile(job.model)

    def loss_in_float32(output: Tensor, target: Tensor) -> Tensor:
        return job.loss(output.float(), target)

    return Prepared(_training(called, lowered, nullcontext, loss_in_float32, update))


def _sgd(params: list[Any]) -> Optimizer:
    return SGD(params, _LEARNING_RATE)


def _wrapped(setting: Setting, scaler: Callable[..., Any] | None) -> Callable[[Optimizer], Update]:
    """float16 gradients need a scale; those of the other types have float32's range."""
    if scaler is None or setting.dtype != torch.float16:
        return by_hand.plain
    return partial(by_hand.scaled, scaler=scaler(setting.device.type))


def _inference(
    model: Callable[[Tensor], Tensor], batches: list[Batch], region: Region, work: str
) -> Callable[[], Tensor]:
    [(inputs, _)] = batches
    mode = torch.inference_mode if work == GENERATION_IN_INFERENCE_MODE else torch.no_grad
    more = 0 if work == INFERENCE else _FORWARDS - 1

    def infer() -> Tensor:
        with mode(), region():
            for _ in range(more):
                model(inputs)
            return model(inputs)

    return infer


def _training(
    model: Callable[[Tensor], Tensor],
    batches: list[Batch],
    region: Region,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    update: Update,
) -> Callable[[], Tensor]:
    parts = len(batches)

    def work() -> Tensor:
        update.clear()
        for inputs, target in batches:
            with region():
                loss = loss_of(model(inputs), target)
            update.backward(loss / parts if parts > 1 else loss)
        update.apply()
        return loss.detach()

    return work
