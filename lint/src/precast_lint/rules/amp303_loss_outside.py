"""AMP303: a loss that is computed after the region that computed its inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.callers import calls_of, regions_of_callers
from precast_lint.meaning.functions import called_forward
from precast_lint.meaning.regions import region_in_force, regions, regions_around
from precast_lint.meaning.tensors import constant, is_lowered, operation, value_of
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.propagated import has_no_grad, is_propagated

__all__ = ["RULE"]

_FUNCTIONS = frozenset(
    f"torch.nn.functional.{name}"
    for name in (
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "gaussian_nll_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "nll_loss",
        "smooth_l1_loss",
    )
)
_CLASSES = re.compile(r"torch\.nn\.(modules\.loss\.)?\w+Loss$")
_PROMOTED = re.compile(
    r"(^|\.)(mse_loss|l1_loss|smooth_l1_loss|kl_div|MSELoss|L1Loss|SmoothL1Loss|KLDivLoss)$"
)
_MODELS = re.compile(
    r"(model|net|network|module|generator|discriminator|unet|classifier|teacher|student)",
    re.IGNORECASE,
)
_TEMPERATURE = re.compile(r"(^|[._])(t|tau|temp|temperature)$", re.IGNORECASE)
_DEEP = 3  # functions that return what others return
_WIDE = {"float", "double", "to", "type", "softmax", "log_softmax", "exp", "sum", "norm", "pow"}
_KEEPS = {"view", "reshape", "squeeze", "flatten", "transpose", "permute", "contiguous"}
_PARTS = {"last_hidden_state", "logits", "sample"}


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each loss of a region's outputs that is computed after the region and propagated back."""
    if not any(region.enabled is not False for region in regions(source)):
        return
    for call in source.all(cst.Call):
        loss = _loss(source, call)
        if loss is None or _is_widened(call):
            continue
        if not any(_is_output(source, arg.value, call, _DEEP) for arg in call.args[:2]):
            continue
        if _PROMOTED.search(loss) and not _is_low(source, call):
            continue
        region = next(regions_around(source, call), None)
        if region is not None and region.enabled is not False:
            continue
        if region is None and any(regions_of_callers(source, call)):
            continue
        if is_propagated(source, call):
            yield source.find(RULE, call)


def _is_widened(call: cst.Call) -> bool:
    """Return True if one of a loss's inputs is cast to float32, so that PyTorch promotes the other one."""
    casts = [arg.value.func for arg in call.args[:2] if isinstance(arg.value, cst.Call)]
    return any(isinstance(func, cst.Attribute) and func.attr.value == "float" for func in casts)


def _is_low(source: Source, call: cst.Call) -> bool:
    """Return True if all inputs of a loss are 16-bit; with a float32 input PyTorch computes it in float32.

    Cross entropies round sigmoid and softmax to 16 bits also with a float32 target.
    """
    arguments = Arguments.of(call)
    target = arguments.get("target", 1)
    first = arguments.get("input", 0)

    if first is None or target is None:
        return False
    entry, other = first, target
    if not _is_output(source, first, call, _DEEP):
        entry, other = target, first
    alike = _text(source, entry)

    def is_output(node: Node) -> bool:
        if _text(source, node) == alike:
            return True  # whatever it is of: the other one has its dtype
        if isinstance(node, cst.Name):
            return False  # it may have other values than the last one in the text
        inside = _is_forward_inside(source, node, grads=False)
        return inside or _is_output(source, node, node, _DEEP, grads=False)

    return _is_low_target(source, other, is_output)


def _normalized(source: Source, node: Node) -> Node:
    """Return the x of `F.log_softmax(x / temperature, -1)` outside of regions, where a softmax keeps the dtype."""
    inner = operation(source, value_of(source, node), "softmax", "log_softmax")
    if inner is None or "dtype" in inner.keywords or region_in_force(source, inner.call):
        return node
    logits = inner.operand
    if isinstance(logits, cst.BinaryOperation) and isinstance(logits.operator, cst.Divide):
        is_number = constant(source, logits.right) is not None
        named = key(source, logits.right) or ""
        return logits.left if is_number or _TEMPERATURE.search(named) else node
    return logits


