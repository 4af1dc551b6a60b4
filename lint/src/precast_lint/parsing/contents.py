"""The items of the lists and dictionaries of a file, and the variables of loops over them.

Invariants: a container is known only if the file shows all its items: literals, comprehensions, assigned items and
`append`. Items that other code may add are assumed to be alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

from precast_lint.parsing.names import NameTable
from precast_lint.parsing.scopes import elements
from precast_lint.parsing.syntax import Node, cst, string_value

__all__ = ["Containers"]

_DEPTH = 4
_Place = tuple[object, str]


class ValueSource(Protocol):
    """The part of `precast_lint.parsing.values.Values` that contents need."""

    names: NameTable
    parents: dict[Node, Node]

    def results(self, call: cst.Call) -> list[Node]:
        """The values that a call of a function of this file returns."""

    def sources(self, node: Node | None) -> list[tuple[Node | None, Node | None]]:
        """The values and annotations that a name or an attribute of self gets."""

    def variable(self, node: Node) -> tuple[object, str] | None:
        """Return a key that is equal for all uses of one variable."""


class Containers:
    """The elements of one file's containers."""

    def __init__(self, values: ValueSource) -> None:
        self.values = values
        self.parents = values.parents
        self._open: set[Node] = set()
        self._loops: dict[Node, list[Node] | None] = {}

    def item(self, node: cst.Subscript) -> list[Node] | None:
        """Return the possible values of `optimizers["d"]`; None if they are unknown."""
        index = node.slice[0].slice if len(node.slice) == 1 else None
        if not isinstance(index, cst.Index):
            return None
        named = string_value(index.value)
        if named is not None:
            result = self._named(node.value, named, _DEPTH)
            if result:
                return result
        return self.elements(node.value)

    def of_target(self, target: Node) -> list[Node] | None:
        """Return the values of a name from a loop, or from a function with several results: `opt, scaler = make()`."""
        element = self.parents.get(target)
        line = self.parents.get(element) if isinstance(element, cst.Element) else None
        outer = self.parents.get(line) if line is not None else None
        assign = self.parents.get(outer) if isinstance(outer, cst.AssignTarget) else None
        if not isinstance(assign, cst.Assign) or not isinstance(line, (cst.Tuple, cst.List)):
            return self.of_loop(target)
        returned = self.values.results(assign.value) if isinstance(assign.value, cst.Call) else []
        arguments = [elements(value, len(line.elements)) for value in returned]
        place = next(i for i, one in enumerate(line.elements) if one is element)
        results = [values[place] for values in arguments]
        entries = [value for value in results if value is not None]
        return entries if entries and len(entries) == len(results) else None

    def of_loop(self, target: Node) -> list[Node] | None:
        """Return a loop variable's values: `for opt in (first, second)`, `for name, opt in optimizers.items()`."""
        if target in self._open:
            return None  # `for x in x`
        if target in self._loops:
            return self._loops[target]
        self._open.add(target)
        result = self._of_loop(target)
        self._open.discard(target)
        if not self._open:
            self._loops[target] = result
        return result

    def _of_loop(self, target: Node) -> list[Node] | None:
        place, outer = 0, self.parents.get(target)
        inner: Node = target
        if isinstance(outer, cst.Element):
            line = self.parents[outer]
            if not isinstance(line, (cst.Tuple, cst.List)):
                return None
            place, inner, outer = list(line.elements).index(outer), line, self.parents.get(line)
        if not isinstance(outer, (cst.For, cst.CompFor)) or outer.target is not inner:
            return None
        over = self._iterated(outer.iter, place if inner is not target else None)
        return self.elements(over) if over is not None else None

    def _iterated(self, node: Node, place: int | None) -> Node | None:
        """Return the container whose elements a loop variable gets; `place` is its position among several variables."""
        if not isinstance(node, cst.Call):
            return node if place is None else None
        func = node.func
        if isinstance(func, cst.Attribute) and not node.args:
            expected = {"values": None, "items": 1}.get(func.attr.value, -1)
            return func.value if expected == place else None
        if place is None and self.values.results(node):
            return node
        name = self.values.names.builtin(func)
        plain = [arg.value for arg in node.args if arg.keyword is None and not arg.star]
        if name in ("list", "tuple", "reversed", "sorted") and place is None and len(plain) == 1:
            return self._iterated(plain[0], None)
        if name == "enumerate" and place == 1 and plain:
            return self._iterated(plain[0], None)
        if name == "zip" and place is not None and place < len(plain) == len(node.args):
            return self._iterated(plain[place], None)
        return None

    def elements(self, node: Node | None, depth: int = _DEPTH) -> list[Node] | None:
        """Return the elements of a container; None if it is empty or one is unknown."""
        results = list(self._elements(node, depth)) if node is not None else []
        entries = [inner for inner in results if inner is not None]
        return entries if entries and len(entries) == len(results) else None

    def _elements(self, node: Node, depth: int) -> Iterator[Node | None]:
        if isinstance(node, (cst.List, cst.Tuple, cst.Set)):
            for element in node.elements:
                yield element.value if isinstance(element, cst.Element) else None
        elif isinstance(node, cst.Dict):
            for entry in node.elements:
                yield entry.value if isinstance(entry, cst.DictElement) else None
        elif isinstance(node, cst.ListComp):
            yield node.elt
        elif isinstance(node, cst.DictComp):
            yield node.value
        elif self._is_constructor(node):
            assert isinstance(node, cst.Call)
            for arg in node.args:
                yield arg.value if arg.keyword is not None else None
        elif depth and isinstance(node, (cst.Name, cst.Attribute, cst.Call)):
            yield from self._held(node, depth)
        else:
            yield None

    def _is_constructor(self, node: Node) -> bool:
        """Return True for `dict(...)`, and for `list()`; the items of a list of something else are unknown."""
        name = self.values.names.builtin(node.func) if isinstance(node, cst.Call) else None
        return name in ("dict", "list")

    def _held(self, node: Node, depth: int) -> Iterator[Node | None]:
        """Yield the elements of the values of a name or an attribute of self, and those that are added later."""
        values = (
            [(value, None) for value in self.values.results(node)]
            if isinstance(node, cst.Call)
            else self.values.sources(node)
        )
        if not values:
            yield None
        for value, _ in values:
            if value is None or value is node:
                yield None
            else:
                yield from self._elements(value, depth - 1)
        place = self.values.variable(node)
        if place is not None:
            yield from self._put.get(place, ())

    def _named(self, node: Node, name: str, depth: int) -> list[Node]:
        """Return the values of a key of a table."""
        if isinstance(node, cst.Dict):
            entries = [e for e in node.elements if isinstance(e, cst.DictElement)]
            return [e.value for e in entries if string_value(e.key) == name]
        if isinstance(node, cst.Call) and self.values.names.builtin(node.func) == "dict":
            return [a.value for a in node.args if a.keyword is not None and a.keyword.value == name]
        if isinstance(node, cst.Call) and depth:
            returned = self.values.results(node)
            return [n for value in returned for n in self._named(value, name, depth - 1)]
        if depth == 0 or not isinstance(node, (cst.Name, cst.Attribute)):
            return []
        values = [value for value, _ in self.values.sources(node)]
        results = [
            n for value in values if value is not None for n in self._named(value, name, depth - 1)
        ]
        place = self.values.variable(node)
        return results + self._put_under.get((place, name), []) if place is not None else results

    @cached_property
    def _put(self) -> dict[_Place, list[Node | None]]:
        results: dict[_Place, list[Node | None]] = {}
        for owner, _, value in self._stores:
            place = self.values.variable(owner)
            if place is not None:
                results.setdefault(place, []).append(value)
        return results

    @cached_property
    def _put_under(self) -> dict[tuple[_Place, str], list[Node]]:
        results: dict[tuple[_Place, str], list[Node]] = {}
        for owner, name, value in self._stores:
            place = self.values.variable(owner)
            if place is not None and name is not None:
                results.setdefault((place, name), []).append(value)
        return results

    @cached_property
    def _stores(self) -> list[tuple[Node, str | None, Node]]:
        """The containers that get an item, with the key, if it is a string, and the item."""
        results: list[tuple[Node, str | None, Node]] = []
        for node in self.parents:
            if type(node) is cst.Assign:
                for one in node.targets:
                    if isinstance(one.target, cst.Subscript):
                        index = one.target.slice[0].slice
                        name = string_value(index.value) if isinstance(index, cst.Index) else None
                        results.append((one.target.value, name, node.value))
            elif type(node) is cst.Call and isinstance(node.func, cst.Attribute) and _appends(node):
                results.append((node.func.value, None, node.args[0].value))
        return results


def _appends(call: cst.Call) -> bool:
    is_method = isinstance(call.func, cst.Attribute) and call.func.attr.value == "append"
    return is_method and len(call.args) == 1
