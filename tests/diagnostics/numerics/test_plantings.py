"""monitor: a fault is planted at a known place, and the monitor has to name that place, whatever the step.

Each row of the table is a model with a place in it where a number becomes infinite or NaN. The oracle is the planting
itself: which module's output, which module's input, which gradient, or which parameter was the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import precast
from tests.diagnostics.numerics.test_monitor import sgd

WIDTH = 8
STEPS = 9
"""Of these 0, 1, 2, 4 and 8 are counted, where a monitor has no interval."""


class Fault:
    """What is planted: nothing until its step, a number that is not finite then."""

    def __init__(self, number: float = math.inf) -> None:
        self.number = number
        self.is_on = False

    def __call__(self, x: Tensor) -> Tensor:
        """Out of place."""
        return x + self._bad(x) if self.is_on else x + 0.0

    def write(self, x: Tensor, *, always: bool = True) -> Tensor:
        """In place; unless `always`, in the bad step alone."""
        if self.is_on or always:
            x += self._bad(x) if self.is_on else torch.zeros_like(x)
        return x

    def _bad(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_fill(-1, torch.tensor([1]), self.number)


class Backwards(torch.autograd.Function):
    """Forward gives what it is given; the fault is in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.fault(gradients[0]), None


class Planted(nn.Module):
    """Gives what it is given, with the fault in it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(x)


class WritesInput(Planted):
    def forward(self, x: Tensor) -> Tensor:
        return self.fault.write(x)


class PlantedBackward(Planted):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Backwards.apply(x, self.fault)  # type: ignore[no-untyped-call]
        return found


class Chain(nn.Module):
    """a, code, b, code, c: what is between is given by a function."""

    def __init__(
        self, between: Callable[[Tensor], Tensor], middle: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.between = between
        self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH) if middle is None else middle

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c(self.b(self.between(self.a(x))))
        return found


class Block(nn.Module):
    """As in a transformer, with a residual of each kind."""

    def __init__(self, residual: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual(x, self.attend(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x + y


class Stack(nn.Module):
    """Embeds, runs two blocks, and has a head; a fault may be between blocks."""

    def __init__(
        self,
        *residuals: Callable[[Tensor, Tensor], Tensor],
        between: Callable[[Tensor], Tensor] = lambda x: x,
        run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x),
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(residual) for residual in residuals)
        self.between, self.run = between, run

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = self.run(block, self.between(x) if number == 1 else x)
        found: Tensor = self.head(x)
        return found


class Twice(nn.Module):
    """Calls a module twice; the fault is in what it gives the second time, or in front of that."""

    def __init__(self, fault: Fault, inside: bool) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Sequential(nn.Linear(WIDTH, WIDTH), Planted(Fault()))
        self.fault, self.inside = fault, inside

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.a(x))
        if self.inside:
            self.tied[1].fault = self.fault
        found: Tensor = self.tied(x if self.inside else self.fault(x))
        self.tied[1].fault = Fault()
        return found


class Again(nn.Module):
    """Calls one layer twice; the fault is in between."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.between = nn.Linear(WIDTH, WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = self.layer(self.between(self.layer(x)))
        return again


class Last(nn.Module):
    """The fault is behind the last module, in the code of the model itself."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.b(self.a(x)))


class Holder(nn.Module):
    """Has a child that is really called `module`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found


class Planting(NamedTuple):
    """A row of the table."""

    build: Callable[[Fault], nn.Module]
    kind: str
    name: str
    says: str = ""
    """What the message has to say besides."""
    doubts: str | None = None
    """The module that may have been first, where the fault is the first write in place ever and nothing was counted."""


def _compiled(fault: Fault) -> nn.Module:
    model = Chain(fault)
    model.a = torch.compile(model.a, backend="eager")  # type: ignore[assignment]
    return model


def _compiled_in_place(fault: Fault) -> nn.Module:
    model = Chain(lambda x: x, nn.Sequential(nn.Linear(WIDTH, WIDTH), Planted(fault)))
    model.b.compile(backend="eager", fullgraph=True)
    return model


