"""AMP314: an autograd Function that computes its forward again in backward, without the forward's region."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.functions import Method, functions
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk

__all__ = ["RULE"]

_RUNS = ("list", "tuple", "reversed", "enumerate", "iter")
_STEPS = 3  # from a loop's name to the list, to its name, to ctx
_GRADIENTS = ("torch.enable_grad", "torch.set_grad_enabled")


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each call in a backward of a function that forward got as an argument and ran."""
    for node, methods in functions(source):
        forward, backward = methods.get("forward"), methods.get("backward")
        if forward is None or backward is None or forward.decorators or backward.decorators:
            continue
        if _handles_regions(node):
            continue
        selection = _stored_functions(forward)
        call = next(
            (c for c in _with_gradients(source, backward) if _runs(backward, c, selection)), None
        )
        if call is not None:
            yield source.find(RULE, call)


def _handles_regions(node: Node) -> bool:
    """Return True if a name in a class suggests that it handles regions."""
    names = (n.value for n in walk(node) if isinstance(n, cst.Name))
    return any("autocast" in name.lower() or "amp" in name.lower().split("_") for name in names)


def _stored_functions(forward: Method) -> set[str]:
    """Return the attributes of ctx in which forward stores functions, or lists of them, that it calls."""
    params = forward.node.params
    names = {param.name.value for param in params.params[1:]}
    if isinstance(params.star_arg, cst.Param):
        names.add(params.star_arg.name.value)
    called = _called(forward)
    results = set()
    for statement in (n for n in walk(forward.node.body) if isinstance(n, cst.Assign)):
        value = _whole(statement.value)
        if value not in names:
            continue
        selection = {dotted(target.target) or "" for target in statement.targets}
        if value in called or selection & called:
            results |= {name for name in selection if name.startswith("ctx.")}
    return results


def _called(method: Method) -> set[str]:
    inner = list(walk(method.node.body))
    called = {dotted(n.func) or "" for n in inner if isinstance(n, cst.Call)}
    for loop in (n for n in inner if isinstance(n, cst.For)):
        if any(isinstance(n, cst.Name) and n.value in called for n in walk(loop.target)):
            called.add(_whole(loop.iter))
    items = [n.func for n in inner if isinstance(n, cst.Call)]
    return called | {dotted(item.value) or "" for item in items if isinstance(item, cst.Subscript)}


def _whole(node: Node) -> str:
    """Return the list in `list(blocks)`, `enumerate(blocks)`, `blocks[::-1]` and other forms with all its items."""
    while True:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.args:
            if node.func.value not in _RUNS:
                return ""
            node = node.args[0].value
        elif isinstance(node, cst.Subscript) and isinstance(node.slice[0].slice, cst.Slice):
            node = node.value
        else:
            return dotted(node) or ""


def _with_gradients(source: Source, backward: Method) -> Iterator[cst.Call]:
    for statement in (n for n in walk(backward.node.body) if isinstance(n, cst.With)):
        items = [i.item for i in statement.items if isinstance(i.item, cst.Call)]
        if any(source.origin(item.func) in _GRADIENTS for item in items):
            yield from (n for n in walk(statement.body) if isinstance(n, cst.Call))


def _runs(backward: Method, call: cst.Call, selection: set[str]) -> bool:
    """Return True if a call runs a stored function, by its name in ctx or by a name that is assigned from it."""
    func = call.func.value if isinstance(call.func, cst.Subscript) else call.func
    expected = {dotted(func) or ""}
    for _ in range(_STEPS):
        if expected & selection:
            return True
        for node in walk(backward.node.body):
            if isinstance(node, cst.Assign):
                targets = {dotted(target.target) for target in node.targets}
                expected |= {_whole(node.value)} if targets & expected else set()
            elif isinstance(node, cst.For):
                names = {n.value for n in walk(node.target) if isinstance(n, cst.Name)}
                expected |= {_whole(node.iter)} if names & expected else set()
        expected.discard("")
    return bool(expected & selection)


RULE = LintRule(
    code="AMP314",
    name="checkpoint-without-region",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="this runs without the region of forward; use `torch.utils.checkpoint.checkpoint`",
    what=(
        "An autograd Function that runs a function in forward and once more in backward, under "
        "`torch.enable_grad()` alone: a checkpoint by hand."
    ),
    why=(
        "A backward pass runs outside the region. It repeats in float32 what forward computed in lower precision: "
        "slower, with more memory, and with other values than those of the loss. `torch.utils.checkpoint` enters the "
        "regions again, and so does a Function with `custom_fwd` and `custom_bwd`."
    ),
    fine="The model is cast by hand and never runs in a region.",
    words=("Function enable_grad backward", "Function set_grad_enabled backward"),
    check=check,
    example="""
 import torch

 class Reversible(torch.autograd.Function):
     @staticmethod
+    @torch.amp.custom_fwd(device_type="cuda")
     def forward(ctx, x, block):
         ctx.block = block
         ctx.save_for_backward(x)
         with torch.no_grad():
             return block(x)

     @staticmethod
+    @torch.amp.custom_bwd(device_type="cuda")
     def backward(ctx, grad):
         x = ctx.saved_tensors[0].detach().requires_grad_()
         with torch.enable_grad():
             y = ctx.block(x)
         y.backward(grad)
         return x.grad, None
""",
)
