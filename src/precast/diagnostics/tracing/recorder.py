"""The full trace of one thread: receives every operation, and sums them up in rows.

Invariants:

- operations are not changed: the trace does not wait for a device, replace a tensor or keep one alive; times are the
  host's, from call to return;
- an operation inside an application of a rule belongs to it; any other has its own row;
- memory is bounded: rows by `MOST_ROWS`, origins by the storages that are alive, graph nodes by two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing import reasons
from precast.diagnostics.tracing.call_sites import (
    ModuleNames,
    frame_above,
    is_enabled,
    outermost_region,
    read_stack,
    region_around,
)
from precast.diagnostics.tracing.counting import RuleCounts
from precast.diagnostics.tracing.error_notes import add_note
from precast.diagnostics.tracing.facts import CastPatterns, Float32Island
from precast.diagnostics.tracing.graph_places import GraphPlaces
from precast.diagnostics.tracing.lineage import Lineage, Origin, Upcast
from precast.diagnostics.tracing.listening import OperationListener, casting_devices
from precast.diagnostics.tracing.reasons import ModuleRuleTexts, RuleDecision
from precast.diagnostics.tracing.tally import CallPlace, Surroundings, TracedCall, TraceTally
from precast.diagnostics.tracing.trials import TrialCall
from precast.engine.entry_point import take_annotation
from precast.engine.operation import Operation, is_eligible
from precast.engine.operator_kinds import Cast, dtype_of, floating_in, kind_of, tensors_of
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT32_RULES
from precast.report.saved_trace import LineageStep

__all__ = ["TraceRecorder"]

_MOST_ORIGINS: Final = 8
"""The most results of one operation whose origin is recorded."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class TraceRecorder(OperationListener):
    """The rows of a trace, and the data for its findings."""

    def __init__(self, names: ModuleNames, counts: RuleCounts, failures: Failures) -> None:
        self.names = names
        self.counts = counts
        self.failures = failures
        self.tally = TraceTally()
        self.totals = self.tally.totals
        self.saved: dict[str, int] = {}
        self.policies: dict[str, Policy] = {}
        """Maps a device type to its latest policy."""
        self.patterns = CastPatterns()
        self.lineage = Lineage()
        self._module_rules = ModuleRuleTexts()
        self._applications: list[tuple[Operation, TracedCall]] = []
        """The rules that are being applied, the outermost first."""
        self._nodes = GraphPlaces()
        self._in_backward = False
        self.start()

    def start(self) -> None:
        """Begin, or continue, to record."""
        self._nodes.start()
        self._applications.clear()

    def stepped(self) -> None:
        """Record an optimizer's step."""
        self.totals.steps += 1
        self.patterns.new_step(self.totals.seconds)
        self._nodes.new_step()

    # --- decisions ---

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of an operation with a rule."""
        device = op.device_type
        policy = self.policies[device] = reasons.policy_here(device)
        place = self._place_on_stack().forward()
        if _torch.current_node() is not None:  # a checkpoint repeats its forward
            place = CallPlace(place.module, place.source, "backward")
        decision = reasons.decide(policy, op.name, device)
        record = self._record(op.overload, (args, kwargs), device, decision, place)
        if decision.rule == Rule.LOWER:
            lower = op.lower_dtype()
            record.mismatched = sum(
                t.dtype is not lower and is_eligible(t, device) for t in tensors_of(args, kwargs)
            )
        self._applications.append((op, record))

    def end(self, result: Any) -> None:
        """Record the results of an operation with a rule."""
        _, record = self._applications.pop()
        annotation = take_annotation()
        if annotation:
            op, rule, reason = record.decision
            record.decision = RuleDecision(op, rule, f"{reason}; {annotation}")
        rule, outputs = record.decision.rule, tensors_of((result,), {})
        self._count(record, outputs)
        island = None
        if rule is None:
            self._record_product(record)
        if record.upcasts and rule in FLOAT32_RULES:
            where, policy = record.where, record.policy.name
            island = self.patterns.island(where, record.device, policy, record.upcasts)
            self.patterns.note_call(where, *record.call)
        self._put_origins(record, outputs, island=island)

    def fail(self, error: BaseException) -> None:
        """Record an error of an operation with a rule. A checkpoint ends its repetition by an error, too."""
        _, record = self._applications.pop()
        take_annotation()  # of an inner call that did not raise
        self._count(record, [])
        add_note(error, record, is_in_region=True)

    def _count(self, record: TracedCall, outputs: list[Tensor]) -> None:
        op, rule, _ = record.decision
        if outputs:
            record.sums.cached = max(0, record.mismatched - record.rule_casts)
        self.tally.add(record, outputs, self._around(record.device))
        if rule is not None:
            count = self.counts[op, record.device, rule]
            count.calls += 1
            count.casts += record.rule_casts

    def _record(
        self, func: Any, call: _Call, device: str, decision: RuleDecision, place: CallPlace
    ) -> TracedCall:
        tensors, policy = tensors_of(*call), reasons.policy_here(device)
        inputs = tuple(map(dtype_of, tensors))
        origins = [self.lineage.of(tensor) for tensor in floating_in(tensors)]
        return TracedCall(TrialCall(func, *call), device, policy, decision, place, inputs, origins)

    # --- operations ---

    def casting_here(self) -> list[str]:
        """Return the device types on which autocast casts now: none inside most operations that have a rule."""
        if not self._applications:
            return casting_devices()
        op, record = self._applications[-1]
        return casting_devices((op, record.policy, record.decision.rule))

    @property
    def depth(self) -> int:
        """The number of rules that are being applied."""
        return len(self._applications)

    def saw(self, func: Any, call: _Call, out: Any, seconds: float, inside: Sequence[Cast]) -> None:
        """Record an operation; `inside` are the casts in operations that it called."""
        kind = kind_of(func)
        has_node = self._nodes.has_new
        if not self._applications:
            if has_node or not kind.is_view:
                self._record_without_rule(func, call, out, seconds, inside)
            return
        _, record = self._applications[-1]
        record.sums.seconds += seconds
        if has_node:
            self._nodes.add(record.decision.op, record.place)
        for cast in kind.casts(call[0], out, seconds):
            self.tally.add_cast(cast, record)
            record.rule_casts += 1
            upcast = self._find_patterns(cast, record)
            if upcast is not None:
                record.upcasts.append(upcast)
            self._put_origin(cast.target, record, (dtype_of(cast.source),), None)
        for cast in inside:
            self.tally.add_cast(cast, record, is_inside=True)

    def failed(self, func: Any, call: _Call, error: BaseException) -> None:
        """Record an error of an operation, unless a rule is being applied."""
        tensors = floating_in(tensors_of(*call))
        if self._applications or not tensors:
            return
        device = tensors[0].device.type
        policy, (region, module_rule, _) = reasons.policy_here(device), self._around(device)
        decision = reasons.why_alone(policy, kind_of(func).name, device, region, module_rule)
        is_in_region = is_enabled(device) or region is not None or module_rule is not None
        place = CallPlace(None, None, "other")  # of no use for a note
        record = self._record(func, call, device, decision, place)
        add_note(error, record, is_in_region=is_in_region)

    def _record_without_rule(
        self, func: Any, call: _Call, out: Any, seconds: float, inside: Sequence[Cast]
    ) -> None:
        kind = kind_of(func)
        place, reason = self._place()
        tensors, outputs = tensors_of(*call), tensors_of((out,), {})
        if not (tensors or outputs):
            return
        device = (outputs or tensors)[0].device.type
        if self._nodes.has_new:
            place = place.forward()
            self._nodes.add(kind.name, place)
        elif is_enabled(device):
            place = place.forward()
        if kind.is_view:
            return
        casts = kind.casts(call[0], out, seconds)
        around = self._around(device)
        if reason is None and casts:
            reason = "an explicit cast of the program"
        if reason is None:
            policy = reasons.policy_here(device)
            if around.region is not None:
                self.policies[device] = policy
            module_rule = around.module_rule
            _, _, reason = reasons.why_alone(policy, kind.name, device, around.region, module_rule)
        decision = RuleDecision(kind.name, None, reason)
        record = self._record(func, call, device, decision, place)
        record.sums.seconds = seconds
        self._record_product(record)
        self.patterns.limited(record.where, record.call, out)
        for cast in inside:
            self.tally.add_cast(cast, record, is_inside=True)
        for cast in casts:
            self.tally.add_cast(cast, record)
        if place.phase != "optimizer":
            for cast in casts:
                upcast = self._find_patterns(cast, record) if place.phase != "backward" else None
                origin = self._put_origin(cast.target, record, (dtype_of(cast.source),), None)
                origin.upcast = upcast
            if not casts and len(outputs) <= _MOST_ORIGINS:
                self._put_origins(record, outputs, arguments=tensors)
        self.tally.add(record, outputs, around)

    def _record_product(self, record: TracedCall) -> None:
        """Store the description of a call in forward that may be a product."""
        if (
            reasons.is_lowered(record.decision.op)
            and record.place.phase == "forward"
            and set(record.inputs) == {"float32"}
        ):
            self.patterns.note_call(record.where, *record.call)

    def _place_on_stack(self) -> CallPlace:
        frame = frame_above(1)
        source, owner, phase = read_stack(frame)
        module = None if owner is None else self.names.of(owner, frame)
        return CallPlace(module, source, phase)

    def _place(self) -> tuple[CallPlace, str | None]:
        """Return the place of the current operation, and why it has no rule if that follows from the phase."""
        place = self._place_on_stack()
        graph_node = _torch.current_node()
        if graph_node is None:
            self._in_backward = False
            return place, "a step of an optimizer" if place.phase == "optimizer" else None
        if not self._in_backward:
            self._in_backward = True
            self._count_saved()
        place = CallPlace(place.module, place.source, "backward")
        if place.module is not None:  # a checkpoint repeats its forward
            return place, None
        creator = self._nodes.creator(graph_node)
        if creator is None:
            return place, reasons.why_in_backward(None, graph_node)
        op, forward = creator
        place = CallPlace(forward.module, forward.source or place.source, "backward")
        return place, reasons.why_in_backward(op, graph_node)

    def _around(self, device: str) -> Surroundings:
        return Surroundings(region_around(device), self._module_rules.here(), device)

    def _put_origins(
        self,
        record: TracedCall,
        outputs: list[Tensor],
        *,
        island: Float32Island | None = None,
        arguments: Sequence[Tensor] = (),
    ) -> None:
        """Record the origins of results; a result that is one of `arguments` was written in place and keeps its own."""
        (op, rule, _), origins = record.decision, record.origins
        upcast = self.patterns.carried(op, origins, record.upcasts)
        if rule != Rule.LOWER and record.place.phase != "backward":
            self.patterns.use(origins, upcast)
        sets_dtype = rule in (Rule.LOWER, *FLOAT32_RULES)
        for tensor in floating_in(outputs):
            is_argument = any(tensor is each for each in arguments)
            origin = self.lineage.of(tensor) if is_argument else None
            if origin is None:
                parent = None if sets_dtype else _parent(origins, tensor.dtype)
                origin = self._put_origin(tensor, record, record.inputs, parent)
                origin.island = island
            origin.upcast = upcast if tensor.dtype is torch.float32 else None

    # --- graphs and tensors ---

    def _find_patterns(self, cast: Cast, record: TracedCall) -> Upcast | None:
        """Find round trips, islands and repeated casts of weights; return the cast if it is to a wider dtype."""
        at, rule, source = record.where, record.decision.rule, cast.source
        if source.element_size() < cast.target.element_size():
            return Upcast(at, cast.seconds, cast.bytes, rule=rule, dtype=source.dtype)
        origin = self.lineage.of(source)
        if origin is not None:
            self.patterns.came_down(origin, at, cast)
            if rule == Rule.LOWER:
                self.patterns.rounds(origin, at, cast)
        self.patterns.weights.saw(at, cast, outermost_region())
        return None

    def _count_saved(self) -> None:
        """Sum the memory of forward's results that exist when backward begins; `saved` is the largest sum."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for origin in self.lineage.alive(self.totals.steps):
            sizes[dtype_name(origin.dtype)] += origin.bytes
        if sum(sizes.values()) > sum(self.saved.values()):
            self.saved = dict(sizes)

    def _put_origin(
        self, tensor: Tensor, record: TracedCall, inputs: tuple[str, ...], parent: Origin | None
    ) -> Origin:
        (op, rule, reason), place = record.decision, record.place
        dtypes = list(inputs), dtype_of(tensor)
        step = LineageStep(op, place.module, place.source, *dtypes, rule, reason)
        size = _torch.stored_bytes(tensor)
        origin = Origin(step, place.phase, tensor.dtype, parent, self.totals.steps, size)
        self.lineage.put(tensor, origin)
        return origin


def _parent(origins: list[Origin | None], dtype: torch.dtype) -> Origin | None:
    """Return the input that gave a result its dtype: the first of that dtype, or else the first with an origin."""
    recorded = [origin for origin in origins if origin is not None]
    first = recorded[0] if recorded else None
    return next((origin for origin in recorded if origin.dtype is dtype), first)
