"""Tables of claims: what precast does as PyTorch does, each claim with a program that shows it of either.

A program takes the class that it is about, PyTorch's or precast's, and the arguments of its row, and returns what is to
be the same to the bit. What it asserts is true of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from precast.errors import PrecastError

__all__ = ["Claim", "Claims", "one_each", "refused"]

Program = Callable[..., list[Any]]


class Claim(NamedTuple):
    """A row of a table."""

    says: str
    program: Program
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return ", ".join([self.says, *(getattr(a, "__name__", str(a)) for a in self.arguments)])

    def hold(self, theirs: type[Any], ours: type[Any]) -> None:
        """Runs the program with both, on the same random numbers."""
        seed = torch.initial_seed() % 2**31
        returned = []
        for kind in (theirs, ours):
            torch.manual_seed(seed)
            returned.append(self.program(kind, *self.arguments))
        assert returned[1] == returned[0], f"{self}: precast's, then PyTorch's"


class Claims(list[Claim]):
    """A table, which programs are put into as they are defined."""

    def __call__(self, says: str, *rows: tuple[Any, ...]) -> Callable[[Program], Program]:
        """Puts a program into the table: once, or once for the arguments of each row."""

        def add(program: Program) -> Program:
            self.extend(Claim(says, program, row) for row in rows or [()])
            return program

        return add


def one_each(*values: Any) -> list[tuple[Any, ...]]:
    """Rows of one argument."""
    return [(value,) for value in values]


def refused(is_ours: bool, call: Callable[[], Any], error: type[PrecastError], says: str) -> None:
    """A call is refused by both: by precast with its error, whose message says what is wrong."""
    if is_ours:
        with pytest.raises(error, match=says):
            call()
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            call()