def _text(source: Source, node: Node) -> str | None:
    """Return the text of the name that an expression is a part or a view of."""
    plain = _plain(node)
    return source.code(plain) if plain is not None else None


def _is_output(source: Source, node: Node, at: Node, depth: int, grads: bool = True) -> bool:
    """Return True if an expression after a region is what a model returned in it, in the same dtype."""
    plain = _plain(_normalized(source, node))
    if plain is None or depth == 0:
        return False
    if isinstance(plain, cst.Call):
        forward = called_forward(source, plain)
        returned = returned_by(forward) if forward is not None else source.values.results(plain)
        return bool(returned) and all(
            _is_output(source, value, value, depth - 1, grads)
            or _is_forward_inside(source, value, grads)
            for value in returned
        )
    target = _last_target(source, plain, at) or _only_target(source, plain)
    if target is None:
        values = _handed(source, plain)
        every = all(_is_output(source, one, one, depth - 1, grads=False) for one in values)
        return every and any(_is_output(source, one, one, depth - 1, grads) for one in values)
    value = _given(source, target)
    if value is not None and region_in_force(source, target) is not None:
        return _is_surely_there(source, target) and _is_forward_inside(source, value, grads)
    several = source.values.contents.of_target(target) if value is not None else None
    if several:
        return all(
            _is_output(source, one, one, depth - 1, grads) or _is_forward_inside(source, one, grads)
            for one in several
        )
    is_call = isinstance(value, cst.Call) and target in _targets(source, value)
    return is_call and value is not None and _is_output(source, value, at, depth - 1, grads)


def _last_target(source: Source, plain: Node, at: Node) -> Node | None:
    """Return the last target before a node at which a name or an attribute of self gets a value."""
    text, function, end = key(source, plain), source.function(at), source.span(at).start
    before = [
        target
        for target in _stored(source).get(text or "", ())
        if source.function(target) is function and source.span(target).start < end
    ]
    last = max(before, key=lambda target: source.span(target).start, default=None)
    if last is None or _given(source, last) is None:
        return None
    return last


def _only_target(source: Source, plain: Node) -> Node | None:
    """Return the only target in a class for an attribute of self, if it is in a region."""
    if not isinstance(plain, cst.Attribute) or source.values.enclosing_class(plain) is None:
        return None
    home = source.values.enclosing_class(plain)
    results = [
        target
        for target in _stored(source).get(key(source, plain) or "", ())
        if source.values.enclosing_class(target) is home
    ]
    is_one = len(results) == 1 and region_in_force(source, results[0]) is not None
    return results[0] if is_one else None


@once
def _stored(source: Source) -> dict[str, list[Node]]:
    table: dict[str, list[Node]] = {}
    kinds = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.AsName)
    for line in source.all(*kinds):
        target = line.name if isinstance(line, cst.AsName) else line.target  # type: ignore[attr-defined]
        items = target.elements if isinstance(target, (cst.Tuple, cst.List)) else ()
        for one in (target, *(item.value for item in items)):
            if isinstance(one, (cst.Name, cst.Attribute)):
                table.setdefault(key(source, one) or "", []).append(one)
    return table


def _given(source: Source, target: Node) -> Node | None:
    """Return the value assigned to a target, or to the `mean, deviation` that contains it."""
    outer = source.parents[target]
    if isinstance(outer, cst.Element):
        outer = source.parents[source.parents[outer]]
    if isinstance(outer, cst.AssignTarget):
        outer = source.parents[outer]
    return outer.value if isinstance(outer, (cst.Assign, cst.AnnAssign, cst.NamedExpr)) else None


def _targets(source: Source, value: Node) -> list[Node]:
    outer = source.parents[value]
    if isinstance(outer, cst.Assign):
        return [one.target for one in outer.targets]
    return [outer.target] if isinstance(outer, (cst.AnnAssign, cst.NamedExpr)) else []


def _is_surely_there(source: Source, target: Node) -> bool:
    """Return True if each run of a region assigns a target: it is in no loop or `try` inside the region."""
    for outer in source.around(target):
        if isinstance(outer, (cst.For, cst.While, cst.Try, cst.FunctionDef)):
            return isinstance(outer, cst.FunctionDef)
        if isinstance(outer, cst.With):
            return True
    return True


