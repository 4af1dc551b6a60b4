"""Random programs of the conformance tests as modules, exported and compared with themselves in a region.

Invariants:

- what a program computes stays: operations, layers, samples, writes in place, regions inside the outermost. Gradients,
  hooks, grad modes and changes of weights from outside are left out: an exported program computes, and does no more;
- a step that raises an error in a region is left out, and what it would have computed is its operand;
- weights and inputs are not written to: a write to what shares memory with one is to a copy.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import precast
from precast import Policy
from precast._internal.pytree import map_tensors, tensors_in
from precast.errors import ExportError
from precast.shipping.exported_file import differences
from tests.conformance.programs.draw import cases
from tests.conformance.programs.layers import LAYERS
from tests.conformance.programs.operations import IN_PLACE, OPERATIONS
from tests.conformance.programs.run import blend
from tests.conformance.programs.steps import (
    Call,
    Case,
    Compute,
    InPlace,
    Layer,
    Leave,
    Program,
    Region,
    Sampled,
    Step,
)
from tests.conformance.programs.world import World, fold
from tests.support import op_samples

__all__ = ["REFUSALS", "Outcome", "as_module", "outcomes", "refusal"]

_LEFT_OUT = ("checkpointed", "functional", "mapped", "packed")
"""Layers that `torch.export` does not record."""
_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)

REFUSALS = {
    "control flow or a result that depends on data": r"DataDependent|data-dependent|depends on data",
    "a size that depends on data": r"DynamicOutputShape",
    "tensors that are taken for constants, as those of `.data`": (
        r"fake tensor in the exported program constant|treats a tensor without values as a constant"
    ),
    "an operation that PyTorch has no version of without numbers": r"its data is not allocated yet",
    "an operation that calls others as its numbers decide": r"linalg_matrix_exp calls operations that the policy",
}
"""Why a program cannot be recorded -> what the error says. All but the last are `torch.export`'s own."""
POLICIES = (
    Policy.load("torch"),
    Policy.load("default"),
    Policy.load("default").retarget("cpu", like="cuda"),
    Policy.load("lean"),
)


class Outcome(NamedTuple):
    """What became of a program.

    Attributes:
        kind: "equal", "refused", "differs" or "fails".
        why: what differs, or the error.
        by_torch: whether PyTorch refuses the same program without a region of ours, too, for the same reason.
    """

    kind: str
    why: str = ""
    by_torch: bool = False


class _Program(nn.Module):
    """The steps of a program, on the weights and inputs of its seed."""

    def __init__(self, case: Case, make: Callable[..., Any]) -> None:
        super().__init__()
        world = World.fresh(case.program, case.seed)
        frozen = [nn.Parameter(t.detach(), requires_grad=False) for t in world.leaves[:6]]
        self.weights = nn.ParameterList(frozen)
        self.layers = nn.ModuleList(module.eval() for module in world.modules.values())
        self.layers.requires_grad_(False)
        self.names = {name: place for place, name in enumerate(world.modules)}
        self.samples = world.samples
        self.sampled = nn.ParameterDict()
        self.inputs = tuple(t.detach().clone() for t in world.tensors[8:13])
        self.steps: list[Step] = list(_steps(case.program))
        self.make = make
        self.raising: set[int] = set()
        self.copied: set[int] = set()
        self.is_tried = False
        self.sources: list[Step] = []
        """The steps that the results are from."""

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        trained, frozen, leaf, tied, tall, low = self.weights
        tensors = [trained, frozen, leaf, tied, low, tied.t(), tall[1:5], tall[:4], *inputs]
        self.roots = {_place(t) for t in tensors} if self.is_tried else set()
        found: list[Tensor] = []
        self.sources.clear()
        with contextlib.ExitStack() as stack:
            regions: list[contextlib.ExitStack] = []
            for number, step in enumerate(self.steps):
                if isinstance(step, Region):
                    regions.append(stack.enter_context(contextlib.ExitStack()))
                    if step.device == "cpu":
                        regions[-1].enter_context(self._region(step))
                elif isinstance(step, Leave):
                    if regions:
                        regions.pop().close()
                else:
                    results = tensors_in(self._attempted(number, step, tensors))
                    floating = [t for t in results if t.is_floating_point() or t.is_complex()]
                    found += floating
                    self.sources += [step] * len(floating)
                    tensors.append(fold(floating[0]) if floating else tensors[0])
            for region in reversed(regions):
                region.close()
        return found

    def _region(self, step: Region) -> Any:
        make = torch.autocast if step.torchs else self.make
        return make(step.device, step.dtype, step.enabled, step.cache)

    def _attempted(self, number: int, step: Step, tensors: list[Tensor]) -> Any:
        if number in self.raising:
            return None
        if not self.is_tried:
            return self._result(number, step, tensors)
        try:
            return self._result(number, step, tensors)
        except _ERRORS:
            self.raising.add(number)
            return None

    def _result(self, number: int, step: Any, tensors: list[Tensor]) -> Any:
        def at(place: int) -> Tensor:
            return tensors[place % len(tensors)]

        if isinstance(step, Compute):
            return OPERATIONS[step.name](*map(at, step.operands))
        if isinstance(step, InPlace):
            target = at(step.target)
            if self.is_tried and _place(target) in self.roots:
                self.copied.add(number)
            target = target.clone() if number in self.copied else target
            IN_PLACE[step.name](target, at(step.operand))
            return target
        if isinstance(step, Sampled):
            return op_samples.call(step.name, self._sample(step, at(step.operand)))
        return LAYERS[step.name].call(self.layers[self.names[step.name]], at(step.operand))

    def _sample(self, step: Sampled, operand: Tensor) -> Any:
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
            return self._weight(f"{step.name} {step.sample} {place}".replace(".", " "), tensor)

        return map_tensors(self.samples[step.name, step.sample], convert)

    def _weight(self, name: str, tensor: Tensor) -> Tensor:
        if self.is_tried and name not in self.sampled:
            self.sampled[name] = nn.Parameter(tensor.clone(), requires_grad=False)
        weight: Tensor = self.sampled[name]
        return weight


