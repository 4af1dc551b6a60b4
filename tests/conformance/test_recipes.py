"""Training as PyTorch's AMP recipes write it: scaling, clipping, accumulation, penalties, several models, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conformance.compare import amp, assert_same, in_both_dtypes
from tests.conformance.systems import MakeRegion, System, on_all_systems

STEPS = 6
BROKEN = 2
"""The step whose input is infinite: its gradients are, the scaler skips it, and its scale shrinks."""


@dataclass
class Training:
    """A model with its optimizer and scaler, its data, and what is noted on the way."""

    region: MakeRegion
    dtype: torch.dtype
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    notes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.scaler = amp(self.region).GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    def autocast(self, **options: Any) -> Any:
        return self.region("cpu", **{"dtype": self.dtype, **options})

    def batches(self) -> Any:
        for step in range(STEPS):
            x, target = torch.randn(6, 4), torch.randn(6, 2)
            yield x / 0 if step == BROKEN else x, target

    def step(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.note(loss, self.scaler.get_scale())

    def note(self, *values: Any) -> None:
        """Notes numbers of a step; one that is not finite as text, for NaN equals nothing."""
        for value in values:
            number = value.item() if isinstance(value, Tensor) else value
            self.notes.append(number if abs(number) < float("inf") else repr(number))


def typical(t: Training) -> None:
    for x, target in t.batches():
        t.optimizer.zero_grad()
        with t.autocast():
            loss = F.mse_loss(t.model(x), target)
        t.step(loss)


def clipped(t: Training) -> None:
    for x, target in t.batches():
        t.optimizer.zero_grad(set_to_none=False)
        with t.autocast():
            loss = F.mse_loss(t.model(x), target)
        t.scaler.scale(loss).backward()
        t.scaler.unscale_(t.optimizer)
        norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
        t.scaler.step(t.optimizer)
        t.scaler.update()
        t.note(loss, norm, t.scaler.get_scale())


def accumulated_in_one_region(t: Training) -> None:
    """Both halves find the same copies of the weights."""
    for x, target in t.batches():
        t.optimizer.zero_grad()
        with t.autocast():
            for part, expected in zip(x.chunk(2), target.chunk(2), strict=True):
                loss = F.mse_loss(t.model(part), expected) / 2
                t.scaler.scale(loss).backward()
        t.scaler.step(t.optimizer)
        t.scaler.update()
        t.note(loss, t.scaler.get_scale())


def penalised(t: Training) -> None:
    """The gradients of the penalty are scaled, and unscaled by hand."""
    for x, target in t.batches():
        t.optimizer.zero_grad()
        with t.autocast():
            loss = F.mse_loss(t.model(x), target)
        scaled = torch.autograd.grad(
            t.scaler.scale(loss), list(t.model.parameters()), create_graph=True
        )
        gradients = [gradient / t.scaler.get_scale() for gradient in scaled]
        with t.autocast():
            penalty = sum(gradient.square().sum() for gradient in gradients)
            loss = loss + torch.sqrt(penalty)  # type: ignore[arg-type]
        t.step(loss)


def several(t: Training) -> None:
    """Two models, two losses that share a graph, two optimizers of which one is unscaled, one scaler."""
    other = nn.Linear(2, 2)
    second = t.make_optimizer(other.parameters())
    for x, target in t.batches():
        t.optimizer.zero_grad()
        second.zero_grad()
        with t.autocast():
            first_output = t.model(x)
            second_output = other(first_output)
            losses = [
                F.mse_loss(2 * first_output + 3 * second_output, target),
                F.l1_loss(3 * first_output - 5 * second_output, target),
            ]
        t.scaler.scale(losses[0]).backward(retain_graph=True)
        t.scaler.scale(losses[1]).backward()
        t.scaler.unscale_(t.optimizer)
        t.scaler.step(t.optimizer)
        t.scaler.step(second)
        t.scaler.update()
        t.note(*losses, *t.scaler.scale([torch.ones(()), torch.ones(())]))
    t.note(*(p.sum() for p in other.parameters()))


def adversarial(t: Training) -> None:
    """A generator and a critic in turns, in one region each, with a critic that is not trained through."""
    critic = nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(), nn.Linear(4, 1))
    second = t.make_optimizer(critic.parameters())
    for x, real in t.batches():
        with t.autocast():
            fake = t.model(x)
            gain = critic(real).mean() - critic(fake.detach()).mean()
        second.zero_grad()
        t.scaler.scale(-gain).backward()
        t.scaler.step(second)
        with t.autocast():
            critic.requires_grad_(False)
            loss = F.softplus(-critic(fake)).mean()
            critic.requires_grad_(True)
        t.optimizer.zero_grad()
        t.scaler.scale(loss).backward()
        t.scaler.step(t.optimizer)
        t.scaler.update()
        t.note(gain, loss, t.scaler.get_scale())
    t.note(*(p.sum() for p in critic.parameters()))


def evaluated(t: Training) -> None:
    """With an evaluation of averaged weights in between, without gradients and in the same dtype."""
    average = torch.optim.swa_utils.AveragedModel(t.model)
    for x, target in t.batches():
        t.optimizer.zero_grad()
        with t.autocast():
            loss = F.mse_loss(t.model(x), target)
        t.scaler.scale(loss).backward()
        t.scaler.step(t.optimizer)
        t.scaler.update()
        average.update_parameters(t.model)
        with torch.no_grad(), t.autocast():
            t.note(average.eval()(target.repeat(1, 2)).float().sum(), t.scaler.get_scale())


def by_threads(t: Training) -> None:
    """Run a thread for each part, with the region inside of the model's forward, as `DataParallel` does."""

    class Replica(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        @t.autocast()  # type: ignore[untyped-decorator]
        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)  # type: ignore[no-any-return]

    replica = Replica(t.model)
    for x, target in t.batches():
        outputs: dict[int, Tensor] = {}

        def work(i: int, part: Tensor, outputs: dict[int, Tensor] = outputs) -> None:
            outputs[i] = replica(part)

        # One after the other: PyTorch's threads share copies, and what they add up depends on who is first.
        for pair in enumerate(x.chunk(2)):
            thread = threading.Thread(target=work, args=pair)
            thread.start()
            thread.join()
        t.optimizer.zero_grad()
        with t.autocast():
            loss = F.mse_loss(torch.cat([outputs[0], outputs[1]]), target)
        t.step(loss)


