"""The gradient scaler: PyTorch's decisions on runs that recover, and an error where one would train on nonsense."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import precast
from precast.errors import BrokenModelError, ScalerError
from tests.attack.scenarios import scenario
from tests.attack.tools import equal, same_state


def _run(
    kind: type[Any], factors: list[float], start: nn.Module, **settings: Any
) -> tuple[list[float], nn.Module]:
    """The scales of a run whose losses are multiplied by `factors`, and its model."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = kind("cpu", **settings)
    scales = []
    x = torch.ones(2, 4)
    for factor in factors:
        optimizer.zero_grad()
        loss = model(x).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model


def _as_pytorch(factors: Callable[[], list[float]], **settings: Any) -> Callable[[], None]:
    def run() -> None:
        sample, start = factors(), nn.Linear(4, 4)
        theirs = _run(torch.amp.GradScaler, sample, start, **settings)
        mine = _run(precast.GradScaler, sample, start, **settings)
        assert mine[0] == theirs[0]
        same_state(mine[1], theirs[1])

    return run


def _sometimes(bad: float, share: float, count: int = 40) -> Callable[[], list[float]]:
    return lambda: [1.0, *(bad if random.random() < share and i % 2 else 1.0 for i in range(count))]


RUNS: dict[str, tuple[Callable[[], list[float]], dict[str, Any]]] = {
    "good batches alone": (lambda: [random.random() for _ in range(20)], {"growth_interval": 3}),
    "an overflow now and then": (_sometimes(1e38, 0.3), {"growth_interval": 4}),
    "a bad batch now and then": (_sometimes(math.nan, 0.2), {"init_scale": 256.0}),
    "a scale that is far too high": (lambda: [1e20] * 12 + [1.0] * 10, {"init_scale": 2.0**70}),
    "a slow backoff": (
        lambda: [1e30] * 30 + [1.0] * 3,
        {"init_scale": 2.0**30, "backoff_factor": 0.9},
    ),
    "a slower backoff": (
        lambda: [1e30] * 30 + [1.0] * 3,
        {"init_scale": 2.0**28, "backoff_factor": 0.95},
    ),
    "one infinite loss": (lambda: [1.0, math.inf, 1.0, 1.0], {}),
    "one bad batch at the user's floor": (lambda: [1.0, math.nan, 1.0], {"init_scale": 1.0}),
    "growth after each step": (lambda: [1.0] * 10, {"growth_interval": 1, "growth_factor": 1.5}),
    "losses of zero": (lambda: [0.0] * 10, {"growth_interval": 2}),
}

for _what, (_factors, _settings) in RUNS.items():
    scenario(
        "scaler",
        f"a run with {_what} has the scales and weights of torch.amp.GradScaler",
        "plain PyTorch",
        name=f"a run with {_what}",
    )(_as_pytorch(_factors, **_settings))


@scenario("scaler", "float16 runs that recover by themselves are never stopped", "plain PyTorch")
def runs_that_recover() -> None:
    for _ in range(30):
        high = random.randint(1, 8)
        start = nn.Linear(4, 4)

        def run(kind: type[Any], high: int = high, start: nn.Module = start) -> nn.Module:
            model = copy.deepcopy(start)
            optimizer = torch.optim.SGD(model.parameters(), 0.001)
            scaler = kind("cpu", init_scale=2.0 ** (14 + high))
            for _ in range(high + 12):
                optimizer.zero_grad()
                out = model(torch.full((2, 4), 0.5))
                loss = out.half().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return model

        same_state(run(precast.GradScaler), run(torch.amp.GradScaler))


@scenario("scaler", "init_scale='auto' trains on after three bad first batches", "by hand")
def auto_after_bad_batches() -> None:
    scales, model = _run(
        precast.GradScaler, [1e38, 1e38, 1e38] + [1.0] * 10, nn.Linear(4, 4), init_scale="auto"
    )
    assert all(math.isfinite(p.detach().abs().sum()) for p in model.parameters())
    assert scales[-1] > 0