def _is_forward_inside(source: Source, node: Node, grads: bool) -> bool:
    """Return True if an expression is a model's result that a region computes."""
    if region_in_force(source, node) is None or (grads and has_no_grad(source, node)):
        return False  # of a teacher without gradients the loss of a float32 model is float32
    plain = _plain(node)
    if isinstance(plain, (cst.Name, cst.Attribute)):
        target = _last_target(source, plain, node)
        value = _given(source, target) if target is not None else None
        plain = _plain(value) if value is not None else None
    return isinstance(plain, cst.Call) and _is_forward(source, plain)


def _is_forward(source: Source, node: Node) -> bool:
    """Return True for `model(x)`, `self.model(x)` and `model.forward(x)`: by the name, or by a call of `parameters`."""
    if not isinstance(node, cst.Call):
        return False
    func = node.func
    if isinstance(func, cst.Attribute) and func.attr.value == "forward":
        func = func.value
    forward = called_forward(source, node)
    if forward is not None and any(map(_is_wide, returned_by(forward))):
        return False
    if _has_parameters(source, func) or is_lowered(source, node):
        return True
    last = func.attr.value if isinstance(func, cst.Attribute) else getattr(func, "value", "")
    return isinstance(last, str) and _MODELS.search(last) is not None and "loss" not in last.lower()


def _is_wide(value: Node) -> bool:
    """Return True if a result may be float32: by a cast, or by an operation that a region runs in float32."""
    return any(isinstance(n, cst.Attribute) and n.attr.value in _WIDE for n in walk(value))


def _has_parameters(source: Source, func: Node) -> bool:
    """Return True if the file calls `parameters` on the called object, or on the value it was assigned from."""
    values = [func, *(value for value, _ in source.values.sources(func) if value is not None)]
    plain = (v for v in values if isinstance(v, (cst.Name, cst.Attribute)))
    return any(key(source, value) in _parameter_owners(source) for value in plain)


@once
def _parameter_owners(source: Source) -> set[str | None]:
    return {key(source, owner) for _, owner, _ in source.methods("parameters")}


def _loss(source: Source, call: cst.Call) -> str | None:
    """Return the documented name of PyTorch's function or class if a call computes a loss."""
    path = source.origin(call.func)
    if path in _FUNCTIONS:
        return path
    definition = None
    if isinstance(call.func, cst.Call):
        definition = source.origin(call.func.func)
    elif isinstance(call.func, (cst.Name, cst.Attribute, cst.Subscript)):
        definition = source.instance(call.func)
    return definition if definition is not None and _CLASSES.match(definition) else None


def _plain(node: Node | None) -> Node | None:
    """Return the name or call in `out.logits`, `out[0]`, `out.view(-1)`: none of these changes the dtype."""
    while not isinstance(node, cst.Name):
        if isinstance(node, cst.Call):
            func = node.func
            if not isinstance(func, cst.Attribute) or func.attr.value not in _KEEPS:
                return node
            node = func.value
        elif isinstance(node, cst.Subscript) or (
            isinstance(node, cst.Attribute) and node.attr.value in _PARTS
        ):
            node = node.value
        elif isinstance(node, cst.Attribute) and dotted(node.value) == "self":
            return node
        else:
            return None
    return node


_LOW = ("torch.float16", "torch.half", "torch.bfloat16")
_INTEGERS = ("int", "long", "short")
_LIKE = {f"torch.{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn")}
_MAKERS = {
    f"torch.{name}" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "tensor")
}
_NEW = ("new_empty", "new_full", "new_ones", "new_zeros")
_SAME_DTYPE = re.compile(
    r"clone|contiguous|cpu|cuda|detach|diagonal|expand|expand_as|flatten|movedim|narrow|permute|repeat|reshape|select|"
    r"squeeze|swapaxes|t|transpose|unflatten|unsqueeze|view"
)


