"""AMP204: steps of a scaler without `update`, or with `update` before them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precast_lint.editing.lines import block_of, exchange, insert_after, line_of, remove
from precast_lint.model import Applicability, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.rules.object_cases import UPDATE_INVALID
from precast_lint.rules.update_cases import HANDED, INVALID, VALID
from precast_lint.rules.update_several_cases import SEVERAL_INVALID
from precast_lint.training_step.counters import counted_test
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import (
    assigned_in,
    comes_each_time,
    followed,
    hides,
    is_plain,
    judged,
    leading_to,
    loop_around,
    loop_in,
    loops_around,
    only_here,
)

__all__ = ["RULE"]

_MISSING = "no `{}.update()` follows this step: the next one raises, and the scale never changes"
_BEHIND = (
    "`{}.update()` behind the loop comes too late: the second step raises; call it after each step"
)
_SOMETIMES = "only some rounds call `{}.update()`: the second step without it raises; call it after each step"
_FIRST = (
    "`update` belongs after `step`: before it, PyTorch raises, or the gradients are divided twice"
)


@dataclass(frozen=True)
class _State:
    """Where a path stands between a scaled backward, the step and the update.

    Attributes:
        steps: those without an update so far.
        scaled: whether a scaled backward came last, and no step since.
        early: the update between a backward and its step.
        stepped: whether there was a step in this round of the loop.
        ever: whether there was one at all, or may have been.
    """

    steps: frozenset[Node] = frozenset()
    scaled: bool = False
    early: Node | None = None
    stepped: bool = False
    ever: bool = True


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each step that no update follows, and each update before its step."""

    def follow(
        flow: Flow, scaler: str
    ) -> tuple[_State, Callable[[_State, Event, Say], _State]] | None:
        if not flow.comes_by(("scaler_step", scaler)) and not flow.comes_by(("update", scaler)):
            return None
        hidden = any(hides(source, event, scaler) for event in flow.events())
        owned = flow.is_seen(scaler, "update") and not hidden
        never = "." in scaler and not _is_updated(flow, scaler)
        updates = [e for e in flow.events() if e.kind == "update" and e.scaler == scaler]
        updating = {
            loop
            for e in updates
            for at in leading_to(flow, e.node)
            for loop in loops_around(source, at)
        }

        def on(state: _State, event: Event, say: Say) -> _State:
            if hides(source, event, scaler):
                for step in state.steps:  # the update may be there
                    say.good(step)
                return _State()
            if event.kind == "next":  # of a loop without an update it is all one
                return replace(state, stepped=False) if event.node in updating else state
            if event.kind == "return":
                for step in state.steps if owned else ():
                    if loop_in(flow, step) is not None or never:
                        say.bad(step, _MISSING.format(scaler))
                return state
            return _on(flow, state, event, say, scaler)

        others = any(event.kind == "optimizer_step" for event in flow.events())
        return _State(ever=not owned or others or not flow.has_all(scaler, "step")), on

    for flow, scaler, node, message in judged(source, follow):
        is_early = message == _FIRST
        if is_early and not only_here(flow, scaler, "step"):
            continue
        fix = (_swap if is_early else _insert)(source, flow, scaler, node)
        yield source.find(RULE, node, message, fix)
    yield from _behind_loop(source)
    yield from _only_sometimes(source)


def _only_sometimes(source: Source) -> Iterator[Finding]:
    """The steps that each round of a loop makes with one optimizer, while only every so many call `update`."""
    for flow, scaler in followed(source):
        events = flow.events()
        updates = [e.node for e in events if e.kind == "update" and e.scaler == scaler]
        if not updates or not only_here(flow, scaler, "update"):
            continue
        for event in events:
            loop = loop_around(source, event.node) if event.kind == "scaler_step" else None
            if event.scaler != scaler or loop is None or not _is_own_optimizer(source, event, loop):
                continue
            tests = [
                counted_test(source, node, loop) if loop in loops_around(source, node) else None
                for node in updates
            ]
            around = set(source.around(event.node))
            is_seen = not any(hides(source, other, scaler) for other in events)
            if is_seen and None not in tests and not any(test in around for test in tests):
                yield source.find(RULE, event.node, _SOMETIMES.format(scaler))


