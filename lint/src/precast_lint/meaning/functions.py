"""Resolution of calls to functions and methods of the same file, and the autograd Functions that the file defines.

Invariants: a class is listed only if one of its bases is `torch.autograd.Function`; a decorator that is not PyTorch's
makes a function unknown, and rules then report nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from precast_lint.meaning.regions import AUTOCASTS
from precast_lint.parsing.family import is_left_open
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, dotted, is_self, methods_named, walk

__all__ = [
    "MODULES",
    "NEW_CUSTOM",
    "Method",
    "called_forward",
    "called_function",
    "called_method",
    "called_object",
    "followed_call",
    "functions",
    "methods_of",
]

_BASES = ("torch.autograd.Function", "torch.autograd.function.Function")
MODULES = (
    "torch.nn.Module",
    "torch.nn.modules.module.Module",
    "lightning.LightningModule",
    "lightning.pytorch.LightningModule",
    "pytorch_lightning.LightningModule",
)
"""The classes whose objects run their `forward` when they are called."""

_PLAIN = ("staticmethod", "classmethod")
NEW_CUSTOM = (
    "torch.amp.custom_fwd",
    "torch.amp.custom_bwd",
    "precast.custom_fwd",
    "precast.custom_bwd",
)
"""Decorators of autograd Functions' methods that take the device type as a keyword."""


@dataclass(frozen=True, eq=False)
class Method:
    """A method with its decorators except `staticmethod` and `classmethod`, each with its origin or None."""

    node: cst.FunctionDef
    decorators: tuple[tuple[cst.Decorator, str | None], ...]


def functions(source: Source) -> Iterator[tuple[cst.ClassDef, dict[str, Method]]]:
    """Yield the autograd Functions of a file with their methods."""
    for node in source.all(cst.ClassDef):
        if any(source.origin(base.value) in _BASES for base in node.bases):
            yield node, methods_of(source, node)


@once
def methods_of(source: Source, node: cst.ClassDef) -> dict[str, Method]:
    """Return the methods of a class by name, without names that it defines more than once."""
    results: dict[str, Method] = {}
    duplicates = set()
    for function in node.body.body:
        if isinstance(function, cst.FunctionDef):
            name = function.name.value
            if name in results:
                duplicates.add(name)
            results[name] = Method(function, tuple(_decorators(source, function)))
    return {name: method for name, method in results.items() if name not in duplicates}


def called_method(source: Source, call: Node) -> cst.FunctionDef | None:
    """Return the method that `self.name(...)` runs, if the class defines it once and no decorator wraps it."""
    func = call.func if isinstance(call, cst.Call) else None
    if not isinstance(func, cst.Attribute):
        return None
    owner_class = _class_of_receiver(source, func)
    if owner_class is None:
        override = _method_of_subclass(source, func)
        return override or _method_of_object(source, func.value, func.attr.value)
    if func.attr.value in source.values.attributes(owner_class):
        return None
    method = methods_of(source, owner_class).get(func.attr.value)
    if method is not None and is_left_open(method.node):
        if (override := _method_of_subclass(source, func)) is not None:
            return override
        if any(isinstance(inner, cst.Raise) for inner in walk(method.node.body)):
            return None
    if method is None or method.decorators or method.node.asynchronous is not None:
        return None
    if source.values.call_arguments.is_static(method.node):
        return method.node
    first = method.node.params.params[:1]
    is_plain = bool(first) and first[0].name.value in ("self", "cls")
    by_class = isinstance(func.value, cst.Name) and func.value.value != "self"
    is_bound = is_plain and (not by_class or bool(method.node.decorators))
    return method.node if is_bound else None


def _method_of_subclass(source: Source, func: cst.Attribute) -> cst.FunctionDef | None:
    """Return the method that `self.name` runs if exactly one subclass in this file defines it."""
    owner_class = source.values.enclosing_class(func) if dotted(func.value) == "self" else None
    if not isinstance(owner_class, cst.ClassDef) or not source.values.family.is_of_file(
        owner_class
    ):
        return None
    result = source.values.family.overriding(owner_class, func.attr.value)
    method = result[0] if len(result) == 1 else None
    if method is None or method.decorators or method.asynchronous is not None:
        return None
    first = method.params.params[:1]
    return method if bool(first) and first[0].name.value == "self" else None


def called_object(source: Source, call: Node) -> Node | None:
    """Return the object whose method a call runs: `amp` of `amp.step()` and `amp(loss)`."""
    func = call.func if isinstance(call, cst.Call) else None
    if isinstance(func, cst.Attribute) and _class_of_receiver(source, func) is None:
        owner: Node | None = func.value
    else:
        owner = func
    return owner if source.values.object_class(owner) is not None else None


