"""The events of PyTorch's profiler in a program: the oracle for the casts that a trace counts."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

__all__ = ["casts_profiled"]


def casts_profiled(run: Callable[[], object], *, numbers: bool = False) -> int:
    """The copies from one floating dtype to another while something runs.

    Args:
        run: what runs.
        numbers: whether those of one float64 number count, which look the same for a number of Python's and a tensor.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as records:
        run()
    copies = [e for e in records.profiler.kineto_results.events() if e.name() == "aten::copy_"]
    return sum(
        _is_cast(e.dtypes()) and (numbers or not _is_number(e.dtypes(), e.shapes())) for e in copies
    )


_FLOATING = {"float", "double", "c10::Half", "c10::BFloat16"}


def _is_number(dtypes: list[str], shapes: list[list[int]]) -> bool:
    """True if it is a number of Python beside a tensor, as in ``x * 0.5``: PyTorch makes a float64 tensor of it."""
    return dtypes[1] == "double" and shapes[1] == []


def _is_cast(dtypes: list[str]) -> bool:
    return dtypes[0] != dtypes[1] and {dtypes[0], dtypes[1]} <= _FLOATING
