"""Runs a random program in any maker of regions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precast._internal.pytree import map_tensors
from precast.errors import PrecastWarning
from tests.conformance.programs.divergence_points import NO_REPAIRS, DivergencePoints, Repairs
from tests.conformance.programs.layers import LAYERS
from tests.conformance.programs.operations import HOOKS, IN_PLACE, OPERATIONS, SIDE
from tests.conformance.programs.steps import (
    Call,
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
    Write,
)
from tests.conformance.programs.world import World, fold, kind, record
from tests.conformance.programs.writes import FUSED, WRITES
from tests.conformance.systems import MakeRegion
from tests.support import op_samples
from tests.support.op_samples import Sample

__all__ = ["GRAD_MODES", "Found", "State", "blend", "run"]

GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}
DEVICES = ("cpu", "cuda", "xpu")


class Found(NamedTuple):
    """All that a program computes, the gradients of all leaves last, and the divergence points that it came by."""

    results: list[Any]
    gradients: list[Any]
    points: frozenset[str]


class State(NamedTuple):
    """Return the autocast state in force by PyTorch's queries."""

    devices: tuple[tuple[bool, torch.dtype], ...]
    cache: bool


class _InterruptedError(Exception):
    """An error that a program raises itself."""


def run(
    program: Program,
    seed: int,
    region: MakeRegion,
    torchs: MakeRegion = torch.autocast,
    repairs: Repairs = NO_REPAIRS,
) -> Found:
    """Everything that the program computes.

    Args:
        program: what `strategies.programs` draws.
        seed: of the values of weights and inputs.
        region: makes the regions under test.
        torchs: makes the regions that are PyTorch's in every run.
        repairs: what is done at the divergence points.
    """
    world = World.fresh(program, seed)
    before = _state()
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=()):
        warnings.simplefilter("always")
        runner = _Runner(world, region, torchs, DivergencePoints(world, repairs))
        runner.run(program)
    _restore(before)
    odd = [w for w in caught if issubclass(w.category, PrecastWarning) and "CUDA" not in str(w)]
    assert not odd, odd[0]
    world.gradients += [record(leaf.grad) for leaf in world.watched() if leaf.is_leaf]
    return Found(world.found, world.gradients, frozenset(runner.points.met))


@dataclass
class _Runner:
    """Takes one step after another; what was entered and not left yet is on its stack."""

    world: World
    region: MakeRegion
    torchs: MakeRegion
    points: DivergencePoints
    entered: list[tuple[Region | GradMode, AbstractContextManager[Any]]] = field(
        default_factory=list
    )
    depth: int = 0
    """The number of regions entered before the function that runs now."""

    def run(self, program: Program) -> None:
        """All steps; regions that they leave open end with the last one."""
        outside, self.depth = self.depth, len(self.entered)
        for number, step in enumerate(program):
            torch.default_generator.manual_seed(number)
            _STEPS[type(step)](self, step)
        while len(self.entered) > self.depth:
            self.leave(Leave())
        self.depth = outside

    def make(self, region: Region) -> AbstractContextManager[Any]:
        """A new region object."""
        make = self.torchs if region.torchs else self.region
        return make(region.device, region.dtype, region.enabled, region.cache)

    def enter(self, step: Region | GradMode, manager: AbstractContextManager[Any]) -> None:
        """Enters a manager, and records what PyTorch says of the state inside."""
        manager.__enter__()
        self.entered.append((step, manager))
        self.points.entered(step)
        self.world.found.append(_state())

    def leave(self, step: Leave) -> None:
        """Leaves what was entered last, if that was in this function."""
        if len(self.entered) == self.depth:
            return
        _, manager = self.entered.pop()
        error = _InterruptedError() if step.raises else None
        manager.__exit__(type(error) if error else None, error, None)
        self.points.left()
        self.world.found.append(_state())


def _region(runner: _Runner, step: Region) -> None:
    runner.enter(step, runner.make(step))


def _reenter(runner: _Runner, step: Reenter) -> None:
    regions = [(s, manager) for s, manager in runner.entered if isinstance(s, Region)]
    if regions:
        again, manager = regions[step.which % len(regions)]
        if runner.points.meets("re-entered"):
            manager = runner.make(again)
        runner.enter(again, manager)


def _grad_mode(runner: _Runner, step: GradMode) -> None:
    runner.enter(step, GRAD_MODES[step.name]())


def _call(runner: _Runner, step: Call) -> None:
    decorate: Any = runner.make(step.region)

    def body() -> None:
        runner.points.entered(step.region)
        try:
            runner.world.found.append(_state())
            runner.run(step.body)
            if step.raises:
                raise _InterruptedError
        finally:
            runner.points.left()

    try:
        decorate(body)()
    except _InterruptedError:
        runner.world.found.append(_InterruptedError)
    runner.world.found.append(_state())


def _compute(runner: _Runner, step: Compute) -> None:
    a, b, c = operands = [runner.world[i] for i in step.operands]
    with runner.points:
        runner.world.attempt(lambda: OPERATIONS[step.name](a, b, c), operands[0])


