"""The full trace of one thread: sees every operation that runs, and sums them up in rows.

Invariants:

- what runs is run as it is: nothing is waited for, replaced or kept; times are the host's, from call to return;
- an operation inside a decision (a rule that is being carried out) is the decision's; any other is a row of its own;
- memory is bounded: rows by the tally, what is known of tensors and graph nodes by what is alive, or by two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast.diagnostics.schema import Row
from precast.diagnostics.tracing.call_sites import (
    Names,
    frame_above,
    is_enabled,
    read_stack,
    region_around,
)
from precast.diagnostics.tracing.counting import Counts
from precast.diagnostics.tracing.error_notes import note_on
from precast.diagnostics.tracing.facts import Facts
from precast.diagnostics.tracing.lineage import Lineage, Link, Up
from precast.diagnostics.tracing.operators import Kind, floating_in, kind_of, tensors_of, text_of
from precast.diagnostics.tracing.reasons import Decided, Reasons
from precast.diagnostics.tracing.tally import Around, Place, Tally
from precast.engine.operation import Operation, is_eligible
from precast.policy.policy import DEVICE_TYPES, Policy, Rule

__all__ = ["Inside", "Recorder"]

_MOST_NODES: Final = 200_000
_FP32: Final = ("fp32", "fp32_set_dtype", "fp32_append_dtype")
_Texts = tuple[str, ...]
Inside = Sequence[tuple[Tensor, Tensor, float]]
"""Casts inside an operation: what was cast, to what, and the seconds."""


class _Node(NamedTuple):
    """What made a node of the graph."""

    op: str
    place: Place


class _Decision:
    """A rule that is being carried out."""

    __slots__ = (
        "cast_bytes",
        "cast_seconds",
        "casts",
        "decided",
        "inputs",
        "inside",
        "links",
        "op",
        "place",
        "policy",
        "seconds",
        "ups",
        "wanting",
    )

    def __init__(self, op: Operation, policy: Policy, decided: Decided, place: Place) -> None:
        self.op = op
        self.policy = policy
        self.decided = decided
        self.place = place
        self.inputs: _Texts = ()
        self.links: list[Link | None] = []
        self.wanting = 0
        self.inside: list[tuple[int, float]] = []
        self.casts = 0
        self.cast_bytes = 0
        self.cast_seconds = 0.0
        self.seconds = 0.0
        self.ups: list[Up] = []

    @property
    def at(self) -> tuple[str, str | None, str | None]:
        return self.decided.op, self.place.module, self.place.source


class Recorder:
    """Rows and all that findings need: is told of decisions by `begin` and `end`, of operations by `saw`."""

    def __init__(self, names: Names, counts: Counts) -> None:
        self.names = names
        self.counts = counts
        self.tally = Tally()
        self.totals = self.tally.totals
        self.saved: dict[str, int] = {}
        self.policies: dict[str, Policy] = {}
        """Device type -> the policy that was last in force there."""
        self.facts = Facts()
        self.lineage = Lineage()
        self._reasons = Reasons()
        self._decisions: list[_Decision] = []
        self._nodes: dict[int, _Node] = {}
        self._nodes_before: dict[int, _Node] = {}
        self._in_backward = False
        self.start()

    def start(self) -> None:
        """From here on all is seen."""
        self._sequence = _torch.next_sequence()
        self._decisions.clear()

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self.totals.steps += 1
        self.facts.weights.new_step()
        self._nodes_before, self._nodes = self._nodes, {}

    # --- decisions ---

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A rule is about to be carried out."""
        policy = self._reasons.policy_here(op.device_type)
        self.policies[op.device_type] = policy
        decided = self._reasons.decided(policy, op)
        frame = frame_above(2)
        source, owner, phase = read_stack(frame)
        module = None if owner is None else self.names.of(owner, frame)
        if _torch.current_node() is not None:
            phase = "backward"  # as where a checkpoint runs again
        place = Place(module, source, phase).forward()
        decision = _Decision(op, policy, decided, place)
        tensors = tensors_of(args, kwargs)
        decision.inputs = tuple(map(text_of, tensors))
        decision.links = [self.lineage.of(t) for t in tensors if t.dtype.is_floating_point]
        if decided.rule == Rule.LOWER:
            lower, device = op.lower_dtype(), op.device_type
            decision.wanting = sum(t.dtype is not lower and is_eligible(t, device) for t in tensors)
        self._decisions.append(decision)

    def end(self, result: Any) -> None:
        """It has been carried out."""
        d = self._decisions.pop()
        decided, outputs = d.decided, tensors_of((result,), {})
        self._count(d, outputs)
        island = None
        if d.ups and decided.rule in _FP32:
            key = *d.at, d.op.device_type, d.policy.name
            island = self.facts.island(key, d.ups, d.seconds - d.cast_seconds)
        up = self.facts.carried(decided.op, d.links) or self.facts.moved(decided.op, d.ups)
        sets = decided.rule in (Rule.LOWER, *_FP32)
        for tensor in floating_in(outputs):
            parent = None if sets else _like(d.links, tensor.dtype)
            link = self._link(tensor, decided, d.place, d.inputs, parent)
            link.island = island
            link.up = up if tensor.dtype is torch.float32 else None

    def fail(self, error: BaseException) -> None:
        """It has raised; a checkpoint that runs again ends so, when it has what it needs."""
        d = self._decisions.pop()
        self._count(d, [])
        note_on(error, d.decided, d.op.device_type, d.policy, d.inputs, d.links, enabled=True)

    def _count(self, d: _Decision, outputs: list[Tensor]) -> None:
        decided, device = d.decided, d.op.device_type
        cached = max(0, d.wanting - d.casts) if outputs else 0
        around = Around(region_around(device), self._reasons.module_rule(), device)
        row = self.tally.row(d.place, decided, d.inputs, outputs, around)
        if row is not None:
            row.casts += d.casts
            row.cast_bytes += d.cast_bytes
            row.cached += cached
            row.seconds += d.seconds
            row.cast_seconds += d.cast_seconds
            _add_inside(row, d.inside)
        self.totals.cached += cached
        if decided.rule is not None:
            self.counts.add(decided.op, device, decided.rule, d.casts)

    # --- operations ---

    def casting_here(self) -> list[str]:
        """Device types on which what runs now is cast by autocast: not inside an operation that has a rule."""
        if any(d.decided.rule is not None for d in self._decisions[-1:]):
            return []
        return [device for device in DEVICE_TYPES if is_enabled(device)]

    @property
    def depth(self) -> int:
        """How many rules are being carried out."""
        return len(self._decisions)

    def saw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        seconds: float,
        *,
        inside: Inside = (),
    ) -> None:
        """An operation has run; `inside` are the casts in what it called in turn."""
        kind = kind_of(func)
        sequence = _torch.next_sequence()
        made = sequence > self._sequence
        if not self._decisions:
            if made or not kind.is_view:
                self._saw_alone(kind, args, kwargs, out, seconds, inside=inside)
            return
        decision = self._decisions[-1]
        self.totals.seconds += seconds
        decision.seconds += seconds
        if made:
            self._remember(_Node(decision.decided.op, decision.place))
        if kind.may_cast:
            for source, target in kind.casts(args, out):
                self._cast_in(decision, source, target, seconds)
        decision.inside += [self._sized(cast) for cast in inside]

    def failed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException
    ) -> None:
        """An operation has raised."""
        tensors = floating_in(tensors_of(args, kwargs))
        if self._decisions or not tensors:
            return
        device = tensors[0].device.type
        policy = self._reasons.policy_here(device)
        decided = self._reasons.alone(policy, kind_of(func).name, device, region_around(device))
        links = [self.lineage.of(t) for t in tensors]
        enabled = is_enabled(device)
        note_on(error, decided, device, policy, map(text_of, tensors), links, enabled=enabled)

    def _saw_alone(
        self,
        kind: Kind,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        seconds: float,
        *,
        inside: Inside,
    ) -> None:
        """Outside of all decisions: a row of its own."""
        place, reason = self._place()
        tensors, outputs = tensors_of(args, kwargs), tensors_of((out,), {})
        if not (tensors or outputs):
            return
        device = (outputs or tensors)[0].device.type
        if _torch.next_sequence() > self._sequence:
            place = place.forward()
            self._remember(_Node(kind.name, place))
        elif place.phase == "other" and is_enabled(device):
            place = place.forward()
        if kind.is_view:
            return
        self.totals.seconds += seconds
        casts = kind.casts(args, out) if kind.may_cast else []
        region = region_around(device)
        if reason is None and casts:
            reason = "a cast that the program asks for"
        if reason is None:
            policy = self._reasons.policy_here(device)
            if region is not None:
                self.policies[device] = policy
            reason = self._reasons.alone(policy, kind.name, device, region).reason
        decided = Decided(kind.name, None, reason)
        inputs = tuple(map(text_of, tensors))
        around = Around(region, self._reasons.module_rule(), device)
        row = self.tally.row(place, decided, inputs, outputs, around)
        sized = [self._sized(cast) for cast in inside]
        if row is not None:
            row.seconds += seconds
            _add_inside(row, sized)
        if casts:
            self._casts_alone(row, decided, place, casts, seconds / len(casts))
        elif len(outputs) <= _MOST_TRAILED and place.phase != "optimizer":
            self._trail(decided, place, tensors, inputs, outputs)

    def _place(self) -> tuple[Place, str | None]:
        """Where the operation that is being told of runs; why it has no rule, where the phase says so."""
        frame = frame_above(4)  # what called `__torch_dispatch__`
        source, owner, phase = read_stack(frame)
        module = None if owner is None else self.names.of(owner, frame)
        graph_node = _torch.current_node()
        if graph_node is None:
            self._in_backward = False
            reason = "a step of an optimizer" if phase == "optimizer" else None
            return Place(module, source, phase), reason
        if not self._in_backward:
            self._in_backward = True
            self._count_saved()
        if module is not None:  # a checkpoint runs again
            return Place(module, source, "backward"), None
        maker = self._maker(graph_node)
        if maker is not None:
            module, source = maker.place.module, maker.place.source or source
        reason = self._reasons.backward(None if maker is None else maker.op, graph_node)
        return Place(module, source, "backward"), reason

    def _trail(
        self,
        decided: Decided,
        place: Place,
        tensors: list[Tensor],
        inputs: _Texts,
        outputs: list[Tensor],
    ) -> None:
        """Notes where results come from."""
        floating = floating_in(outputs)
        if not floating:
            return
        links = [self.lineage.of(t) for t in tensors if t.dtype.is_floating_point]
        up = self.facts.carried(decided.op, links)
        for tensor in floating:
            link = self.lineage.of(tensor) if any(tensor is given for given in tensors) else None
            if link is None:  # else it was written in place, and keeps its dtype
                parent = _like(links, tensor.dtype)
                link = self._link(tensor, decided, place, inputs, parent)
            link.up = up if tensor.dtype is torch.float32 else None

    # --- casts ---

    def _sized(self, cast: tuple[Tensor, Tensor, float]) -> tuple[int, float]:
        """Counts a cast inside an operation, which no rule asks for; its bytes and seconds."""
        return self.tally.cast_inside(*cast), cast[2]

    def _cast_in(self, d: _Decision, source: Tensor, target: Tensor, seconds: float) -> None:
        size = self.tally.cast(source, target, seconds)
        d.casts += 1
        d.cast_bytes += size
        d.cast_seconds += seconds
        up = self._follow(d.at, d.decided.rule, source, target, seconds)
        if up is not None:
            d.ups.append(up)
        self._link(target, d.decided, d.place, (text_of(source),), None)

    def _casts_alone(
        self,
        row: Row | None,
        decided: Decided,
        place: Place,
        casts: list[tuple[Tensor, Tensor]],
        seconds: float,
    ) -> None:
        for source, target in casts:
            size = self.tally.cast(source, target, seconds)
            if row is not None:
                row.casts += 1
                row.cast_bytes += size
                row.cast_seconds += seconds
            if place.phase == "optimizer":
                continue
            at, in_backward = (decided.op, place.module, place.source), place.phase == "backward"
            up = None if in_backward else self._follow(at, None, source, target, seconds)
            self._link(target, decided, place, (text_of(source),), None).up = up

    def _follow(
        self,
        at: tuple[str, str | None, str | None],
        rule: str | None,
        source: Tensor,
        target: Tensor,
        seconds: float,
    ) -> Up | None:
        """Looks for round trips, islands and weights that are cast again; gives a way up that begins here."""
        size = target.numel() * target.element_size()
        if source.element_size() < target.element_size():
            return Up(*at, rule, source.dtype, seconds, size)
        before = self.lineage.of(source)
        if before is not None:
            self.facts.came_down(before, at, target.dtype, seconds, size)
        self.facts.weights.saw(source, target.dtype, at, seconds, size)
        return None

    # --- what is known of graphs and tensors ---

    def _remember(self, node: _Node) -> None:
        if len(self._nodes) > _MOST_NODES:
            self._nodes_before, self._nodes = self._nodes, {}
        sequence = _torch.next_sequence()
        for number in range(max(self._sequence, sequence - _MOST_AT_ONCE), sequence):
            self._nodes[number] = node
        self._sequence = sequence

    def _maker(self, graph_node: Any) -> _Node | None:
        number = _torch.sequence_of(graph_node)
        return self._nodes.get(number) or self._nodes_before.get(number)

    def _count_saved(self) -> None:
        """Backward begins: what forward made and is still there is there for it; of all such moments the fullest."""
        there: defaultdict[str, int] = defaultdict(int)
        for link in self.lineage.alive(self.totals.steps):
            there[str(link.dtype).removeprefix("torch.")] += link.bytes
        if sum(there.values()) > sum(self.saved.values()):
            self.saved = dict(there)

    def _link(
        self, tensor: Tensor, decided: Decided, place: Place, inputs: _Texts, parent: Link | None
    ) -> Link:
        size = tensor.numel() * tensor.element_size()
        link = Link(*decided, *place, inputs, tensor.dtype, parent, self.totals.steps, size)
        self.lineage.put(tensor, link)
        return link


def _add_inside(row: Row, sized: Iterable[tuple[int, float]]) -> None:
    for size, seconds in sized:
        row.casts += 1
        row.cast_bytes += size
        row.cast_seconds += seconds


_MOST_TRAILED: Final = 8
"""Of how many results of one operation the origin is noted."""
_MOST_AT_ONCE: Final = 64
"""How many nodes of the graph one operation is taken for the maker of."""


def _like(links: list[Link | None], dtype: torch.dtype) -> Link | None:
    """What gave a result its dtype: the first input of that dtype, or else the first that is known."""
    known = [link for link in links if link is not None]
    return next((link for link in known if link.dtype is dtype), known[0] if known else None)
