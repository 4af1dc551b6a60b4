"""The models that are trained, and the casts of them to 16 bits.

Invariants: a model is trained if an optimizer of PyTorch's gets parameters of it; it is named by its text ("model",
"self.net") together with its home: the function, or for an attribute of self the class, in which the text means one
thing. What a parameter is handed, and what an attribute of self gets from one, is the same model under another name.
"""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings
from precast_lint.training_step.flow_events import is_optimizer, key

__all__ = [
    "Models",
    "home",
    "names_of",
    "optimizers_of",
    "trained",
]

Models = dict[tuple[str, Node | None], cst.Call]
"""Models by their texts and homes, each with the call that makes its optimizer."""

_METHODS = {"half": "torch.float16", "bfloat16": "torch.bfloat16"}
_LOW = {
    "torch.float16": "torch.float16",
    "torch.half": "torch.float16",
    "torch.bfloat16": "torch.bfloat16",
}
_PICK = ("filter", "list", "tuple")
_DEEP = 6  # names, lists and groups in one another


def trained(source: Source) -> Models:
    """The models whose parameters an optimizer gets, under all names that this file has for them; computed once."""
    known = source.cache.get("trained models")
    if known is None:
        found: Models = {}
        for call, model in _optimized(source):
            for name in names_of(source, model):
                text = key(source, name) or ""
                found.setdefault((text, home(source, name, text)), call)
            for text, place in _kept_as(source, model):
                found.setdefault((text, place), call)
        known = source.cache["trained models"] = found
    assert isinstance(known, dict)
    return known


def optimizers_of(source: Source) -> list[tuple[str, cst.Call]]:
    """The calls that make optimizers of a model's parameters, each with the model's text there."""
    return [(key(source, model) or "", call) for call, model in _optimized(source)]


def names_of(source: Source, node: Node) -> Iterator[Node]:
    """An expression, and the names that stand for the same in the functions that hand it on."""
    waiting, seen = [(node, 0)], set()
    while waiting:
        node, depth = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if depth < _DEEP:
            waiting += [(value, depth + 1) for value in _handed(source, node)]


def _kept_as(source: Source, node: Node) -> Iterator[tuple[str, Node]]:
    """The attributes of self that get what a parameter is: `self.net` of `self.net = net.to(device)`."""
    place = source.values.enclosing_class(node)
    binding = source.names.only_binding(node)
    if place is None or binding is None or binding.kind != "param":
        return
    for name, values in source.values.attributes(place).items():
        roots = [_root(value) for value, _ in values]
        if roots and all(source.names.only_binding(root) is binding for root in roots):
            yield f"self.{name}", place


def _root(node: Node | None) -> Node | None:
    """The `model` of `model.to(device).train()`."""
    while _moves(node):
        assert isinstance(node, cst.Call)
        assert isinstance(node.func, cst.Attribute)
        node = node.func.value
    return node


def _handed(source: Source, node: Node) -> Iterator[Node]:
    """What the calls of this file hand to a parameter, or to the parameter from which an attribute of self comes.

    And what a function of this file returns that makes the model.
    """
    if isinstance(node, cst.Name):
        binding = source.names.only_binding(node)
        found = source.values.handed.to(binding) if binding is not None else []
        if binding is not None and binding.kind == "assign":
            root = _root(binding.value)
            yield from source.values.returned(root) if isinstance(root, cst.Call) else ()
    else:
        found = [value for value, _ in source.values.sources(node)]
        for value in found:
            made = _root(value)
            for returned in source.values.returned(made) if isinstance(made, cst.Call) else ():
                yield _uncast(returned)
    for value in found:
        inner = _root(value)
        if isinstance(inner, (cst.Name, cst.Attribute)):
            yield inner


def _uncast(node: Node) -> Node:
    """The `model` of `model.cuda().half()`."""
    inner: Node | None = _root(node)
    while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
        if inner.func.attr.value not in _METHODS:
            break
        inner = _root(inner.func.value)
    return node if inner is None or isinstance(inner, cst.Call) else inner


def _moves(node: Node | None) -> bool:
    """`model.to(device)`, `model.cuda()`: the model itself."""
    func = node.func if isinstance(node, cst.Call) else None
    return isinstance(func, cst.Attribute) and func.attr.value in ("to", "cuda", "train")


def _optimized(source: Source) -> list[tuple[cst.Call, Node]]:
    """The calls that make optimizers, each with the models whose parameters it gets; computed once."""
    known = source.cache.get("optimized models")
    if known is None:
        calls = [
            call
            for call in source.all(cst.Call)
            if (source.origin(call.func) or "").startswith("torch.optim.")
            and is_optimizer(source, call)
        ]
        known = source.cache["optimized models"] = [
            (call, model)
            for call in calls
            for model in _models_in(source, Arguments.of(call).get("params", 0), _DEEP)
        ]
    assert isinstance(known, list)
    return known


def _models_in(source: Source, node: Node | None, depth: int) -> Iterator[Node]:
    """The models of which an expression has parameters: all, some that a test picks, or groups of them."""
    if node is None or depth == 0:
        return
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        if node.func.attr.value in ("parameters", "named_parameters"):
            yield node.func.value
        return
    for inner in _parts(source, node):
        yield from _models_in(source, inner, depth - 1)


def _parts(source: Source, node: Node) -> Iterator[Node | None]:
    """The expressions from which another one has its parameters."""
    if isinstance(node, cst.Call) and source.names.builtin(node.func) in _PICK and node.args:
        yield node.args[-1].value
    elif isinstance(node, (cst.ListComp, cst.GeneratorExp)):
        if _is_target(node.elt, node.for_in.target):
            yield node.for_in.iter
    elif isinstance(node, (cst.List, cst.Tuple)):
        yield from (element.value for element in node.elements)
    elif isinstance(node, cst.Dict):
        entries = [e for e in node.elements if isinstance(e, cst.DictElement)]
        yield from (entry.value for entry in entries if strings(entry.key) == "params")
    elif isinstance(node, cst.Name):
        binding = source.names.only_binding(node)
        yield binding.value if binding is not None and binding.kind == "assign" else None


def _is_target(element: Node, target: Node) -> bool:
    """Whether a comprehension gives what it runs over: `p for p in ...`, `p for name, p in ...`."""
    last = target.elements[-1].value if isinstance(target, cst.Tuple) else target
    return (
        isinstance(element, cst.Name)
        and isinstance(last, cst.Name)
        and (element.value == last.value)
    )


def home(source: Source, node: Node, name: str) -> Node | None:
    """Where a text means one thing: the function around a node, or for an attribute of self the class.

    Of a node that is a name itself, and one of the module's, it is None in functions, too.
    """
    if name.startswith("self."):
        return source.values.enclosing_class(node)
    root = node
    while isinstance(root, cst.Attribute):
        root = root.value
    if isinstance(root, cst.Name) and root in source.scopes.scope_of:
        found = source.scopes.scope_of[root].home(root.value)
        if found is source.scopes.module:
            return None
    return source.function(node)
