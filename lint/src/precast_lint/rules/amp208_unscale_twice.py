"""AMP208: gradients that are unscaled twice before an update."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import FunctionFlow, Say
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import (
    comes_each_time,
    leading_to,
    loop_around,
    loops_around,
    may_use,
    no_other_calls,
    scaler_flows,
)

__all__ = ["RULE"]

_State = frozenset[tuple[str, Node]]
_AGAIN = (
    "the next batch comes here before `update` was called: `unscale_` belongs where the step is"
)
_SKIPPED = (
    "an iteration that skips the step ends before `update` was called, and the next `unscale_` "
    "raises: call `update` in that iteration too"
)


class _Follower:
    """The `unscale_` calls of one scaler along the paths of a function, by optimizer."""

    def __init__(self, source: Source, scaler: str) -> None:
        self.source = source
        self.scaler = scaler
        self.first: set[Node] = set()
        self.second: set[Node] = set()
        self.again: set[Node] = set()
        self.pairs: set[tuple[Node, Node]] = set()
        self.pending: set[Node] = set()  # without an update when the function ends

    def on(self, state: _State, event: Event, _: Say) -> _State:
        if may_use(self.source, event, self.scaler):
            return frozenset()
        if event.kind == "return":
            self.pending |= {node for _, node in state}
        if event.kind == "assign":
            word = re.compile(rf"(?<![\w.]){re.escape(event.assigned or '')}\b")
            return frozenset(pair for pair in state if not word.search(pair[0]))
        if event.scaler != self.scaler or event.kind not in ("update", "unscale"):
            return state
        if event.kind == "update":
            return frozenset()
        before = dict(state).get(event.optimizer or "")
        if before is None:
            self.first.add(event.node)
            return state | {(event.optimizer or "", event.node)}
        (self.again if before is event.node else self.second).add(event.node)
        self.pairs.add((before, event.node))
        return state


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `unscale_` of an optimizer whose gradients are unscaled already."""
    for flow, scaler in scaler_flows(source):
        if not flow.has_events(("unscale", scaler)) or not no_other_calls(flow, scaler, "update"):
            continue
        follower = _Follower(source, scaler)
        start: _State = frozenset()
        list(flow.run(start, follower.on))
        behind = {
            second
            for first, second in follower.pairs
            if any(_comes_always(source, at, second) for at in leading_to(flow, first))
        }
        for node in follower.second - follower.first | behind:
            yield source.find(RULE, node)
        for node in follower.again:
            if _is_each_time(source, flow, scaler, node):
                yield source.find(
                    RULE, node, _AGAIN if _accumulates(source, flow, scaler) else _SKIPPED
                )
        for node in follower.pending - follower.again - follower.second:
            if _is_in_each_call(source, flow, scaler, node):
                yield source.find(RULE, node, _AGAIN)


def _comes_always(source: Source, first: Node, second: Node) -> bool:
    """Return True if the second node runs whenever the first one, which is under a test, does."""
    block = source.block(source.statement(second))
    before = (
        block[: block.index(source.statement(second))] if source.statement(second) in block else []
    )
    inner = first
    for outer in source.around(first):
        if outer in before:
            return isinstance(outer, cst.If) and inner is not outer.test
        if isinstance(
            outer, (cst.FunctionDef, cst.For, cst.While, cst.Try, cst.TryStar, cst.Match)
        ):
            return False
        inner = outer
    return False


def _is_each_time(source: Source, flow: FunctionFlow, scaler: str, node: Node) -> bool:
    """Return True if each iteration of the loop runs a node, and the update is not in an inner loop."""
    way = list(leading_to(flow, node))
    at = next((one for one in way if loop_around(source, one) is not None), node)
    loop = loop_around(source, at)
    updates = [e.node for e in flow.events() if e.kind == "update" and e.scaler == scaler]
    if loop is None or not updates:
        return False
    around = [
        [outer for one in leading_to(flow, update) for outer in loops_around(source, one)]
        for update in updates
    ]
    if any(loop in loops and loops[0] is not loop for loops in around):
        return False
    inside = way[: way.index(at)]
    return comes_each_time(source, at, loop) and all(_always_runs(source, one) for one in inside)


def _accumulates(source: Source, flow: FunctionFlow, scaler: str) -> bool:
    """Return True if a counter decides when `update` runs, as where gradients are accumulated."""
    return any(
        _is_counted(source, one)
        for event in flow.events()
        if event.kind == "update" and event.scaler == scaler
        for one in leading_to(flow, event.node)
    )


