"""What a step in one pass takes: beside PyTorch's own with the casts that they need, and in the training of a decoder.

The step alone: AdamW on 48 weights, gradients in bfloat16, weights used in bfloat16. PyTorch's fused and foreach steps
need the gradients in float32, and the weights cast again afterwards: both are fused copies of a whole list. The ratio
is to the faster of the two. All have numbers of their own, so that none finds the other's in the processor's caches.

A training step: forward, backward and step of a decoder of width 512 with AdamW, whose baseline is torch.autocast with
`fused=True`. "attached" is what there is without one pass: it says how much memory that takes at its peak.

Compiling is over before anything is timed, and a step that is not taken in one pass, where it is said to be, raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import precast
from benchmarks import networks
from benchmarks.interleave import Comparison, Variant, compare
from benchmarks.networks import Network
from benchmarks.observe import observe
from benchmarks.variants import Prepared
from precast.errors import PrecastWarning
from precast.weights.held import MIN_ELEMENTS_FOR_NODE
from precast.weights.partial_steps import parameters_of

__all__ = ["AUTOCAST", "MILLIONS", "ONE_PASS", "ROUNDS", "SHAPES", "case_of_step", "run"]

ROUNDS: Final = 15
MILLIONS: Final = (10, 25, 100)
SHAPES: Final = ((1, 1), (1, 16), (8, 128))
"""Batch and length."""
ONE_PASS, AUTOCAST, ATTACHED = "one pass", "torch.autocast, fused", "attached"
_FUSED, _FOREACH = "fused, with casts", "foreach, with casts"
_WEIGHTS, _WIDTH = 48, 1024
_CALLS = 2
_STEPS_BEFORE: Final = 3
"""The first is the optimizer's own, the second compiles."""
_LOW: Final = torch.bfloat16


def case_of_step(millions: float) -> str:
    """What a row of the step alone is called."""
    return f"AdamW, {millions:g} million in {_WEIGHTS} weights"


def run(
    *,
    rounds: int = ROUNDS,
    millions: tuple[float, ...] = MILLIONS,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    width: int = 512,
) -> Iterator[dict[str, Any]]:
    """A row for each size and each way to take the step; then for each shape and each way to train."""
    for many in millions:
        yield from _steps(many, rounds)
    for batch, length in shapes:
        yield from _trainings(width, batch, length, rounds)


def _steps(millions: float, rounds: int) -> Iterator[dict[str, Any]]:
    rows = max(1, round(millions * 1e6 / _WEIGHTS / _WIDTH))
    works: dict[str, Callable[[], object]] = {
        ONE_PASS: _one_pass(rows),
        _FUSED: _pytorchs(rows, fused=True),
        _FOREACH: _pytorchs(rows, foreach=True),
    }
    found = compare(
        {name: Variant(work) for name, work in works.items()}, rounds=rounds, calls=_CALLS
    )
    best = min((_FUSED, _FOREACH), key=found.median)
    for name in works:
        yield _row(case_of_step(millions), name, found, best)


def _layers(rows: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(_WIDTH, rows, bias=False) for _ in range(_WEIGHTS))


def _one_pass(rows: int) -> Callable[[], object]:
    layers = _layers(rows)
    optimizer = AdamW(layers.parameters(), lr=1e-5)
    attachment = precast.attach(layers, optimizer=optimizer, grad_dtype=_LOW, step="one-pass")
    _check_that_nothing_is_left(optimizer)
    with precast.autocast("cpu", dtype=_LOW):
        torch.stack([layer(torch.ones(1, _WIDTH)).sum() for layer in layers]).sum().backward()
    with _refusing_to_step_as_before():
        for _ in range(_STEPS_BEFORE):
            optimizer.step()
    alive = attachment, layers

    def step() -> None:
        optimizer.step()
        assert all(alive)  # an attachment ends with its model

    return step


def _pytorchs(rows: int, **how: bool) -> Callable[[], object]:
    layers = _layers(rows)
    weights: list[Tensor] = list(layers.parameters())
    low = [torch.randn_like(weight, dtype=_LOW) for weight in weights]
    copies: list[Tensor] = [weight.detach().to(_LOW) for weight in weights]
    gradients = [torch.zeros_like(weight) for weight in weights]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer = AdamW(weights, lr=1e-5, **how)  # type: ignore[arg-type]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(gradients, low)
        optimizer.step()
        torch._foreach_copy_(copies, weights)

    step()
    return step


