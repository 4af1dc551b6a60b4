"""What is chosen between: the operations of a model's modules, how tensors flow between them, and a choice of dtypes.

A *site* is an operation of one module, by the name that a row of a policy gives it. All calls of the operation in that
module are one site, because one row decides for all of them. A *choice* says for each site whether it runs in float32
or in the program's 16-bit dtype.

Invariants:

- everything here is plain data; neither tensors nor modules are kept;
- sites are equal if their module and operation are; what else is known of one does not count;
- edges tell of floating-point tensors only, other than float64, because rules act on nothing else;
- a choice is *settled* if a policy can carry it out (`Program.settle`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from precast.policy.policy import Rule

__all__ = ["Argument", "Call", "Choice", "Edge", "Program", "Site"]

_F32 = torch.float32


@dataclass(frozen=True, slots=True)
class Argument:
    """One tensor of a call.

    Attributes:
        shape: its sizes, in elements.
        strides: in elements.
        dtype: the dtype that it had in the float32 run.
        low: the smallest number in it; 0 where it has none that is finite.
        high: the largest one.
        is_weight: whether it is a parameter, or a view of one.
        needs_grad: whether backward computes its gradient.
        stays: whether it stays as it is where the others are in 16 bits, as the weights of `layer_norm` do.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    low: float = 0.0
    high: float = 0.0
    is_weight: bool = False
    needs_grad: bool = False
    stays: bool = False


