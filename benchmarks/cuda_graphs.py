"""CUDA graphs, as PyTorch's documentation has programs make them, and the waits of the host for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["counted_waits", "graph_of"]


def graph_of(iteration: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture an iteration in a graph, after three runs on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iteration()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    return graph


@contextmanager
def counted_waits() -> Iterator[list[int]]:
    """Count how often the host waits for the GPU inside, by PyTorch's sync debug mode: a list that gets the number."""
    result: list[int] = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield result
        finally:
            torch.cuda.set_sync_debug_mode("default")
    result.append(sum("called a synchronizing" in str(each.message) for each in caught))