def _is_updated(flow: Flow, scaler: str) -> bool:
    """Whether something in the file is updated that is called as the attribute of a scaler, or may be it."""
    source, last = flow.source, scaler.rpartition(".")[2]
    made = {
        source.values.constructed(node)
        for node in flow.nodes
        if isinstance(node, cst.Attribute) and key(source, node) == scaler
    }
    return any(
        (key(source, owner) or "").rpartition(".")[2] == last
        or (source.instance(owner) in SCALERS and not _is_another(source, owner, made))
        for _, owner, _ in source.methods("update")
    )


def _is_another(source: Source, owner: Node, made: set[Node | None]) -> bool:
    """Whether an attribute of self is a scaler that another call makes."""
    own = source.values.constructed(owner) if isinstance(owner, cst.Attribute) else None
    return own is not None and bool(made) and None not in made and own not in made


def _behind_loop(source: Source) -> Iterator[Finding]:
    """The steps that a loop makes with one optimizer again and again, while `update` waits behind the loop."""
    for flow, scaler in followed(source):
        events = flow.events()
        updates = [e.node for e in events if e.kind == "update" and e.scaler == scaler]
        if not updates or not only_here(flow, scaler, "update"):
            continue
        if any(hides(source, event, scaler) for event in events):
            continue
        scaled = [e.node for e in events if e.kind == "backward" and e.scaler == scaler]
        for event in events:
            loop = loop_around(source, event.node) if event.kind == "scaler_step" else None
            if event.scaler != scaler or loop is None or not _is_own_optimizer(source, event, loop):
                continue
            is_outside = all(_is_own(source, flow, n, loop, inside=False) for n in updates)
            if is_outside and any(_is_own(source, flow, n, loop, inside=True) for n in scaled):
                yield source.find(RULE, event.node, _BEHIND.format(scaler))


def _is_own(source: Source, flow: Flow, node: Node, loop: Node, *, inside: bool) -> bool:
    """Whether a node stands in the function itself, and inside a loop, or outside of it."""
    is_here = (source.function(node) or source.module) is flow.node
    return is_here and (loop in loops_around(source, node)) is inside


def _is_own_optimizer(source: Source, event: Event, loop: Node) -> bool:
    """Whether each round of a loop steps one and the same optimizer, and no round ends the loop."""
    ends = (cst.Break, cst.Return, cst.Raise)
    for inner in walk(loop):
        if isinstance(inner, ends) or (
            isinstance(inner, cst.Continue) and not _skips(source, inner)
        ):
            return False
    names = set(re.findall(r"[A-Za-z_][\w.]*", event.optimizer or ""))
    return (
        bool(names)
        and not names & assigned_in(source, loop)
        and comes_each_time(source, event.node, loop)
    )


def _skips(source: Source, node: Node) -> bool:
    """Whether `continue` only leaves out a loss or a batch that is no number, or nothing."""
    test = next((one.test for one in source.around(node) if isinstance(one, cst.If)), None)
    names = {n.value for n in walk(test) if isinstance(n, cst.Name)} if test is not None else set()
    return bool(names & {"isfinite", "isnan", "isinf", "None"})


def _on(flow: Flow, state: _State, event: Event, say: Say, scaler: str) -> _State:
    if event.kind == "backward":
        return replace(state, scaled=event.scaler == scaler, early=None)
    if event.kind == "optimizer_step":  # in the place of the scaler's, which AMP205 says
        return replace(state, ever=True)
    if event.scaler != scaler:
        return state
    if event.kind == "scaler_step":
        if state.early is not None:
            say.bad(state.early, _FIRST)
        return _State(state.steps | {event.node}, stepped=True)
    if event.kind == "update":
        for step in state.steps:
            say.good(step)
        if state.stepped and not state.scaled:
            say.good(event.node)
        elif not state.ever and _is_unconditional(flow, event.node):
            say.bad(event.node, _FIRST)
        early = event.node if state.scaled and not state.stepped else None
        return replace(state, steps=frozenset(), early=early)
    return state