def _method_of_object(source: Source, owner: Node | None, name: str) -> cst.FunctionDef | None:
    """Return the method of an object of a class of this file, if no subclass overrides it."""
    if owner is None or name not in _method_names(source):
        return None
    owner_class = source.values.object_class(owner)
    if owner_class is None:
        return None
    family = source.values.family
    if family.is_overridden(owner_class, name) or name in source.values.attributes(owner_class):
        return None
    provider_class: cst.ClassDef | None = owner_class
    if not methods_named(owner_class, name):
        provider_class = family.provider(owner_class, name)
    if provider_class is None:
        return None
    method = methods_of(source, provider_class).get(name)
    if method is None or method.decorators or method.node.decorators:
        return None
    first = method.node.params.params[:1]
    is_bound = bool(first) and first[0].name.value == "self"
    return method.node if is_bound and method.node.asynchronous is None else None


@once
def _method_names(source: Source) -> set[str]:
    return {
        statement.name.value
        for node in source.all(cst.ClassDef)
        for statement in node.body.body
        if isinstance(statement, cst.FunctionDef)
    }


def _is_plain(source: Source, function: cst.FunctionDef) -> bool:
    return all(source.names.builtin(d.decorator) in _PLAIN for d in function.decorators)


def _class_of_receiver(source: Source, func: cst.Attribute) -> cst.ClassDef | None:
    """Return the class of this file that defines the method `self.name` or `super().name`."""
    owner, name = func.value, func.attr.value
    is_own = is_self(owner)
    binding = source.names.only_binding(owner)
    if binding is not None and isinstance(binding.node, cst.ClassDef):
        return binding.node
    is_super = isinstance(owner, cst.Call) and not owner.args
    is_super = is_super and source.names.builtin(owner.func) == "super"  # type: ignore[attr-defined]
    owner_class = source.values.enclosing_class(func) if is_own or is_super else None
    if not isinstance(owner_class, cst.ClassDef):
        return None
    if is_own and methods_named(owner_class, name):
        return owner_class
    return source.values.family.provider(owner_class, name)


@once
def followed_call(source: Source, call: Node) -> tuple[cst.FunctionDef, dict[str, Node]] | None:
    """Return the function of this file that a call runs, and the arguments by parameter, if both are certain."""
    function = called_function(source, call)
    if function is None or not isinstance(call, cst.Call) or not _is_plain(source, function):
        return None
    if any(arg.star for arg in call.args) or _yields(source, function):
        return None
    params = [
        param.name.value for param in (*function.params.posonly_params, *function.params.params)
    ]
    owner = called_object(source, call)
    is_method = isinstance(call.func, cst.Attribute) or owner is not None
    if is_method and not source.values.call_arguments.is_static(function):
        params = params[1:]  # self
    positional: list[Node] = [arg.value for arg in call.args if arg.keyword is None]
    by_keyword: dict[str, Node] = {
        arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None
    }
    arguments = dict(zip(params, positional, strict=False)) | by_keyword
    if owner is not None:
        arguments["self"] = owner
    return function, arguments


@once
def _yields(_: Source, function: cst.FunctionDef) -> bool:
    return any(isinstance(node, cst.Yield) for node in walk(function))


def called_function(source: Source, call: Node) -> cst.FunctionDef | None:
    """Return the function or method of this file that a call runs, if it is certain. It may have decorators."""
    method = called_method(source, call)
    if method is not None:
        return method
    if isinstance(call, cst.Call) and not isinstance(call.func, cst.Call):
        method = _method_of_object(source, call.func, "__call__")
        if method is not None:
            return method
    binding = source.names.only_binding(call.func) if isinstance(call, cst.Call) else None
    node = binding.node if binding is not None else None
    return node if isinstance(node, cst.FunctionDef) and node.asynchronous is None else None


def called_forward(source: Source, call: cst.Call) -> cst.FunctionDef | None:
    """Return the `forward` that a call of a module of this file runs: `self.loss(output, target)`, `self(x)`."""
    func = call.func
    owner_class: Node | None = source.values.object_class(func)
    if isinstance(func, cst.Name) and func.value == "self" and _is_first_parameter(source, func):
        owner_class = source.values.enclosing_class(func)
    if not isinstance(owner_class, cst.ClassDef):
        return None
    if not any(source.origin(base.value) in MODULES for base in owner_class.bases):
        return None
    if source.values.family.is_overridden(owner_class, "forward"):
        return None
    method = methods_of(source, owner_class).get("forward")
    is_plain = method is not None and all(name in AUTOCASTS for _, name in method.decorators)
    return method.node if method is not None and is_plain else None


def _is_first_parameter(source: Source, name: cst.Name) -> bool:
    binding = source.names.only_binding(name)
    function = source.function(name)
    first = function.params.params[:1] if isinstance(function, cst.FunctionDef) else ()
    return binding is not None and bool(first) and binding.node is first[0]


def _decorators(
    source: Source, function: cst.FunctionDef
) -> Iterator[tuple[cst.Decorator, str | None]]:
    for decorator in function.decorators:
        inner: Node = decorator.decorator
        func = inner.func if isinstance(inner, cst.Call) else inner
        if source.names.builtin(func) not in _PLAIN:
            yield decorator, source.origin(func)
