"""Peak memory and casts of one step of a variant.

Measured apart from time, in a run of its own under PyTorch's profiler, which writes down every allocation, every
release and every operation with the dtypes of its arguments:

- memory on the CPU is the running sum of bytes allocated and released from before the model is made; the peak is its
  highest value within the step. Weights, masters, copies that are kept, gradients and activations are all in it,
  and nothing of other variants. On CUDA it is the most that the allocator had handed out, from the same beginning;
- a cast is a copy between two floating-point dtypes, whoever asked for it; its bytes are those that it writes. On
  CUDA casts are not counted: the profiler takes seconds to start there, and a fused copy of a list has no sizes.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from benchmarks.variants import Prepared
from precast.diagnostics.hardware.machine import synchronize

__all__ = ["Observation", "cuda_peak", "observe"]

_STEP = "the step that is observed"
_SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


@dataclass(frozen=True)
class Observation:
    """Of one step: its peak of tensor memory, its casts, and the bytes that they wrote; None where not counted."""

    peak_bytes: int
    casts: int | None
    cast_bytes: int | None


def observe(make: Callable[[], Prepared], device: torch.device) -> Observation:
    """Makes a variant, warms it up with one step, and observes the next.

    Args:
        make: the variant; what it allocates counts.
        device: where it runs.
    """
    if device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        prepared = make()
        prepared.work()
        peak = cuda_peak(prepared.work, device) - before
        prepared.close()
        return Observation(peak, None, None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its start and end on stderr
    gc.collect()
    # `acc_events`: without it PyTorch up to 2.12 warns of cycles that there are not here.
    with profile(
        use_kineto=True, profile_memory=True, record_shapes=True, acc_events=True
    ) as profiler:
        prepared = make()
        prepared.work()
        with record_function(_STEP):
            prepared.work()
    prepared.close()
    events = list(profiler.kineto_results.events())
    begin, end = next((e.start_ns(), e.end_ns()) for e in events if e.name() == _STEP)
    casts = list(_casts(e for e in events if begin <= e.start_ns() <= end))
    return Observation(_cpu_peak(events, begin, end), len(casts), sum(casts))


def cuda_peak(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that the allocator of a GPU had handed out while `work` ran."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _casts(events: Iterable[Any]) -> Iterator[int]:
    """The bytes that each cast wrote."""
    for event in events:
        if event.name() == "aten::copy_":
            to, source = event.dtypes()[:2]
            if to != source and to in _SIZES and source in _SIZES:
                yield math.prod(event.shapes()[0]) * _SIZES[to]


def _cpu_peak(events: list[Any], begin: int, end: int) -> int:
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = sum(change for when, change in changes if when < begin)
    highest: int = now
    for when, change in changes:
        if begin <= when <= end:
            now += change
            highest = max(highest, now)
    return highest