def _reentrant(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(block, x, use_reentrant=True)  # type: ignore[no-untyped-call]
    return found


def _not_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(block, x, use_reentrant=False)  # type: ignore[no-untyped-call]
    return found


def _second(residual: Callable[[Tensor, Tensor], Tensor], **how: Any) -> nn.Module:
    """A stack whose second block has the residual."""
    return Stack(plain, residual, **how)


def _sometimes(fault: Fault) -> Callable[[Tensor], Tensor]:
    return lambda x: fault.write(x, always=False)


def _in_a_view(fault: Fault) -> Callable[[Tensor], Tensor]:
    def write(x: Tensor) -> Tensor:
        fault.write(x.view(-1, WIDTH))
        return x

    return write


def _backward(fault: Fault) -> Callable[[Tensor], Tensor]:
    return PlantedBackward(fault).forward


PLANTINGS = {
    # Outputs of modules.
    "a module": Planting(lambda f: Chain(lambda x: x, Planted(f)), "output", "b"),
    "a module in a sequence": Planting(
        lambda f: nn.Sequential(nn.Linear(WIDTH, WIDTH), Planted(f), nn.Linear(WIDTH, 2)), "output", "1"
    ),
    "a module that writes its input": Planting(
        lambda f: Chain(lambda x: x, WritesInput(f)), "output", "b"
    ),
    "a module in a block": Planting(
        lambda f: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), Planted(f))),
        "output", "1.1",
    ),
    "a module behind one in place": Planting(
        lambda f: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(inplace=True), Planted(f)), "output", "2"
    ),
    "a module before one in place": Planting(
        lambda f: nn.Sequential(nn.Linear(WIDTH, WIDTH), Planted(f), nn.LeakyReLU(inplace=True)),
        "output", "1",
    ),
    # Operations between modules.
    "between": Planting(Chain, "input", "b", "between `a` and `b`"),
    "between, in place": Planting(lambda f: Chain(f.write), "input", "b", "between `a` and `b` wrote it in place"),
    "between, in place now only": Planting(
        lambda f: Chain(_sometimes(f)), "input", "b", "`b`", doubts="a"
    ),
    "between, in place through a view": Planting(
        lambda f: Chain(_in_a_view(f)), "input", "b", "between `a` and `b` wrote it in place"
    ),
    "between, before a module in place": Planting(
        lambda f: Chain(f.write, nn.ReLU(inplace=True)), "input", "b", "between `a` and `b`"
    ),
    "between, before one that gives its input": Planting(
        lambda f: Chain(f, nn.Identity()), "input", "b", "between `a` and `b`"
    ),
    "between, before dropout that does nothing": Planting(
        lambda f: Chain(f, nn.Dropout(0.5).eval()), "input", "b", "between `a` and `b`"
    ),
    "between, in a part": Planting(lambda f: nn.Sequential(Chain(f)), "input", "0.b", "between `0.a` and"),
    "behind the last module": Planting(Last, "output", ""),
    "behind the last module, in place": Planting(lambda f: Last(f.write), "output", ""),
    "behind the last module, in place now only": Planting(
        lambda f: Last(_sometimes(f)), "output", "", doubts="b"
    ),
    # Transformers.
    "a residual": Planting(
        lambda f: _second(lambda x, y: f(x + y)), "input", "blocks.1.norm2", "between `blocks.1.attend` and"
    ),
    "a residual in place": Planting(
        lambda f: _second(lambda x, y: f.write(y).add_(x)), "input", "blocks.1.norm2", "wrote it in place"
    ),
    "a residual in place on the branch before": Planting(
        lambda f: _second(lambda x, y: f.write(x * 1.0) + y), "input", "blocks.1.norm2"
    ),
    "between blocks": Planting(
        lambda f: Stack(plain, plain, between=f), "input", "blocks.1", "between `blocks.0` and `blocks.1`"
    ),
    "between blocks, in place": Planting(
        lambda f: Stack(plain, plain, between=f.write), "input", "blocks.1", "wrote it in place"
    ),
    "a tied module's second call": Planting(
        lambda f: Twice(f, inside=True), "output", "tied.1", "`tied.1`"
    ),
    "before a tied module's second call": Planting(
        lambda f: Twice(f, inside=False), "input", "tied", "`tied`"
    ),
    "between two calls": Planting(Again, "input", "layer", "computed between two calls of `layer`"),
    "between two calls, in place": Planting(
        lambda f: Again(f.write), "input", "layer", "code between two calls of `layer` wrote it in place"
    ),
    # Checkpoints.
    "in a checkpoint": Planting(
        lambda f: _second(lambda x, y: f(x + y), run=_not_reentrant), "input", "blocks.1.norm2"
    ),
    "in a reentrant checkpoint": Planting(
        lambda f: _second(lambda x, y: f(x + y), run=_reentrant), "input", "blocks.1.norm2"
    ),
    "in place in a checkpoint": Planting(
        lambda f: _second(lambda x, y: f.write(y).add_(x), run=_not_reentrant), "input", "blocks.1.norm2"
    ),
    "backward in a checkpoint": Planting(
        lambda f: _second(lambda x, y: _backward(f)(x + y), run=_not_reentrant),
        "gradient", "blocks.1.attend",
    ),
    "backward in a reentrant checkpoint": Planting(
        lambda f: _second(lambda x, y: _backward(f)(x + y), run=_reentrant),
        "gradient", "blocks.1.attend",
    ),
    # Compiled parts.
    "behind a compiled module": Planting(_compiled, "input", "b", "between `a` and `b`"),
    "in a module compiled in place": Planting(
        _compiled_in_place, "output", "b"
    ),
    # Gradients.
    "backward of a module": Planting(
        lambda f: Chain(lambda x: x, PlantedBackward(f)), "gradient", "a", "the gradient of `b`"
    ),
    "backward between": Planting(
        lambda f: Chain(_backward(f)), "gradient", "a", "the gradient of `b`"
    ),
    "backward behind the last module": Planting(
        lambda f: Last(_backward(f)), "gradient", "b"
    ),
    "backward behind a write in place": Planting(
        lambda f: Chain(lambda x: _backward(f)(x.add_(1.0))), "gradient", "a", "the gradient of `b`"
    ),
    # Names.
    "a child called module": Planting(
        lambda f: Holder(Chain(lambda x: x, Planted(f))), "output", "module.b"
    ),
    "DataParallel": Planting(
        lambda f: nn.DataParallel(Chain(lambda x: x, Planted(f))), "output", "b"
    ),
    "DataParallel of a child called module": Planting(
        lambda f: nn.DataParallel(Holder(Chain(lambda x: x, Planted(f)))), "output", "module.b"
    ),
}  # fmt: skip


