"""The steps of a random program. A program is plain data: its `repr` is the program, to be run again.

Invariants:

- a tensor is named by its place in the world of the run, taken modulo the number of tensors there;
- no step depends on a dtype or on what an earlier step gave, so that two runs can differ in values alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = [
    "Call",
    "Case",
    "Compute",
    "Differentiate",
    "GradMode",
    "Hook",
    "InPlace",
    "Layer",
    "Leave",
    "Program",
    "Reenter",
    "Region",
    "Sampled",
    "Step",
    "Write",
]


@dataclass(frozen=True)
class Compute:
    """An operation on three tensors, by its name in `operations.OPERATIONS`."""

    name: str
    operands: tuple[int, int, int]


@dataclass(frozen=True)
class Sampled:
    """An operation of the dispatcher on arguments of `op_samples`, the first tensor of which comes from the world."""

    name: str
    sample: int
    operand: int
    dtypes: tuple[torch.dtype | None, ...]
    """Taken in turn for the other floating-point arguments; None is a weight, shared by all calls of the sample."""


@dataclass(frozen=True)
class Layer:
    """A module, by its name in `layers.LAYERS`; all steps of that name use one instance."""

    name: str
    operand: int


@dataclass(frozen=True)
class InPlace:
    """A write to a tensor of the world, by its name in `operations.IN_PLACE`."""

    name: str
    target: int
    operand: int


@dataclass(frozen=True)
class Differentiate:
    """Gradients of some tensors."""

    outputs: tuple[int, ...]
    inputs: tuple[int, ...] | None
    """The leaves, by their place among the leaves; None is all."""
    accumulate: bool
    """True: by `backward`, into `grad`. False: gradients become tensors of the world."""
    create_graph: bool
    retain_graph: bool


@dataclass(frozen=True)
class Hook:
    """The hook that changes a gradient, by its name in `operations.HOOKS`."""

    name: str
    target: int


@dataclass(frozen=True)
class Write:
    """A change of a weight as programs do it outside of the graph, by its name in `writes.WRITES`."""

    name: str
    weight: int


@dataclass(frozen=True)
class Region:
    """Enters a region."""

    torchs: bool
    """True if it is `torch.autocast` in a program that otherwise uses precast's."""
    device: str
    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None


@dataclass(frozen=True)
class Reenter:
    """Enters the object of an open region once more."""

    which: int


@dataclass(frozen=True)
class GradMode:
    """Enters another grad mode."""

    name: str


@dataclass(frozen=True)
class Leave:
    """Leaves what was entered last."""

    raises: bool = False
    """True if an exception is the reason."""


@dataclass(frozen=True)
class Call:
    """Runs steps as a function that a region decorates."""

    region: Region
    body: tuple[Step, ...]
    raises: bool
    """True if the function ends with an exception."""


Step = (
    Compute
    | Sampled
    | Layer
    | InPlace
    | Differentiate
    | Hook
    | Write
    | Region
    | Reenter
    | GradMode
    | Leave
    | Call
)
Program = tuple[Step, ...]


class Case(NamedTuple):
    """A program, and the seed of its numbers."""

    program: Program
    seed: int
