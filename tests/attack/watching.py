"""Traces and monitors: they count what PyTorch's profiler counts, blame who is to blame, and change nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import precast
from tests.attack.scenarios import scenario
from tests.attack.tools import equal, net
from tests.support.processor import has_bfloat16, runs_lstm_in_bfloat16
from tests.support.profiled import casts_profiled

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "a linear model": lambda: (
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)),
        (torch.randn(3, 8),),
    ),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 2, 1)),
        (torch.randn(2, 2, 6, 6),),
    ),
    "a GRU": lambda: (nn.GRU(4, 5), (torch.randn(3, 2, 4),)),
    "an LSTM": lambda: (
        (nn.LSTM if runs_lstm_in_bfloat16() else nn.RNN)(4, 5),
        (torch.randn(3, 2, 4),),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (torch.randn(2, 3, 8),),
    ),
    "a tied model": lambda: (net(), (torch.randn(2, 2, 8),)),
}


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _casts_as_the_profiler(make: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        model, inputs = make()

        def step() -> None:
            with precast.autocast("cpu"):
                out = _first(model(*inputs))
            out.float().sum().backward()

        step()
        copies = casts_profiled(step)
        with precast.trace(model) as trace:
            step()
        # Without bfloat16 instructions kernels cast their operands too, which is no cast of the region.
        casts = trace.totals.casts
        agrees = casts == copies if has_bfloat16() else 0 < casts <= copies
        assert agrees, f"{casts} for the profiler's {copies}"

    return run


def _changes_nothing(
    make: Callable[[], Any], watch: Callable[[nn.Module], Any], mode: str
) -> Callable[[], None]:
    def run() -> None:
        model, inputs = make()
        model.train(mode == "training")
        results = []
        for watched in (False, True):
            mine = copy.deepcopy(model)
            manager = watch(mine) if watched else contextlib.nullcontext()
            grads = mode == "training"
            with manager, torch.inference_mode(not grads):
                with precast.autocast("cpu"):
                    out = _first(mine(*inputs))
                if grads:
                    out.float().square().sum().backward()
            result = [out.detach().clone()] if grads else [out]
            results.append([*result, *[p.grad for p in mine.parameters() if grads]])
        equal(results[1], results[0])

    return run


for _what, _make in MODELS.items():
    scenario(
        "trace",
        f"a trace of {_what} counts the casts that PyTorch's profiler counts",
        "plain PyTorch",
        name=f"casts of {_what}",
    )(_casts_as_the_profiler(_make))
    for _mode in ("training", "inference"):
        scenario(
            "trace",
            f"a trace changes no bit and no dtype of {_what} in {_mode}",
            "plain PyTorch",
            name=f"{_what} under a trace in {_mode}",
        )(_changes_nothing(_make, precast.trace, _mode))
        scenario(
            "monitor",
            f"a monitor changes no bit and no dtype of {_what} in {_mode}",
            "plain PyTorch",
            name=f"{_what} under a monitor in {_mode}",
        )(_changes_nothing(_make, precast.monitor, _mode))


@scenario("trace", "rows add up to the totals", "by hand")
def rows_add_up() -> None:
    model = net()
    with precast.trace(model) as trace:
        for _ in range(3):
            with precast.autocast("cpu"):
                loss = model(torch.randn(2, 2, 8)).float().sum()
            loss.backward()
    assert trace.totals.casts == sum(row.casts for row in trace.rows)
    assert trace.totals.casts == sum(flow.casts for flow in trace.flow)


class Planted(nn.Module):
    """Blocks of which one makes a NaN, in a way that is chosen."""

    def __init__(self, where: int, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.where, self.how, self.bad = where, how, False

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.where and self.bad and self.how == "weight":
                with torch.no_grad():
                    block.weight.fill_(float("nan"))
            x = block(x)
            if number == self.where and self.bad and self.how == "between":
                x = x * float("nan")
            if number == self.where and self.bad and self.how == "in place":
                x += float("nan")
        return x


def _planted(where: int, how: str) -> Callable[[], None]:
    def run() -> None:
        model = Planted(where, how)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = precast.GradScaler("cpu", on_diagnosis="ignore")
        monitor = precast.monitor(model)
        for step in range(6):
            model.bad = step == 4
            optimizer.zero_grad()
            with precast.autocast("cpu"):
                loss = model(torch.randn(2, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        first = monitor.first
        assert first is not None
        assert first.step == 4, first
        module = f"blocks.{where}"
        if how == "weight":
            assert first.name == module, first
        else:
            assert first.name != module, (
                f"{module} is blamed for what is behind it: {first.message}"
            )

    return run


for _where in (0, 2):
    for _how in ("weight", "between", "in place"):
        scenario(
            "monitor",
            f"a NaN made {'by a' if _how == 'weight' else ''} {_how} at block {_where} is blamed on what made it",
            "by hand",
            name=f"a NaN, {_how}, at block {_where}",
        )(_planted(_where, _how))


@scenario("monitor", "a child that is called module keeps its name", "by hand")
def a_child_called_module() -> None:
    model = nn.Sequential()
    model.add_module("module", nn.Sequential())
    model.module.add_module("head", nn.Linear(2, 2))
    monitor = precast.monitor(model)
    with torch.no_grad():
        model.module.head.weight.fill_(float("inf"))
    with precast.autocast("cpu"):
        model(torch.ones(1, 2)).float().sum().backward()
    monitor.end_step()
    assert monitor.first is not None
    assert monitor.first.name.startswith("module.head"), monitor.first.name


@scenario("monitor", "what was counted is what counting in float64 counts", "float64")
def counts_as_in_float64() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    x = torch.randn(8, 16)
    with precast.monitor(model) as monitor, precast.autocast("cpu"):
        out = model(x)
        out.float().sum().backward()
        monitor.end_step()
    entry = next(
        e for e in monitor.to_dict()["modules"] if (e["kind"], e["name"]) == ("output", "1")
    )
    exact = out.detach().double()
    assert entry["zeros"][0] == int((exact == 0).sum())
    assert abs(entry["rms"][0] - float(exact.square().mean().sqrt())) < 1e-3 * float(
        exact.abs().max()
    )
    assert entry["maximum"][0] == float(exact.abs().max())
