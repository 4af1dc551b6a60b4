"""Time of other people's models and trainers: float32, torch.autocast, precast installed and pure bfloat16, in turns.

Every variant works on its own copy of the model, from the same seed, on the same batch, with one thread. PyTorch's side
of each round runs with every kernel of ours off the dispatcher. PyTorch stands there twice: how far its ratio to itself
is from 1 says what the figures beside it are worth.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import precast
from benchmarks.client_models import MODELS, SIZES, Batch, Size
from benchmarks.client_steps import FRAMEWORKS, WORKS, Region
from benchmarks.interleave import Variant, compare
from precast.engine import registration

__all__ = ["BASELINE", "SIZES", "USUAL_SIZES", "run"]

USUAL_SIZES = ("tiny", "small", "medium")
BASELINE = "torch.autocast"
_CONTROL = "torch.autocast again"
_INSTALLED = "precast.install"
_MIXED = (BASELINE, _CONTROL, _INSTALLED)
_TURN = 0.2
_IN_FRAMEWORKS = "GPT-2"


def run(
    *,
    rounds: int = 21,
    sizes: tuple[str, ...] = USUAL_SIZES,
    only: tuple[str, ...] = (),
    works: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Measures each model, and each framework on one of them.

    Args:
        rounds: rounds of each comparison.
        sizes: of `SIZES`; the smaller a model, the larger the share of what a call costs.
        only: the cases to measure; all if there are none.
        works: the works to measure; all if there are none.

    Returns:
        One row for each size, model, work and variant: "size", "case", "work", "kind", "engine", "median_ms",
        "iqr_ms", and "ratio" with "ratio_iqr", to the baseline's time; below 1 is faster.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
    warnings.filterwarnings("ignore", category=FutureWarning)  # of one library about another
    torch.set_num_threads(1)
    for size in sizes:
        for case, work, make in _cases(SIZES[size]):
            if (only and case not in only) or (works and work not in works):
                continue
            variants = make()
            if variants:
                yield from _rows(size, case, work, variants, rounds)
            del variants
            gc.collect()


def _cases(size: Size) -> Iterator[tuple[str, str, Callable[[], dict[str, Variant]]]]:
    for name in MODELS:
        for work in WORKS:
            yield name, work, partial(_variants, name, work, size)
    for framework in FRAMEWORKS:
        yield (
            f"{_IN_FRAMEWORKS} in {framework}",
            "training step",
            partial(_framework, framework, size),
        )


def _variants(name: str, work: str, size: Size) -> dict[str, Variant]:
    """The work in every precision; nothing where the model does not do it."""
    region = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    regions: Mapping[str, Region] = {
        "float32": nullcontext,
        **dict.fromkeys(_MIXED, region),
        "pure bfloat16": nullcontext,
    }
    variants = {}
    for kind, opened in regions.items():
        model, batch = _seeded(name, size)
        if kind == "pure bfloat16":
            model, batch = model.bfloat16(), _lowered(batch)
        step = WORKS[work](model, MODELS[name], batch, opened)
        if step is not None:
            variants[kind] = _variant(kind, step)
    return variants


def _framework(framework: str, size: Size) -> dict[str, Variant]:
    make = FRAMEWORKS[framework]
    return {kind: _variant(kind, make(*_seeded(_IN_FRAMEWORKS, size))) for kind in _MIXED}


def _variant(kind: str, work: Callable[[], object]) -> Variant:
    if kind == _INSTALLED:
        installed = ExitStack()
        return Variant(
            work,
            before=lambda: installed.enter_context(precast.install("torch")),
            after=installed.close,
        )
    return Variant(work)


def _seeded(name: str, size: Size) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return MODELS[name].make(size), MODELS[name].batch(size)


def _lowered(batch: Batch) -> Batch:
    return {n: v.bfloat16() if v.is_floating_point() else v for n, v in batch.items()}


def _rows(
    size: str, case: str, work: str, variants: Mapping[str, Variant], rounds: int
) -> Iterator[dict[str, Any]]:
    calls = max(1, round(_TURN / _seconds(variants[BASELINE])))
    result = compare(variants, rounds=rounds, calls=calls)
    for kind in variants:
        ratio, spread = result.ratio(kind, BASELINE)
        yield {
            "benchmark": "clients",
            "size": size,
            "case": case,
            "work": work,
            "kind": kind,
            "engine": registration.engine(),
            "median_ms": result.median(kind) * 1e3,
            "iqr_ms": result.spread(kind) * 1e3,
            "ratio": ratio,
            "ratio_iqr": spread,
        }


def _seconds(variant: Variant) -> float:
    """Return the time of a call after the first, which builds caches."""
    variant.work()
    start = time.perf_counter()
    variant.work()
    return time.perf_counter() - start
