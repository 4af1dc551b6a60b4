"""Detection of tensors: by their constructor, by an annotation, or as an input or output of a module.

Invariant: True only with evidence in the file; of several values of a name each needs its own.
"""

from __future__ import annotations

import re

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.functions import MODULES, methods_of
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted

__all__ = ["is_module_method", "is_tensor"]

_NOTES = ("torch.Tensor", "torch.FloatTensor", "torch.nn.Parameter")
# Methods that return a tensor if they are called on one.
_METHODS = re.compile(
    r"abs|bfloat16|clone|contiguous|cpu|cuda|detach|double|exp|expand|flatten|float|half|log|masked_fill|matmul|max|"
    r"mean|min|norm|permute|prod|relu|reshape|sigmoid|softmax|squeeze|std|sum|tanh|to|transpose|unsqueeze|var|view"
)
_MAKERS = re.compile(
    r"arange|as_tensor|cat|einsum|empty|eye|from_numpy|full|linspace|matmul|ones|rand|randn|stack|tensor|where|zeros"
)
_FUNCTIONAL = "torch.nn.functional."
_DEPTH = 4


def is_module_method(source: Source, node: Node) -> bool:
    """Return True if a node is in a method of a class with a module as a direct base."""
    home = source.values.enclosing_class(node)
    return isinstance(home, cst.ClassDef) and any(
        source.origin(base.value) in MODULES for base in home.bases
    )


def is_tensor(source: Source, node: Node, depth: int = _DEPTH) -> bool:
    """Return True if a value is certainly a tensor."""
    if depth == 0:
        return False
    if isinstance(node, cst.BinaryOperation):
        return any(is_tensor(source, side, depth - 1) for side in (node.left, node.right))
    if isinstance(node, cst.Call):
        return _gives_tensor(source, node, depth)
    if not isinstance(node, cst.Name):
        return False
    results = values_seen(source, node)
    if results and all(_comes_of(b.value, node) for b in results):
        results = source.names.bindings(node)  # `x = x / 2` keeps x a tensor
    first = [b for b in results if not _comes_of(b.value, node)]
    return bool(first) and all(
        source.origin(b.annotation) in _NOTES
        if b.annotation is not None
        else _is_input(source, node)
        if b.kind == "param"
        else b.kind == "assign" and b.value is not None and is_tensor(source, b.value, depth - 1)
        for b in first
    )


def _comes_of(value: Node | None, name: cst.Name) -> bool:
    """Return True if a value is computed from a name by arithmetic or methods of tensors: `x.float() / 2`."""
    if isinstance(value, cst.BinaryOperation):
        return _comes_of(value.left, name) or _comes_of(value.right, name)
    if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute):
        return bool(_METHODS.fullmatch(value.func.attr.value)) and _comes_of(value.func.value, name)
    return isinstance(value, cst.Name) and value.value == name.value


def _gives_tensor(source: Source, call: cst.Call, depth: int) -> bool:
    origin = source.origin(call.func)
    if origin is not None:
        name = origin.rpartition(".")[2]
        entry = origin.startswith("torch.") and origin.count(".") == 1
        return origin.startswith(_FUNCTIONAL) or (
            entry and any(names.fullmatch(name) for names in (_METHODS, _MAKERS))
        )
    if isinstance(call.func, cst.Attribute) and _METHODS.fullmatch(call.func.attr.value):
        return is_tensor(source, call.func.value, depth - 1)
    return _is_model(source, call.func)


def _is_input(source: Source, name: cst.Name) -> bool:
    """Return True for a parameter of a module's method, or one that PyTorch's functions get; not for self."""
    if name.value in ("self", "cls"):
        return False
    if is_module_method(source, name):
        return True
    home = source.scopes.scope_of[name].home(name.value)
    for other in source.scopes.references(home, name.value) if home is not None else ():
        arg = source.parents.get(other)
        call = source.parents.get(arg) if arg is not None else None
        if isinstance(arg, cst.Arg) and isinstance(call, cst.Call) and call.args[0] is arg:
            origin = source.origin(call.func) or ""
            module, _, function = origin.rpartition(".")
            if origin.startswith(_FUNCTIONAL) or (
                module == "torch" and _METHODS.fullmatch(function)
            ):
                return True
    return False


def _is_model(source: Source, func: Node) -> bool:
    """Return True for objects of `torch.nn`, attributes that a module calls, and objects with `eval()` or `train()`."""
    if (source.instance(func) or "").startswith("torch.nn."):
        return True
    name = dotted(func)
    if name is None:
        return False
    if name.endswith(".forward"):
        return True
    if name.startswith("self.") and name.count(".") == 1 and is_module_method(source, func):
        home = source.values.enclosing_class(func)
        assert isinstance(home, cst.ClassDef)
        return name.removeprefix("self.") not in methods_of(source, home)
    modes = source.methods("eval", "train")
    return any(dotted(owner) == name for _, owner, _ in modes)
