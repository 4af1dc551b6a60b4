"""Draws random programs from a `random.Random`: one with a seed, or one of hypothesis' own, whose programs shrink.

Hypothesis alone would draw most programs as variations of one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from tests.conformance.programs.layers import LAYERS
from tests.conformance.programs.operations import HOOKS, IN_PLACE, LOWERED, OPERATIONS
from tests.conformance.programs.run import GRAD_MODES
from tests.conformance.programs.steps import (
    Call,
    Case,
    Compute,
    Differentiate,
    GradMode,
    Hook,
    InPlace,
    Layer,
    Leave,
    Program,
    Reenter,
    Region,
    Sampled,
    Step,
    Write,
)
from tests.conformance.programs.writes import UNCOUNTED, WRITES
from tests.support import op_samples

__all__ = ["LOWER", "UNREPEATABLE", "Kind", "cases", "drawn"]

LOWER = (torch.bfloat16, torch.float16)

UNREPEATABLE = {
    "aten::linalg_lstsq": "a LAPACK routine whose rounding depends on where its memory lies",
    "aten::mkldnn_rnn_layer": "returns a buffer that is scratch memory",
}
"""Operations with another result at each call in PyTorch itself. Both are compared in tests/engine/test_bitwise.py."""

SAMPLED = sorted(
    (op_samples.named() | op_samples.promoted()) - set(op_samples.NOT_ON_CPU) - set(UNREPEATABLE)
)
MIXTURES: tuple[tuple[torch.dtype | None, ...], ...] = (
    (None,),
    (None,),
    (torch.float32,),
    (torch.bfloat16,),
    (None, torch.bfloat16),
    (torch.float16, None),
    (torch.float64,),
)
STABLE = (
    *(
        "linear",
        "linear with bias",
        "matmul",
        "matmul of a transposed",
        "vector",
        "addmm",
        "conv1d",
    ),
    *("multi_dot", "einsum", "attention", "mse_loss", "fft", "avg_pool1d", "cat", "stack", "add"),
    *("multiply", "gelu", "softmax", "layer_norm", "prelu", "where", "to double", "to float"),
    *("to half", "detached"),
)
"""Operations whose gradients lose little where they are summed in 16 bits."""
LAST = (
    *(Differentiate(tuple(range(-count, 0)), None, True, False, True) for count in (12, 6, 3)),
    *(Differentiate((place,), None, True, False, True) for place in range(-3, 0)),
)
"""The last steps of every program: its last results are differentiated, together if possible, and one by one."""


@dataclass(frozen=True)
class Kind:
    """The settings of the programs of one kind."""

    dtypes: tuple[torch.dtype | None, ...] = LOWER
    """The lower precision of the regions."""
    writes: bool = False
    """True if weights are changed outside of the graph."""
    torchs: float = 0.5
    """The share of regions of PyTorch."""
    leaks: bool = False
    """True if PyTorch's regions may be around precast's, and one object be entered twice."""
    feedback: bool = True
    """True if a result may depend on a gradient.

    Without, a program also has well-conditioned operations alone, and no write that leaves no trace: how often a
    weight was cast is then seen in gradients alone.
    """


def cases(count: int, seed: int) -> list[Case]:
    """Draw `count` cases of all kinds, the same ones for the same seed."""
    draw = Random(seed)
    return [Case(_Draw(draw, _kind(draw)).program(), draw.randrange(10_000)) for _ in range(count)]


def drawn(kind: Kind) -> st.SearchStrategy[Case]:
    """A strategy of hypothesis for cases of one kind."""
    return st.randoms().map(lambda draw: Case(_Draw(draw, kind).program(), draw.randrange(1000)))


def _kind(draw: Random) -> Kind:
    """Most have one lower precision, and no change of a weight outside of the graph."""
    dtypes = (None, *LOWER) if draw.random() < 0.4 else (draw.choice(LOWER),)
    return Kind(dtypes, writes=draw.random() < 0.4, leaks=draw.random() < 0.25)


class _Draw:
    """Draws steps of one kind."""

    def __init__(self, draw: Random, kind: Kind) -> None:
        self._draw = draw
        self._kind = kind
        self._writes = sorted(WRITES if kind.feedback else WRITES.keys() - UNCOUNTED - {"AdamW"})
        steps: dict[Callable[[], Sequence[Step]], int] = {
            self._enter: 4,
            self._leave: 4,
            self._grad_mode: 1,
            self._differentiate: 4,
            self._compute: 20,
        }
        if kind.feedback:
            steps |= {self._layer: 10, self._sampled: 10, self._in_place: 4, self._hook: 1}
        if kind.writes:
            steps |= {self._write: 2, self._around: 8}
        if kind.leaks:
            steps[self._reenter] = 2
        self._inner = steps
        self._steps = {**steps, self._call: 2}

    def program(self) -> Program:
        """One or two outermost regions, and what is computed in them."""
        program = self._part()
        if self._draw.random() < 0.3:
            program = (*program, *(Leave(),) * 9, *self._part())
        return (*program, *LAST)

    def _part(self) -> Program:
        torchs = self._kind.leaks and self._draw.random() < 0.5
        first = Region(torchs, "cpu", self._one(self._kind.dtypes), True, self._cache())
        return first, *self._several(self._steps, self._draw.randint(5, 25))

    def _several(self, steps: dict[Callable[[], Sequence[Step]], int], count: int) -> Program:
        makers = self._draw.choices(list(steps), list(steps.values()), k=count)
        return tuple(step for make in makers for step in make())

    def _one(self, options: Sequence[Any]) -> Any:
        return self._draw.choice(options)

    def _place(self) -> int:
        """Draw one of the first tensors, one of the last results, or any tensor."""
        return self._draw.randint(*self._one([(0, 12), (-6, -1), (0, 60)]))

    def _places(self, most: int) -> tuple[int, ...]:
        return tuple(self._place() for _ in range(self._draw.randint(1, most)))

    def _weight(self) -> int:
        """A weight that requires a gradient: few, so that most are used more than once."""
        return int(self._one([0, 0, 0, 2, 3]))

    def _cache(self) -> bool | None:
        return self._one([None, None, None, True, True, False])  # type: ignore[no-any-return]

    def _enter(self) -> tuple[Region]:
        device = self._one(["cpu"] * 8 + ["cuda", "xpu"])
        torchs, enabled = self._draw.random() < self._kind.torchs, self._draw.random() < 0.8
        return (Region(torchs, device, self._one(self._kind.dtypes), enabled, self._cache()),)

    def _leave(self) -> tuple[Leave]:
        return (Leave(self._draw.random() < 0.3),)

    def _reenter(self) -> tuple[Reenter]:
        return (Reenter(self._draw.randint(0, 2)),)

    def _grad_mode(self) -> tuple[GradMode]:
        return (GradMode(self._one(sorted(GRAD_MODES))),)

    def _call(self) -> tuple[Call]:
        [region] = self._enter()
        body = self._several(self._inner, self._draw.randint(0, 6))
        return (Call(region, body, self._draw.random() < 0.5),)

    def _compute(self) -> tuple[Compute]:
        names = self._one([sorted(OPERATIONS), sorted(LOWERED)]) if self._kind.feedback else STABLE
        second = self._weight() if self._draw.random() < 0.6 else self._place()
        return (Compute(self._one(names), (self._place(), second, self._place())),)

    def _layer(self) -> tuple[Layer]:
        return (Layer(self._one(sorted(LAYERS)), self._place()),)

    def _sampled(self) -> tuple[Sampled]:
        name, sample = self._one(SAMPLED), self._draw.randint(0, 3)
        return (Sampled(name, sample, self._place(), self._one(MIXTURES)),)

    def _in_place(self) -> tuple[InPlace]:
        return (InPlace(self._one(sorted(IN_PLACE)), self._place(), self._place()),)

    def _hook(self) -> tuple[Hook]:
        return (Hook(self._one(sorted(HOOKS)), self._place()),)

    def _differentiate(self) -> tuple[Differentiate]:
        outputs = self._places(4)
        if not self._kind.feedback:
            return (Differentiate(outputs, None, True, False, True),)
        inputs = self._places(3) if self._draw.random() < 0.4 else None
        accumulate, again = self._draw.random() < 0.5, self._draw.random() < 0.5
        return (Differentiate(outputs, inputs, accumulate, again, self._draw.random() < 0.8),)

    def _write(self) -> tuple[Write]:
        return (Write(self._one(self._writes), self._draw.randint(0, 5)),)

    def _around(self) -> Program:
        """One operation on a weight before and after a write."""
        [compute] = self._compute()
        weight = self._weight()
        same = Compute(compute.name, (compute.operands[0], weight, weight))
        return same, Write(self._one(self._writes), weight), same
