"""Timings on a GPU, in sections; each row is written as soon as it is measured.

    python -m benchmarks.cuda SECTION --rows FILE     appends rows to FILE, and measures what is not in it yet

Invariants:
    - Ratios are taken within a round, in which all variants take turns; the clock stops when the GPU is done.
    - What cannot run is a row with its error, and takes no other row with it.
    - `--device cpu --small` tries a section out on a machine without a GPU; its figures say nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import nn

import precast
from benchmarks import float8, models, networks, observing, scaler
from benchmarks.cuda_graphs import graph_of
from benchmarks.interleave import Variant, compare
from benchmarks.networks import Network
from benchmarks.observe import cuda_peak
from benchmarks.variants import INFERENCE, LEAN, TRAINING, Setting
from precast.diagnostics.hardware.machine import synchronize
from precast.optim import bfloat16_weights

__all__ = ["SECTIONS", "Unit", "measure", "missing"]

_ROUNDS, _SECONDS = 11, 1.2
_DTYPES = (torch.bfloat16, torch.float16)
Rows = Iterable[dict[str, Any]]


class Unit(NamedTuple):
    """A measurement that is made whole or not at all: its name, and what returns its rows."""

    name: str
    rows: Callable[[], Rows]


class Place(NamedTuple):
    """The device of a section, and whether it is only tried out there."""

    device: torch.device
    small: bool


def _cases(place: Place, *, compiled: bool) -> Iterator[Network]:
    """Networks whose time goes into arithmetic, then networks whose time goes into launches."""
    if not place.small:
        yield networks.decoder(2048, 8, 1024)
        if not compiled:
            yield networks.resnet50()
    yield networks.decoder(512, 1, 1)
    yield networks.mlp()


def _networks(place: Place, *, compiled: bool) -> Iterator[Unit]:
    """All cases; compiled, which takes long, training in bfloat16 without the ResNet."""
    for dtype in _DTYPES[:1] if compiled else _DTYPES:
        for network in _cases(place, compiled=compiled):
            for work in (TRAINING,) if compiled else (TRAINING, INFERENCE):
                yield Unit(
                    f"{network.case}, {work}, {dtype}",
                    partial(
                        models.measure,
                        network,
                        work,
                        Setting(place.device, dtype, compiled),
                        rounds=_ROUNDS,
                        seconds=_SECONDS,
                        leaves_out=(LEAN, "float32") if compiled else (),
                    ),
                )


def _optimizers(place: Place) -> Iterator[Unit]:
    """An optimizer's step of 350 million parameters: time, memory at its peak, and how often the host waits."""
    layers, width = (1, 64) if place.small else (28, 1024)
    yield Unit(
        "AdamW step, 350 million parameters",
        partial(_optimizer_rows, networks.decoder(width, 1, 1, layers=layers), place.device),
    )


_STEPS: Mapping[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "fused": lambda *_: None,
    "fused, attached": lambda model, _: precast.attach(model),
    "kahan": partial(bfloat16_weights, masters="kahan"),
    "kahan, bfloat16 states": partial(bfloat16_weights, masters="kahan", states=torch.bfloat16),
    "stochastic": partial(bfloat16_weights, masters="stochastic"),
}


