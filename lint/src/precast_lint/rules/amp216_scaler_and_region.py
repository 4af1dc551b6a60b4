"""AMP216: a scaler and the region of its loss, of which one is on where the other is off."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.regions import Region, regions, regions_around
from precast_lint.model import Applicability, Edit, Finding, Fix, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_DEEP = 4  # names, functions and parameters that a loss comes through
_UNSCALED = "the region is on and the scaler is off: small gradients become zero"
_USELESS = "the scaler is on and the region is off: what is scaled is float32"
_OPPOSITE = "the scaler is on where the region is off, and the other way round"
_SOMETIMES = "this region is always on, its scaler only with `{flag}`: without it, small gradients become zero"
# A region is off by itself where there is no CUDA.
_DEVICE = re.compile(r"cuda|device|available|gpu", re.IGNORECASE)
_DTYPE = re.compile(r"dtype|float16|fp16|half|precision", re.IGNORECASE)
_OTHER_DEVICE = re.compile(r"cpu|mps|xpu|hpu|tpu|xla", re.IGNORECASE)  # `not args.cpu`


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each scaler, or each region, that disagrees with the other one."""
    said: set[Node] = set()
    for call, owner, arguments in source.methods("scale"):
        made = source.values.constructed(owner)
        if source.instance(owner) not in SCALERS or not isinstance(made, cst.Call):
            continue
        if _is_for_grad(source, call):
            continue  # a penalty, which is often computed in float32
        if source.origin(made.func) not in SCALERS or Arguments.of(made).starred:
            continue
        found = _regions(source, call, arguments)
        if _branches(source, made) or any(Arguments.of(r.call).starred for r in found):
            continue
        if any(_branches(source, r.node) != _branches(source, call) for r in found):
            continue  # what decides on one need not decide on the other
        if any(_branches(source, r.call) - _branches(source, r.node) for r in found):
            continue  # a function or a lambda decides whether there is a region
        disagree = [list(_disagreement(source, made, region)) for region in found]
        if len({said_of[0][1] if said_of else None for said_of in disagree}) != 1:
            continue  # regions that differ are there for a reason
        for node, message, fix in (one for said_of in disagree for one in said_of):
            if node not in said:
                said.add(node)
                yield source.find(RULE, node, message, fix)


def _is_for_grad(source: Source, scaled: Node) -> bool:
    """Whether `torch.autograd.grad` takes gradients of a scaled value."""
    outer = source.parents[source.parents[scaled]]
    return isinstance(outer, cst.Call) and source.origin(outer.func) == "torch.autograd.grad"


def _regions(source: Source, call: cst.Call, arguments: Arguments) -> list[Region]:
    """The regions in which a scaled loss is computed: the one around the call, or all that give it its value."""
    around = next(regions_around(source, call), None)
    if around is not None:
        return [around]
    loss = arguments.positional[0] if arguments.positional else None
    return list(dict.fromkeys(_regions_of(source, loss, _DEEP)))


def _regions_of(source: Source, node: Node | None, depth: int) -> Iterator[Region]:
    """The regions in which a value is computed: where its names are bound, in what hands it over or returns it."""
    if node is None or depth == 0:
        return
    for inner in walk(node):
        if isinstance(inner, cst.Call):
            for value in source.values.returned(inner):
                region = next(regions_around(source, value), None)
                if region is None:
                    yield from _regions_of(source, value, depth - 1)
                elif region.enabled is not False or not _others(source, region, inner):
                    yield region
        if not isinstance(inner, cst.Name):
            continue
        for binding in source.names.bindings(inner):
            region = _around(source, binding.node)
            if region is not None and source.function(region.node) is source.function(inner):
                yield region
            elif region is None and binding.kind == "assign" and _calls(source, binding.value):
                yield from _regions_of(source, binding.value, depth - 1)
            for given in source.values.handed.to(binding):
                yield from _regions_of(source, given, depth - 1)


def _around(source: Source, node: Node) -> Region | None:
    """The innermost region around a node; of one that is off in a part of another, the other."""
    found = list(regions_around(source, node))
    on = [region for region in found if region.enabled is not False]
    return on[0] if on else next(iter(found), None)


def _calls(source: Source, value: Node | None) -> bool:
    """Whether a value is what a function of this file returns."""
    return isinstance(value, cst.Call) and bool(source.values.returned(value))


def _others(source: Source, region: Region, call: Node) -> bool:
    """Whether a function that calls another one, or that one, has regions beside one that is off in a part of it."""
    homes = (source.function(call), source.function(region.node))
    return any(
        other is not region and source.function(other.node) in homes for other in regions(source)
    )


def _branches(source: Source, node: Node) -> set[Node]:
    """The tests that decide in its function whether a node is reached, but for that of `__main__`."""
    found: set[Node] = set()
    inner = node
    for outer in source.around(node):
        if isinstance(outer, cst.FunctionDef) and inner is outer.body:
            break
        is_main = isinstance(outer, cst.If) and "__name__" in (key(source, outer.test) or "")
        kinds = (cst.If, cst.IfExp, cst.ExceptHandler, cst.MatchCase)
        if isinstance(outer, kinds) and not is_main:
            found.add(outer)
        inner = outer
    return found


