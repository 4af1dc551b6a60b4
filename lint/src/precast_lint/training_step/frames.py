"""Mapping of a called function's parameters to its caller's variables.

Invariant: a name of the called function that is not a parameter, or a parameter that is assigned, is local: its key
differs from all keys of the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from precast_lint.meaning.functions import followed_call
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, children, cst
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import key

__all__ = [
    "Frame",
    "MethodCall",
    "called_frames",
    "calls_in",
    "frame_of",
    "methods_in",
    "methods_of_scalers",
    "nodes_of",
]

_ROOT = re.compile(r"\w*")
_DEEP = 3  # calls in functions that are called
_SELF = cst.Name("self")
_Named = Callable[[Node | None], str | None]

MethodCall = tuple[cst.Call, str, Node]
"""A call of a method, with the method's name and its object."""


@dataclass(frozen=True)
class Frame:
    """The variables of a called function.

    Attributes:
        source: the file.
        function: the function.
        names: its parameters, each with the caller's key of the argument.
        own: its local names.
    """

    source: Source
    function: cst.FunctionDef
    names: dict[str, str]
    own: frozenset[str]

    @property
    def called(self) -> dict[str, str]:
        """The caller's keys of arguments, each with the parameter; one parameter for each key."""
        return {value: name for name, value in self.names.items()}

    def named(self, node: Node | None) -> str | None:
        """Return the caller's key of an expression."""
        text = key(self.source, node)
        result = _ROOT.match(text or "")
        root = result[0] if result is not None else ""
        if text is None or root == "":
            return text
        if root in self.names:
            return self.names[root] + text[len(root) :]
        return f"{self.function.name.value}:{text}" if root in self.own else text


def frame_of(
    source: Source, function: cst.FunctionDef, values: dict[str, Node], named: _Named
) -> Frame:
    """Return the frame of a called function; `named` returns the caller's keys of the arguments."""
    bindings = source.scopes.owned[function].bindings
    plain = (cst.Name, cst.Attribute)
    names = {
        name: named(value) or ""
        for name, value in values.items()
        if isinstance(value, plain) and len(bindings.get(name, ())) == 1
    }
    if "self" in bindings and "self" not in values and (owner := named(_SELF)) != "self":
        names["self"] = owner or ""  # a method of the object whose method runs
    return Frame(source, function, names, frozenset(bindings) - names.keys() - {"self", "cls"})


def called_frames(source: Source, function: Node) -> Iterator[tuple[Frame, list[Node]]]:
    """Yield the functions that a function calls, directly or not, each with its frame and nodes."""
    waiting: list[tuple[Node, _Named, int]] = [(function, lambda node: key(source, node), 0)]
    visited: set[Node] = set()
    while waiting:
        caller, named, depth = waiting.pop()
        for result in calls_in(source, caller) if depth < _DEEP else ():
            if result[0] in visited:
                continue
            visited.add(result[0])
            frame = frame_of(source, *result, named)
            yield frame, nodes_of(source, result[0])
            waiting.append((result[0], frame.named, depth + 1))


@once
def calls_in(source: Source, function: Node) -> list[tuple[cst.FunctionDef, dict[str, Node]]]:
    """Return the functions of this file that a function calls directly, with the arguments by parameter."""
    calls = [n for n in nodes_of(source, function) if type(n) is cst.Call]
    results = [followed_call(source, call) for call in calls]
    return [pair for pair in results if pair is not None]


@once
def nodes_of(_: Source, function: Node) -> list[Node]:
    """Return the nodes of a function's body, without those inside of inner functions and classes."""
    assert isinstance(function, (cst.FunctionDef, cst.Module))
    apart = (cst.FunctionDef, cst.Lambda, cst.ClassDef)
    stack: list[Node] = [function.body] if isinstance(function, cst.FunctionDef) else []
    if isinstance(function, cst.Module):
        stack = list(reversed(function.body))
    nodes = []
    while stack:
        node = stack.pop()
        nodes.append(node)
        if type(node) not in apart:
            stack.extend(reversed(list(children(node))))
    return nodes


@once
def methods_in(source: Source, function: Node) -> list[MethodCall]:
    """Return the calls of methods in a function's body."""
    return [
        (node, node.func.attr.value, node.func.value)
        for node in nodes_of(source, function)
        if type(node) is cst.Call and isinstance(node.func, cst.Attribute)
    ]


@once
def methods_of_scalers(source: Source) -> set[Node]:
    """Return the calls of methods of scalers in the whole file."""
    return {
        call
        for call in source.all(cst.Call)
        if isinstance(call.func, cst.Attribute) and source.instance(call.func.value) in SCALERS
    }
