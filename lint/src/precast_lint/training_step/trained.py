"""The models that are trained, and the casts of them to 16 bits.

Invariant: a model is trained if an optimizer of PyTorch's gets its `parameters()`; it is named by its text ("model",
"self.net"), which means one thing in one function, or for an attribute of self in one class.
"""

from __future__ import annotations

from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow_events import is_optimizer, key

__all__ = ["cast_and_move", "cast_dtype", "cast_model", "home", "optimizers_of", "trained"]

_METHODS = {"half": "torch.float16", "bfloat16": "torch.bfloat16"}
_LOW = {
    "torch.float16": "torch.float16",
    "torch.half": "torch.float16",
    "torch.bfloat16": "torch.bfloat16",
}


def trained(source: Source) -> dict[str, Node | None]:
    """The models whose parameters an optimizer gets, by their text, with the function where it does."""
    return {name: home(source, call, name) for name, call in optimizers_of(source)}


def optimizers_of(source: Source) -> list[tuple[str, cst.Call]]:
    """The calls that make optimizers of all parameters of a model, each with the model's text."""
    found = []
    for call in source.all(cst.Call):
        if not (source.origin(call.func) or "").startswith("torch.optim."):
            continue
        first = Arguments.of(call).get("params", 0)
        if not is_optimizer(source, call):
            continue
        func = first.func if isinstance(first, cst.Call) else None
        if isinstance(func, cst.Attribute) and func.attr.value == "parameters":
            found.append((key(source, func.value) or "", call))
    return found


def home(source: Source, node: Node, name: str) -> Node | None:
    """Where a name means one thing: the function around a node, or for an attribute of self the class."""
    if name.startswith("self."):
        return source.values.enclosing_class(node)
    return source.function(node)


def cast_dtype(source: Source, call: cst.Call, arguments: Arguments) -> str | None:
    """The lower precision that a call casts to: `x.half()`, `x.to(torch.float16)`; nothing else at once."""
    return cast_and_move(source, call, arguments) if len(call.args) < 2 else None


def cast_and_move(source: Source, call: cst.Call, arguments: Arguments) -> str | None:
    """The same where the call may also move to a device: `x.to("cuda", torch.float16)`."""
    assert isinstance(call.func, cst.Attribute)
    name = call.func.attr.value
    if name in _METHODS:
        return None if call.args else _METHODS[name]
    if name != "to" or arguments.starred:
        return None
    given = (arguments.get("dtype"), *arguments.positional)
    found = (_LOW.get(source.origin(value) or "") for value in given)
    return next((dtype for dtype in found if dtype), None)


def cast_model(
    source: Source, call: cst.Call, owner: Node, models: dict[str, Node | None]
) -> str | None:
    """The trained model that a call casts: `model.half()`, `model = Net().half().cuda()`."""
    name = key(source, owner) or ""
    if name in models and models[name] is home(source, call, name):
        return name
    outer: Node = call
    while isinstance(source.parents[outer], (cst.Attribute, cst.Call)):
        outer = source.parents[outer]
    parent = source.parents[outer]
    if not isinstance(parent, cst.Assign) or len(parent.targets) != 1:
        return None
    name = key(source, parent.targets[0].target) or ""
    # of a name that gets a tensor later on it says nothing: only what is made here
    is_here = models.get(name, source.module) is home(source, call, name)
    made = is_here and (isinstance(owner, cst.Call) or name.startswith("self."))
    return name if made else None