RECIPES = {
    recipe.__name__.replace("_", " "): recipe
    for recipe in (
        typical,
        clipped,
        accumulated_in_one_region,
        penalised,
        several,
        adversarial,
        evaluated,
        by_threads,
    )
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam, one by one": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=False),
    "AdamW, all at once": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "Adam, fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
}


@in_both_dtypes
@pytest.mark.parametrize("name", RECIPES)
@on_all_systems
def test_recipes(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, _trained, name, "SGD", dtype)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"SGD"}))
@pytest.mark.parametrize("name", ["typical", "clipped", "several"])
@on_all_systems
def test_optimizers(system: System, name: str, optimizer: str) -> None:
    assert_same(system, _trained, name, optimizer, torch.float16)


def _trained(region: MakeRegion, name: str, optimizer: str, dtype: torch.dtype) -> Any:
    """Losses and scales of every step; the weights, and the state of optimizer and scaler, after the last."""
    training = Training(region, dtype, OPTIMIZERS[optimizer])
    RECIPES[name](training)
    parameters = list(training.model.parameters())
    moments = [training.optimizer.state[p] for p in parameters]
    return training.notes, parameters, moments, training.scaler.state_dict()


@on_all_systems
def test_bfloat16_needs_no_scaler(system: System) -> None:
    """The loop that most people write."""

    def program(region: MakeRegion) -> Any:
        model, notes = nn.Linear(4, 2), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for _ in range(STEPS):
            optimizer.zero_grad()
            with region("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 2)
            loss.backward()
            optimizer.step()
            schedule.step()
            notes.append(loss.item())
        return notes, list(model.parameters())

    assert_same(system, program)