def _is_in_each_call(source: Source, flow: FunctionFlow, scaler: str, node: Node) -> bool:
    """Return True if each call of a function runs a node, and a counter decides when the update runs."""
    if not isinstance(flow.node, cst.FunctionDef):
        return False
    updates = [e.node for e in flow.events() if e.kind == "update" and e.scaler == scaler]
    is_all = not flow.called_elsewhere(scaler, "update")
    is_all = is_all and ("." not in scaler or flow.has_all(scaler, "update"))
    way = list(leading_to(flow, node))
    if not updates or not is_all or any(loops_around(source, one) for one in way):
        return False
    return all(_always_runs(source, one) for one in way) and all(
        any(
            _is_counted(source, one) and not loops_around(source, one)
            for one in leading_to(flow, update)
        )
        for update in updates
    )


def _is_counted(source: Source, node: Node) -> bool:
    """Return True if a test of a counter decides whether a node runs in an iteration or a call of its function."""
    inner = node
    for outer in source.around(node):
        if isinstance(outer, (cst.FunctionDef, cst.For, cst.While)):
            return False
        if isinstance(outer, cst.If) and inner is not outer.test and _counts(source, outer.test):
            return True
        if isinstance(outer, cst.IndentedBlock):
            block: list[Node] = list(outer.body)
            before = block[: block.index(inner)]
            if any(_leaves(line) and _counts(source, line.test) for line in before):  # type: ignore[attr-defined]
                return True
        inner = outer
    return False


def _leaves(line: Node) -> bool:
    """Return True if a statement is a test that ends the iteration or the function."""
    if not isinstance(line, cst.If) or not isinstance(line.body, cst.IndentedBlock):
        return False
    last = line.body.body[-1]
    return isinstance(last, cst.SimpleStatementLine) and isinstance(
        last.body[-1], (cst.Return, cst.Continue)
    )


def _always_runs(source: Source, node: Node) -> bool:
    """Return True if a node runs whenever its function does: it is in no test or `try`, and behind no `return`."""
    function = source.function(node)
    line = source.statement(node)
    if (
        function is None
        or line not in source.block(line)
        or source.parents[line] is not function.body
    ):
        return False
    block = source.block(line)
    before = block[: block.index(line)]
    ends = (cst.Return, cst.Raise)
    return not any(isinstance(inner, ends) for one in before for inner in walk(one))


def _counts(source: Source, test: Node, depth: int = 2) -> bool:
    """Return True if a test is of a counter."""
    function = source.function(test)
    added = {
        key(source, line.target)
        for line in source.all(cst.AugAssign)
        if source.function(line) is function and isinstance(line.operator, cst.AddAssign)
    }
    for inner in walk(test):
        if isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, cst.Modulo):
            return True
        if isinstance(inner, cst.Comparison) and key(source, inner.left) in added:
            return True
        if depth and isinstance(inner, cst.Call):
            returned = source.values.results(inner)
            if returned and all(_counts(source, value, depth - 1) for value in returned):
                return True
        binding = source.names.only_binding(inner) if isinstance(inner, cst.Name) else None
        value = binding.value if binding is not None and binding.kind == "assign" else None
        if value is not None and depth and _counts(source, value, depth - 1):
            return True
    return False


RULE = LintRule(
    code="AMP208",
    name="unscaled-twice",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this optimizer's gradients are unscaled already: `unscale_` is called once before each `update`",
    what=(
        "`scaler.unscale_(optimizer)` twice before `scaler.update()`; in a loop that accumulates gradients, `unscale_` "
        "at each batch with `update` only at some; an iteration that skips the step and `update` after `unscale_`."
    ),
    why=(
        "`unscale_` raises a RuntimeError the second time. A step that is skipped by hand, as for a norm that is too "
        "large, needs `update` in that iteration, too."
    ),
    fine="Code of another file calls `update`.",
    words=("unscale_(",),
    check=check,
    example="""
 def step(net, opt, loss, scaler, log):
     scaler.scale(loss).backward()
+    scaler.unscale_(opt)
     if log:
-        scaler.unscale_(opt)
         print(sum(p.grad.norm() for p in net.parameters()))
-    scaler.unscale_(opt)
     scaler.step(opt)
     scaler.update()
""",
)
