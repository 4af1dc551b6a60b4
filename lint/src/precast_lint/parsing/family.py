"""Inheritance between the classes of a file, including mixins.

Invariants: a class is only looked for by a name that is bound once; methods of a base of another file are unknown.
"""

from __future__ import annotations

from functools import cached_property

from precast_lint.parsing.names import NameTable
from precast_lint.parsing.syntax import Node, cst, methods_named

__all__ = ["Family", "is_left_open"]

_HARMLESS = (
    "torch.nn.Module",
    "torch.nn.modules.module.Module",
    "abc.ABC",
    "typing.Generic",
    "typing.Protocol",
)


class Family:
    """The classes of one file by their bases."""

    def __init__(self, names: NameTable) -> None:
        self.names = names

    def bases(self, home: cst.ClassDef) -> list[cst.ClassDef]:
        """Return the bases of a class in this file, in the order in which Python searches them."""
        results: list[cst.ClassDef] = []
        waiting = list(reversed(self._direct.get(home, ())))
        while waiting:
            base = waiting.pop()
            if base not in results and base is not home:
                results.append(base)
                waiting += reversed(self._direct.get(base, ()))
        return results

    def related(self, home: cst.ClassDef) -> list[cst.ClassDef]:
        """Return the bases of a class, its subclasses, and the other bases of those."""
        if not self._direct:
            return []
        result = self.bases(home)
        for other in self._direct:
            above = self.bases(other) if other is not home else []
            if home in above:
                result += [one for one in (other, *above) if one not in result and one is not home]
        return result

    def is_of_file(self, home: cst.ClassDef) -> bool:
        """Return True if all bases are in this file or have no methods that a training step uses."""
        entries = {home, *self.bases(home)}
        return all(
            self.names.class_named(arg.value) in entries or self._is_harmless(arg.value)
            for one in entries
            for arg in one.bases
        )

    def is_overridden(self, home: cst.ClassDef, name: str) -> bool:
        """Return True if a subclass in this file overrides a method."""
        return any(
            home in self.bases(other) and methods_named(other, name) for other in self._direct
        )

    def implementations(self, function: cst.FunctionDef) -> list[cst.FunctionDef]:
        """Return the methods that `self.name()` may run: for an abstract method, those of the subclasses."""
        if not is_left_open(function):
            return [function]
        scope = self.names.scopes.owned[function].parent
        home = scope.node if scope is not None else None
        if not isinstance(home, cst.ClassDef):
            return [function]
        return self.overriding(home, function.name.value) or [function]

    def overriding(self, home: cst.ClassDef, name: str) -> list[cst.FunctionDef]:
        """Return the methods of one name in the subclasses in this file, without abstract ones."""
        return [
            line
            for other in self._direct
            if home in self.bases(other)
            for line in methods_named(other, name)
            if not is_left_open(line)
        ]

    def provider(self, home: cst.ClassDef, name: str) -> cst.ClassDef | None:
        """Return the base in this file that defines a method; None if a base of another file may define it."""
        waiting, visited = [arg.value for arg in reversed(home.bases)], {home}
        while waiting:
            node = waiting.pop()
            base = self.names.class_named(node)
            if base is None and not self._is_harmless(node):
                return None
            if base is None or base in visited:
                continue
            visited.add(base)
            if methods_named(base, name):
                return base
            waiting += [arg.value for arg in reversed(base.bases)]
        return None

    def _is_harmless(self, node: Node) -> bool:
        """Return True if a base of another file has no methods that a training step uses."""
        return self.names.origin(node) in _HARMLESS or self.names.builtin(node) == "object"

    @cached_property
    def _direct(self) -> dict[cst.ClassDef, list[cst.ClassDef]]:
        table: dict[cst.ClassDef, list[cst.ClassDef]] = {}
        for scope in self.names.scopes.owned.values():
            if isinstance(scope.node, cst.ClassDef):
                results = [self.names.class_named(arg.value) for arg in scope.node.bases]
                entries = [base for base in results if base is not None and base is not scope.node]
                if entries:
                    table[scope.node] = entries
        return table


def is_left_open(function: cst.FunctionDef) -> bool:
    """Return True if a method is abstract: its body only raises, passes or is a docstring."""
    if isinstance(function.body, cst.SimpleStatementSuite):
        lines = list(function.body.body)
    else:
        body = function.body.body
        if not all(isinstance(line, cst.SimpleStatementLine) for line in body):
            return False
        lines = [one for line in body for one in line.body]  # type: ignore[union-attr]
    return all(isinstance(line, (cst.Raise, cst.Pass)) or _says_nothing(line) for line in lines)


def _says_nothing(line: Node) -> bool:
    value = line.value if isinstance(line, cst.Expr) else None
    return isinstance(value, (cst.SimpleString, cst.ConcatenatedString, cst.Ellipsis))
