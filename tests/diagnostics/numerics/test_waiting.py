"""monitor: what waits to be looked at in steps that are not counted says what it would have said at once."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import precast
from precast.diagnostics.numerics import running_step
from tests.diagnostics.numerics.test_monitor import sgd, take

WIDTH = 8


class Block(nn.Module):
    """Modules and plain operations, some of which write what a module gave, and some of which overflow."""

    def __init__(self, actions: list[str]) -> None:
        super().__init__()
        self.actions = actions
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in actions)
        self.in_place = nn.ReLU(inplace=True)
        self.pair = Pair()
        self.shift = Shift()

    def forward(self, x: Tensor) -> Tensor:
        for action, linear in zip(self.actions, self.linears, strict=True):
            y = linear(x)
            match action:
                case "module in place":
                    y = self.in_place(y)
                case "in place":
                    y.mul_(0.5)
                case "input in place":
                    y = self.shift(y)
                    x = y * 1
                    y = self.shift(x)
                    x.add_(1.0)
                case "residual":
                    y += x
                case "pair":
                    y, _ = self.pair(first=y, second=(x,))
                case "frozen":
                    with torch.no_grad():
                        linear(x)
                case "infinite":
                    y = y + torch.tensor([math.inf] + [0.0] * (WIDTH - 1))
            x = y
        return x


class Shift(nn.Module):
    """Keeps nothing for backward, so that its input may be written."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0


class Pair(nn.Module):
    def forward(self, first: Tensor, second: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        return first + second[0], second[0]


ACTIONS = ["plain", "module in place", "in place", "input in place", "residual", "pair", "frozen"]
PROGRAM = st.lists(st.sampled_from([*ACTIONS, "infinite"]), min_size=1, max_size=6)


def ring(actions: list[str], *, every: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = Block(actions)
    optimizer = sgd(model)
    with precast.monitor(model, every=every) as monitor:
        for _ in range(3):
            take(model, optimizer, torch.randn(4, WIDTH))
        return [{**entry, "seconds": 0.0} for entry in monitor.ring]


@pytest.mark.parametrize("elements", [1, 1 << 20])
@given(actions=PROGRAM)
@settings(max_examples=20)
def test_steps_that_are_not_counted_say_the_same(elements: int, actions: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_step, "_ELEMENTS", elements)
        assert repr(ring(actions, every=10**9)) == repr(ring(actions, every=1))


class Joins(nn.Module):
    """Adds two branches, the first of which is written; the second overflows where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.writes = True
        self.overflows = False

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        right: Tensor = self.right(x * 1e38 if self.overflows else x)
        if self.writes:
            left += right
            return left
        return left + right


@pytest.mark.parametrize("known", [True, False], ids=["always", "now only"])
def test_what_another_writes_into_an_output_is_not_its_own(known: bool) -> None:
    model = Joins()
    with torch.no_grad():
        model.right.weight.fill_(1.0)
    optimizer = sgd(model)
    with precast.monitor(model, every=1000) as monitor:
        model.writes = known
        take(model, optimizer, torch.ones(4, WIDTH))
        model.writes = model.overflows = True
        take(model, optimizer, torch.ones(4, WIDTH))
        first = monitor.first
    assert first is not None
    assert (first.step, first.kind, first.name) == (1, "output", "right")


class Writes(torch.autograd.Function):
    """Gives its input, and writes over the gradient that it takes, as a careless kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradients[0].fill_(math.inf)
        return torch.zeros_like(gradients[0])


class Careless(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Writes.apply(self.inner(x))  # type: ignore[no-any-return, no-untyped-call]


def test_a_gradient_that_is_written_while_it_waits_is_not_blamed() -> None:
    model = nn.Sequential(Careless(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    optimizer = sgd(model)
    with precast.monitor(model, every=1000) as monitor:
        for _ in range(4):
            take(model, optimizer, torch.randn(4, WIDTH))
        assert monitor.first is None


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part"])
def test_nothing_of_a_call_is_held_after_it(whole: bool) -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    )
    optimizer = sgd(model)
    held: list[Any] = []
    model[1][0].register_forward_hook(lambda *given: held.append(weakref.ref(given[2])))
    with precast.monitor(model, every=1000):
        for _ in range(2):
            take(model, optimizer, torch.randn(4, WIDTH))
        out = (model if whole else model[1])(torch.randn(4, WIDTH))
        assert held[-1]() is None, "tanh keeps its output alone"
        held.append(weakref.ref(out))
        del out
        gc.collect()
        assert [one() for one in held] == [None] * 4


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("no")
        return x * 1


def test_an_exception_in_the_model_loses_no_gradient_afterwards() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raises(), nn.Linear(WIDTH, WIDTH))
    optimizer = sgd(model)
    with precast.monitor(model, every=1000) as monitor:
        take(model, optimizer, torch.randn(4, WIDTH))
        model[1].raises = True
        with pytest.raises(ValueError, match="no"):
            model(torch.randn(4, WIDTH))
        out = model[2](torch.ones(4, WIDTH))  # a part, called by itself
        out.backward(torch.full_like(out, math.inf))
        optimizer.step()
        first = monitor.first
    assert first is not None
    assert (first.kind, first.name, first.step) == ("gradient", "2", 1)


def test_hooks_of_the_program_stay_as_they_are() -> None:
    seen: list[str] = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x.register_hook(lambda g: seen.append("early"))
            x = F.relu(self.second(x))
            x.retain_grad()
            self.last = x
            return x

    model = Hooked()
    optimizer = sgd(model)
    with precast.monitor(model, every=1000) as monitor:
        for _ in range(2):
            out = model(torch.randn(4, WIDTH))
            assert not out._backward_hooks
            out.register_hook(lambda g: seen.append("late"))
            out.sum().backward()
            assert model.last.grad is not None
            optimizer.step()
        gradients = {(e["kind"], e["name"]) for e in monitor.to_dict()["modules"]}
    assert seen == ["late", "early"] * 2
    assert {("gradient", ""), ("gradient", "first"), ("gradient", "second")} <= gradients
