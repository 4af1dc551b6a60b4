"""CUDA graphs, as PyTorch's documentation has programs make them."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["graph_of"]


def graph_of(iteration: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What an iteration does, written down; it has run three times before, on a stream of its own."""
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
