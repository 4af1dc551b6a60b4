"""Events of a training step: backward, scale, step, update, unscale_, clip, zero_grad ...

Invariants: an expression is named by its text ("scaler", "self.scaler", "optims[0]"), which is its *key*;
a call is an event of a protocol only if its receiver's class is known, except `backward` without
positional arguments and `zero_grad`, whose names are enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from precast_lint.meaning.functions import followed_call
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.parsing.values import SCALERS

__all__ = ["CallContext", "Event", "call_event", "is_optimizer", "key", "scaler_of"]

_CLIPS = {
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_norm",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
    "torch.nn.utils.clip_grad.clip_grad_value_",
    "torch.nn.utils.clip_grads_with_norm_",
    "torch.nn.utils.clip_grad.clip_grads_with_norm_",
}
_SELF = cst.Name("self")
_SCALER_METHODS = {
    "scale": "scale",
    "unscale_": "unscale",
    "step": "scaler_step",
    "update": "update",
}


@dataclass(frozen=True, eq=False)
class Event:
    """An event when a function runs.

    Attributes:
        kind: one of
            scale, unscale, scaler_step, update: methods of a scaler;
            backward: of a loss, or torch.autograd.backward (`scaler` is the scaler of the loss);
            autograd_grad: torch.autograd.grad; optimizer_step, scheduler_step, zero_grad, clip;
            grad_read: `.grad` is read; call: any other call;
            assign: a name, attribute or item gets a value;
            loop: an iteration begins; return: the function is left.
        node: the call, attribute, target or statement.
        receiver: the key of the object of a method, or of the target of an assignment.
        scaler: the key of the scaler.
        optimizer: the key of the optimizer.
        arguments: the arguments of a call.
        value: the assigned value.
        assigned: the key of the target in the function that is followed.
        instance: the class of the receiver, if context.
    """

    kind: str
    node: Node
    receiver: str | None = None
    scaler: str | None = None
    optimizer: str | None = None
    arguments: Arguments | None = None
    value: Node | None = None
    assigned: str | None = None
    instance: str | None = None


def key(source: Source, node: Node | None) -> str | None:
    """Return the key of an expression: its text; None for no expression."""
    if node is None:
        return None
    cached = source.cache.setdefault("keys", {})
    assert isinstance(cached, dict)
    text = cached.get(node)
    if text is None:
        text = cached[node] = _text(source, node)
    assert isinstance(text, str)
    return text


def _text(source: Source, node: Node) -> str:
    """Return the code of an expression. LibCST is slow even for a name."""
    if isinstance(node, cst.Name) and not node.lpar:
        return node.value
    if isinstance(node, cst.Attribute) and not node.lpar and not node.attr.lpar:
        dot = node.dot
        if dot.whitespace_before.empty and dot.whitespace_after.empty:
            return f"{key(source, node.value)}.{node.attr.value}"
    module = source.module
    assert isinstance(module, cst.Module)
    return module.code_for_node(node).strip()


def is_optimizer(source: Source, node: Node) -> bool:
    """Return True if an expression is known to be an optimizer."""
    result = source.instance(node) or ""
    if result.startswith(("torch.optim.", "apex.optimizers.", "bitsandbytes.optim.")):
        return "lr_scheduler" not in result and "swa_utils" not in result
    return _acts_as_optimizer(source, node)


@dataclass(frozen=True)
class CallContext:
    """The scalers of unknown class and the optimizers that scalers step, by their keys in the function followed."""

    source: Source
    named: Callable[[Node | None], str | None]
    scalers: frozenset[str] = field(default_factory=frozenset)
    optimizers: frozenset[str] = field(default_factory=frozenset)

    def is_scaler(self, node: Node) -> bool:
        """Return True if an expression is a scaler."""
        return self.source.instance(node) in SCALERS or self.named(node) in self.scalers


def scaler_of(context: CallContext, node: Node | None, scaled: dict[str, str]) -> str | None:
    """Return the scaler that scaled a loss: `scaler.scale(loss) / 2`, or a name with such a value."""
    if node is None:
        return None
    for inner in walk(node):
        if isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
            owner = inner.func.value
            if inner.func.attr.value == "scale" and context.is_scaler(owner):
                return context.named(owner)
            if (result := _scaler_of_result(context, inner)) is not None:
                return result
        if (
            isinstance(inner, (cst.Name, cst.Attribute))
            and (text := key(context.source, inner)) in scaled
        ):
            return scaled[text or ""]
    return None


def _scaler_of_result(context: CallContext, call: cst.Call) -> str | None:
    """Return the scaler that scaled the result of a function of this file: `self.scaled(loss)`."""
    source = context.source
    result = followed_call(source, call)
    if result is None or "scale" not in source.words:
        return None
    function, argument = result
    scalers: set[str | None] = set()
    for returned in returned_by(function):
        binding = source.names.only_binding(returned)
        value = binding.value if binding is not None and binding.kind == "assign" else returned
        func = value.func if isinstance(value, cst.Call) else None
        is_scale = isinstance(func, cst.Attribute) and func.attr.value == "scale"
        if not is_scale or not isinstance(func, cst.Attribute):
            return None
        text = key(source, func.value) or ""
        root, dot, rest = text.partition(".")
        if root in argument:
            text = f"{context.named(argument[root])}{dot}{rest}"
        elif root == "self":
            text = f"{context.named(_SELF)}{dot}{rest}"
        is_one = source.instance(func.value) in SCALERS or text in context.scalers
        scalers.add(text if is_one else None)
    return scalers.pop() if len(scalers) == 1 else None


def call_event(context: CallContext, call: cst.Call, scaled: dict[str, str]) -> Event:
    """Return the event of a call; `scaled` maps names that hold scaled losses to their scalers."""
    source = context.source
    arguments = Arguments.of(call)
    origin = source.origin(call.func) or ""
    if origin in _CLIPS:
        return Event("clip", call, arguments=arguments)
    inner = _lambda_call(source, call)
    if inner is not None and source.origin(inner.func) in _CLIPS:
        return Event("clip", call, arguments=Arguments.of(inner))
    if origin in ("torch.autograd.backward", "torch.autograd.grad"):
        kind = "backward" if origin.endswith("backward") else "autograd_grad"
        loss = arguments.get("tensors" if kind == "backward" else "outputs", 0)
        return Event(kind, call, scaler=scaler_of(context, loss, scaled), arguments=arguments)
    if isinstance(call.func, cst.Attribute):
        return _method(context, call, arguments, scaled)
    return Event("call", call, arguments=arguments)


def _lambda_call(source: Source, call: cst.Call) -> cst.Call | None:
    """Return the call in a `lambda`, if that is the only value of the called name or attribute of self."""
    if not isinstance(call.func, (cst.Name, cst.Attribute)) or not source.all(cst.Lambda):
        return None
    value = source.values.sources(call.func)
    definition = value[0][0] if len(value) == 1 else None
    inner = definition.body if isinstance(definition, cst.Lambda) else None
    return inner if isinstance(inner, cst.Call) else None


def _method(
    context: CallContext, call: cst.Call, arguments: Arguments, scaled: dict[str, str]
) -> Event:
    source, optimizers = context.source, context.optimizers
    assert isinstance(call.func, cst.Attribute)
    name, owner = call.func.attr.value, call.func.value
    receiver = context.named(owner)
    instance = source.instance(owner)
    kind = "call"
    scaler = optimizer = None
    if name in _SCALER_METHODS and context.is_scaler(owner):
        kind, scaler = _SCALER_METHODS[name], receiver
        if name in ("unscale_", "step"):
            optimizer = context.named(arguments.get("optimizer", 0))
    elif name == "backward" and not arguments.positional:
        kind, scaler = "backward", scaler_of(context, owner, scaled)
    elif name == "clip_grad_norm_" and (instance or "").startswith("torch.distributed.fsdp."):
        kind = "clip"
    elif name == "zero_grad":
        kind = "zero_grad"
        optimizer = receiver if is_optimizer(source, owner) or receiver in optimizers else None
    elif name == "step" and (is_optimizer(source, owner) or receiver in optimizers):
        kind, optimizer = "optimizer_step", receiver
    elif name == "step" and _is_scheduler(instance):
        kind = "scheduler_step"
    return Event(kind, call, receiver, scaler, optimizer, arguments, instance=instance)


_NAME = re.compile(r"(^|_)(optim(izer)?|opt)(?![a-z])", re.IGNORECASE)
_MAKER = re.compile(r"(^|[._])(build|create|get|make|configure)_optim", re.IGNORECASE)
_SCHEDULER = re.compile(r"lr_scheduler|(transformers|diffusers)\..*\bget_\w*schedule\w*$")


def _acts_as_optimizer(source: Source, node: Node) -> bool:
    """Return True if the name, `step` and `zero_grad` show that something is an optimizer."""
    last = node.attr if isinstance(node, cst.Attribute) else node
    if not isinstance(last, cst.Name) or not _NAME.search(last.value):
        return False
    definition = source.values.constructor(node)
    if isinstance(definition, cst.Call) and not _MAKER.search(dotted(definition.func) or ""):
        return False
    entry = source.instance(node)
    return (entry is None or _MAKER.search(entry) is not None) and dotted(node) in _used(source)


def _is_scheduler(instance: str | None) -> bool:
    """Return True if a class, or the function that creates an object, is a learning rate scheduler's."""
    return _SCHEDULER.search(instance or "") is not None


@once
def _used(source: Source) -> set[str]:
    """Return the objects, as texts, with calls of `step` and `zero_grad`, but not of `backward`, `train`, `update`."""
    called: dict[str, set[str]] = {"step": set(), "zero_grad": set(), "other": set()}
    for call, owner, _ in source.methods("step", "zero_grad", "backward", "train", "update"):
        assert isinstance(call.func, cst.Attribute)
        called.get(call.func.attr.value, called["other"]).add(dotted(owner) or "")
    return called["step"] & called["zero_grad"] - called["other"] - {""}
