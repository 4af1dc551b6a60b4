"""The operations of a model's modules, the tensors that flow between them, and a choice of their dtypes.

An *operation site* is an operation of one module, by the name of its row in a policy. All calls of the operation in
that module are one site, because one row decides for all of them. A *choice* assigns float32 or the program's 16-bit
dtype to each site, and is *settled* if a policy can carry it out.

Invariants:
- neither tensors nor modules are kept. Calls are equal if they cost the same, and sites if their module and operation
  are;
- edges are floating-point tensors only, other than float64, because rules act on nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.pytree import tensors_in
from precast.policy.policy import Rule

__all__ = ["TENSOR", "CallRecord", "DtypeChoice", "OperationSite", "TensorArgument", "TensorEdge"]
__all__ += ["TunedProgram", "first_floating", "is_castable", "record_call", "written_arguments"]

_F32: Final = torch.float32
TENSOR: Final = "<tensor>"
"""Stands for a tensor among the arguments of a recorded call."""


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """One tensor of a call.

    Attributes:
        low: the smallest finite number in it; 0 if there is none.
        high: the largest one.
        is_weight: True for a parameter, or a view of one.
        stays: True if it keeps its dtype where the others are in 16 bits, as the weights of `layer_norm` do.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    low: float = field(default=0.0, compare=False)
    high: float = field(default=0.0, compare=False)
    is_weight: bool = False
    needs_grad: bool = False
    stays: bool = False


