"""The events of a function along its paths, for the rules about order (AMP2xx, AMP3xx).

A rule is a function `on(state, event, say) -> state`. It is called for each event on each path. `say.bad`
marks a node as wrong on this path, `say.good` as right; a node is reported if it is wrong on some path
and right on none. So a path without a judgement does not hide a mistake, and a path that is right excuses the others.

Two tests with the same text (`if amp:`) have the same result until a name in the test is assigned. Loops run until
no new state appears, three times at most. An `except` block runs as if the `try` block had done nothing. Nested
functions have separate flows.

Invariants: states are hashable and never changed; a function with too many paths reports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import TypeVar

from precast_lint.meaning.functions import followed_call
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import Event, key
from precast_lint.training_step.flow_places import FlowPlace, root
from precast_lint.training_step.flow_run import FlowRun, Say, TooManyPaths
from precast_lint.training_step.frames import (
    Frame,
    MethodCall,
    called_frames,
    calls_in,
    methods_in,
    methods_of_scalers,
    nodes_of,
)

__all__ = ["FunctionFlow", "Say", "flows"]

_State = TypeVar("_State", bound=Hashable)
_HARMLESS = re.compile(r"isinstance|print|len|type|id|repr|str|bool|hasattr|getattr")
# Functions that save or load states have no part in a step: `save_checkpoint(model, optimizer, scaler)`.
_KEEPS = re.compile(r"(^|_)(save|load|resume|restore|checkpoint|ckpt|snapshot)(_|$)", re.IGNORECASE)
# The parents of a name that do not pass its value on.
_LOOKED_AT = re.compile(
    r"AnnAssign|Assert|AssignTarget|Attribute|BooleanOperation|Comparison|ComparisonTarget|Del|Expr|If|NameItem|"
    r"UnaryOperation|While"
)


class FunctionFlow:
    """The body of one function, or of the module."""

    def __init__(self, source: Source, node: Node) -> None:
        self.source = source
        self.node = node
        assert isinstance(node, (cst.FunctionDef, cst.Module))
        self.body = node.body
        self.nodes = nodes_of(source, node)
        self.scalers = self._scalers()
        self.optimizers = frozenset(self._stepped())
        self._leaky: dict[str, bool] = {}
        self._kinds: set[str | tuple[str, str | None]] = set()

    @cached_property
    def called(self) -> list[tuple[Frame, list[Node]]]:
        """The functions that this one calls, directly or not, with their variables and nodes."""
        return list(called_frames(self.source, self.node))

    def run(
        self, start: _State, on: Callable[[_State, Event, Say], _State]
    ) -> Iterator[tuple[Node, str | None]]:
        """Yield the nodes that `on` calls bad on some path and good on none, each with its message."""
        say = Say()
        self.judge(start, on, say)
        yield from say.reported()

    def judge(self, start: _State, on: Callable[[_State, Event, Say], _State], say: Say) -> None:
        """Judge the nodes of this function; `say` collects the judgements of several functions."""
        heard = Say()
        try:
            FlowRun(self._place, on, heard).function(self.node, start)
        except TooManyPaths:
            return
        say.hear(heard)

    @cached_property
    def _place(self) -> FlowPlace:
        return root(self.source, self.node, frozenset(self.scalers), self.optimizers)

    def events(self) -> list[Event]:
        """Return all events of the function once, in the order of the text."""
        return self._events

    def has_events(self, *kinds: str | tuple[str, str | None]) -> bool:
        """Return True if the function has events of all given kinds, or of the pairs of a kind and a scaler."""
        self.events()
        return self._kinds.issuperset(kinds)

    @cached_property
    def _events(self) -> list[Event]:
        results: dict[tuple[Node, str], Event] = {}
        self._kinds = set()

        def note(state: int, event: Event, _: Say) -> int:
            results.setdefault((event.node, event.kind), event)
            self._kinds |= {event.kind, (event.kind, event.scaler)}
            return state

        list(self.run(0, note))
        return list(results.values())

    def leaks(self, name: str) -> bool:
        """Return True if code that is not followed gets a value.

        As an argument, a result, an element or another attribute, or by a use in an inner function.
        """
        if name not in self._leaky:
            self._leaky[name] = self._leaks(name)
        return self._leaky[name]

    def _leaks(self, name: str) -> bool:
        return any(
            self._leaks_at(node) for node in self.nodes if self._is(node, name)
        ) or self._is_captured(name)

    def _home(self, name: str) -> tuple[Node | None, str]:
        """Return the class of this file that has an attribute, of self or another object, and the attribute's name."""
        owner, _, attribute = name.rpartition(".")
        if owner == "self":
            return self.source.values.enclosing_class(self.node), attribute
        for node in self.reads(owner):
            return self.source.values.object_class(node), attribute
        return None, attribute

    def reads(self, name: str) -> list[Node]:
        """Return the nodes of this function with a key."""
        if not name:
            return []
        return [node for node in self.nodes if self._is(node, name)]

    def has_all(self, name: str, method: str) -> bool:
        """Return True if this function makes all calls of a method of an attribute of self in its class."""
        if not name.startswith("self."):
            return False
        home = self.source.values.enclosing_class(self.node)
        return all(
            call in self._methods_seen
            for call, owner, _ in self.source.methods(method)
            if key(self.source, owner) == name and self.source.values.enclosing_class(call) is home
        )

    def called_elsewhere(self, name: str, *methods: str) -> bool:
        """Return True if another function of the file calls a method on a value with the same last name."""
        last = name.rpartition(".")[2]
        return any(
            (key(self.source, owner) or "").rpartition(".")[2] == last
            for call, owner, _ in self.source.methods(*methods)
            if call not in self._methods_seen and not self._is_of_same_class(call, name)
        )

    def _is_of_same_class(self, call: Node, name: str) -> bool:
        home, _ = self._home(name)
        return home is not None and self.source.values.enclosing_class(call) is home

    def is_local(self, name: str) -> bool:
        """Return True if a name is local to this function."""
        for node in self.nodes:
            if isinstance(node, cst.Name) and node.value == name:
                scope = self.source.scopes.scope_of.get(node)
                home = scope.home(name) if scope else None
                if home is not None:
                    return home.node is self.node
        return False

    def _stepped(self) -> Iterator[str]:
        """Yield the keys of the optimizers that scalers step or unscale here, or in called functions."""
        own = methods_of_scalers(self.source)
        for named, calls in self._methods() if own or self.scalers else ():
            for call, method, owner in calls:
                is_step = method in ("step", "unscale_") and call.args
                if is_step and (call in own or named(owner) in self.scalers):
                    yield named(call.args[0].value) or ""

    def _scalers(self) -> list[str]:
        """Return the keys of the scalers whose methods are called here, or in called functions."""
        handed = {
            key(self.source, value)
            for _, argument in calls_in(self.source, self.node)
            for value in argument.values()
            if self.source.instance(value) in SCALERS
        }
        own = methods_of_scalers(self.source)
        if not own and not handed:
            return []
        called: list[str] = []
        for named, calls in self._methods():
            for call, _, owner in calls:
                if call in own or handed:
                    name = named(owner) or ""
                    if (call in own and ":" not in name) or name in handed:
                        called.append(name)
        return list(dict.fromkeys(called))

    def _methods(self) -> Iterator[tuple[Callable[[Node | None], str | None], list[MethodCall]]]:
        """Yield the calls of methods here and in called functions, with the function that returns keys there."""
        yield lambda inner: key(self.source, inner), methods_in(self.source, self.node)
        for frame, _ in self.called:
            yield frame.named, methods_in(self.source, frame.function)

    @cached_property
    def _methods_seen(self) -> frozenset[Node]:
        return frozenset(call for _, calls in self._methods() for call, _, _ in calls)

    @cached_property
    def leading(self) -> dict[Node, cst.Call]:
        """The functions that this one calls, directly or not, each with its first call."""
        results: dict[Node, cst.Call] = {}
        for nodes in (self.nodes, *(nodes for _, nodes in self.called)):
            for node in nodes:
                target = followed_call(self.source, node) if type(node) is cst.Call else None
                if target is not None and isinstance(node, cst.Call):
                    results.setdefault(target[0], node)
        return results

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
            if keeps or _HARMLESS.fullmatch(self.source.names.builtin(func) or ""):
                return False
            return not self._is_kept_by(call, node)
        if isinstance(parent, cst.Assign):
            return parent.value is node
        if isinstance(parent, cst.Element):  # of `a, b = ...`
            outer = self.source.parents[self.source.parents[parent]]
            return not isinstance(outer, cst.AssignTarget)
        if isinstance(parent, cst.IfExp):
            return parent.test is not node
        return _LOOKED_AT.fullmatch(type(parent).__name__) is None

    def _is_kept_by(self, call: Node, node: Node) -> bool:
        """Return True if a function of this file neither stores an argument under another name nor passes it on."""
        result = followed_call(self.source, call)
        if result is None:
            return False
        function, argument = result
        cached = self.source.cache.setdefault("keeps", {})
        assert isinstance(cached, dict)
        for name, value in argument.items():
            if value is node and (function, name) not in cached:
                cached[function, name] = False  # for a function that calls itself
                flow = next(flow for flow in flows(self.source) if flow.node is function)
                params = self.source.scopes.owned[function].bindings.get(name, ())
                cached[function, name] = len(params) == 1 and not flow._leaks(name)
        return all(cached[function, n] for n, value in argument.items() if value is node)

    def _is_captured(self, name: str) -> bool:
        inner = [
            n
            for n in self.nodes
            if isinstance(n, (cst.FunctionDef, cst.Lambda)) and n is not self.node
        ]
        return any(
            self._is(node, name)
            for outer in inner
            if not self._is_only_called(outer)
            for node in walk(outer)
        )

    def _is_only_called(self, inner: Node) -> bool:
        """Return True if an inner function is only called in this function, so that it is followed."""
        if not isinstance(inner, cst.FunctionDef) or not any(
            f.function is inner for f, _ in self.called
        ):
            return False
        home = self.source.scopes.scope_of.get(inner.name) or self.source.scopes.owned.get(
            self.node
        )
        own = set(self.nodes)
        for name in self.source.scopes.references(home, inner.name.value) if home else ():
            call = self.source.parents[name]
            if call not in own or followed_call(self.source, call) is None:
                return False
        return True


@once
def flows(source: Source) -> list[FunctionFlow]:
    """Return the flows of a file: its functions and its top level."""
    nodes: list[Node] = [source.module, *source.all(cst.FunctionDef)]
    return [FunctionFlow(source, node) for node in nodes]