@scenario("scaler", "NaN for ever is an error, and writes no parameter", "by hand")
def nan_for_ever() -> None:
    start = nn.Linear(4, 4)
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = precast.GradScaler("cpu")
    try:
        for _ in range(400):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 4)).sum() * math.nan).backward()
            scaler.step(optimizer)
            scaler.update()
    except BrokenModelError:
        same_state(model, start)
        return
    raise AssertionError("it went on for 400 iterations")


def _after_unscaling(again: Callable[[Any, Any, Any], None]) -> Callable[[], None]:
    def run() -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scaler = precast.GradScaler("cpu", init_scale=256.0)
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.unscale_(optimizer)
        before = model.weight.detach().clone()
        try:
            again(scaler, model, torch.ones(1, 1))
            scaler.step(optimizer)
        except ScalerError:
            equal(model.weight.detach(), before)
            return
        raise AssertionError(f"stepped to {model.weight.item()} from {before.item()}")

    return run


AGAIN: dict[str, Callable[[Any, Any, Any], None]] = {
    "another backward": lambda s, m, x: s.scale(m(x).sum()).backward(),
    "torch.autograd.backward": lambda s, m, x: torch.autograd.backward(s.scale(m(x).sum())),
    "a list of losses": lambda s, m, x: torch.autograd.backward(s.scale([m(x).sum(), m(x).sum()])),
}
for _what, _again in AGAIN.items():
    scenario(
        "scaler",
        f"a step on gradients to which {_what} added after unscale_ is refused",
        "by hand",
        name=f"{_what} after unscale",
    )(_after_unscaling(_again))


@scenario(
    "scaler", "a closure without backward has its gradient divided once, or is refused", "by hand"
)
def a_closure_without_backward() -> None:
    weight = nn.Parameter(torch.ones(1))
    scaler = precast.GradScaler("cpu", init_scale=2.0**12)

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            closure()
            return super().step()

    optimizer = Twice([weight], 0.1)
    calls = []

    def closure() -> Tensor:
        loss = weight.sum() * 2
        if not calls:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        calls.append(1)
        return loss

    try:
        scaler.step(optimizer, closure)
    except ScalerError:
        equal(weight.detach(), torch.ones(1))
        return
    assert abs(weight.item() - 0.8) < 1e-6, weight.item()


STATES: list[Any] = [
    {"scale": "high"}, {"scale": None}, {"scale": [1]}, {"growth_factor": "x"}, {"growth_interval": 1.5},
    {"growth_interval": 2**70}, {"_growth_tracker": []}, {"scale": -1.0}, {"scale": math.nan}, {"a": 1},
]  # fmt: skip


@scenario("scaler", "a state of wrong types is one ScalerError, and changes nothing", "by hand")
def states_of_wrong_types() -> None:
    scaler = precast.GradScaler("cpu", init_scale=512.0)
    good = scaler.state_dict()
    for change in STATES:
        with contextlib.suppress(ScalerError):
            scaler.load_state_dict({**good, **change})
        assert scaler.state_dict() == good, change
    for junk in (None, 3, "state", [], [1]):
        with contextlib.suppress(ScalerError):
            scaler.load_state_dict(junk)  # type: ignore[arg-type]
        assert scaler.state_dict() == good, junk


@scenario("scaler", "settings that cannot be are refused when the scaler is made", "by hand")
def settings_that_cannot_be() -> None:
    for settings in (
        {"growth_interval": 2**70},
        {"init_scale": "high"},
        {"growth_factor": 0.5},
        {"backoff_factor": 2.0},
        {"init_scale": math.nan},
    ):
        try:
            precast.GradScaler("cpu", **settings)  # type: ignore[arg-type]
        except ScalerError:
            continue
        raise AssertionError(settings)


@scenario("scaler", "a state goes from PyTorch's scaler to precast's and back", "plain PyTorch")
def states_go_both_ways() -> None:
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=random.choice([8.0, 2.0**20]), growth_interval=7
    )
    theirs.scale(torch.ones(1))
    mine = precast.GradScaler("cpu")
    mine.load_state_dict(theirs.state_dict())
    assert mine.get_scale() == theirs.get_scale()
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict({k: v for k, v in mine.state_dict().items() if k in theirs.state_dict()})
    assert back.state_dict() == theirs.state_dict()


