"""The full trace of one thread: sees every operation that runs, and adds them up in rows.

Invariants:

- operations run as they are: the trace waits for nothing, replaces nothing and keeps no tensor; times are the host's,
  from call to return;
- an operation inside a decision (a rule that is being carried out) belongs to the decision; any other has its own row;
- memory is bounded: rows by the tally, what is known of tensors by what is alive, of graph nodes by two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name
from precast.diagnostics.failures import Failures
from precast.diagnostics.schema import Totals
from precast.diagnostics.tracing import reasons
from precast.diagnostics.tracing.call_sites import (
    Names,
    frame_above,
    is_enabled,
    outermost_region,
    read_stack,
    region_around,
)
from precast.diagnostics.tracing.counting import Counts
from precast.diagnostics.tracing.error_notes import Attempt, note_on
from precast.diagnostics.tracing.explanation import LineageStep
from precast.diagnostics.tracing.facts import Facts
from precast.diagnostics.tracing.lineage import Lineage, Link, Site, Up
from precast.diagnostics.tracing.reasons import Decided, ModuleRules
from precast.diagnostics.tracing.tally import Around, Place, Tally
from precast.diagnostics.tracing.trials import Call
from precast.engine.operation import Operation, is_eligible
from precast.engine.operator_kinds import (
    Cast,
    dtype_of,
    floating_in,
    kind_of,
    tensors_of,
)
from precast.engine.remarks import take_remark
from precast.policy.policy import DEVICE_TYPES, Policy, Rule

__all__ = ["HEAVY", "Recorder"]

HEAVY: Final = (
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "matmul", "einsum"}
    | {"convolution", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
)  # fmt: skip
"""Operations that are worth 16 bits."""
_MOST_NODES: Final = 200_000
_MOST_TRAILED: Final = 8
"""Of how many results of one operation the origin is noted."""
_MOST_AT_ONCE: Final = 64
"""How many nodes of the graph one operation is taken for the maker of."""
_FP32: Final = ("fp32", "fp32_set_dtype", "fp32_append_dtype")
_Texts = tuple[str, ...]
_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(slots=True)
class _Decision:
    """A rule that is being carried out."""

    op: Operation
    policy: Policy
    decided: Decided
    place: Place
    inputs: _Texts
    links: list[Link | None]
    """Where its floating-point inputs come from."""
    call: _Call
    wanting: int = 0
    """How many of its inputs have another dtype than the rule wants."""
    casts: int = 0
    """How many casts the rule made, without those inside operations, which are in `sums` too."""
    sums: Totals = field(default_factory=Totals)
    ups: list[Up] = field(default_factory=list)


class Recorder:
    """Rows, and all that findings need; it is told of decisions by `begin` and `end`, of operations by `saw`."""

    def __init__(self, names: Names, counts: Counts, failures: Failures) -> None:
        self.names = names
        self.counts = counts
        self.failures = failures
        self.tally = Tally()
        self.totals = self.tally.totals
        self.saved: dict[str, int] = {}
        self.policies: dict[str, Policy] = {}
        """Device type -> the policy that was last in force there."""
        self.facts = Facts()
        self.lineage = Lineage()
        self._module_rules = ModuleRules()
        self._decisions: list[_Decision] = []
        self._nodes: dict[int, tuple[str, Place]] = {}
        """The number of a node of the graph -> the operation that made it, and where."""
        self._nodes_before: dict[int, tuple[str, Place]] = {}
        self._in_backward = False
        self.start()

    def start(self) -> None:
        """Everything is seen from here on."""
        self._sequence = _torch.next_sequence()
        self._decisions.clear()

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self.totals.steps += 1
        self.facts.new_step(self.totals.seconds)
        self._nodes_before, self._nodes = self._nodes, {}

    # --- decisions ---

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A rule is about to be carried out."""
        policy = reasons.policy_here(op.device_type)
        self.policies[op.device_type] = policy
        place = self._place_on_stack().forward()
        if _torch.current_node() is not None:  # as where a checkpoint runs again
            place = Place(place.module, place.source, "backward")
        tensors = tensors_of(args, kwargs)
        links = [self.lineage.of(t) for t in floating_in(tensors)]
        found = reasons.decided(policy, op.name, op.device_type)
        inputs = tuple(map(dtype_of, tensors))
        decision = _Decision(op, policy, found, place, inputs, links, (args, kwargs))
        if found.rule == Rule.LOWER:
            lower, device = op.lower_dtype(), op.device_type
            decision.wanting = sum(t.dtype is not lower and is_eligible(t, device) for t in tensors)
        self._decisions.append(decision)

    def end(self, result: Any) -> None:
        """It has been carried out."""
        d = self._decisions.pop()
        said = take_remark()
        if said:
            op, rule, reason = d.decided
            d.decided = Decided(op, rule, f"{reason}; {said}")
        op, rule, _ = d.decided
        outputs = tensors_of((result,), {})
        self._count(d, outputs)
        island = None
        if rule is None:
            self._note_product(Call(d.op.overload, *d.call), d.place, d.inputs)
        if d.ups and rule in _FP32:
            at = Site(op, d.place.module, d.place.source)
            island = self.facts.island(at, d.op.device_type, d.policy.name, d.ups)
            self.facts.note_call(at, d.op.overload, *d.call)
        up = self.facts.carried(op, d.links, d.ups)
        if rule != Rule.LOWER and d.place.phase != "backward":
            self.facts.use(d.links, up)
        sets_dtype = rule in (Rule.LOWER, *_FP32)
        for tensor in floating_in(outputs):
            parent = None if sets_dtype else _like(d.links, tensor.dtype)
            link = self._link(tensor, d.decided, d.place, d.inputs, parent)
            link.island = island
            link.up = up if tensor.dtype is torch.float32 else None

    def fail(self, error: BaseException) -> None:
        """It has raised; a checkpoint that runs again ends so, when it has what it needs."""
        d = self._decisions.pop()
        take_remark()  # of a call inside that did not raise
        self._count(d, [])
        call = Call(d.op.overload, *d.call)
        attempt = Attempt(call, d.op.device_type, d.policy, is_in_region=True)
        note_on(error, d.decided, attempt, d.inputs, d.links)

    def _count(self, d: _Decision, outputs: list[Tensor]) -> None:
        op, rule, _ = d.decided
        cached = max(0, d.wanting - d.casts) if outputs else 0
        row = self.tally.row(d.place, d.decided, d.inputs, outputs, self._around(d.op.device_type))
        if row is not None:
            row.casts += d.sums.casts
            row.cast_bytes += d.sums.cast_bytes
            row.cast_seconds += d.sums.cast_seconds
            row.seconds += d.sums.seconds
            row.cached += cached
        self.totals.cached += cached
        if rule is not None:
            count = self.counts[op, d.op.device_type, rule]
            count.calls += 1
            count.casts += d.casts

    # --- operations ---

    def casting_here(self) -> list[str]:
        """Device types on which autocast casts what runs now: none inside an operation that has a rule."""
        if self._decisions and self._decisions[-1].decided.rule is not None:
            return []
        return [device for device in DEVICE_TYPES if is_enabled(device)]

    @property
    def depth(self) -> int:
        """How many rules are being carried out."""
        return len(self._decisions)

    def saw(
        self,
        func: Any,
        call: _Call,
        out: Any,
        seconds: float,
        inside: Sequence[Cast],
    ) -> None:
        """An operation has run; `inside` are the casts in the operations that it called."""
        kind = kind_of(func)
        made = _torch.next_sequence() > self._sequence
        if not self._decisions:
            if made or not kind.is_view:
                self._saw_alone(func, call, out, seconds, inside)
            return
        d = self._decisions[-1]
        self.totals.seconds += seconds
        d.sums.seconds += seconds
        if made:
            self._remember(d.decided.op, d.place)
        for cast in kind.casts(call[0], out, seconds):
            self.tally.cast(cast, d.sums)
            d.casts += 1
            up = self._follow(cast, d.decided, d.place)
            if up is not None:
                d.ups.append(up)
            self._link(cast.target, d.decided, d.place, (dtype_of(cast.source),), None)
        for cast in inside:
            self.tally.cast_inside(cast, d.sums)

    def failed(self, func: Any, call: _Call, error: BaseException) -> None:
        """An operation has raised."""
        tensors = floating_in(tensors_of(*call))
        if self._decisions or not tensors:
            return
        device = tensors[0].device.type
        policy, (region, module_rule, _) = reasons.policy_here(device), self._around(device)
        found = reasons.why_alone(policy, kind_of(func).name, device, region, module_rule)
        links = [self.lineage.of(t) for t in tensors]
        is_in_region = is_enabled(device) or region is not None or module_rule is not None
        attempt = Attempt(Call(func, *call), device, policy, is_in_region=is_in_region)
        note_on(error, found, attempt, map(dtype_of, tensors), links)

    def _saw_alone(
        self,
        func: Any,
        call: _Call,
        out: Any,
        seconds: float,
        inside: Sequence[Cast],
    ) -> None:
        """Gives an operation outside of all decisions its own row."""
        kind = kind_of(func)
        place, reason = self._place()
        tensors, outputs = tensors_of(*call), tensors_of((out,), {})
        if not (tensors or outputs):
            return
        device = (outputs or tensors)[0].device.type
        if _torch.next_sequence() > self._sequence:
            place = place.forward()
            self._remember(kind.name, place)
        elif is_enabled(device):
            place = place.forward()
        if kind.is_view:
            return
        self.totals.seconds += seconds
        casts = kind.casts(call[0], out, seconds)
        around = self._around(device)
        if reason is None and casts:
            reason = "a cast that the program asks for"
        if reason is None:
            policy = reasons.policy_here(device)
            if around.region is not None:
                self.policies[device] = policy
            module_rule = around.module_rule
            _, _, reason = reasons.why_alone(policy, kind.name, device, around.region, module_rule)
        found = Decided(kind.name, None, reason)
        inputs = tuple(map(dtype_of, tensors))
        self._note_product(Call(func, *call), place, inputs)
        row = self.tally.row(place, found, inputs, outputs, around)
        if row is not None:
            row.seconds += seconds
        for cast in inside:
            self.tally.cast_inside(cast, row)
        for cast in casts:
            self.tally.cast(cast, row)
            if place.phase != "optimizer":
                up = self._follow(cast, found, place) if place.phase != "backward" else None
                self._link(cast.target, found, place, (dtype_of(cast.source),), None).up = up
        if not casts and len(outputs) <= _MOST_TRAILED and place.phase != "optimizer":
            self._trail(found, place, tensors, inputs, outputs)

    def _note_product(self, call: Call, place: Place, inputs: _Texts) -> None:
        """Keep the description of a call in forward that may be worth 16 bits."""
        kind = kind_of(call.overload)
        if place.phase == "forward" and kind.base in HEAVY and set(inputs) == {"float32"}:
            self.facts.note_call(Site(kind.name, place.module, place.source), *call)

    def _place_on_stack(self) -> Place:
        frame = frame_above(1)
        source, owner, phase = read_stack(frame)
        module = None if owner is None else self.names.of(owner, frame)
        return Place(module, source, phase)

    def _place(self) -> tuple[Place, str | None]:
        """Where the operation that is being told of runs; why it has no rule, if the phase says so."""
        place = self._place_on_stack()
        graph_node = _torch.current_node()
        if graph_node is None:
            self._in_backward = False
            return place, "a step of an optimizer" if place.phase == "optimizer" else None
        if not self._in_backward:
            self._in_backward = True
            self._count_saved()
        place = Place(place.module, place.source, "backward")
        if place.module is not None:  # a checkpoint runs again
            return place, None
        number = _torch.sequence_of(graph_node)
        maker = self._nodes.get(number) or self._nodes_before.get(number)
        if maker is None:
            return place, reasons.why_in_backward(None, graph_node)
        op, made_at = maker
        place = Place(made_at.module, made_at.source or place.source, "backward")
        return place, reasons.why_in_backward(op, graph_node)

    def _around(self, device: str) -> Around:
        return Around(region_around(device), self._module_rules.here(), device)

    def _trail(
        self,
        found: Decided,
        place: Place,
        tensors: list[Tensor],
        inputs: _Texts,
        outputs: list[Tensor],
    ) -> None:
        """Notes where results come from."""
        floating = floating_in(outputs)
        links = [self.lineage.of(t) for t in floating_in(tensors)]
        up = self.facts.carried(found.op, links, [])
        if place.phase != "backward":
            self.facts.use(links, up)
        for tensor in floating:
            link = self.lineage.of(tensor) if any(tensor is given for given in tensors) else None
            if link is None:  # else it was written in place, and keeps its dtype
                link = self._link(tensor, found, place, inputs, _like(links, tensor.dtype))
            link.up = up if tensor.dtype is torch.float32 else None

    # --- what is known of graphs and tensors ---

    def _follow(self, cast: Cast, found: Decided, place: Place) -> Up | None:
        """Looks for round trips, islands and weights that are cast again; returns a way up that begins here."""
        at, source = Site(found.op, place.module, place.source), cast.source
        if source.element_size() < cast.target.element_size():
            return Up(*at, cast.seconds, cast.bytes, rule=found.rule, dtype=source.dtype)
        before = self.lineage.of(source)
        if before is not None:
            self.facts.came_down(before, at, cast)
            if found.rule == Rule.LOWER:
                self.facts.rounds(before, at, cast)
        self.facts.weights.saw(at, cast, outermost_region())
        return None

    def _remember(self, op: str, place: Place) -> None:
        if len(self._nodes) > _MOST_NODES:
            self._nodes_before, self._nodes = self._nodes, {}
        sequence = _torch.next_sequence()
        for number in range(max(self._sequence, sequence - _MOST_AT_ONCE), sequence):
            self._nodes[number] = op, place
        self._sequence = sequence

    def _count_saved(self) -> None:
        """Backward begins, and uses what forward made and is still there; the largest of all these sums is kept."""
        there: defaultdict[str, int] = defaultdict(int)
        for link in self.lineage.alive(self.totals.steps):
            there[dtype_name(link.dtype)] += link.bytes
        if sum(there.values()) > sum(self.saved.values()):
            self.saved = dict(there)

    def _link(
        self, tensor: Tensor, found: Decided, place: Place, inputs: _Texts, parent: Link | None
    ) -> Link:
        op, rule, reason = found
        made = list(inputs), dtype_of(tensor)
        step = LineageStep(op, place.module, place.source, *made, rule, reason)
        size = _torch.stored_bytes(tensor)
        link = Link(step, place.phase, tensor.dtype, parent, self.totals.steps, size)
        self.lineage.put(tensor, link)
        return link


def _like(links: list[Link | None], dtype: torch.dtype) -> Link | None:
    """What gave a result its dtype: the first input of that dtype, or else the first that is known."""
    known = [link for link in links if link is not None]
    return next((link for link in known if link.dtype is dtype), known[0] if known else None)
