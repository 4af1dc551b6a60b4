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
from dataclasses import dataclass, field
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
from precast.diagnostics.tracing.error_notes import FailedCall, add_note
from precast.diagnostics.tracing.facts import CastPatterns
from precast.diagnostics.tracing.lineage import CastSite, Lineage, Origin, Upcast
from precast.diagnostics.tracing.mode import OperationListener
from precast.diagnostics.tracing.reasons import ModuleRuleTexts, RuleDecision
from precast.diagnostics.tracing.tally import CallPlace, Surroundings, TraceTally
from precast.diagnostics.tracing.trials import TrialCall
from precast.engine.annotations import take_annotation
from precast.engine.operation import Operation, is_eligible
from precast.engine.operator_kinds import (
    Cast,
    dtype_of,
    floating_in,
    kind_of,
    tensors_of,
)
from precast.policy.policy import DEVICE_TYPES, Policy, Rule
from precast.report.saved_trace import LineageStep
from precast.report.schema import TraceTotals

__all__ = ["HEAVY", "TraceRecorder"]

HEAVY: Final = (
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "matmul", "einsum"}
    | {"convolution", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
)  # fmt: skip
"""Operations that are worth 16 bits."""
_MOST_NODES: Final = 200_000
_MOST_ORIGINS: Final = 8
"""The most results of one operation whose origin is recorded."""
_MOST_NEW_NODES: Final = 64
"""The most nodes of the graph that are attributed to one operation."""
_FP32: Final = ("fp32", "fp32_set_dtype", "fp32_append_dtype")
_Texts = tuple[str, ...]
_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(slots=True)
class _RuleApplication:
    """A rule that is being applied to an operation."""

    op: Operation
    policy: Policy
    decision: RuleDecision
    place: CallPlace
    inputs: _Texts
    origins: list[Origin | None]
    """The origins of its floating-point inputs."""
    call: _Call
    mismatched: int = 0
    """The number of inputs whose dtype is not that of the rule."""
    casts: int = 0
    """The number of casts that the rule made. `sums` also counts those inside operations."""
    sums: TraceTotals = field(default_factory=TraceTotals)
    upcasts: list[Upcast] = field(default_factory=list)


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
        self._applications: list[_RuleApplication] = []
        self._nodes: dict[int, tuple[str, CallPlace]] = {}
        """Maps the number of a graph node to the operation that created it, and its place."""
        self._nodes_before: dict[int, tuple[str, CallPlace]] = {}
        self._in_backward = False
        self.start()

    def start(self) -> None:
        """Begin, or continue, to record."""
        self._sequence = _torch.next_sequence()
        self._applications.clear()

    def stepped(self) -> None:
        """Record an optimizer's step."""
        self.totals.steps += 1
        self.patterns.new_step(self.totals.seconds)
        self._nodes_before, self._nodes = self._nodes, {}

    # --- decisions ---

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of an operation with a rule."""
        policy = reasons.policy_here(op.device_type)
        self.policies[op.device_type] = policy
        place = self._place_on_stack().forward()
        if _torch.current_node() is not None:  # a checkpoint repeats its forward
            place = CallPlace(place.module, place.source, "backward")
        tensors = tensors_of(args, kwargs)
        origins = [self.lineage.of(t) for t in floating_in(tensors)]
        decision = reasons.decide(policy, op.name, op.device_type)
        inputs = tuple(map(dtype_of, tensors))
        call = args, kwargs
        application = _RuleApplication(op, policy, decision, place, inputs, origins, call)
        if decision.rule == Rule.LOWER:
            lower, device = op.lower_dtype(), op.device_type
            application.mismatched = sum(
                t.dtype is not lower and is_eligible(t, device) for t in tensors
            )
        self._applications.append(application)

    def end(self, result: Any) -> None:
        """Record the results of an operation with a rule."""
        application = self._applications.pop()
        annotation = take_annotation()
        if annotation:
            op, rule, reason = application.decision
            application.decision = RuleDecision(op, rule, f"{reason}; {annotation}")
        op, rule, _ = application.decision
        outputs = tensors_of((result,), {})
        self._count(application, outputs)
        island = None
        if rule is None:
            self._record_product(
                TrialCall(application.op.overload, *application.call),
                application.place,
                application.inputs,
            )
        if application.upcasts and rule in _FP32:
            at = CastSite(op, application.place.module, application.place.source)
            island = self.patterns.island(
                at, application.op.device_type, application.policy.name, application.upcasts
            )
            self.patterns.note_call(at, application.op.overload, *application.call)
        upcast = self.patterns.carried(op, application.origins, application.upcasts)
        if rule != Rule.LOWER and application.place.phase != "backward":
            self.patterns.use(application.origins, upcast)
        sets_dtype = rule in (Rule.LOWER, *_FP32)
        for tensor in floating_in(outputs):
            parent = None if sets_dtype else _parent(application.origins, tensor.dtype)
            origin = self._put_origin(
                tensor, application.decision, application.place, application.inputs, parent
            )
            origin.island = island
            origin.upcast = upcast if tensor.dtype is torch.float32 else None

    def fail(self, error: BaseException) -> None:
        """Record an error of an operation with a rule. A checkpoint ends its repetition by an error, too."""
        application = self._applications.pop()
        take_annotation()  # of an inner call that did not raise
        self._count(application, [])
        call = TrialCall(application.op.overload, *application.call)
        attempt = FailedCall(
            call, application.op.device_type, application.policy, is_in_region=True
        )
        add_note(error, application.decision, attempt, application.inputs, application.origins)

    def _count(self, application: _RuleApplication, outputs: list[Tensor]) -> None:
        op, rule, _ = application.decision
        cached = max(0, application.mismatched - application.casts) if outputs else 0
        row = self.tally.row(
            application.place,
            application.decision,
            application.inputs,
            outputs,
            self._around(application.op.device_type),
        )
        if row is not None:
            row.casts += application.sums.casts
            row.cast_bytes += application.sums.cast_bytes
            row.cast_seconds += application.sums.cast_seconds
            row.seconds += application.sums.seconds
            row.cached += cached
        self.totals.cached += cached
        if rule is not None:
            count = self.counts[op, application.op.device_type, rule]
            count.calls += 1
            count.casts += application.casts

    # --- operations ---

    def casting_here(self) -> list[str]:
        """Return the device types on which autocast casts now: none inside an operation that has a rule."""
        if self._applications and self._applications[-1].decision.rule is not None:
            return []
        return [device for device in DEVICE_TYPES if is_enabled(device)]

    @property
    def depth(self) -> int:
        """The number of rules that are being applied."""
        return len(self._applications)

    def saw(
        self,
        func: Any,
        call: _Call,
        out: Any,
        seconds: float,
        inside: Sequence[Cast],
    ) -> None:
        """Record an operation; `inside` are the casts in operations that it called."""
        kind = kind_of(func)
        has_node = _torch.next_sequence() > self._sequence
        if not self._applications:
            if has_node or not kind.is_view:
                self._record_without_rule(func, call, out, seconds, inside)
            return
        application = self._applications[-1]
        self.totals.seconds += seconds
        application.sums.seconds += seconds
        if has_node:
            self._add_nodes(application.decision.op, application.place)
        for cast in kind.casts(call[0], out, seconds):
            self.tally.cast(cast, application.sums)
            application.casts += 1
            upcast = self._find_patterns(cast, application.decision, application.place)
            if upcast is not None:
                application.upcasts.append(upcast)
            self._put_origin(
                cast.target, application.decision, application.place, (dtype_of(cast.source),), None
            )
        for cast in inside:
            self.tally.cast_inside(cast, application.sums)

    def failed(self, func: Any, call: _Call, error: BaseException) -> None:
        """Record an error of an operation, unless a rule is being applied."""
        tensors = floating_in(tensors_of(*call))
        if self._applications or not tensors:
            return
        device = tensors[0].device.type
        policy, (region, module_rule, _) = reasons.policy_here(device), self._around(device)
        decision = reasons.why_alone(policy, kind_of(func).name, device, region, module_rule)
        origins = [self.lineage.of(t) for t in tensors]
        is_in_region = is_enabled(device) or region is not None or module_rule is not None
        attempt = FailedCall(TrialCall(func, *call), device, policy, is_in_region=is_in_region)
        add_note(error, decision, attempt, map(dtype_of, tensors), origins)

    def _record_without_rule(
        self,
        func: Any,
        call: _Call,
        out: Any,
        seconds: float,
        inside: Sequence[Cast],
    ) -> None:
        """Record an operation without a rule in its own row."""
        kind = kind_of(func)
        place, reason = self._place()
        tensors, outputs = tensors_of(*call), tensors_of((out,), {})
        if not (tensors or outputs):
            return
        device = (outputs or tensors)[0].device.type
        if _torch.next_sequence() > self._sequence:
            place = place.forward()
            self._add_nodes(kind.name, place)
        elif is_enabled(device):
            place = place.forward()
        if kind.is_view:
            return
        self.totals.seconds += seconds
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
        inputs = tuple(map(dtype_of, tensors))
        self._record_product(TrialCall(func, *call), place, inputs)
        row = self.tally.row(place, decision, inputs, outputs, around)
        if row is not None:
            row.seconds += seconds
        for cast in inside:
            self.tally.cast_inside(cast, row)
        for cast in casts:
            self.tally.cast(cast, row)
            if place.phase != "optimizer":
                upcast = (
                    self._find_patterns(cast, decision, place)
                    if place.phase != "backward"
                    else None
                )
                self._put_origin(
                    cast.target, decision, place, (dtype_of(cast.source),), None
                ).upcast = upcast
        if not casts and len(outputs) <= _MOST_ORIGINS and place.phase != "optimizer":
            self._put_origins(decision, place, tensors, inputs, outputs)

    def _record_product(self, call: TrialCall, place: CallPlace, inputs: _Texts) -> None:
        """Store the description of a call in forward that may be faster in 16 bits."""
        kind = kind_of(call.overload)
        if place.phase == "forward" and kind.base in HEAVY and set(inputs) == {"float32"}:
            self.patterns.note_call(CastSite(kind.name, place.module, place.source), *call)

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
        number = _torch.sequence_of(graph_node)
        creator = self._nodes.get(number) or self._nodes_before.get(number)
        if creator is None:
            return place, reasons.why_in_backward(None, graph_node)
        op, forward = creator
        place = CallPlace(forward.module, forward.source or place.source, "backward")
        return place, reasons.why_in_backward(op, graph_node)

    def _around(self, device: str) -> Surroundings:
        return Surroundings(region_around(device), self._module_rules.here(), device)

    def _put_origins(
        self,
        decision: RuleDecision,
        place: CallPlace,
        tensors: list[Tensor],
        inputs: _Texts,
        outputs: list[Tensor],
    ) -> None:
        """Record the origins of results."""
        floating = floating_in(outputs)
        origins = [self.lineage.of(t) for t in floating_in(tensors)]
        upcast = self.patterns.carried(decision.op, origins, [])
        if place.phase != "backward":
            self.patterns.use(origins, upcast)
        for tensor in floating:
            origin = self.lineage.of(tensor) if any(tensor is each for each in tensors) else None
            if origin is None:  # otherwise it was written in place, and its dtype is the same
                parent = _parent(origins, tensor.dtype)
                origin = self._put_origin(tensor, decision, place, inputs, parent)
            origin.upcast = upcast if tensor.dtype is torch.float32 else None

    # --- graphs and tensors ---

    def _find_patterns(self, cast: Cast, decision: RuleDecision, place: CallPlace) -> Upcast | None:
        """Find round trips, islands and repeated casts of weights; return the cast if it is to a wider dtype."""
        at, source = CastSite(decision.op, place.module, place.source), cast.source
        if source.element_size() < cast.target.element_size():
            return Upcast(*at, cast.seconds, cast.bytes, rule=decision.rule, dtype=source.dtype)
        origin = self.lineage.of(source)
        if origin is not None:
            self.patterns.came_down(origin, at, cast)
            if decision.rule == Rule.LOWER:
                self.patterns.rounds(origin, at, cast)
        self.patterns.weights.saw(at, cast, outermost_region())
        return None

    def _add_nodes(self, op: str, place: CallPlace) -> None:
        if len(self._nodes) > _MOST_NODES:
            self._nodes_before, self._nodes = self._nodes, {}
        sequence = _torch.next_sequence()
        for number in range(max(self._sequence, sequence - _MOST_NEW_NODES), sequence):
            self._nodes[number] = op, place
        self._sequence = sequence

    def _count_saved(self) -> None:
        """Sum the memory of forward's results that exist when backward begins; `saved` is the largest sum."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for origin in self.lineage.alive(self.totals.steps):
            sizes[dtype_name(origin.dtype)] += origin.bytes
        if sum(sizes.values()) > sum(self.saved.values()):
            self.saved = dict(sizes)

    def _put_origin(
        self,
        tensor: Tensor,
        decision: RuleDecision,
        place: CallPlace,
        inputs: _Texts,
        parent: Origin | None,
    ) -> Origin:
        op, rule, reason = decision
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