@scenario("scaler", "a scaler survives pickling with its scale", "plain PyTorch")
def pickled_scalers() -> None:
    scaler = precast.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 64.0


@scenario(
    "scaler", "the names of PyTorch's scaler that trainers read are there and true", "plain PyTorch"
)
def names_that_trainers_read() -> None:
    mine, theirs = precast.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    for scaler in (mine, theirs):
        scaler.scale(torch.ones(1))
    for name in ("_per_optimizer_states", "_scale", "_growth_tracker", "_enabled", "_init_scale"):
        assert hasattr(mine, name), name
    assert dict(mine._per_optimizer_states) == dict(theirs._per_optimizer_states) == {}
    assert float(mine._scale) == float(theirs._scale)
    assert optimizer is not None


@scenario("scaler", "unscaled gradients are within float32 of those of float64", "float64")
def unscaled_near_float64() -> None:
    model = nn.Linear(16, 4)
    exact = copy.deepcopy(model).double()
    x = torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = precast.GradScaler("cpu", init_scale=2.0 ** random.randint(1, 20))
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    exact(x.double()).square().mean().backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


@scenario("scaler", "LossScalers gives the gradient of the sum of the losses", "float64")
def scales_for_each_loss() -> None:
    model = nn.Linear(6, 3)
    exact = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scalers = precast.LossScalers("cpu", ["a", "b"], init_scale=1024.0)
    x = torch.randn(5, 6)
    optimizer.zero_grad()
    out = model(x)
    scalers.backward("a", out.square().mean(), optimizer, retain_graph=True)
    scalers.backward("b", 1e-3 * out.abs().mean(), optimizer)
    out = exact(x.double())
    (out.square().mean() + 1e-3 * out.abs().mean()).backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


@scenario("scaler", "gradients made infinite after unscale_ are never written", "by hand")
def infinite_after_unscaling() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = precast.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    weight.grad[random.randrange(3)] = random.choice([math.inf, -math.inf, math.nan])
    scaler.step(optimizer)
    equal(weight.detach(), torch.ones(3))


@scenario(
    "scaler",
    "a step without any gradient is an AssertionError, as in PyTorch, and a ScalerError",
    "plain PyTorch",
)
def no_gradients_at_all() -> None:
    for kind in (torch.amp.GradScaler, precast.GradScaler):
        scaler = kind("cpu")
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        scaler.scale(torch.ones(1))
        try:
            scaler.step(optimizer)
        except AssertionError:
            continue
        except ScalerError as error:
            raise AssertionError(f"a {type(error).__name__} that is no AssertionError") from error
        raise AssertionError("no error")


@scenario(
    "scaler", "LBFGS with a scaler takes the steps that it takes without one", "plain PyTorch"
)
def lbfgs_as_without() -> None:
    start = nn.Linear(3, 1)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    ends = []
    for scaled in (False, True):
        model = copy.deepcopy(start)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        scaler = precast.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)

        def closure(model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            scaler.scale(loss).backward()
            return loss  # type: ignore[no-any-return]

        for _ in range(3):
            scaler.step(optimizer, closure)
            scaler.update()
        ends.append([p.detach() for p in model.parameters()])
    for mine, theirs in zip(ends[1], ends[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@scenario(
    "scaler",
    "fused, foreach and plain optimizers take the same steps under a scaler",
    "plain PyTorch",
)
def kinds_of_steps() -> None:
    start = nn.Linear(4, 4)
    for kind in ({"fused": True}, {"foreach": True}, {}):
        ends = []
        for of in (torch.amp.GradScaler, precast.GradScaler):
            model = copy.deepcopy(start)
            optimizer = torch.optim.AdamW(model.parameters(), 0.01, **kind)  # type: ignore[arg-type]
            scaler = of("cpu", init_scale=2.0**8, growth_interval=2)
            for number in range(8):
                optimizer.zero_grad()
                factor = 1e38 if number == 3 else 1.0
                scaler.scale(model(torch.ones(1, 4)).square().sum() * factor).backward()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    scaler.step(optimizer)
                scaler.update()
            ends.append(model)
        same_state(ends[1], ends[0])
