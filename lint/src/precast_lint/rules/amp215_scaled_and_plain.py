"""AMP215: gradients of a scaled loss and of one that is not, in one step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from precast_lint.model import Applicability, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.protocol import hides, is_plain, judged, scales_by_hand

__all__ = ["RULE"]

_BY_HAND = re.compile(r"scale", re.IGNORECASE)
_OTHERS = re.compile(r"(^|[._])(env|envs|prof|profiler|ema|p?bar|progress)$|sched", re.IGNORECASE)


@dataclass(frozen=True)
class _State:
    """The backwards of plain losses since the gradients were last zero, and those of scaled ones."""

    plain: frozenset[Node] = frozenset()
    scaled: frozenset[Node] = frozenset()
    known: bool = True  # nothing happened out of sight


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each plain backward whose gradients a scaler's step divides with those of a scaled one."""

    def follow(
        flow: Flow, scaler: str
    ) -> tuple[_State, Callable[[_State, Event, Say], _State]] | None:
        if not flow.comes_by(("backward", None), ("scaler_step", scaler)):
            return None
        if scales_by_hand(flow, scaler) or len(_optimizers(flow)) != 1:
            return None

        optimizer = next(iter(_optimizers(flow)))

        def on(state: _State, event: Event, say: Say) -> _State:
            if hides(source, event, scaler):
                return replace(state, known=False)
            if _may_zero(source, event, optimizer):
                return _State()
            return _on(source, state, event, say, scaler)

        return _State(), on

    for _, scaler, node, _ in judged(source, follow):
        yield source.find(RULE, node, fix=_fix(source, scaler, node))


def _optimizers(flow: Flow) -> set[str | None]:
    """All that steps here: with two optimizers the losses may be for different parameters."""
    found: set[str | None] = set()
    for event in flow.events():
        if event.kind in ("scaler_step", "optimizer_step"):
            found.add(event.optimizer)
        elif event.kind == "call" and isinstance(event.node, cst.Call):
            func = event.node.func
            is_step = isinstance(func, cst.Attribute) and func.attr.value == "step"
            if is_step and not _is_other(flow.source, event.node, event):
                found.add(event.receiver)
    return found


def _is_other(source: Source, call: cst.Call, event: Event) -> bool:
    """Whether a call of `step` is of something that is no optimizer: an environment, a profiler, a scheduler."""
    outer = source.parents[call]
    targets = [one.target for one in outer.targets] if isinstance(outer, cst.Assign) else []
    if any(isinstance(target, (cst.Tuple, cst.List)) for target in targets):
        return True  # `state, reward, *rest = env.step(action)`
    is_profiler = (event.instance or "").startswith("torch.profiler.")
    return is_profiler or _OTHERS.search(event.receiver or "") is not None


def _may_zero(source: Source, event: Event, optimizer: str | None) -> bool:
    """Whether gradients may be zero afterwards: by hand, by a name that says so, or by code that gets the optimizer."""
    node = event.node
    if event.kind == "assign":
        return isinstance(node, cst.Attribute) and node.attr.value == "grad"
    if event.kind == "grad_read":
        around = (source.parents[node], source.parents[source.parents[node]])
        return any(isinstance(o, cst.Attribute) and o.attr.value == "zero_" for o in around)
    if event.kind != "call" or not isinstance(node, cst.Call):
        return False
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    says_so = isinstance(name, cst.Name) and "zero" in name.value
    given = any(key(source, arg.value) == optimizer for arg in node.args)
    return says_so or given or event.receiver == optimizer


def _on(source: Source, state: _State, event: Event, say: Say, scaler: str) -> _State:
    if event.kind == "backward":
        if event.scaler == scaler:
            return replace(state, scaled=state.scaled | {event.node})
        if event.scaler is not None or _BY_HAND.search(key(source, event.node) or ""):
            return replace(state, known=False)
        return replace(state, plain=state.plain | {event.node})
    if event.kind in ("zero_grad", "optimizer_step"):
        return _State()
    if event.kind == "scaler_step" and event.scaler == scaler:
        for node in state.plain:
            if state.known and any(_go_together(source, node, other) for other in state.scaled):
                say.bad(node)
            elif not state.scaled:
                say.good(node)  # AMP206 speaks of those
        return _State()
    return state


def _go_together(source: Source, plain: Node, scaled: Node) -> bool:
    """Whether one of two nodes stands under no test that the other one is not under: they are no alternatives."""
    one, other = _tests(source, plain), _tests(source, scaled)
    return one <= other or other <= one


def _tests(source: Source, node: Node) -> set[tuple[Node, bool]]:
    """The tests around a node in its function, with the side that it is on."""
    found: set[tuple[Node, bool]] = set()
    inner = node
    for outer in source.around(node):
        if isinstance(outer, cst.FunctionDef):
            break
        if isinstance(outer, (cst.If, cst.IfExp)):
            found.add((outer, inner is outer.body))
        elif isinstance(outer, (cst.ExceptHandler, cst.MatchCase)):
            found.add((outer, True))
        inner = outer
    return found


def _fix(source: Source, scaler: str, backward: Node) -> Fix | None:
    """`scaler.scale(...)` around the loss; None where this loss has been propagated already."""
    func = backward.func if isinstance(backward, cst.Call) else None
    if not isinstance(func, cst.Attribute) or func.attr.value != "backward":
        return None
    loss = func.value
    if not isinstance(loss, (cst.Name, cst.Attribute, cst.Subscript)) or not is_plain(scaler):
        return None
    text = source.code(loss)
    if any(_scales(source, call, text) for call, _, _ in source.methods("scale")):
        return None
    edit = source.replace(loss, f"{scaler}.scale({text})")
    return source.fix("Scale this loss as well", edit, unsafe=True)


def _scales(source: Source, call: cst.Call, text: str) -> bool:
    return [source.code(arg.value) for arg in call.args] == [text]


RULE = Rule(
    code="AMP215",
    name="scaled-and-plain-gradients",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="this loss is not scaled, and the step divides its gradients by the scale of another one; scale it, too",
    what=(
        "`backward()` of a loss that is not scaled, where another loss was scaled for the same step of the only "
        "optimizer."
    ),
    why=(
        "A step divides all gradients by the scale. Those of the plain loss have never been multiplied by it: with the "
        "default scale they count 65536 times less than those of the other, and more or less whenever the scale "
        "changes."
    ),
    fine="The plain loss is for parameters that the optimizer does not have.",
    words=("backward( scale( .step(",),
    check=check,
    example="""
 import torch

 scaler = torch.amp.GradScaler("cuda")
 for batch in batches:
     optimizer.zero_grad()
     with torch.autocast("cuda", dtype=torch.float16):
         loss = model(batch)
     scaler.scale(loss).backward()
     penalty = 1e-4 * sum(p.square().sum() for p in model.parameters())
-    penalty.backward()
+    scaler.scale(penalty).backward()
     scaler.step(optimizer)
     scaler.update()
""",
)
