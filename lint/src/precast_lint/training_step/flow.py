"""Follows a function's events along its paths, for the rules about order (AMP2xx, AMP3xx).

A rule is a function `on(state, event, say) -> state`. It is called for each event on each path. `say.bad`
marks a node as wrong on this path, `say.good` as right; a node is reported if it is wrong on some path
and right on none. So a path on which a rule knows nothing does not hide a mistake, and a path that
does the right thing excuses the others.

Branches whose tests have the same text go together (`if amp:` here, `if amp:` there) until a name in
the test is assigned. Loops run until no new state appears, three times at most. An `except` block runs as
if nothing of what was tried had happened. Nested functions have flows of their own.

Invariants: states are hashable and never changed; a function with too many paths reports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import TypeVar

from precast_lint.meaning.functions import called_method
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, children, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.flow_run import Run, Say, TooManyPaths

__all__ = ["Flow", "Say", "flows"]

_State = TypeVar("_State", bound=Hashable)
_HARMLESS = {
    "isinstance",
    "print",
    "len",
    "type",
    "id",
    "repr",
    "str",
    "bool",
    "hasattr",
    "getattr",
}
# What writes states down or reads them has no hand in a step: `save_checkpoint(model, optimizer, scaler)`.
_KEEPS = re.compile(r"(^|_)(save|load|resume|restore|checkpoint|ckpt|snapshot)(_|$)", re.IGNORECASE)
# Where a name may stand without going anywhere: tests, the left of an assignment, before a dot.
_LOOKED_AT = {
    "AnnAssign",
    "Assert",
    "AssignTarget",
    "Attribute",
    "BooleanOperation",
    "Comparison",
    "ComparisonTarget",
    "Del",
    "Expr",
    "If",
    "NameItem",
    "UnaryOperation",
    "While",
}


class Flow:
    """The body of one function, or of the module."""

    def __init__(self, source: Source, node: Node) -> None:
        self.source = source
        self.node = node
        assert isinstance(node, (cst.FunctionDef, cst.Module))
        self.body = node.body
        self.nodes = list(_own_nodes(node))
        self.methods = list(_methods(source, self.nodes))
        self.optimizers = frozenset(self._stepped())
        self.scalers = self._scalers()

    def run(
        self, start: _State, on: Callable[[_State, Event, Say], _State]
    ) -> Iterator[tuple[Node, str | None]]:
        """The nodes that `on` calls bad on some path and good on none, each with its message."""
        say = Say()
        self.judge(start, on, say)
        yield from say.reported()

    def judge(self, start: _State, on: Callable[[_State, Event, Say], _State], say: Say) -> None:
        """The same for a rule that judges a node by all functions that come by it."""
        heard = Say()
        try:
            Run(self.source, on, heard, self.optimizers).function(self.node, start)
        except TooManyPaths:
            return
        say.hear(heard)

    def events(self) -> list[Event]:
        """All events of the function once, in the order of the text, branches one after the other."""
        return self._events

    @cached_property
    def _events(self) -> list[Event]:
        found: dict[tuple[Node, str], Event] = {}

        def note(state: int, event: Event, _: Say) -> int:
            found.setdefault((event.node, event.kind), event)
            return state

        list(self.run(0, note))
        return list(found.values())

    def leaks(self, name: str) -> bool:
        """Whether what a key stands for is handed to code that is not seen here.

        As an argument, a result, an element or another attribute; or used by a function inside.
        """
        return any(
            self._leaks_at(node) for node in self.nodes if self._is(node, name)
        ) or self._is_captured(name)

    def is_owned(self, name: str) -> bool:
        """Whether it is made in this function and never leaks: nobody else can have a hand in it."""
        made = any(
            self._is(node.target, name)
            for node in self.nodes
            if isinstance(node, cst.AssignTarget)
            or (isinstance(node, cst.AnnAssign) and node.value is not None)
        )
        return made and "." not in name and not self.leaks(name)

    def is_seen(self, name: str, *methods: str) -> bool:
        """Whether a scaler can be followed to its last use: nobody else calls these methods of one, as far as is seen.

        It is made here and never leaks; or calls of this file hand it to this function, or a class without foreign
        bases makes it, and no other function of the file calls these methods of any scaler.
        """
        if self.is_owned(name):
            return True
        own = {*self.nodes, *self.methods}
        return self._is_of_file(name) and not any(
            call not in own and self.source.instance(owner) in SCALERS
            for call, owner, _ in self.source.methods(*methods)
        )

    def _is_of_file(self, name: str) -> bool:
        values = self.source.values
        node = next((n for n in self.nodes if self._is(n, name)), None)
        if isinstance(node, cst.Name):
            binding = self.source.names.only_binding(node)
            is_handed = binding is not None and bool(values.handed.to(binding))
            return is_handed and self.is_local(name) and not self.leaks(name)
        home = values.enclosing_class(self.node) if name.startswith("self.") else None
        if not isinstance(home, cst.ClassDef) or node is None or self.leaks(name):
            return False
        bases = [
            self.source.origin(b.value) or self.source.names.builtin(b.value) for b in home.bases
        ]
        made = values.attributes(home).get(name.removeprefix("self."), [])
        return all(base in ("object", "torch.nn.Module") for base in bases) and any(
            isinstance(value, cst.Call) for value, _ in made
        )

    def called_elsewhere(self, name: str, *methods: str) -> bool:
        """Whether another function of the file calls a method on something whose last name is the same."""
        last = name.rpartition(".")[2]
        own = set(self.nodes)
        return any(
            (key(self.source, owner) or "").rpartition(".")[2] == last
            for call, owner, _ in self.source.methods(*methods)
            if call not in own and not (name.startswith("self.") and self._is_of_same_class(call))
        )

    def _is_of_same_class(self, call: Node) -> bool:
        """Whether a call is in a method of the class of this one: who calls that is seen, or hides what it does."""
        home = self.source.values.enclosing_class(self.node)
        return home is not None and self.source.values.enclosing_class(call) is home

    def is_local(self, name: str) -> bool:
        """Whether a name belongs to this function: no other function can use what it stands for by that name."""
        for node in self.nodes:
            if isinstance(node, cst.Name) and node.value == name:
                scope = self.source.scopes.scope_of.get(node)
                home = scope.home(name) if scope else None
                if home is not None:
                    return home.node is self.node
        return False

    def _stepped(self) -> Iterator[str]:
        for node in [*self.nodes, *self.methods]:
            if (
                isinstance(node, cst.Call)
                and isinstance(node.func, cst.Attribute)
                and node.func.attr.value in ("step", "unscale_")
                and node.args
                and self.source.instance(node.func.value) in SCALERS
            ):
                yield key(self.source, node.args[0].value) or ""

    def _scalers(self) -> list[str]:
        """The keys of the scalers whose methods are called here, or in methods of self that are called here."""
        called = [*self._scalers_in(self.nodes)]
        called += [
            name
            for name in self._scalers_in(self.methods)
            if name.startswith("self.") or name in self._handed
        ]
        return list(dict.fromkeys(called))

    @cached_property
    def _handed(self) -> set[str]:
        """The names that methods of the same object get for parameters of the same name."""
        found = set()
        for call in (n for n in self.nodes if isinstance(n, cst.Call)):
            method = called_method(self.source, call)
            if method is not None:
                found |= {n for arg in call.args if (n := _same_name(method, call, arg))}
        return found

    def _scalers_in(self, nodes: list[Node]) -> Iterator[str]:
        for node in nodes:
            func = node.func if isinstance(node, cst.Call) else None
            if isinstance(func, cst.Attribute) and self.source.instance(func.value) in SCALERS:
                yield key(self.source, func.value) or ""

    def _is(self, node: Node, name: str) -> bool:
        if not isinstance(node, (cst.Name, cst.Attribute)) or key(self.source, node) != name:
            return False
        parent = self.source.parents.get(node)
        is_part = isinstance(parent, cst.Attribute) and parent.attr is node
        is_keyword = isinstance(parent, (cst.Arg, cst.Param)) and node in (
            getattr(parent, "keyword", None),
            getattr(parent, "name", None),
        )
        return not is_part and not is_keyword

    def _leaks_at(self, node: Node) -> bool:
        parent = self.source.parents[node]
        if isinstance(parent, cst.Arg):
            call = self.source.parents[parent]
            func = call.func if isinstance(call, cst.Call) else None
            called = func.attr if isinstance(func, cst.Attribute) else func
            keeps = isinstance(called, cst.Name) and _KEEPS.search(called.value) is not None
            keeps |= self._is_followed(call, parent, node)
            return not keeps and self.source.names.builtin(func) not in _HARMLESS
        if isinstance(parent, cst.Assign):
            return parent.value is node
        if isinstance(parent, cst.IfExp):
            return parent.test is not node
        return type(parent).__name__ not in _LOOKED_AT

    def _is_followed(self, call: Node, arg: cst.Arg, node: Node) -> bool:
        """Whether a method of the same object gets a name for a parameter of that name, and lets nobody have it."""
        method = called_method(self.source, call)
        if method is None or not isinstance(node, cst.Name) or not isinstance(call, cst.Call):
            return False
        asked = self.source.cache.setdefault("methods asked for leaks", set())
        assert isinstance(asked, set)
        if _parameter(method, call, arg) != node.value or method in asked:
            return False
        asked.add(method)  # of methods that call each other nothing is known
        flow = next(flow for flow in flows(self.source) if flow.node is method)
        leaks = flow.leaks(node.value)
        asked.discard(method)
        return not leaks

    def _is_captured(self, name: str) -> bool:
        inner = [
            n
            for n in self.nodes
            if isinstance(n, (cst.FunctionDef, cst.Lambda)) and n is not self.node
        ]
        return any(self._is(node, name) for outer in inner for node in walk(outer))


def flows(source: Source) -> list[Flow]:
    """The flows of a file: its functions and its top level; computed once."""
    known = source.cache.get("flows")
    if known is None:
        nodes: list[Node] = [source.module, *source.all(cst.FunctionDef)]
        known = source.cache["flows"] = [Flow(source, node) for node in nodes]
    assert isinstance(known, list)
    return known


def _parameter(method: cst.FunctionDef, call: cst.Call, arg: cst.Arg) -> str | None:
    """The parameter of a method that an argument is for."""
    if arg.star or any(other.star for other in call.args):
        return None
    if arg.keyword is not None:
        return arg.keyword.value
    names = [param.name.value for param in method.params.params[1:]]
    place = list(call.args).index(arg)
    return names[place] if place < len(names) else None


def _same_name(method: cst.FunctionDef, call: cst.Call, arg: cst.Arg) -> str | None:
    """The name that an argument is, if that is the name of its parameter, too."""
    name = arg.value.value if isinstance(arg.value, cst.Name) else None
    return name if _parameter(method, call, arg) == name else None


def _methods(source: Source, nodes: list[Node]) -> Iterator[Node]:
    """The nodes of the methods of the same object that are called here, and of those that these call."""
    waiting, seen = list(nodes), set[Node]()
    while waiting:
        method = called_method(source, waiting.pop())
        if method is not None and method not in seen:
            seen.add(method)
            inner = list(_own_nodes(method))
            yield from inner
            waiting += inner


def _own_nodes(function: Node) -> Iterator[Node]:
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