def _trainings(width: int, batch: int, length: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of trainings that take their turns in processes of their own.

    Memory that other work has freed stays with a process. What a region of PyTorch allocates anew in each step would
    find its pages there, which it does not in a training of one's own.
    """
    with ExitStack() as stack:
        processes = {
            way: stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
            for way in _WAYS
        }
        for way, process in processes.items():
            process.submit(_begin, way, width, batch, length).result()
        found = compare(
            {way: Variant(partial(_wait_for, process)) for way, process in processes.items()},
            rounds=rounds,
            calls=_CALLS,
        )
        peaks = {way: process.submit(_peak).result() for way, process in processes.items()}
    case = networks.decoder(width, batch, length).case
    for way in _WAYS:
        peak = {"peak_bytes": peaks[way], "grown_bytes": peaks[way] - peaks[ATTACHED]}
        yield {**_row(case, way, found, AUTOCAST), **peak}


def _wait_for(process: ProcessPoolExecutor) -> None:
    process.submit(_take_step).result()


_begun: Final[list[tuple[Callable[[], Prepared], Prepared]]] = []
"""How the training of this process is made, and that training; in a process that trains."""


def _begin(way: str, width: int, batch: int, length: int) -> None:
    network = networks.decoder(width, batch, length)
    make = partial(_training, network, *_WAYS[way])
    _begun.append((make, make()))


def _take_step() -> None:
    [(_, training)] = _begun
    training.work()


def _peak() -> int:
    """Ends the training, and gives the bytes that one more needs at its peak."""
    make, training = _begun.pop()
    training.close()
    return observe(make, torch.device("cpu")).peak_bytes


_region: Final = partial(precast.autocast, "cpu", dtype=_LOW)
_WAYS: Final[Mapping[str, tuple[Any, ...]]] = {
    AUTOCAST: (partial(torch.autocast, "cpu", dtype=_LOW),),
    ATTACHED: (_region, {"grad_dtype": _LOW}),
    ONE_PASS: (_region, {"grad_dtype": _LOW, "step": "one-pass"}),
}
"""What a training is called -> its region, and how its model is attached."""


def _training(
    network: Network, region: Callable[[], Any], attached: Mapping[str, Any] | None = None
) -> Prepared:
    model, [(inputs, target)] = network.seeded(torch.device("cpu"), 1)
    optimizer = AdamW(model.parameters(), lr=1e-5, fused=True)
    end: Callable[[], object] = lambda: None  # noqa: E731
    if attached is not None:
        end = precast.attach(model, optimizer=optimizer, **attached).detach
        if "step" in attached:
            _check_that_nothing_is_left(optimizer)

    def step() -> Tensor:
        optimizer.zero_grad()
        with region():
            loss = network.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with _refusing_to_step_as_before():
        for _ in range(_STEPS_BEFORE):
            step()
    return Prepared(step, end)


def _check_that_nothing_is_left(optimizer: AdamW) -> None:
    """Has a step raise where the optimizer itself would still step a large weight, after its first step.

    What an attachment steps has no gradient by then; one that has ended, as with its model, steps nothing.
    """

    def check(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        large = [p for p in parameters_of(optimizer) if p.numel() >= MIN_ELEMENTS_FOR_NODE]
        left = [p for p in large if p.grad is not None and optimizer.state.get(p)]
        if left:
            raise RuntimeError(f"{len(left)} weights are not stepped in one pass.")

    optimizer.register_step_pre_hook(check)


@contextmanager
def _refusing_to_step_as_before() -> Iterator[None]:
    """A block in which an attachment that cannot step in one pass, and says so, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecastWarning)
        yield


def _row(case: str, name: str, found: Comparison, to: str) -> dict[str, Any]:
    ratio, spread = found.ratio(name, to)
    figure = "of_autocast" if to == AUTOCAST else "of_best"
    return {
        "benchmark": "steps",
        "case": case,
        "kind": name,
        "device": "cpu",
        "median_ms": found.median(name) * 1e3,
        "iqr_ms": found.spread(name) * 1e3,
        "baseline": to,
        "ratio": ratio,
        "ratio_iqr": spread,
        figure: ratio,
        f"{figure}_iqr": spread,
    }
