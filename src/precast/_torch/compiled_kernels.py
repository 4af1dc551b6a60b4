"""What a compiled program comes down to, where that is one C++ function over rows of numbers.

Invariants:

- a program that calls anything else than one such function, or gives it anything else than what it was given itself, is
  called as a whole;
- while a program is watched, other threads call theirs as before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any, Final, NamedTuple

from torch import Tensor

__all__ = ["CompiledKernel", "kernel_of"]

COUNT: Final = -1


class CompiledKernel(NamedTuple):
    """A C++ function and what it is given.

    `torch.compile` calls it within wrappers of Dynamo, AOTAutograd and Inductor that take longer than a small weight
    does, and nothing public goes without them (2.13).
    """

    function: Callable[..., Any]
    order: tuple[int, ...]
    """Which of the program's tensors each argument is; -1 stands for the count of numbers."""

    def __call__(self, tensors: Sequence[Tensor], count: int) -> None:
        """Calls it with the program's tensors, which may have any shape: it goes through `count` numbers of each."""
        given = (*tensors, count)
        self.function(*[given[number] for number in self.order])


def kernel_of(run: Callable[..., Any], rows: Sequence[Tensor], count: int) -> CompiledKernel | None:
    """Calls a compiled program, and gives the one kernel that it calls; None where that is not known.

    Args:
        run: the program.
        rows: what it is called with, each at an address of its own.
        count: how many numbers the large ones have, which is the size of none of the others.
    """
    with _watched() as calls:
        run(*rows)
    if len(calls) != 1:
        return None
    function, given = calls[0]
    places = {row.data_ptr(): number for number, row in enumerate(rows)}
    order = tuple(
        places.get(each.data_ptr())
        if isinstance(each, Tensor)
        else (COUNT if each == count else None)
        for each in given
    )
    known = tuple(number for number in order if number is not None)
    return CompiledKernel(function, known) if known == order else None


@contextmanager
def _watched() -> Iterator[list[tuple[Callable[..., Any], tuple[Any, ...]]]]:
    """A block in which the kernels that this thread's compiled programs call are noted, with their arguments.

    Inductor's programs are modules whose kernels are built-in functions called `kernel`, among their globals (2.11 to
    2.13). Where that is otherwise, none are noted.
    """
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    thread = threading.get_ident()

    def noting(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            if threading.get_ident() == thread:
                calls.append((kernel, given))
            return kernel(*given)

        return noted

    replaced = [
        (vars(module), name, value)
        for module in list(getattr(cache, "modules", ()))
        for name, value in list(vars(module).items())
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    ]
    for names, name, value in replaced:
        names[name] = noting(value)
    try:
        yield calls
    finally:
        for names, name, value in replaced:
            names[name] = value
