"""Finds how many CPU threads to train on: all of them, unless one is faster right now.

Threads that share a small step wait for each other after every operation. Where other programs use the same cores they
wait much longer, and one thread can be ten times as fast as two.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["fastest_threads"]

_WARM_UP, _TIMED = 3, 5
_CLEARLY = 1.1  # one thread is taken only if it is faster by this factor


@contextmanager
def fastest_threads(step: Callable[[], object]) -> Iterator[int]:
    """Times `step` on one thread and on all, and keeps the faster number until the `with` ends.

    Yields:
        The number of threads.
    """
    all_of_them = torch.get_num_threads()
    try:
        if all_of_them > 1 and _seconds(step, all_of_them) < _seconds(step, 1) * _CLEARLY:
            torch.set_num_threads(all_of_them)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(all_of_them)


def _seconds(step: Callable[[], object], threads: int) -> float:
    torch.set_num_threads(threads)
    for _ in range(_WARM_UP):
        step()
    moments = [time.perf_counter()]
    for _ in range(_TIMED):
        step()
        moments.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(moments))
