"""How the cost of whole networks grows: with layers, with regions, and with parameters that a region does not use.

Tiny layers in inference, so that calls, entries and checks are what costs. A ratio to torch.autocast that stays
where it is says that the cost grows as PyTorch's does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.models import ROUNDS, figures, timed, variant
from benchmarks.networks import Network
from benchmarks.variants import (
    BASELINE,
    BY_HAND,
    INFERENCE,
    Prepared,
    Setting,
    SkippedError,
    prepare,
)

__all__ = ["AXES", "COMPARISONS", "run"]

_ATTACHED = "attached"
_KINDS = (BASELINE, "precast", _ATTACHED, BY_HAND)
_WIDTH, _BATCH = 16, 8


class _WithSpare(nn.Module):
    """A network, and parameters that take no part in it."""

    def __init__(self, network: nn.Module, spare: int) -> None:
        super().__init__()
        self.network = network
        self.spare = nn.ParameterList(torch.zeros(_WIDTH) for _ in range(spare))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network(x)
        return y


def _layers(count: int) -> tuple[Network, int]:
    return networks.mlp(_WIDTH, _BATCH, layers=count), 1


def _regions(count: int) -> tuple[Network, int]:
    return networks.mlp(_WIDTH, _BATCH, layers=4), count


def _parameters(count: int) -> tuple[Network, int]:
    plain = networks.mlp(_WIDTH, _BATCH, layers=4)
    return dataclasses.replace(plain, model=lambda: _WithSpare(plain.model(), count)), 1


AXES: Mapping[str, tuple[Callable[[int], tuple[Network, int]], tuple[int, ...]]] = {
    "layers": (_layers, (4, 16, 64, 256)),
    "regions": (_regions, (1, 4, 16, 64)),
    "spare parameters": (_parameters, (0, 100, 1000)),
}
"""What grows -> the network of each size and how often it is called, each time in a region of its own; the sizes."""

COMPARISONS = sum(len(sizes) for _, sizes in AXES.values())


def run(
    *, rounds: int = ROUNDS, device: torch.device | None = None, threads: int = 1
) -> Iterator[dict[str, Any]]:
    """One row for each axis, size and variant: time, ratios, and how often the time of the first size it takes."""
    setting = Setting(device or torch.device("cpu"), torch.bfloat16)
    torch.set_num_threads(threads)
    for axis, (make, sizes) in AXES.items():
        first: dict[str, float] = {}
        for size in sizes:
            about = {"benchmark": "models growth", "case": axis, "size": size, "work": INFERENCE}
            for measured in _figures(*make(size), setting, rounds):
                row: dict[str, Any] = about | measured
                if "skipped" not in row:
                    row["times_first"] = row["median_ms"] / first.setdefault(
                        row["kind"], row["median_ms"]
                    )
                yield row


def _figures(
    network: Network, calls: int, setting: Setting, rounds: int
) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        variants = {}
        for kind in _KINDS:
            make = partial(prepare, kind, network, INFERENCE, setting)
            try:
                prepared = make()
            except SkippedError as error:
                yield {"kind": kind, "skipped": str(error)}
                continue
            if kind == _ATTACHED:
                prepared.close()
                turns = _Turns(make)
                one = Prepared(partial(_repeat, turns.work, calls), before=turns.begin)
                variants[kind] = dataclasses.replace(variant(one, setting), after=turns.end)
                continue
            stack.callback(prepared.close)
            repeated = dataclasses.replace(prepared, work=partial(_repeat, prepared.work, calls))
            variants[kind] = variant(repeated, setting)
        result, counts = timed(variants, rounds)
    for kind in variants:
        yield {"kind": kind, **figures(result, kind), **counts}


class _Turns:
    """A variant that is made for each turn: as long as a model is attached, every region looks whether it may stay."""

    def __init__(self, make: Callable[[], Prepared]) -> None:
        self._make = make
        self._prepared: Prepared | None = None

    def begin(self) -> None:
        self._prepared = self._make()
        self._prepared.before()

    def work(self) -> Tensor:
        assert self._prepared is not None
        return self._prepared.work()

    def end(self) -> None:
        assert self._prepared is not None
        self._prepared.close()
        self._prepared = None


def _repeat(work: Callable[[], Tensor], count: int) -> Tensor:
    for _ in range(count - 1):
        work()
    return work()