def _optimizer_rows(network: Network, device: torch.device) -> Rows:
    steps, peaks, waits = {}, {}, {}
    for name, prepare in _STEPS.items():
        model, _ = network.seeded(device, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        handle = prepare(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        step = partial(_step_of, optimizer, (model, handle))
        for _ in range(3):
            step()
        waits[name] = scaler.waits_of(step, device)
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            peaks[name] = cuda_peak(step, device) - before
        steps[name] = Variant(step, finish=partial(synchronize, device))
    result = compare(steps, rounds=_ROUNDS, calls=5)
    parameters = sum(p.numel() for p in model.parameters())
    for name in steps:
        ratio, spread = result.ratio(name, "fused")
        yield {
            "case": network.case,
            "parameters": parameters,
            "kind": name,
            "median_ms": result.median(name) * 1e3,
            "iqr_ms": result.spread(name) * 1e3,
            "ratio": ratio,
            "ratio_iqr": spread,
            "peak_bytes_above_start": peaks.get(name),
            "waits": waits[name],
        }


def _step_of(optimizer: torch.optim.Optimizer, _alive: object) -> None:
    optimizer.step()


def _scalers(place: Place) -> Iterator[Unit]:
    yield Unit("GradScaler step", lambda: scaler.rows_on(place.device))


def _observers(place: Place) -> Iterator[Unit]:
    width = 64 if place.small else observing.WIDTH
    yield Unit(
        "trace and monitor",
        partial(observing.run, rounds=_ROUNDS, width=width, device=place.device),
    )


_HEADS = {"output head": (4096, 4096, 32768), "router": (16384, 4096, 64)}
_RULES = ("lower", "lower_out_fp32", "fp32")


def _products(place: Place) -> Iterator[Unit]:
    """Linear layers by the rule of their product, and experts by the policy, forward and backward."""
    make = partial(torch.randn, device=place.device, requires_grad=True)
    default = precast.Policy.load("default")
    by_rule = {rule: default.replace(ops={"linear": rule}) for rule in _RULES}
    for case, shape in _HEADS.items():
        tokens, inputs, outputs = (8, 8, 8) if place.small else shape
        linear = _Product(case, nn.functional.linear, (make(tokens, inputs), make(outputs, inputs)))
        yield Unit(case, partial(_product_rows, linear, by_rule, place.device))
    count, rows, width = (2, 16, 16) if place.small else (16, 16384, 2048)
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=place.device) * (rows // count)
    grouped = partial(nn.functional.grouped_mm, offs=ends)
    experts = _Product("experts", grouped, (make(rows, width), make(count, width, 2 * width)))
    by_policy = {"torch": precast.Policy.load("torch"), "default": default}
    yield Unit("experts", partial(_product_rows, experts, by_policy, place.device))


class _Product(NamedTuple):
    """A product and its factors."""

    case: str
    function: Callable[..., torch.Tensor]
    factors: tuple[torch.Tensor, torch.Tensor]

    def run(self, device: torch.device, policy: precast.Policy) -> torch.Tensor:
        with precast.autocast(device.type, torch.bfloat16, policy=policy):
            result = self.function(*self.factors)
        torch.autograd.grad(result, self.factors, torch.ones_like(result))
        return result.detach()


def _product_rows(
    product: _Product, policies: Mapping[str, precast.Policy], device: torch.device
) -> Rows:
    """Times, and of linear layers the error of a part, to float64 and relative to its root mean square."""
    errors = {}
    if product.function is nn.functional.linear:
        x, weight = (factor.detach()[:512].double() for factor in product.factors)
        exact = x @ weight.T
        for name, policy in policies.items():
            difference = product.run(device, policy)[:512, :512].double() - exact
            errors[name] = (difference.norm() / exact.norm()).item()
    finish = partial(synchronize, device)
    variants = {
        name: Variant(partial(product.run, device, policy), finish=finish)
        for name, policy in policies.items()
    }
    comparison = compare(variants, rounds=_ROUNDS, calls=5)
    for name in variants:
        ratio, spread = comparison.ratio(name, next(iter(policies)))
        yield {
            "case": product.case,
            "kind": name,
            "median_ms": comparison.median(name) * 1e3,
            "ratio": ratio,
            "ratio_iqr": spread,
            "relative_error": errors.get(name),
        }


def _captured(place: Place) -> Iterator[Unit]:
    """A training step in a CUDA graph, replayed."""
    for dtype in _DTYPES:
        network = networks.decoder(512, 1, 16)
        yield Unit(
            f"{network.case}, captured, {dtype}",
            partial(_captured_rows, network, dtype, place.device),
        )


class _Use(NamedTuple):
    """One side of the comparison of captured steps."""

    region: Any
    scaler: Any
    attach: Callable[[nn.Module], object] = lambda _: None


_USES: Mapping[str, _Use] = {
    "torch.autocast": _Use(torch.autocast, torch.amp.GradScaler),
    "precast": _Use(precast.autocast, precast.GradScaler),
    "attached": _Use(precast.autocast, precast.GradScaler, precast.attach),
}


def _captured_rows(network: Network, dtype: torch.dtype, device: torch.device) -> Rows:
    finish = partial(synchronize, device)
    variants = {
        name: Variant(_replay(network, dtype, device, use), finish=finish)
        for name, use in _USES.items()
    }
    result = compare(variants, rounds=_ROUNDS, calls=20)
    for name in variants:
        ratio, spread = result.ratio(name, "torch.autocast")
        yield {
            "case": network.case,
            "dtype": str(dtype).removeprefix("torch."),
            "kind": name,
            "median_ms": result.median(name) * 1e3,
            "ratio": ratio,
            "ratio_iqr": spread,
        }


def _replay(
    network: Network, dtype: torch.dtype, device: torch.device, use: _Use
) -> Callable[[], None]:
    model, [(inputs, target)] = network.seeded(device, 1)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, capturable=on_gpu)
    attachment = use.attach(model)
    scale = use.scaler(device.type, enabled=dtype is torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with use.region(device.type, dtype):
            loss = network.loss(model(inputs), target)
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()

    if not on_gpu:
        return step
    return partial(_play, graph_of(step), (step, attachment))


def _play(graph: torch.cuda.CUDAGraph, _alive: object) -> None:
    graph.replay()


def _float8(place: Place, *, compiled: bool) -> Iterator[Unit]:
    shapes = [float8.Shape(32, 64, 48)] if place.small else _SHAPES
    for shape in shapes:
        yield Unit(
            f"float8, {shape}",
            partial(float8.run, place.device, [shape], rounds=_ROUNDS, compiles=(compiled,)),
        )


_SHAPES = sorted(
    (shape for shape in float8.LLAMA if shape.tokens in (4096, 16384)),
    key=lambda shape: shape.size,
    reverse=True,
)

SECTIONS: Mapping[str, Callable[[Place], Iterator[Unit]]] = {
    "eager": partial(_networks, compiled=False),
    "optimizer": _optimizers,
    "scaler": _scalers,
    "observers": _observers,
    "products": _products,
    "captured": _captured,
    "float8": partial(_float8, compiled=False),
    "float8-compiled": partial(_float8, compiled=True),
    "compiled": partial(_networks, compiled=True),
}


def missing(section: str, place: Place, rows: Iterable[Mapping[str, Any]]) -> list[Unit]:
    """The units of a section that have no row without an error in `rows`."""
    done = {row["unit"] for row in rows if row["section"] == section and "error" not in row}
    return [unit for unit in SECTIONS[section](place) if unit.name not in done]


def measure(section: str, units: Iterable[Unit]) -> Iterator[dict[str, Any]]:
    """The rows of some units, or a row with the error of one that failed."""
    for unit in units:
        about = {"section": section, "unit": unit.name}
        try:
            for row in list(unit.rows()):
                yield about | row
        except Exception as error:
            yield about | {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}


@click.command()
@click.argument("section", type=click.Choice(list(SECTIONS)))
@click.option("--rows", "path", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--small", is_flag=True, help="Small sizes, to try a section out.")
@click.option("--only", default="", help="A word in the names of what is measured.")
def main(section: str, path: Path, device: str, small: bool, only: str) -> None:
    """Measure SECTION and append its rows to a file of JSON lines."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    place = Place(torch.device(device), small)
    units = [u for u in missing(section, place, map(json.loads, lines)) if only in u.name]
    with path.open("a", encoding="utf-8") as file:
        for row in measure(section, units):
            file.write(json.dumps(row) + "\n")
            file.flush()
            click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