def _is_unconditional(flow: Flow, update: Node) -> bool:
    """Whether an update runs in each round of a loop, the first one too: it stands in no branch on the way there."""
    source = flow.source
    for node in leading_to(flow, update):
        line = line_of(source, node)
        if line is None:
            return False
        suite = source.parents[line]
        while isinstance(block := source.parents.get(suite), cst.With):
            suite = source.parents[block]
        loop = loop_around(source, node)
        if loop is not None or not isinstance(block, cst.FunctionDef):
            return loop is not None and block is loop
    return False


def _insert(source: Source, flow: Flow, scaler: str, step: Node) -> Fix | None:
    """`update` after the step, or after the last of some steps in one block, each of an optimizer of its own."""
    events = [e for e in flow.events() if e.scaler == scaler]
    stepped = [e for e in events if e.kind == "scaler_step"]
    lines = [line_of(source, e.node) for e in stepped]
    line = line_of(source, step)
    if line is None or not is_plain(scaler):
        return None
    block = block_of(source, line)
    places = [block.index(one) for one in lines if one is not None and one in block]
    if len(places) != len(stepped) or len({e.optimizer for e in stepped}) != len(stepped):
        return None
    is_whole = any(e.kind == "backward" for e in events)
    if not is_whole and _steps_elsewhere(source, scaler, flow):
        return None
    return source.fix(
        "Update the scale after the step",
        insert_after(source, block[max(places)], f"{scaler}.update()"),
        unsafe=True,
    )


def _steps_elsewhere(source: Source, scaler: str, flow: Flow) -> bool:
    """Whether another function steps the same scaler: both may belong to one backward, which needs one update."""
    return any(
        key(source, owner) == scaler and call.args and source.function(call) is not flow.node
        for call, owner, _ in source.methods("step")
    )


def _swap(source: Source, flow: Flow, scaler: str, update: Node) -> Fix | None:
    """The update after the steps, if the first of them stands behind it, and the last in the same block."""
    line = line_of(source, update)
    block = block_of(source, line) if line is not None else []
    behind = block[block.index(line) + 1 :] if line in block else []
    events = [e for e in flow.events() if e.scaler == scaler]
    steps = [line_of(source, e.node) for e in events if e.kind == "scaler_step"]
    if line is None or not behind or behind[0] not in steps:
        return None
    scaled = {outer for e in events if e.kind == "backward" for outer in source.around(e.node)}
    until = next((place for place, one in enumerate(behind) if one in scaled), len(behind))
    last = [one for one in behind[:until] if one in steps][-1]
    if {e.node for e in events if e.kind == "scaler_step"} & _inside(behind[:until], steps):
        return None  # a step under a test: nobody knows where the last one is
    if last is behind[0]:
        return source.fix("Step before the update", exchange(source, line, last), unsafe=True)
    taken = remove(source, line)
    if taken is None:
        return None
    put = insert_after(source, last, source.code(line))
    return source.fix("Update the scale after the steps", taken, put, unsafe=True)


def _inside(block: list[Node], steps: list[cst.SimpleStatementLine | None]) -> set[Node]:
    """The nodes in the statements of a block that are no steps themselves."""
    return {inner for one in block if one not in steps for inner in walk(one)}


RULE = Rule(
    code="AMP204",
    name="scaler-update-missing",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="`update` has to follow `step`",
    what="In a loop, `scaler.step(optimizer)` without `scaler.update()`, or `update` before `step`.",
    why=(
        "A second `step` without `update` raises a RuntimeError. `update` before `step` raises as well; after "
        "`unscale_` it forgets that the gradients are unscaled already, and `step` divides them once more."
    ),
    fine="The scale is updated in code that the rule can't see.",
    words=(
        "GradScaler .step(",
        ".scale( .step(",
    ),
    check=check,
    valid=(*VALID, *HANDED),
    invalid=(*INVALID, *SEVERAL_INVALID, *UPDATE_INVALID),
)