def _is_low_target(
    source: Source,
    node: Node,
    is_output: Callable[[Node], bool],
    depth: int = 8,
    followed: frozenset[Node] = frozenset(),
) -> bool:
    """Return True if a target is 16-bit, or of integers, for certain, whichever of its values it has.

    `is_output` returns True for what a model returned in a region, in its dtype. `followed` are the values that are
    already followed, as in a loop with `y = y.cuda()`.
    """
    if node in followed or depth == 0:
        return node in followed

    def again(inner: Node) -> bool:
        return _is_low_target(source, inner, is_output, depth - 1, followed | {node})

    if isinstance(node, cst.Subscript):
        index = node.slice[0].slice
        one = index.value if len(node.slice) == 1 and isinstance(index, cst.Index) else None
        if isinstance(one, (cst.Integer, cst.SimpleString)):
            return False  # one of several results of a model may be float32
        return again(node.value)
    if is_output(node):
        return True
    if isinstance(node, cst.Call):
        return _is_low_call(source, node, again)
    if isinstance(node, cst.Attribute):
        values = [value for value, _ in source.values.sources(node)]
        return bool(values) and all(value is not None and again(value) for value in values)
    if not isinstance(node, cst.Name) or node not in source.scopes.scope_of:
        return False
    results = values_seen(source, node)
    if len(results) == 1 and results[0].kind == "param":
        argument = _handed(source, node)
        return bool(argument) and all(map(again, argument))
    values = [b.value if b.kind == "assign" else None for b in results]
    return bool(values) and all(value is not None and again(value) for value in values)


def _is_low_call(source: Source, call: cst.Call, again: Callable[[Node], bool]) -> bool:
    """Return True for a cast to 16 bits or integers, a tensor created so, and operations that keep such a dtype."""
    arguments = Arguments.of(call)
    values = [*arguments.positional, *arguments.keywords.values()]
    dtype = arguments.keywords.get("dtype")

    def is_low_dtype(value: Node) -> bool:
        if isinstance(value, cst.Attribute) and value.attr.value == "dtype":
            return again(value.value)
        return source.origin(value) in _LOW

    origin = source.origin(call.func)
    if origin is not None:
        is_made_low = dtype is not None and is_low_dtype(dtype)
        if origin in _MAKERS:
            return is_made_low
        first = arguments.get("input", 0)
        return origin in _LIKE and (
            is_made_low or (dtype is None and first is not None and again(first))
        )
    if not isinstance(call.func, cst.Attribute):
        return False
    name, owner = call.func.attr.value, call.func.value
    if name in ("half", "bfloat16", *_INTEGERS):
        return not values
    if name == "type_as":
        return len(values) == 1 and again(values[0])
    if name in ("to", "type"):
        alike = len(values) == 1 and isinstance(values[0], cst.Name) and again(values[0])
        return alike or any(map(is_low_dtype, values))
    if name in _NEW:
        return is_low_dtype(dtype) if dtype is not None else again(owner)
    return bool(_SAME_DTYPE.fullmatch(name)) and again(owner)


def _handed(source: Source, plain: Node) -> list[Node]:
    """Return the arguments of all calls of this file for a parameter; empty if one is unknown."""
    binding = source.names.only_binding(plain)
    function = source.function(plain)
    if binding is None or binding.kind != "param" or function is None:
        return []
    names = [
        param.name.value for param in (*function.params.posonly_params, *function.params.params)
    ]
    names = names[1:] if names[:1] == ["self"] else names
    at = names.index(binding.name) if binding.name in names else None
    results = [Arguments.of(call).get(binding.name, at) for call in calls_of(source, function)]
    entries = [value for value in results if value is not None]
    return entries if len(entries) == len(results) else []


RULE = LintRule(
    code="AMP303",
    name="loss-outside-region",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="this loss is computed in the lower precision of its inputs; compute it inside the region",
    what="A loss of PyTorch's on the outputs of a model in a region, if the loss is computed after the region or in a "
    "disabled one, and `backward` is called on it.",
    why=(
        "Inside a region for CUDA, losses run in float32. After the region they run in the dtype of their inputs: sums "
        "over many elements lose digits, and may overflow in float16."
    ),
    fine=(
        "The model returns float32, because its last operation does. `mse_loss`, `l1_loss` and `smooth_l1_loss` with a "
        "float32 target also run in float32 after the region, and are reported only if their target is 16-bit."
    ),
    words=("autocast backward",),
    check=check,
    example="""
 import torch
 import torch.nn.functional as F

 with torch.autocast("cuda"):
     out = model(x)
-loss = F.cross_entropy(out, y)
+    loss = F.cross_entropy(out, y)
 loss.backward()
""",
)
