"""AMP201: training in float16 without a scaler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from precast_lint.meaning.callers import calls_of
from precast_lint.meaning.functions import called_forward
from precast_lint.meaning.regions import regions, regions_around
from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import Say, flows
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.propagated import has_no_grad

__all__ = ["RULE"]

# Others that scale losses, or choose the dtype.
_HANDLED = re.compile(
    r"scaler|loss_scale|scale_loss|scaled_loss|accelerat|deepspeed|apex|set_autocast|fabric", re.I
)
_LARGE = 64  # a factor of this size is a scale, not a weight of a loss
_DEEP = 3  # names that are followed


@dataclass(frozen=True)
class _LossState:
    """The names that hold results of float16 regions, and the last backward of such a result."""

    lower: frozenset[str] = frozenset()
    backward: Node | None = None


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each backward of a float16 region's loss that is followed by an optimizer's step."""
    is_float16 = any(r.dtype == "torch.float16" for r in regions(source))
    if not is_float16 or _HANDLED.search(source.words):
        return

    def on(state: _LossState, event: Event, say: Say) -> _LossState:
        return _on(source, state, event, say)

    results = (node for flow in flows(source) for node, _ in flow.run(_LossState(), on))
    for node in dict.fromkeys(results):
        yield source.find(RULE, node)


def _on(source: Source, state: _LossState, event: Event, say: Say) -> _LossState:
    if event.kind == "assign":
        name = event.receiver or ""
        if _is_scaled(source, event.value) or has_no_grad(source, event.node):
            return replace(state, lower=state.lower - {name})
        comes = _in_region(source, event.node) or _uses(source, event.value, state.lower)
        comes = comes or _is_returned_from_region(source, event.value)
        comes = comes or (event.value is None and _is_unpacked(source, event.node))
        return replace(state, lower=state.lower | {name} if comes else state.lower - {name})
    if event.kind == "backward":
        assert isinstance(event.node, cst.Call)
        is_lower = _in_region(source, event.node) or _uses(source, event.node, state.lower)
        is_lower = is_lower or _is_result(source, event.node)
        is_lower = is_lower and not _is_scaled(source, event.node)
        return replace(state, backward=event.node if is_lower else None)
    if event.kind == "optimizer_step" and state.backward is not None:
        say.bad(state.backward)
        return replace(state, backward=None)
    return state


def _is_scaled(source: Source, node: Node | None) -> bool:
    """Return True if an expression scales a loss by hand: `loss * SCALE`, `loss * 1024`."""
    for inner in walk(node) if node is not None else ():
        if isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, cst.Multiply):
            for side in (inner.left, inner.right):
                if (constant(source, side) or 0) >= _LARGE or "scale" in _last_name(side).lower():
                    return True
    return False


def _last_name(node: Node) -> str:
    last = node.attr if isinstance(node, cst.Attribute) else node
    return last.value if isinstance(last, cst.Name) else ""


def _is_returned_from_region(source: Source, value: Node | None) -> bool:
    """Return True if a value is a call of a method or module of this file that returns from within a region."""
    returned = source.values.results(value) if isinstance(value, cst.Call) else []
    if returned:
        return all(_is_lower(source, node, _DEEP) for node in returned)
    calls = (node for node in walk(value) if isinstance(node, cst.Call)) if value else ()
    return any(
        forward is not None and _in_region(source, forward.body.body[0])
        for forward in (called_forward(source, call) for call in calls)
    )


def _is_result(source: Source, backward: cst.Call) -> bool:
    """Return True for `self.loss(batch).backward()` if the method returns from within a region."""
    func = backward.func
    parts = [func.value] if isinstance(func, cst.Attribute) else []
    inside = [n for part in (*parts, *backward.args) for n in walk(part)]
    return any(
        isinstance(n, cst.Call)
        and bool(source.values.results(n))
        and _is_returned_from_region(source, n)
        for n in inside
    )


def _is_unpacked(source: Source, target: Node) -> bool:
    """Return True if all values of a loop variable, or of a name for one of several results, come from a region."""
    if not isinstance(target, (cst.Name, cst.Attribute)):
        return False
    values = source.values.contents.of_target(target) or _yielded(source, target)
    return bool(values) and all(_is_lower(source, value, _DEEP) for value in values)


