"""attach, where programs write weights in ways that PyTorch does not count: they compute what the drop-in computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.weights import held

BF16 = torch.bfloat16
WIDTH = 136
"""Wide enough for a weight to be held in training, where a bias is not."""
STEPS = 5


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    yield
    assert held.held_parameters == {}


def region() -> precast.autocast:
    return precast.autocast("cpu", dtype=BF16, policy="torch")


class Run:
    """One model in training: batches that are drawn the same each time, and all losses that it had."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.draw = torch.Generator().manual_seed(3)
        self.losses: list[float] = []

    def loss(self, model: nn.Module | None = None) -> Tensor:
        x = torch.randn(4, WIDTH, generator=self.draw)
        with region():
            y = (model or self.model)(x)
        loss: Tensor = y.float().square().mean()
        self.losses.append(loss.item())
        return loss

    def evaluate(self, mode: Any = torch.no_grad) -> None:
        for _ in range(2):
            with mode():
                self.loss()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


class Lion:
    """An optimizer that is none of PyTorch's, and writes through `.data`."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad.sign(), alpha=0.01)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class LionOfPytorch(torch.optim.Optimizer):
    """The same as a `torch.optim.Optimizer`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})

    def step(self, closure: Any = None) -> None:
        Lion(self.param_groups[0]["params"]).step()


def trained(run: Run, optimizer: Any, before: Callable[[], None] = lambda: None) -> None:
    for _ in range(STEPS):
        before()
        run.loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def an_optimizer_that_is_not_pytorchs(run: Run) -> None:
    trained(run, Lion(run.parameters()))
    run.evaluate()


def one_of_pytorchs_that_writes_data(run: Run) -> None:
    trained(run, LionOfPytorch(run.parameters()))
    run.evaluate()


def gradients_that_are_accumulated(run: Run) -> None:
    for optimizer in (Lion(run.parameters()), torch.optim.SGD(run.parameters(), lr=0.1)):
        for _ in range(STEPS):
            for _ in range(3):
                run.loss().backward()
            optimizer.step()
            optimizer.zero_grad()


def by_hand(run: Run) -> None:
    for _ in range(STEPS):
        gradients = torch.autograd.grad(run.loss(), run.parameters())
        for parameter, gradient in zip(run.parameters(), gradients, strict=True):
            parameter.data -= 0.1 * gradient


def in_float32_and_evaluated_in_a_region(run: Run) -> None:
    optimizer = Lion(run.parameters())
    for _ in range(STEPS):
        run.model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.evaluate(torch.inference_mode)


def evaluated_after_each_step(run: Run) -> None:
    optimizer = Lion(run.parameters())
    trained(run, optimizer, run.evaluate)
    trained(run, optimizer, lambda: run.evaluate(torch.inference_mode))


def written_after_the_step(run: Run) -> None:
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)

    def average() -> None:  # as a reduction over processes does
        for parameter in run.parameters():
            parameter.data.mul_(0.5)

    trained(run, optimizer, average)


def exchanged_for_their_average(run: Run) -> None:
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    average = [p.detach().clone() for p in run.parameters()]
    for _ in range(STEPS):
        run.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = [p.detach().clone() for p in run.parameters()]
        for mean, p in zip(average, run.parameters(), strict=True):
            mean.lerp_(p.data, 0.5)
            p.data.copy_(mean)
        run.evaluate()
        for own, p in zip(kept, run.parameters(), strict=True):
            p.data.copy_(own)


def clipped_before_the_turn_of_the_critic(run: Run) -> None:
    critic, maker = nn.Linear(WIDTH, WIDTH), run.model
    with torch.no_grad():
        critic.weight.copy_(maker[0].weight)  # type: ignore[index]
        critic.bias.zero_()
    both = nn.Sequential(maker, critic)
    with precast.attach(critic, hold=bool(held.attached)):
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        of_maker = torch.optim.SGD(maker.parameters(), lr=0.1)
        for _ in range(STEPS):
            for _ in range(2):
                for p in critic.parameters():
                    p.data.clamp_(-0.05, 0.05)
                critic.zero_grad()
                (-run.loss(both)).backward()
                of_critic.step()
            maker.zero_grad()
            run.loss(both).backward()
            of_maker.step()
            critic.zero_grad()


def views_of_a_flat_buffer(run: Run, optimizer: Any = Lion) -> None:
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in run.parameters()]))
    flat.grad, start = torch.zeros_like(flat), 0
    for p in run.parameters():
        place = slice(start, start := start + p.numel())
        p.data, p.grad = flat.data[place].view(p.shape), flat.grad[place].view(p.shape)
    optimizer = optimizer([flat])
    for _ in range(STEPS):
        run.loss().backward()
        optimizer.step()
        flat.grad.zero_()
        run.evaluate()


def views_of_a_flat_buffer_of_pytorchs(run: Run) -> None:
    views_of_a_flat_buffer(run, lambda flat: torch.optim.SGD(flat, lr=0.1))


def views_of_a_flat_buffer_that_is_a_parameter(run: Run) -> None:
    run.model.flat = nn.Parameter(torch.zeros(2))
    views_of_a_flat_buffer(run, lambda flat: torch.optim.Adam(flat, lr=0.1, fused=True))


def tied_by_storage(run: Run, optimizer: Any = lambda p: torch.optim.SGD(p, lr=0.1)) -> None:
    first, last = run.model[0], run.model[2]  # type: ignore[index]
    run.evaluate()
    last.weight.data = first.weight.data
    last.requires_grad_(False)
    trained(run, optimizer([first.weight, first.bias]), run.evaluate)


def tied_by_storage_and_written_by_hand(run: Run) -> None:
    class Counted(Lion):
        def step(self) -> None:
            with torch.no_grad():
                for p in self.parameters:
                    p.sub_(p.grad)

    tied_by_storage(run, Counted)


def tied_by_storage_and_written_unseen(run: Run) -> None:
    tied_by_storage(run, Lion)


def tied_to_what_is_not_held(run: Run) -> None:
    other = nn.Linear(WIDTH, WIDTH)
    other.load_state_dict(run.model[0].state_dict())  # type: ignore[index]
    run.model[0].weight.data = other.weight.data  # type: ignore[index]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(STEPS):
        run.evaluate()
        other(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()


PROGRAMS = [
    an_optimizer_that_is_not_pytorchs,
    one_of_pytorchs_that_writes_data,
    gradients_that_are_accumulated,
    by_hand,
    in_float32_and_evaluated_in_a_region,
    evaluated_after_each_step,
    written_after_the_step,
    exchanged_for_their_average,
    clipped_before_the_turn_of_the_critic,
    views_of_a_flat_buffer,
    views_of_a_flat_buffer_of_pytorchs,
    views_of_a_flat_buffer_that_is_a_parameter,
    tied_by_storage,
    tied_by_storage_and_written_by_hand,
    tied_by_storage_and_written_unseen,
    tied_to_what_is_not_held,
]


def pair() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_writes_unseen_has_the_losses_of_the_drop_in(
    program: Callable[[Run], None], used_before: bool
) -> None:
    losses = []
    for model, attached in zip(pair(), (True, False), strict=True):
        with precast.attach(model) if attached else nullcontext():
            run = Run(model)
            if used_before:
                run.evaluate()
            program(run)
            losses.append(run.losses)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) >= STEPS