@dataclass(frozen=True)
class CallRecord:
    """Calls of a site with the same overload, shapes and strides.

    Attributes:
        overload: the dispatcher's name, such as `aten::softmax.int`.
        args: the positional arguments, with `TENSOR` for each tensor, also in lists.
        kwargs: the names and values of keyword arguments, likewise.
        count: the number of calls in a step.
        recomputed: the number of calls that a checkpoint repeats in the backward pass.
    """

    overload: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[TensorArgument, ...] = ()
    count: int = field(default=1, compare=False)
    recomputed: int = field(default=0, compare=False)

    def random_arguments(
        self, dtype_of: Callable[[int, TensorArgument], torch.dtype], generator: torch.Generator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return random arguments for a call like this one; tensors that had a gradient require one.

        `dtype_of` returns the dtype of the tensor at a position among the call's tensors.
        """
        tensors = (
            _random_tensor(argument, dtype_of(i, argument), generator)
            for i, argument in enumerate(self.tensors)
        )
        args = _filled(self.args, tensors)
        return args, {name: _filled(value, tensors) for name, value in self.kwargs}


@dataclass(frozen=True, slots=True)
class OperationSite:
    """An operation of one module.

    Attributes:
        module: the module's name in the model, "" for the model itself; None where no module of the model runs it.
        op: its name in a policy's row, such as `softmax` or `mylib::scan`.
        rule: the rule of the base policy that casts its arguments.
        barred: why it cannot run in 16 bits; "" if it can.
        casts_down: False if it writes to its arguments: under the rule `lower` it would write to 16-bit copies.
        pinned: True if rules for modules around may not reach it: it is called from elsewhere, or has two names.
    """

    module: str | None
    op: str
    rule: Rule | None = field(default=None, compare=False)
    barred: str = field(default="", compare=False)
    casts_down: bool = field(default=True, compare=False)
    pinned: bool = field(default=False, compare=False)
    calls: tuple[CallRecord, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{'the model' if self.module == '' else self.module or 'outside of modules'}: {self.op}"


@dataclass(frozen=True, slots=True)
class TensorEdge:
    """Tensors of one size that flow from one site, or from outside, to another site.

    Attributes:
        elements: of one tensor.
        count: the number of them in a step.
        dtype: the dtype, where there is no producer or the program fixes it; else None.
        weight: the parameter that they are, or are views of; "" for none.
        decides: True if the result of an operation without a rule has the dtype of this input. Numbers without
            dimensions do not decide, nor do float32 weights of operations that take them beside 16-bit inputs.
        is_written: True if the consumer writes into them, so that its result has their dtype.
        needs_grad: True if the backward pass sends a gradient back along the edge.
    """

    producer: OperationSite | None
    consumer: OperationSite
    elements: int
    count: int = 1
    dtype: torch.dtype | None = None
    weight: str = ""
    decides: bool = True
    is_written: bool = False
    needs_grad: bool = True

    def dtype_under(self, choice: DtypeChoice) -> torch.dtype:
        """Return the dtype of these tensors under a choice."""
        if self.dtype is not None:
            return self.dtype
        assert self.producer is not None, "an edge has a producer or a dtype"
        return choice[self.producer]


DtypeChoice = Mapping[OperationSite, torch.dtype]
"""The dtype of each site: float32, or the program's 16-bit dtype."""


@dataclass(frozen=True)
class TunedProgram:
    """One training step, or one run, of a model: its sites in the order of their first calls, and their edges.

    `modules` names all modules of the model, each after those that contain it.
    """

    sites: tuple[OperationSite, ...]
    edges: tuple[TensorEdge, ...] = ()
    low: torch.dtype = torch.bfloat16
    device: str = "cpu"
    modules: tuple[str, ...] = ("",)
    is_inference: bool = False

    def inputs(self, site: OperationSite) -> tuple[TensorEdge, ...]:
        """Return the edges that end at a site."""
        return self._inputs.get(site, ())

    def choose(self, low: Iterable[OperationSite] = ()) -> DtypeChoice:
        """Return the settled choice with these sites in 16 bits, as far as possible, and all others in float32."""
        chosen = set(low)
        return self.settle({site: self.low if site in chosen else _F32 for site in self.sites})

    def settle(self, choice: DtypeChoice) -> DtypeChoice:
        """Return the nearest choice that a policy can carry out.

        A site that cannot run in 16 bits gets float32, also where it would only follow its inputs and one of these is
        float32. An operation in place runs in the dtype of the tensor that it writes to.
        """
        settled = {site: choice.get(site, _F32) for site in self.sites}
        before: DtypeChoice = {}
        while settled != before:  # ends, as sites that write nothing only change to float32
            before = dict(settled)
            for site in self.sites:
                self._settle(site, settled)
        return settled

    def _settle(self, site: OperationSite, settled: dict[OperationSite, torch.dtype]) -> None:
        targets = [edge for edge in self.inputs(site) if edge.is_written]
        if not targets:
            can_be_low = site.casts_down or self._follows_low(site, settled)
            settled[site] = settled[site] if can_be_low and not site.barred else _F32
            return
        if site.barred or len({edge.dtype_under(settled) for edge in targets}) > 1:
            settled |= {edge.producer: _F32 for edge in targets if edge.producer is not None}
        dtypes = {edge.dtype_under(settled) for edge in targets}
        settled[site] = self.low if dtypes == {self.low} else _F32

    def _follows_low(self, site: OperationSite, choice: DtypeChoice) -> bool:
        """Return True if the result is in 16 bits without a rule, because all inputs that decide are."""
        dtypes = {edge.dtype_under(choice) for edge in self.inputs(site) if edge.decides}
        return dtypes == {self.low}

    @functools.cached_property
    def _inputs(self) -> dict[OperationSite, tuple[TensorEdge, ...]]:
        inputs: dict[OperationSite, list[TensorEdge]] = {}
        for edge in self.edges:
            inputs.setdefault(edge.consumer, []).append(edge)
        return {site: tuple(edges) for site, edges in inputs.items()}


def is_castable(dtype: torch.dtype) -> bool:
    """Return True if rules act on tensors of a dtype: floating-point, other than float64."""
    return dtype.is_floating_point and dtype is not torch.float64


def record_call(
    overload: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    describe: Callable[[Tensor], TensorArgument],
) -> CallRecord:
    """Return the record of a call, with `describe` of each tensor."""
    tensors: list[TensorArgument] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(describe(value))
            return TENSOR
        if isinstance(value, list | tuple):
            return tuple(map(replaced, value))
        return None if isinstance(value, torch.Generator) else value

    values = replaced(args), tuple((name, replaced(value)) for name, value in kwargs.items())
    return CallRecord(overload, *values, tuple(tensors))


def written_arguments(
    overload: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments that an operation declares to write to."""
    function = _torch.find_overload(overload)
    arguments = [] if function is None else _torch.schema_of(function).arguments
    values = dict(zip([each.name for each in arguments], args, strict=False)) | dict(kwargs)
    writes = (each.name for each in arguments if each.alias_info and each.alias_info.is_write)
    return tuple(values[name] for name in writes if name in values)


def first_floating(result: Any) -> Tensor | None:
    """Return the first tensor of a result that rules could have cast."""
    return next((each for each in tensors_in(result) if is_castable(each.dtype)), None)


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, tuple):
        return tuple(_filled(each, tensors) for each in value)
    return next(tensors) if value is TENSOR else value


def _random_tensor(
    argument: TensorArgument, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Return a tensor with numbers in the recorded range, so that indices stay inside of what they index."""
    pairs = zip(argument.shape, argument.strides, strict=True)
    size = 0 if 0 in argument.shape else 1 + sum((size - 1) * stride for size, stride in pairs)
    low, high, device = argument.low, argument.high, generator.device
    if argument.dtype is torch.bool:
        numbers = torch.rand(size, generator=generator, device=device) < 0.5
    elif argument.dtype.is_floating_point or argument.dtype.is_complex:
        numbers = torch.rand(size, generator=generator, device=device) * (high - low) + low
    else:
        numbers = torch.randint(
            int(low), int(high) + 1, (size,), generator=generator, device=device
        )
    tensor = numbers.to(dtype).as_strided(argument.shape, argument.strides).detach()
    return tensor.requires_grad_(argument.needs_grad and tensor.is_floating_point())