def as_module(case: Case, policy: Policy, dtype: torch.dtype) -> _Program:
    """A program as a module, which runs in a region of the policy."""

    def make(device: str, lower: Any, enabled: bool, cache: bool | None) -> Any:
        return precast.autocast(device, lower, enabled, cache, policy=policy)

    model = _Program(case, make)
    before = -1
    while len(model.raising) > before:  # what comes after a write that fails may fail then
        before = len(model.raising)
        model.is_tried = True
        _in_region(model, model, policy, dtype)
        model.is_tried = False
    return model


def outcome_of(case: Case, policy: Policy, dtype: torch.dtype) -> Outcome:
    """Exports a program, and compares what it computes with what its module computes in a region."""
    with warnings.catch_warnings(), _without_fused_kernels():
        warnings.simplefilter("ignore")
        model = as_module(case, policy, dtype)
        try:
            program = precast.export(model, model.inputs, policy=policy, dtype=dtype, check=False)
        except ExportError as error:
            refused = Outcome("refused", str(error))
            return refused._replace(by_torch=_refused_by_torch(model, refused))
        except Exception as error:
            return Outcome("fails", f"{type(error).__name__}: {error}")
        expected = _in_region(model, model, policy, dtype)
        try:
            with torch.no_grad():
                found = _seeded(program.module(), model.inputs)
        except Exception as error:
            return Outcome("fails", f"the program raises {type(error).__name__}: {error}")
        different = list(differences(expected, found))
        if not different:
            return Outcome("equal")
        [number] = re.findall(r"^result (\d+)", different[0]) or ["-1"]
        return Outcome("differs", f"{different[0]}: {model.sources[int(number)]}")


def refusal(outcome: Outcome) -> str | None:
    """Why a program was refused, in the words of `REFUSALS`; None for a reason that is not there."""
    return next((why for why, said in REFUSALS.items() if re.search(said, outcome.why)), None)


def _refused_by_torch(model: _Program, outcome: Outcome) -> bool:
    """Whether `torch.export` refuses the program for the same reason without a policy.

    In a region of PyTorch's own, which a program on mixed dtypes needs to run at all.
    """
    with torch.no_grad(), torch.autocast("cpu"):
        try:
            torch.export.export(model, model.inputs)
        except Exception as error:
            why = refusal(Outcome("refused", f"{type(error).__name__}: {error}"))
            return why is not None and why == refusal(outcome)
    return False


def outcomes(count: int, seed: int) -> Iterator[tuple[Case, Outcome]]:
    """Draws programs, and says of each what became of it; policies and dtypes take turns."""
    for number, case in enumerate(cases(count, seed)):
        policy = POLICIES[number % len(POLICIES)]
        dtype = (torch.bfloat16, torch.float16)[number // len(POLICIES) % 2]
        yield case, outcome_of(case, policy, dtype)


def _in_region(run: Callable[..., Any], model: _Program, policy: Policy, dtype: torch.dtype) -> Any:
    with torch.no_grad(), precast.autocast("cpu", dtype, policy=policy):
        return _seeded(run, model.inputs)


def _seeded(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return run(*map(torch.clone, inputs))


@contextlib.contextmanager
def _without_fused_kernels() -> Iterator[None]:
    """Without PyTorch's fused kernels for attention layers, which `torch.export` never records."""
    is_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)


def _steps(program: Program) -> Iterator[Step]:
    """The steps that compute; a decorated function's are in a region of their own."""
    for step in program:
        if isinstance(step, Call):
            yield step.region
            yield from _steps(step.body)
            yield Leave()
        elif isinstance(step, Layer):
            if not any(word in step.name for word in _LEFT_OUT):
                yield step
        elif isinstance(step, (Compute, InPlace, Leave, Region, Sampled)):
            yield step


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