def _first(planting: Planting, step: int, number: float, every: int | None, scaled: bool) -> Any:
    torch.manual_seed(step)
    fault = Fault(number)
    model = planting.build(fault)
    optimizer = sgd(model)
    scaler = precast.GradScaler("cpu", init_scale=4.0, on_diagnosis="ignore", enabled=scaled)
    with precast.monitor(model, every=every) as monitor:
        for k in range(step + 1):
            fault.is_on = k == step
            optimizer.zero_grad()
            loss = model(torch.rand(2, WIDTH) + 0.5).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        first = monitor.first
    if scaled:
        event = scaler.last_step(optimizer)
        assert event is not None
        assert event.skipped is True
        assert event.first == first
    return first


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # PyTorch's own, where a compiled module has hooks
@pytest.mark.parametrize("name", PLANTINGS)
def test_what_was_planted_is_named(name: str) -> None:
    planting = PLANTINGS[name]
    for step in range(STEPS):
        for every in (None, 1000):
            number, scaled = (math.inf, math.nan)[step % 2], step % 3 > 0
            first = _first(planting, step, number, every, scaled)
            assert first is not None
            assert (first.step, first.kind, first.name) == (step, planting.kind, planting.name), (
                first
            )
            assert first.what == "nan" or number == math.inf
            counted = step == 0 or (every is None and step & (step - 1) == 0)
            if planting.doubts is not None and not counted:
                assert planting.doubts in first.doubts
                assert f"It may have begun before, in `{planting.doubts}`" in first.message
            else:
                assert first.doubts == ()
                assert planting.says in first.message
    torch.compiler.reset()


def test_a_parameter_under_a_child_called_module_keeps_its_name() -> None:
    model = Holder(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    optimizer, scaler = sgd(model), precast.GradScaler("cpu", on_diagnosis="ignore")
    with precast.monitor(model) as monitor:
        loss = scaler.scale(model(torch.ones(2, WIDTH)).sum())
        loss.backward()
        model.module[1].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.names == ("module.1.weight",)
    assert monitor.first is not None
    assert (monitor.first.kind, monitor.first.name) == ("parameter", "module.1.weight")


def test_data_that_is_not_finite_is_said_to_come_from_outside() -> None:
    for model in (nn.Linear(WIDTH, 2), nn.Sequential(nn.Linear(WIDTH, 2)), Chain(F.relu)):
        with precast.monitor(model) as monitor:
            model(torch.full((2, WIDTH), math.inf)).sum().backward()
            monitor.end_step()
        assert monitor.first is not None
        assert (monitor.first.kind, monitor.first.name) == ("input", "")
        assert "an input of the whole model was the first to be infinite" in monitor.first.message
        assert "from outside of the model" in monitor.first.message


def test_a_moment_has_one_number() -> None:
    """Also where the monitor begins later than the scaler, and after a trial."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Planted(fault := Fault()))
    optimizer = sgd(model)
    scaler = precast.GradScaler("cpu", init_scale=4.0, max_nonfinite_losses=0)

    def step(times: int = 1) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, WIDTH)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    for _ in range(3):
        step()
    seen: list[Any] = []
    with precast.monitor(model) as monitor, precast.observe(seen.append):
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        step()
        step()
        fault.is_on = True
        with pytest.raises(precast.errors.BrokenModelError) as error:
            step(100)
        event, diagnosis, first = seen[-2], error.value.diagnosis, monitor.first
    assert diagnosis is not None
    assert first is not None
    number = diagnosis.step
    assert event.step == event.first.step == number
    assert event.first == diagnosis.first
    assert f"iteration {number} " in str(error.value)
    assert f"In step {number} the output of `1`" in str(error.value)
    assert first.step == 5
    ring = monitor.ring
    assert [entry["step"] for entry in ring] == list(range(3, number + 1))
    assert [entry["first"] and entry["first"]["step"] for entry in ring[2:]] == list(
        range(5, number + 1)
    )