def _yielded(source: Source, target: Node) -> list[Node]:
    """Return the values of a loop over a generator of this file: `for loss in losses(batches)`."""
    loop = source.parents.get(target)
    call = loop.iter if isinstance(loop, cst.For) and loop.target is target else None
    function = (
        source.values.call_arguments.called_function(call) if isinstance(call, cst.Call) else None
    )
    if function is None or function.decorators:
        return []
    yields = [node.value for node in walk(function.body) if isinstance(node, cst.Yield)]
    values: list[Node] = [v for v in yields if v is not None and not isinstance(v, cst.From)]
    return values if len(values) == len(yields) else []


def _is_lower(source: Source, value: Node, depth: int) -> bool:
    """Return True if a value, or a name in it, is computed in a float16 region."""
    if _in_region(source, value):
        return True
    if depth == 0 or _is_scaled(source, value) or has_no_grad(source, value):
        return False
    if isinstance(value, (cst.Dict, cst.Tuple, cst.List)):
        items = source.values.contents.elements(value) or []
        return bool(items) and all(_is_lower(source, item, depth) for item in items)
    for inner in walk(value):
        binding = source.names.only_binding(inner) if isinstance(inner, cst.Name) else None
        if binding is None or binding.kind != "assign" or _is_cut(source.parents.get(inner)):
            continue
        if source.function(binding.node) is not source.function(value) or binding.value is None:
            continue
        if _in_region(source, binding.node) and not _is_scaled(source, binding.value):
            return True
        if _is_lower(source, binding.value, depth - 1):
            return True
    return False


def _uses(source: Source, node: Node | None, names: frozenset[str]) -> bool:
    if node is None or not names:
        return False
    return any(
        isinstance(inner, (cst.Name, cst.Attribute))
        and key(source, inner) in names
        and not _is_cut(source.parents.get(inner))
        for inner in walk(node)
    )


def _is_cut(parent: Node | None) -> bool:
    """Return True for `x.detach()`, which stops gradients, and `x.float()`, where x may come from a frozen model."""
    return isinstance(parent, cst.Attribute) and parent.attr.value in ("detach", "float", "item")


def _in_region(source: Source, node: Node) -> bool:
    """Return True if a node runs in a float16 region and with gradients."""
    region = next(regions_around(source, node), None)
    if region is None:
        function = source.function(node)
        return function is not None and _is_called_in_region(source, function)
    if region.dtype != "torch.float16" or region.enabled is False:
        return False
    return not has_no_grad(source, node)


def _is_called_in_region(source: Source, function: cst.FunctionDef) -> bool:
    """Return True if all calls of a function are in float16 regions of other functions."""
    cached = source.cache.setdefault("called in float16 regions", {})
    assert isinstance(cached, dict)
    if function not in cached:
        cached[function] = False  # for functions that call each other
        calls = calls_of(source, function)
        cached[function] = bool(calls) and all(
            source.function(call) is not function and _in_region(source, call) for call in calls
        )
    return bool(cached[function])


RULE = LintRule(
    code="AMP201",
    name="float16-without-scaler",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="this loss comes from a float16 region and no scaler scales it: small gradients become zero",
    what="Training with `torch.autocast` in float16, the default on CUDA, without a `GradScaler`.",
    why=(
        "Gradients that pass through float16 operations are float16 too. Those below 6e-8 become zero, and the weights "
        "behind them stop learning. A scaler, or bfloat16, avoids that."
    ),
    fine="The gradients are large enough, or code of another file scales the loss.",
    words=("autocast backward( .step(",),
    check=check,
    example="""
 import torch

 optimizer = torch.optim.SGD(model.parameters(), 0.1)
+scaler = torch.amp.GradScaler("cuda")
 for batch in batches:
     optimizer.zero_grad()
     with torch.autocast("cuda", dtype=torch.float16):
         loss = model(batch).mean()
-    loss.backward()
-    optimizer.step()
+    scaler.scale(loss).backward()
+    scaler.step(optimizer)
+    scaler.update()
""",
)
