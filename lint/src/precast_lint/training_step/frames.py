"""What a function that is called says of its caller's variables: its parameters stand for them.

Invariant: a name of the called function that is no parameter, or a parameter that is bound again, is its own: its key
is not that of anything that the caller has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from precast_lint.meaning.functions import followed_call
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, children, cst
from precast_lint.training_step.flow_events import key

__all__ = ["Frame", "called_frames", "frame_of", "own_nodes"]

_ROOT = re.compile(r"\w*")
_DEEP = 3  # calls in functions that are called
_Named = Callable[[Node | None], str | None]


@dataclass(frozen=True)
class Frame:
    """The variables of a called function.

    Attributes:
        source: the file.
        function: the function.
        names: its parameters, each with the key of what it gets.
        own: its names that stand for nothing of the caller's.
    """

    source: Source
    function: cst.FunctionDef
    names: dict[str, str]
    own: frozenset[str]

    @property
    def called(self) -> dict[str, str]:
        """The keys of what parameters get, each with the name of the parameter; of two that get the same, one."""
        return {given: name for name, given in self.names.items()}

    def named(self, node: Node | None) -> str | None:
        """The key of an expression as the caller says it."""
        text = key(self.source, node)
        found = _ROOT.match(text or "")
        root = found[0] if found is not None else ""
        if text is None or root == "":
            return text
        if root in self.names:
            return self.names[root] + text[len(root) :]
        return f"{self.function.name.value}:{text}" if root in self.own else text


def frame_of(
    source: Source, function: cst.FunctionDef, given: dict[str, Node], named: _Named
) -> Frame:
    """The variables of a function that gets some arguments; `named` gives the keys of these."""
    bindings = source.scopes.owned[function].bindings
    plain = (cst.Name, cst.Attribute)
    names = {
        name: named(value) or ""
        for name, value in given.items()
        if isinstance(value, plain) and len(bindings.get(name, ())) == 1
    }
    return Frame(source, function, names, frozenset(bindings) - names.keys() - {"self", "cls"})


def called_frames(source: Source, nodes: list[Node]) -> Iterator[tuple[Frame, list[Node]]]:
    """The functions that some nodes call, and those that these call, each with its variables and its nodes."""
    waiting: list[tuple[list[Node], _Named, int]] = [(nodes, lambda node: key(source, node), 0)]
    seen: set[Node] = set()
    while waiting:
        calls, named, depth = waiting.pop()
        for call in calls:
            found = followed_call(source, call) if isinstance(call, cst.Call) else None
            if found is None or found[0] in seen or depth == _DEEP:
                continue
            seen.add(found[0])
            frame = frame_of(source, *found, named)
            inner = list(own_nodes(found[0]))
            yield frame, inner
            waiting.append((inner, frame.named, depth + 1))


def own_nodes(function: Node) -> Iterator[Node]:
    """The nodes of a function's body; of functions and classes in it, only they themselves."""
    assert isinstance(function, (cst.FunctionDef, cst.Module))
    stack: list[Node] = [function.body] if isinstance(function, cst.FunctionDef) else []
    if isinstance(function, cst.Module):
        stack = list(reversed(function.body))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
            stack.extend(reversed(list(children(node))))
