"""The C++ function behind a compiled program, for programs that are one elementwise kernel.

Invariants:

- a program that calls several functions, or passes anything but its own tensors and their size, is called as a whole;
- while a program is recorded, compiled programs in other threads run unchanged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any, Final, NamedTuple

from torch import Tensor

__all__ = ["CompiledKernel", "record_kernel"]

COUNT: Final = -1


class CompiledKernel(NamedTuple):
    """A C++ kernel of a compiled program, with the order of its arguments.

    `torch.compile` calls it through wrappers of Dynamo, AOTAutograd and Inductor that take longer than the update of a
    small weight, and no public function calls it directly (2.13).
    """

    function: Callable[..., Any]
    order: tuple[int, ...]
    """For each argument of the kernel, the index of the program's tensor; -1 for the number of elements."""

    def __call__(self, tensors: Sequence[Tensor], count: int) -> None:
        """Run the kernel on `count` elements of each tensor of the program; the shapes are ignored."""
        arguments = (*tensors, count)
        self.function(*[arguments[index] for index in self.order])


def record_kernel(
    run: Callable[..., Any], rows: Sequence[Tensor], count: int
) -> CompiledKernel | None:
    """Run a compiled program, and return its kernel; None if it is not a single known kernel.

    Args:
        run: the program.
        rows: its arguments, each with a different data pointer.
        count: the number of elements of the large ones; no other has this size.
    """
    with _recorded_calls() as calls:
        run(*rows)
    if len(calls) != 1:
        return None
    function, arguments = calls[0]
    indices = {row.data_ptr(): index for index, row in enumerate(rows)}
    order = [
        indices.get(each.data_ptr())
        if isinstance(each, Tensor)
        else (COUNT if each == count else None)
        for each in arguments
    ]
    known_order = tuple(index for index in order if index is not None)
    return CompiledKernel(function, known_order) if len(known_order) == len(order) else None


@contextmanager
def _recorded_calls() -> Iterator[list[tuple[Callable[..., Any], tuple[Any, ...]]]]:
    """Record the kernels that this thread's compiled programs call, with their arguments.

    Inductor's programs are modules with built-in functions named `kernel` among their globals (2.11 to 2.13). Otherwise
    nothing is recorded.
    """
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    thread = threading.get_ident()

    def recording(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            if threading.get_ident() == thread:
                calls.append((kernel, args))
            return kernel(*args)

        return wrapper

    originals = [
        (vars(module), name, value)
        for module in list(getattr(cache, "modules", ()))
        for name, value in list(vars(module).items())
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    ]
    for names, name, value in originals:
        names[name] = recording(value)
    try:
        yield calls
    finally:
        for names, name, value in originals:
            names[name] = value