def _layer(runner: _Runner, step: Layer) -> None:
    x, module = runner.world[step.operand], runner.world.modules[step.name]
    if "checkpointed" in step.name and not module._forward_pre_hooks:
        module.register_forward_pre_hook(
            lambda *_: runner.points.look_at_dtype()
        )  # in backward, too
    with runner.points:
        runner.world.attempt(lambda: LAYERS[step.name].call(module, x), x)


def _sampled(runner: _Runner, step: Sampled) -> None:
    operand = runner.world[step.operand]
    sample = _arguments(step, operand, runner.world)
    with runner.points:
        runner.world.attempt(lambda: op_samples.call(step.name, sample), operand)


def _arguments(step: Sampled, operand: Tensor, world: World) -> Sample:
    """The sample with its first floating tensor made of the operand, the others weights or in the step's dtypes."""
    count = 0

    def convert(tensor: Tensor) -> Tensor:
        nonlocal count
        if not tensor.is_floating_point():
            return tensor.clone()
        place, count = count, count + 1
        dtype = step.dtypes[place % len(step.dtypes)]
        if place == 0:
            return blend(tensor, operand)
        if dtype is not None:
            return tensor.to(dtype, copy=True)
        return world.weight((step.name, step.sample, place), tensor)

    return map_tensors(world.samples[step.name, step.sample], convert)


def blend(tensor: Tensor, square: Tensor) -> Tensor:
    """A tensor in the dtype of a square, and moved a little by its values."""
    repeats = tensor.numel() // (SIDE * SIDE) + 1
    tile = square.reshape(-1).repeat(repeats)[: tensor.numel()].view(tensor.shape)
    return tensor.to(square.dtype) + 0.01 * tile


def _in_place(runner: _Runner, step: InPlace) -> None:
    target, operand = runner.world[step.target], runner.world[step.operand]

    def write() -> Tensor:
        IN_PLACE[step.name](target, operand)
        return target

    with runner.points:
        runner.world.attempt(write, target)


def _hook(runner: _Runner, step: Hook) -> None:
    target = runner.world[step.target]
    # PyTorch 2.13 crashes where a hook is put on a view whose base was written through another view.
    if target.requires_grad and not target._is_view():
        with suppress(RuntimeError):  # some are for leaves alone
            HOOKS[step.name](target)


def _differentiate(runner: _Runner, step: Differentiate) -> None:
    world = runner.world
    outputs = [world[i] for i in step.outputs]
    outputs = [t for t in outputs if t.requires_grad] or outputs
    leaves = [leaf for leaf in world.watched() if leaf.requires_grad]
    if step.inputs is not None and leaves:
        leaves = list(
            {i: leaves[i] for i in (place % len(leaves) for place in step.inputs)}.values()
        )
    with runner.points:
        try:
            total = sum((t.float().square().sum() for t in outputs), torch.zeros(()))
            _gradients(step, total, leaves, world)
        except RuntimeError as error:
            world.found.append(kind(error))
            # Which leaves had theirs before a node failed is a matter of the order of nodes that do not depend on
            # each other: those of casts, too.
            for leaf in world.watched():
                leaf.grad = None


def _gradients(step: Differentiate, total: Tensor, leaves: list[Tensor], world: World) -> None:
    again = step.create_graph
    retain = step.retain_graph or again
    if step.accumulate:
        inputs = leaves if step.inputs is not None else None
        total.backward(inputs=inputs, retain_graph=retain, create_graph=again)
        return
    result = torch.autograd.grad(
        total, leaves, retain_graph=retain, create_graph=again, allow_unused=True
    )
    world.gradients.append(record(result))
    world.tensors.extend(fold(g) for g in result if g is not None and g.numel() == SIDE * SIDE)


def _write(runner: _Runner, step: Write) -> None:
    world = runner.world
    weight = world.leaves[step.weight % len(world.leaves)]
    before = weight.detach().clone()
    with runner.points:
        try:
            new = WRITES[step.name](weight)
        except (RuntimeError, ValueError) as error:
            # A weight made in inference mode cannot be written outside of it, nor one with a history be loaded.
            world.found.append(kind(error))
            return
    if step.name in FUSED and not torch.equal(before, weight.detach()):
        runner.points.fused(weight)
    if new is not None:
        world.replace(weight, new)


_STEPS: dict[type, Callable[[_Runner, Any], None]] = {
    Call: _call,
    Compute: _compute,
    Differentiate: _differentiate,
    GradMode: _grad_mode,
    Hook: _hook,
    InPlace: _in_place,
    Layer: _layer,
    Leave: _Runner.leave,
    Reenter: _reenter,
    Region: _region,
    Sampled: _sampled,
    Write: _write,
}


def _state() -> State:
    per_device = ((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES)
    return State(tuple(per_device), torch.is_autocast_cache_enabled())


def _restore(state: State) -> None:
    for device, (enabled, dtype) in zip(DEVICES, state.devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(state.cache)
