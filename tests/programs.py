"""Random small programs over shared weights, and an interpreter that runs one in any maker of regions.

Invariants:

- a program is plain data: the same steps run under PyTorch's autocast and under precast, from equal inputs;
- every value is a square of `SIDE`, so that any step can follow any other; an operation that raises leaves the
  type of its error in its place and the program goes on;
- no step depends on a value's dtype or on what an earlier step gave, so that two runs can differ in values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["Compute", "Found", "MakeRegion", "Program", "Region", "Write", "programs", "run"]

SIDE = 4
MakeRegion = Callable[..., AbstractContextManager[Any]]

OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # rule "lower"
    "linear": lambda a, b, c: F.linear(a, b),
    "linear with bias": lambda a, b, c: F.linear(a, b, c[0]),
    "matmul": lambda a, b, c: a @ b,
    "matmul of a view": lambda a, b, c: a @ b.t(),
    "matmul of a slice": lambda a, b, c: F.pad(a @ b[:, :2], (0, 2)),
    "vector": lambda a, b, c: (a @ b[0]).expand(SIDE, SIDE),
    "addmm": torch.addmm,
    "baddbmm": lambda a, b, c: torch.baddbmm(a[None], b[None], c[None])[0],
    "conv": lambda a, b, c: F.conv1d(a, b[..., None], c[0]),
    "multi_dot": lambda a, b, c: torch.linalg.multi_dot([a, b, c]),
    "einsum": lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c),
    "attention": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], c[None])[0],
    # rule "fp32"
    "mse_loss": lambda a, b, c: F.mse_loss(a, b, reduction="none"),
    "fft": lambda a, b, c: torch.fft.fft(a).real,
    "qr": lambda a, b, c: torch.linalg.qr(a)[1],
    "pooling": lambda a, b, c: F.avg_pool1d(a[None], 3, 1, 1)[0],
    # rule "promote"
    "cat": lambda a, b, c: torch.cat([a, b])[::2],
    "stack": lambda a, b, c: torch.stack([a, b, c])[1],
    "index_copy": lambda a, b, c: a.index_copy(0, torch.tensor([1]), b[:1]),
    # no rule
    "add": lambda a, b, c: a + b,
    "multiply": lambda a, b, c: a * c,
    "gelu": lambda a, b, c: F.gelu(a),
    "softmax": lambda a, b, c: a.softmax(-1),
    "layer_norm": lambda a, b, c: F.layer_norm(a, (SIDE,), b[0], c[1]),
    "prelu": lambda a, b, c: F.prelu(a, b[0]),
    "where": lambda a, b, c: torch.where(a > 0, b, c),
    "to double": lambda a, b, c: a.double(),
    "to float": lambda a, b, c: a.float(),
    "to half": lambda a, b, c: a.half(),
    "detach": lambda a, b, c: a.detach(),
}


@dataclass(frozen=True)
class Compute:
    """One operation on three tensors of the world, whose result becomes the newest tensor of the world."""

    name: str
    operands: tuple[int, int, int]


@dataclass(frozen=True)
class Differentiate:
    """Gradients of one tensor with respect to every leaf, which become tensors of the world with `again`."""

    output: int
    again: bool
    """Whether to keep a graph of the gradients, so that a later step differentiates them."""
    accumulate: bool
    """Whether by `backward()` into the leaves' `grad`."""


@dataclass(frozen=True)
class Region:
    """Enters a region."""

    torchs: bool
    """Whether it is `torch.autocast` in the program that otherwise uses precast."""
    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None


@dataclass(frozen=True)
class GradMode:
    """Enters another grad mode."""

    name: str


@dataclass(frozen=True)
class Leave:
    """Leaves what was entered last."""


@dataclass(frozen=True)
class Write:
    """A change of a weight that PyTorch's cache does not see, or sees too late."""

    how: str
    weight: int


Program = tuple[Any, ...]

GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}


class Found(NamedTuple):
    """What a program computes; the type of an error stands in the place of what raised it."""

    results: list[Any]
    gradients: list[Any]


@dataclass
class World:
    """The tensors of one run, and all it found out."""

    tensors: list[Tensor]
    leaves: list[Tensor]
    found: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)

    @staticmethod
    def fresh(seed: int) -> World:
        """Weights of every kind, and two inputs, the same for the same seed."""
        draw = torch.Generator().manual_seed(seed)

        def square() -> Tensor:
            return torch.randn(SIDE, SIDE, generator=draw) / 2

        trained = torch.nn.Parameter(square())
        frozen = torch.nn.Parameter(square(), requires_grad=False)
        leaf = square().requires_grad_()
        tall = torch.nn.Parameter(torch.randn(2 * SIDE, SIDE, generator=draw))
        leaves = [trained, frozen, leaf, tall]
        inputs = [square(), square().requires_grad_(), square().bfloat16(), square().half()]
        inputs.append(square().double())
        return World([trained, frozen, leaf, tall[1:5], tall[:4], *inputs], leaves + inputs[1:2])


