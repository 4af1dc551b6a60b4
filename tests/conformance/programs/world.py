"""The tensors of one run of a random program, and the divergence points at which PyTorch's weight cache matters.

Invariants:

- the same program and seed begin with the same tensors;
- every tensor of the world is a square of `SIDE`: what an operation gives is recorded whole, and folded into one;
- what is recorded is a copy, made at once: no later write reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precast._internal.pytree import map_tensors
from tests.conformance.programs.layers import LAYERS
from tests.conformance.programs.operations import SIDE
from tests.conformance.programs.steps import Call, Layer, Program, Sampled, Step
from tests.support import op_samples
from tests.support.op_samples import Sample

__all__ = ["Recorded", "World", "fold", "record"]


class Recorded(NamedTuple):
    """A tensor as it was when it was recorded."""

    copy: Tensor
    requires_grad: bool
    strides: tuple[int, ...]


@dataclass
class World:
    """All that the steps of one run read and write."""

    tensors: list[Tensor]
    leaves: list[Tensor]
    modules: dict[str, nn.Module]
    parameters: list[Tensor]
    """The parameters of the modules."""
    samples: dict[tuple[str, int], Sample]
    weights: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    """The weights among the arguments of samples: by operation, sample and place."""
    found: list[Any] = field(default_factory=list)
    """The results in order; the type of an error takes the place of the result of the step that raised it."""
    gradients: list[Any] = field(default_factory=list)
    """The same for gradients."""

    @staticmethod
    def fresh(program: Program, seed: int) -> World:
        """Weights of every kind, inputs of every dtype, and the modules and samples that the program uses."""
        draw = torch.Generator().manual_seed(seed)

        def square() -> Tensor:
            return torch.randn(SIDE, SIDE, generator=draw) / 2

        trained, tied = nn.Parameter(square()), nn.Parameter(square())
        frozen = nn.Parameter(square(), requires_grad=False)
        leaf = square().requires_grad_()
        tall = nn.Parameter(torch.randn(2 * SIDE, SIDE, generator=draw))
        low = nn.Parameter(square().bfloat16())
        leaves = [trained, frozen, leaf, tied, tall, low]
        inputs = [square(), square().requires_grad_()]
        inputs += [square().to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)]
        views = [tied.t(), tall[1:5], tall[:4]]
        tensors = [trained, frozen, leaf, tied, low, *views, *inputs]
        used = list(_inner(program))
        modules, samples = _modules(used, seed), _samples(used, seed)
        parameters: list[Tensor] = [p for module in modules.values() for p in module.parameters()]
        return World(tensors, leaves + inputs[1:2], modules, parameters, samples)

    def __getitem__(self, place: int) -> Tensor:
        """The tensor at a place."""
        return self.tensors[place % len(self.tensors)]

    def watched(self) -> list[Tensor]:
        """Every leaf that can have a lower-precision copy."""
        return [*self.leaves, *self.parameters, *self.weights.values()]

    def weight(self, key: tuple[str, int, int], value: Tensor) -> Tensor:
        """The weight of a place in a sample; begins with a value."""
        if key not in self.weights:
            with torch.inference_mode(False):
                self.weights[key] = nn.Parameter(value.clone())
        return self.weights[key]

    def attempt(self, compute: Callable[[], Any], instead: Tensor) -> None:
        """Records what is computed, or the type of its error; adds one tensor to the world whatever happens."""
        try:
            result = compute()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            self.found.append(kind(error))
            self.tensors.append(instead)
            return
        self.found.append(record(result))
        squares = [fold(t) for t in _floating(result)]
        self.tensors.append(squares[0] if squares else instead)

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Puts another leaf in the place of one."""
        self.leaves = [new if leaf is old else leaf for leaf in self.leaves]
        self.tensors = [new if t is old else t for t in self.tensors]


def kind(error: Exception) -> type[Exception]:
    """The builtin type of an error: precast's own errors are subclasses of those that PyTorch raises."""
    return next(base for base in type(error).__mro__ if base.__module__ in ("builtins", "torch"))


def record(value: Any) -> Any:
    """A copy of a result, which no later step changes."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return Recorded(value.detach().clone(), value.requires_grad, strides)
    if isinstance(value, (list, tuple)):
        return [record(item) for item in value]
    return value


def fold(tensor: Tensor) -> Tensor:
    """The first numbers of a tensor as a square; a square is itself."""
    if tensor.shape == (SIDE, SIDE) and tensor.is_floating_point():
        return tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.reshape(-1)[: SIDE * SIDE]
    return F.pad(flat, (0, SIDE * SIDE - flat.numel())).view(SIDE, SIDE)


def _floating(value: Any) -> list[Tensor]:
    result: list[Tensor] = []
    map_tensors(value, lambda t: result.append(t) or t)  # type: ignore[func-returns-value]
    return [t for t in result if t.is_floating_point() or t.is_complex()]


def _inner(program: Iterable[Step]) -> Iterable[Step]:
    """All steps, those of called functions too."""
    for step in program:
        yield step
        if isinstance(step, Call):
            yield from _inner(step.body)


def _modules(used: list[Step], seed: int) -> dict[str, nn.Module]:
    names = {step.name for step in used if isinstance(step, Layer)}
    modules = {}
    with torch.random.fork_rng(devices=()):
        for name in sorted(names):
            torch.default_generator.manual_seed(seed)
            modules[name] = LAYERS[name].make()
    return modules


def _samples(used: list[Step], seed: int) -> dict[tuple[str, int], Sample]:
    result = {}
    for step in used:
        if isinstance(step, Sampled):
            draws = op_samples.samples(step.name, seed)
            result[step.name, step.sample] = draws[step.sample % len(draws)]
    return result
