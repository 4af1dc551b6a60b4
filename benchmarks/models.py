"""Whole networks in float32, torch.autocast, precast's forms, and 16 bits by hand, in turns: time, memory, casts.

Ratios are taken within a round, to torch.autocast and to what is written by hand. PyTorch's side of each round runs
with every kernel of ours off the dispatcher. A work that takes long gets fewer rounds, so that all ends in minutes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks import networks
from benchmarks.interleave import Comparison, Variant, compare
from benchmarks.networks import Network
from benchmarks.observe import observe
from benchmarks.variants import (
    ACCUMULATION,
    BASELINE,
    BY_HAND,
    GENERATION,
    GENERATION_IN_INFERENCE_MODE,
    INFERENCE,
    LEAN,
    TRAINING,
    Prepared,
    Setting,
    SkippedError,
    kinds,
    prepare,
)
from precast.diagnostics.hardware.machine import synchronize
from precast.errors import MissingExtraError

__all__ = ["CASES", "ROUNDS", "Case", "comparisons", "figures", "measure", "run", "settings"]
__all__ += ["timed", "title", "variant"]

ROUNDS = 21
WIDTHS, SHAPES = (512, 1024), ((1, 1), (1, 16), (1, 128), (8, 128))
_FEWEST_ROUNDS = 7
_TURN = 0.06
"""Seconds that a variant works in a turn, if some calls are not longer."""
_FEWEST_CALLS = 3
"""Of a turn: fewer are mostly about getting the processor's caches back from the variant before."""
_COMPARISON, _JUDGED = 4.0, 10.0
"""Seconds of a comparison, after which only the fewest rounds are made; and of one that has a target."""
_LONG = 0.25
"""Seconds of a call that is long enough to be timed alone, without an untimed one before it."""

_ALL = (INFERENCE, TRAINING, ACCUMULATION)
_GENERATIONS = (GENERATION, GENERATION_IN_INFERENCE_MODE)


class Case(NamedTuple):
    """A network and its measurements.

    Attributes:
        make: the network, for a device.
        works: what it does.
        seconds: that a comparison of it takes, unless the fewest rounds take longer.
        leaves_out: variants that are not measured.
    """

    make: Callable[[torch.device], Network]
    works: tuple[str, ...]
    seconds: float = _COMPARISON
    leaves_out: tuple[str, ...] = ()


def _on_any(make: Callable[..., Network], *sizes: int) -> Callable[[torch.device], Network]:
    return lambda _: make(*sizes)


def _decoders() -> Iterator[tuple[str, Case]]:
    for batch, length in SHAPES:
        # Longer sequences four times a step would take most of the run, and differ little from one.
        works = _ALL if batch * length <= 16 else (INFERENCE, TRAINING)
        generations = _GENERATIONS if batch * length == 1 else ()
        make = _on_any(networks.decoder, 512, batch, length)
        yield f"decoder 512, {batch}x{length}", Case(make, (*works, *generations), _JUDGED)
    for batch, length in SHAPES:
        # What has a target, and no more: a step takes three times as long. One of 8x128 is nearly all products.
        training = (TRAINING,) if batch == 1 else ()
        generation = (GENERATION,) if batch * length == 1 else ()
        make = _on_any(networks.decoder, 1024, batch, length)
        case = Case(make, (INFERENCE, *training, *generation), _JUDGED, (LEAN,))
        yield f"decoder 1024, {batch}x{length}", case


CASES: Mapping[str, Case] = {
    **dict(_decoders()),
    "convolutional": Case(_on_any(networks.convolutional), _ALL),
    "checkerboard": Case(networks.checkerboard, _ALL),
    "digits": Case(networks.digits, _ALL),
    "MLP": Case(_on_any(networks.mlp), _ALL, _JUDGED),
    "transformers GPT-2": Case(_on_any(networks.transformers_gpt2), _ALL),
}


def settings(device: torch.device) -> tuple[Setting, ...]:
    """Return the settings of a device: bfloat16 on a CPU; both 16-bit types, eager and compiled, on CUDA."""
    if device.type == "cpu":
        return (Setting(device, torch.bfloat16),)
    return tuple(
        Setting(device, dtype, compiled)
        for compiled in (False, True)
        for dtype in (torch.bfloat16, torch.float16)
    )