def run(program: Program, seed: int, ours: MakeRegion, torchs: MakeRegion) -> Found:
    """Everything that the program computes.

    Args:
        program: what `programs` draws.
        seed: of the values of weights and inputs.
        ours: makes the regions under test.
        torchs: makes the regions that are PyTorch's in both runs.
    """
    world = World.fresh(seed)
    entered: list[AbstractContextManager[Any]] = []
    for step in program:
        if isinstance(step, Leave):
            if entered:
                entered.pop().__exit__(None, None, None)
        elif isinstance(step, (Region, GradMode)):
            make = torchs if isinstance(step, Region) and step.torchs else ours
            entered.append(_manager(step, make))
            entered[-1].__enter__()
        else:
            _STEPS[type(step)](step, world)
    while entered:
        entered.pop().__exit__(None, None, None)
    return Found(world.found, world.gradients + [leaf.grad for leaf in world.leaves])


def _manager(step: Region | GradMode, make: MakeRegion) -> AbstractContextManager[Any]:
    if isinstance(step, GradMode):
        return GRAD_MODES[step.name]()
    return make("cpu", step.dtype, step.enabled, step.cache)


def _compute(step: Compute, world: World) -> None:
    operands = [world.tensors[i % len(world.tensors)] for i in step.operands]
    try:
        result = OPERATIONS[step.name](*operands)
    except (RuntimeError, ValueError) as error:
        world.found.append(type(error))
        world.tensors.append(operands[0])  # the same place is filled, whatever raised
        return
    world.found.append(result)
    world.tensors.append(result)


def _differentiate(step: Differentiate, world: World) -> None:
    output = world.tensors[step.output % len(world.tensors)]
    try:
        total = output.float().square().sum()
        if step.accumulate:
            total.backward(retain_graph=True)
            return
        leaves = [leaf for leaf in world.leaves if leaf.requires_grad]
        found = torch.autograd.grad(
            total, leaves, retain_graph=True, create_graph=step.again, allow_unused=True
        )
    except RuntimeError as error:
        world.gradients.append(type(error))
        return
    world.gradients.extend(found)
    world.tensors.extend(g for g in found if g is not None and g.shape == (SIDE, SIDE))


def _write(step: Write, world: World) -> None:
    try:
        WRITES[step.how](world.leaves[step.weight % 4], world)
    except RuntimeError as error:  # a weight made in inference mode cannot be written outside of it
        world.found.append(type(error))


def _replace(weight: Tensor, world: World) -> None:
    new = torch.nn.Parameter(weight.detach() * 2)
    place = next(i for i, leaf in enumerate(world.leaves) if leaf is weight)
    world.leaves[place] = new
    world.tensors = [new if t is weight else t for t in world.tensors]


def _in_place(weight: Tensor, world: World) -> None:
    with torch.no_grad():
        weight.mul_(1.5)


def _swap_data(weight: Tensor, world: World) -> None:
    weight.data = weight.detach() + 1


def _toggle(weight: Tensor, world: World) -> None:
    weight.requires_grad_(not weight.requires_grad)


def _load(weight: Tensor, world: World) -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight) if type(weight) is Tensor else weight
    if module.weight is weight:
        module.load_state_dict({"weight": weight.detach() - 1})


def _optimize(weight: Tensor, world: World) -> None:
    if weight.requires_grad and not torch.is_inference_mode_enabled():
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5).step()


WRITES: dict[str, Callable[[Tensor, World], None]] = {
    "in place": _in_place,
    ".data": _swap_data,
    "requires_grad": _toggle,
    "replaced": _replace,
    "load_state_dict": _load,
    "optimizer": _optimize,
}

_STEPS: dict[type, Callable[[Any, World], None]] = {
    Compute: _compute,
    Differentiate: _differentiate,
    Write: _write,
}


def programs(
    *,
    dtypes: st.SearchStrategy[torch.dtype | None],
    caches: st.SearchStrategy[bool | None],
    writes: bool = False,
) -> st.SearchStrategy[Program]:
    """Programs whose outermost region is ours.

    Args:
        dtypes: the lower precision of each region.
        caches: the `cache_enabled` of each region.
        writes: whether weights change on the way.
    """
    place = st.integers(0, 9) | st.integers(0, 40)  # what is there from the start, or anything
    compute = st.builds(
        Compute, st.sampled_from(sorted(OPERATIONS)), st.tuples(place, place, place)
    )
    enabled = st.sampled_from([True, True, True, False])
    # How often a weight was cast decides in which precision its gradients are summed: where weights are written
    # that may differ, and must not reach a result.
    again = st.just(False) if writes else st.booleans()
    steps = [
        compute,
        compute,
        st.builds(Differentiate, place, again, st.booleans()),
        st.builds(Region, st.booleans(), dtypes, enabled, caches),
        st.builds(GradMode, st.sampled_from(sorted(GRAD_MODES))),
        st.just(Leave()),
    ]
    if writes:
        steps += [
            st.builds(Write, st.sampled_from(sorted(WRITES)), st.integers(0, 3)),
            st.builds(
                _around, st.sampled_from(sorted(OPERATIONS)), place, st.sampled_from(sorted(WRITES))
            ),
        ]
    first = st.builds(Region, st.just(False), dtypes, st.just(True), caches)
    rest = st.lists(st.one_of(steps), max_size=25)
    return st.builds(lambda one, rest: tuple(_flat([one, *rest])), first, rest)


def _around(name: str, operand: int, how: str) -> Program:
    """One operation on a weight before and after a write."""
    weight = operand % 3
    compute = Compute(name, (operand, weight, weight))
    return compute, Write(how, weight), compute


def _flat(steps: list[Any]) -> Iterator[Any]:
    for step in steps:
        yield from step if isinstance(step, tuple) else (step,)