def _disagreement(
    source: Source, made: cst.Call, region: Region
) -> Iterator[tuple[Node, str, Fix | None]]:
    scaler = _value(source, Arguments.of(made).get("enabled"))
    on = _value(source, _enabled(source, region))
    is_float16 = region.dtype == "torch.float16" and region.device != "cpu"
    if _is(scaler, "False") and _is_on(on) and is_float16:
        yield made, _UNSCALED, None
    elif _is(on, "False") and _is_on(scaler):
        yield made, _USELESS, None
    elif _opposite(source, scaler, on):
        yield made, _OPPOSITE, None
    elif _is_on(on) and is_float16 and (flag := _flag(source, scaler)):
        yield region.call, _SOMETIMES.format(flag=flag), _fix(source, region, made)


def _is_choice(source: Source, node: Node) -> bool:
    """`args.amp == "yes"`, `bool(int(os.environ.get("AMP", "1")))`."""
    return isinstance(node, cst.Comparison) or any(
        (source.origin(inner) or "").startswith(("os.environ", "os.getenv")) for inner in walk(node)
    )


def _flag(source: Source, scaler: Node | None) -> str:
    """The flag that a scaler is on with, or the one that it is off with: `args.amp`, `not args.no_amp`."""
    if isinstance(scaler, (cst.Comparison, cst.Call)) and _is_choice(source, scaler):
        text = source.code(scaler)
        about = _DEVICE.search(text) or _OTHER_DEVICE.search(text) or _DTYPE.search(text)
        return "" if about or "\n" in text else text
    negated = _negated(scaler)
    node = scaler if negated is None else _value(source, negated)
    name = dotted(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
    if not name or _is(node, "True", "False") or _DEVICE.search(name):
        return ""
    if negated is None:
        return name
    return "" if _OTHER_DEVICE.search(name) else f"not {name}"


def _negated(node: Node | None) -> Node | None:
    """The `amp` of `not amp`."""
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        return node.expression
    return None


def _enabled(source: Source, region: Region) -> Node | None:
    origin = source.origin(region.call.func) or ""
    place = 0 if origin.startswith(("torch.cuda.", "torch.cpu.")) else 2
    return Arguments.of(region.call).get("enabled", place)


def _value(source: Source, node: Node | None) -> Node | None:
    """What a name or an attribute of self is given, if it gets one value that can be read here; else itself."""
    values = [v for v, note in source.values.sources(node) if note is None] if node else []
    if len(values) == 1 and values[0] is not None and len(source.values.sources(node)) == 1:
        binding = source.names.only_binding(node)
        if binding is None or binding.kind == "assign":
            return values[0]
    return node


def _is(node: Node | None, *names: str) -> bool:
    return isinstance(node, cst.Name) and node.value in names


def _is_on(node: Node | None) -> bool:
    """Whether something is certainly on: nothing is said, or True."""
    return node is None or _is(node, "True")


def _opposite(source: Source, one: Node | None, other: Node | None) -> bool:
    """`not amp` and `amp`."""
    for negated, plain in ((one, other), (other, one)):
        expression = _negated(negated)
        if expression is not None:
            same = _value(source, expression)
            if plain is not None and key(source, same) == key(source, plain):
                return True
    return False


def _fix(source: Source, region: Region, made: cst.Call) -> Fix | None:
    """The scaler's flag for the region, if it means the same there."""
    flag = Arguments.of(made).get("enabled")
    root = flag if (negated := _negated(flag)) is None else negated
    while isinstance(root, cst.Attribute):
        root = root.value
    if flag is None or not isinstance(root, cst.Name) or region.call.args[2:]:
        return None
    at_scaler = source.scope(made).lookup(root.value)
    if source.scope(region.call).lookup(root.value) is not at_scaler:
        return None
    if Arguments.of(region.call).get("enabled") is not None:
        return None
    text = f"enabled={source.code(flag)}"
    if region.call.args:
        edit = source.after(region.call.args[-1].value, f", {text}")
    else:
        end = source.span(region.call).end - 1
        edit = Edit(end, end, text)
    return source.fix("Let the flag decide on both", edit, unsafe=True)


RULE = Rule(
    code="AMP216",
    name="scaler-and-region-disagree",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="the scaler and the region of its loss are not on together",
    what=(
        "A `GradScaler(enabled=...)` and the region that its loss comes from, where one of the two is off and the "
        "other on, or the region is on whatever the scaler's flag says."
    ),
    why=(
        "A scaler that is off hands losses and gradients on as they are. Float16 gradients below 6e-8 then become "
        "zero. A region that is off leaves the scaler nothing to protect: it costs a look at all gradients, and skips "
        "a step whenever the scale has grown too far."
    ),
    fine="The flag is never off where the region is on.",
    words=("GradScaler enabled scale( autocast",),
    check=check,
    example="""
 import torch

 def train(model, batches, optimizer, amp):
     scaler = torch.amp.GradScaler("cuda", enabled=amp)
     for batch in batches:
-        with torch.autocast("cuda", dtype=torch.float16):
+        with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
             loss = model(batch)
         scaler.scale(loss).backward()
         scaler.step(optimizer)
         scaler.update()
""",
)