def run(
    *,
    rounds: int = ROUNDS,
    only: tuple[str, ...] = (),
    device: torch.device | None = None,
    threads: int = 1,
    cases: Mapping[str, Case] | None = None,
) -> Iterator[dict[str, Any]]:
    """Measures every case, work and variant.

    Args:
        rounds: the most rounds of each comparison.
        only: words; a case is measured if its name has one of them.
        device: the CPU if none is given.
        threads: of PyTorch on the CPU.
        cases: what there is to measure; `CASES` if None is given.

    Returns:
        One row for each case, work and variant, or one with "skipped", the reason, in place of the figures.
    """
    where = device or torch.device("cpu")
    torch.set_num_threads(threads)
    for name, case in _chosen(CASES if cases is None else cases, only).items():
        try:
            network = case.make(where)
        except MissingExtraError as error:
            yield from (_skipped(name, work, "all", str(error)) for work in case.works)
            continue
        for work in case.works:
            for setting in settings(where):
                yield from measure(
                    network,
                    work,
                    setting,
                    rounds=rounds,
                    seconds=case.seconds,
                    leaves_out=case.leaves_out,
                )


def comparisons(only: tuple[str, ...], device: torch.device) -> int:
    """Return the number of comparisons."""
    works = sum(len(case.works) for case in _chosen(CASES, only).values())
    return works * len(settings(device))


def measure(
    network: Network,
    work: str,
    setting: Setting,
    *,
    rounds: int,
    seconds: float = _COMPARISON,
    leaves_out: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """One row for each variant of a work, but for those that are left out."""
    observed, facts = {}, {**network.facts, **_about(setting)}
    with ExitStack() as stack:
        variants = {}
        for kind in (kind for kind in kinds(work) if kind not in leaves_out):
            make = partial(prepare, kind, network, work, setting)
            try:
                observed[kind] = observe(make, setting.device)
                variants[kind] = variant(_closed_by(stack, make()), setting)
            except SkippedError as error:
                yield {**_skipped(network.case, work, kind, str(error)), **facts}
        if not variants:
            return
        result, counts = timed(variants, rounds, seconds)
    for kind in variants:
        yield {
            **_row(network.case, work, kind),
            **facts,
            **figures(result, kind),
            **vars(observed[kind]),
            **counts,
        }
    gc.collect()


def variant(prepared: Prepared, setting: Setting) -> Variant:
    """Return the variant that is timed in turns."""
    finish = partial(synchronize, setting.device)
    return Variant(prepared.work, before=prepared.before, finish=finish)


def timed(
    variants: Mapping[str, Variant], rounds: int, seconds: float = _COMPARISON
) -> tuple[Comparison, dict[str, int]]:
    """All variants in turns, for about `seconds`; and how many rounds, and calls in a turn, there were."""
    of_a_call = {kind: _seconds(variant) for kind, variant in variants.items()}
    is_long = of_a_call[BASELINE] > _LONG
    calls = 1 if is_long else max(_FEWEST_CALLS, round(_TURN / of_a_call[BASELINE]))
    untimed = 0 if is_long else max(1, calls // 10)
    each = sum(of_a_call.values()) * (calls + untimed)
    rounds = min(rounds, max(_FEWEST_ROUNDS, round(seconds / each)))
    result = compare(variants, rounds=rounds, calls=calls, untimed=untimed)
    return result, {"rounds": rounds, "calls": calls}


def figures(result: Comparison, kind: str) -> dict[str, float]:
    """A variant's time, and its ratios to torch.autocast and to 16 bits by hand."""
    ratio, spread = result.ratio(kind, BASELINE)
    by_hand, by_hand_spread = result.ratio(kind, BY_HAND)
    return {
        "median_ms": result.median(kind) * 1e3,
        "iqr_ms": result.spread(kind) * 1e3,
        "ratio": ratio,
        "ratio_iqr": spread,
        "by_hand": by_hand,
        "by_hand_iqr": by_hand_spread,
    }


def _chosen(cases: Mapping[str, Case], only: tuple[str, ...]) -> Mapping[str, Case]:
    if not only:
        return cases
    return {name: case for name, case in cases.items() if any(word in name for word in only)}


def title(row: Mapping[str, Any]) -> str:
    """The network of a row, and how it ran, where there is more than one way."""
    if row.get("device", "cpu") == "cpu":
        return str(row["case"])
    return f"{row['case']}, {row['dtype']}, {'compiled' if row['compiled'] else 'eager'}"


def _seconds(variant: Variant) -> float:
    """Return the time of a call after the first, which builds caches."""
    variant.before()
    variant.work()
    variant.finish()
    start = time.perf_counter()
    variant.work()
    variant.finish()
    return time.perf_counter() - start


def _closed_by(stack: ExitStack, prepared: Prepared) -> Prepared:
    stack.callback(prepared.close)
    return prepared


def _about(setting: Setting) -> dict[str, Any]:
    return {
        "device": str(setting.device),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "compiled": setting.compiled,
    }


def _row(case: str, work: str, kind: str) -> dict[str, Any]:
    return {"benchmark": "models", "case": case, "work": work, "kind": kind}


def _skipped(case: str, work: str, kind: str, why: str) -> dict[str, Any]:
    return {**_row(case, work, kind), "skipped": why}
