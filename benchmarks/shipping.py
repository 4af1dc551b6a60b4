"""A converted model beside the same model in 16 bits by hand: time, weights, and the peak while it is converted.

By hand is `model.to(dtype)`, which rounds every weight. What the policy keeps in float32 is named in each row, because
that is what the two differ by; and the same is written by hand too (`benchmarks/islands.py`), which shows what precast
itself costs.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function

import precast
from benchmarks import islands, networks
from benchmarks.interleave import Variant, compare
from benchmarks.networks import Network
from benchmarks.variants import BY_HAND

__all__ = ["CASES", "KINDS", "ROUNDS", "SAME_ISLANDS", "called", "fresh", "repeats", "run"]
__all__ += ["seconds_of"]

ROUNDS = 21
KINDS: Mapping[str, str] = {"converted": "default", "converted + lean": "lean"}
"""What is measured -> the policy."""
SAME_ISLANDS = "by hand, same float32"
"""In 16 bits by hand, with what the policy keeps in float32."""
_DTYPE = torch.bfloat16
_TURN = 0.06
"""Seconds that a variant works in a turn, if a call is not longer."""
_NAMED = 5
_MEASURED = "what is measured"

CASES: Mapping[str, Callable[[], Network]] = {
    "decoder 512, 1x1": partial(networks.decoder, 512, 1, 1),
    "decoder 512, 1x128": partial(networks.decoder, 512, 1, 128),
    "decoder 1024, 1x1": partial(networks.decoder, 1024, 1, 1),
    "convolutional": networks.convolutional,
    "MLP": networks.mlp,
}


def run(*, rounds: int = ROUNDS, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """One row for each network and policy."""
    torch.set_num_threads(1)
    for case, make in CASES.items():
        if not only or any(word in case for word in only):
            yield from _measure(case, make(), rounds)


def _measure(case: str, network: Network, rounds: int) -> Iterator[dict[str, Any]]:
    model, inputs = fresh(network)
    lowered = inputs.to(_DTYPE) if inputs.is_floating_point() else inputs
    by_hand = model.to(_DTYPE).requires_grad_(False)
    works, reports, peaks, bytes_alike = {BY_HAND: called(by_hand, lowered)}, {}, {}, {}
    call_peaks = {kind: _peak(network, _called_in(policy))[1] for kind, policy in KINDS.items()}
    float32_peak = _peak(network, _called)[1]
    for kind, policy in KINDS.items():
        converted, peaks[kind] = _converted(network, policy)
        works[kind] = called(converted, inputs)
        reports[kind] = report = converted.precast_report
        low = [weight.name for weight in report.weights if weight.dtype == "bfloat16"]
        alike = islands.in_16_bits(network, low, _DTYPE)
        works[_alike(kind)], bytes_alike[kind] = called(alike, inputs), _bytes(alike)
    calls = repeats(seconds_of(works[BY_HAND]))
    result = compare(
        {kind: Variant(work) for kind, work in works.items()}, rounds=rounds, calls=calls
    )
    for kind, report in reports.items():
        ratio, spread = result.ratio(kind, BY_HAND)
        ratio_alike, spread_alike = result.ratio(kind, _alike(kind))
        kept = [weight.name for weight in report.kept if weight.dtype == "float32"]
        yield {
            "benchmark": "shipping",
            "case": case,
            "kind": kind,
            "median_ms": result.median(kind) * 1e3,
            "by_hand": ratio,
            "by_hand_iqr": spread,
            "same_islands": ratio_alike,
            "same_islands_iqr": spread_alike,
            "weights": report.bytes / _bytes(by_hand),
            "weights_same_islands": report.bytes / bytes_alike[kind],
            "peak": peaks[kind],
            "call_peak": call_peaks[kind],
            "peak_of_call": peaks[kind] / float32_peak,
            "islands": [*kept[:_NAMED], *["..."] * (len(kept) > _NAMED)],
            "rounds": rounds,
            "calls": calls,
        }
    gc.collect()


def _alike(kind: str) -> str:
    return f"{SAME_ISLANDS}: {kind}"


def fresh(network: Network) -> tuple[nn.Module, Tensor]:
    """The model in evaluation mode, and what it is called with."""
    model, [(inputs, _)] = network.seeded(torch.device("cpu"), 1)
    return model.eval(), inputs


def called(model: Callable[..., object], inputs: Tensor) -> Callable[[], object]:
    """A call of a model without gradients, as work to be measured."""

    def work() -> object:
        with torch.no_grad():
            return model(inputs)

    return work


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _converted(network: Network, policy: str) -> tuple[Any, float]:
    """A model converted in place, and the most memory meanwhile, of that of its float32 weights.

    What the model computes on the example counts, too.
    """

    def convert(model: nn.Module, inputs: Tensor) -> nn.Module:
        return precast.convert(model, policy, _DTYPE, example=inputs, in_place=True)

    return _peak(network, convert)


def _called(model: nn.Module, inputs: Tensor) -> object:
    """A call of the float32 model in float32."""
    with torch.no_grad():
        return model(inputs)


def _called_in(policy: str) -> Callable[[nn.Module, Tensor], object]:
    """A call of the float32 model in a region that keeps no copies of weights, the least that converting has to run."""

    def call(model: nn.Module, inputs: Tensor) -> object:
        with torch.no_grad(), precast.autocast("cpu", _DTYPE, cache_enabled=False, policy=policy):
            return model(inputs)

    return call


def _peak(network: Network, work: Callable[[nn.Module, Tensor], Any]) -> tuple[Any, float]:
    """What work gives for a fresh model and its inputs, and the most memory meanwhile, of that of the float32 weights.

    The model is made under the profiler, which otherwise would not see that its weights are freed.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(use_kineto=True, profile_memory=True, acc_events=True) as profiler:
        model, inputs = fresh(network)
        before = _bytes(model)
        with record_function(_MEASURED):
            result = work(model, inputs)
    events = list(profiler.kineto_results.events())
    begin = next(event.start_ns() for event in events if event.name() == _MEASURED)
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = highest = sum(change for when, change in changes if when < begin)
    for when, change in changes:
        if when >= begin:
            now += change
            highest = max(highest, now)
    return result, highest / before


def seconds_of(work: Callable[[], object]) -> float:
    """What one call takes, after one that is not measured."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def repeats(seconds: float) -> int:
    """How many calls of so many seconds are one turn."""
    return max(1, round(_TURN / seconds))