@dataclass(frozen=True)
class Call:
    """One kind of call of a site: the same overload with arguments of the same shapes and strides.

    Attributes:
        overload: the dispatcher's name, such as `aten::softmax.int`.
        args: the positional arguments; an `Argument` stands for each tensor, also in lists.
        kwargs: the keyword arguments, likewise.
        count: how often a step calls it.
        recomputed: how often a checkpoint calls it again in backward.
    """

    overload: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    count: int = 1
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """An operation of one module.

    Attributes:
        module: the module's name in the model, "" for the model itself; None where no module of the model runs it.
        op: its name as a policy's row has it, such as `softmax` or `mylib::scan`.
        rule: the rule of the base policy that casts its arguments; None for none.
        barred: why it cannot run in 16 bits; "" if it can.
        casts_down: whether the rule `lower` may be given to it: not to an operation that writes to its arguments, as it
            would write to their 16-bit copies.
        pinned: whether rules for modules around it may not reach it: it is called from elsewhere, or has two names.
        calls: what it is called with.
    """

    module: str | None
    op: str
    rule: Rule | None = field(default=None, compare=False)
    barred: str = field(default="", compare=False)
    casts_down: bool = field(default=True, compare=False)
    pinned: bool = field(default=False, compare=False)
    calls: tuple[Call, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{'the model' if self.module == '' else self.module or 'outside of modules'}: {self.op}"


@dataclass(frozen=True, slots=True)
class Edge:
    """Tensors of one size that a site gets from another, or from outside.

    Attributes:
        producer: the site that made them; None where none did, as for weights and batches.
        consumer: the site that gets them.
        elements: of one tensor.
        count: how many a step passes on.
        dtype: where there is no producer, or the program fixes the dtype: the dtype that they have; else None.
        weight: the parameter that they are, or are views of; "" for none.
        decides: whether an operation that follows its inputs follows this one. Numbers of no dimensions do not decide,
            nor do float32 weights for operations that take them beside 16-bit inputs, such as `layer_norm`.
        is_written: whether the consumer writes into them, so that its result has their dtype.
        needs_grad: whether backward passes a gradient back along the edge.
    """

    producer: Site | None
    consumer: Site
    elements: int
    count: int = 1
    dtype: torch.dtype | None = None
    weight: str = ""
    decides: bool = True
    is_written: bool = False
    needs_grad: bool = True

    def dtype_under(self, choice: Choice) -> torch.dtype:
        """The dtype of these tensors under a choice."""
        if self.dtype is not None:
            return self.dtype
        assert self.producer is not None, "an edge has a producer or a dtype"
        return choice[self.producer]


Choice = Mapping[Site, torch.dtype]
"""The dtype in which each site runs: float32, or the program's 16-bit dtype."""


@dataclass(frozen=True)
class Program:
    """One step of a model, or one run: its sites in the order in which they first ran, and the edges between them.

    Attributes:
        sites: all of them.
        edges: all of them.
        low: the 16-bit dtype that sites may run in.
        device: the device type whose rows are chosen.
        modules: the names of all modules of the model, each after those that it is in.
        module_calls: how often a step calls each of them; those that are missing are not called.
        is_inference: whether it is run without gradients, and its weights are stored in the dtypes in which they are
            used, so that they need not be cast again.
    """

    sites: tuple[Site, ...]
    edges: tuple[Edge, ...] = ()
    low: torch.dtype = torch.bfloat16
    device: str = "cpu"
    modules: tuple[str, ...] = ("",)
    module_calls: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    is_inference: bool = False

    def hooks(self, place: str | None) -> int:
        """How many calls of a step get slower by a rule for a module; none by a row of the device type.

        A rule for a list of modules, which is never called itself, is carried out by those in it.
        """
        return 0 if place is None else self._hooks.get(place, 0)

    def inputs(self, site: Site) -> tuple[Edge, ...]:
        """The edges that end at a site."""
        return self._inputs.get(site, ())

    def choose(self, low: Iterable[Site] = ()) -> Choice:
        """The settled choice with these sites in 16 bits, as far as they can, and all others in float32."""
        wanted = set(low)
        return self.settle({site: self.low if site in wanted else _F32 for site in self.sites})

    def settle(self, choice: Choice) -> Choice:
        """The nearest choice that a policy can carry out.

        A site that cannot run in 16 bits gets float32, also where it would only follow its inputs and one of these is
        float32. An operation in place runs in the dtype of what it writes to.
        """
        settled = {site: choice.get(site, _F32) for site in self.sites}
        before: Choice = {}
        while (
            settled != before
        ):  # sites that write nothing only go from 16 bits to float32, so this ends
            before = dict(settled)
            for site in self.sites:
                self._settle(site, settled)
        return settled

    def is_settled(self, choice: Choice) -> bool:
        """Whether a policy can carry out a choice as it is."""
        return all(site in choice and self._can(site, choice) for site in self.sites)

    def follows(self, site: Site, choice: Choice) -> torch.dtype:
        """The dtype in which a site runs if no rule casts its inputs: the widest of those that decide."""
        dtypes = {edge.dtype_under(choice) for edge in self.inputs(site) if edge.decides}
        return self.low if dtypes == {self.low} else _F32

    def _settle(self, site: Site, settled: dict[Site, torch.dtype]) -> None:
        written = self._written(site)
        if not written:
            settled[site] = settled[site] if self._can(site, settled) else _F32
            return
        if site.barred or len({edge.dtype_under(settled) for edge in written}) > 1:
            settled |= {edge.producer: _F32 for edge in written if edge.producer is not None}
        dtypes = {edge.dtype_under(settled) for edge in written}
        settled[site] = self.low if dtypes == {self.low} else _F32

    def _can(self, site: Site, choice: Choice) -> bool:
        if written := self._written(site):
            is_stuck = site.barred and any(edge.producer is not None for edge in written)
            if is_stuck and choice[site] is self.low:
                return False
            return {edge.dtype_under(choice) for edge in written} == {choice[site]}
        if choice[site] is not self.low:
            return True
        return not site.barred and (site.casts_down or self.follows(site, choice) is self.low)

    def _written(self, site: Site) -> list[Edge]:
        return [edge for edge in self.inputs(site) if edge.is_written]

    @functools.cached_property
    def _hooks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        inside: dict[str, int] = {}
        for name in reversed(self.modules):
            found[name] = self.module_calls.get(name, 0) or inside.get(name, 0)
            outer = name.rpartition(".")[0]
            if name:
                inside[outer] = inside.get(outer, 0) + found[name]
        return found

    @functools.cached_property
    def _inputs(self) -> dict[Site, tuple[Edge, ...]]:
        found: dict[Site, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.consumer, []).append(edge)
        return {site: tuple(edges) for site, edges in found.items()}
