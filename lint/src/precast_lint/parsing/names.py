"""Resolution of names and dotted names: `amp.autocast` -> "torch.cuda.amp.autocast".

Invariants: if the bindings of a name disagree, or one of them is unknown, the result is None. A fallback to None
(`except ImportError: torch = None`) is no disagreement.

LibCST's QualifiedNameProvider does not follow `region = torch.autocast`, and takes 19 times as long: 24.6 s against
1.29 s (see `scopes.py`).
"""

from __future__ import annotations

from precast_lint.parsing.scopes import Binding, Scopes
from precast_lint.parsing.syntax import Node, cst

__all__ = ["NameTable", "canonical", "is_none"]

# The module in which PyTorch defines a name -> the module in which its documentation has the name.
_CANONICAL = {
    "torch.autocast": "torch.amp.autocast",
    "torch.GradScaler": "torch.amp.GradScaler",
    "torch.amp.autocast_mode": "torch.amp",
    "torch.amp.grad_scaler": "torch.amp",
    "torch.cuda.amp.autocast_mode": "torch.cuda.amp",
    "torch.cuda.amp.grad_scaler": "torch.cuda.amp",
    "torch.cpu.amp.autocast_mode": "torch.cpu.amp",
    "torch.cpu.amp.grad_scaler": "torch.cpu.amp",
}


def canonical(path: str) -> str:
    """Return the dotted name that PyTorch's documentation uses."""
    for old, new in _CANONICAL.items():
        if path == old or path.startswith(old + "."):
            return new + path[len(old) :]
    return path


def is_none(node: Node | None) -> bool:
    """Return True if an expression is the constant None."""
    return isinstance(node, cst.Name) and node.value == "None"


class NameTable:
    """The names of one file, and the dotted names that they refer to."""

    def __init__(self, scopes: Scopes) -> None:
        self.scopes = scopes
        self._paths: dict[object, str | None] = {}

    def origin(self, node: Node | None) -> str | None:
        """Return the dotted name of an expression, as documented; None if it is unknown."""
        path = self.path(node)
        return canonical(path) if path else None

    def path(self, node: Node | None) -> str | None:
        """Return the dotted name as the file uses it: "torch.autocast", not "torch.amp.autocast"."""
        if not isinstance(node, (cst.Name, cst.Attribute)):
            return None
        entry = node if isinstance(node, cst.Attribute) else self._variable_key(node)
        if entry not in self._paths:
            self._paths[entry] = None  # the result if the name refers to itself
            self._paths[entry] = self._resolve(node)
        return self._paths[entry]

    def bindings(self, node: Node | None) -> list[Binding]:
        """Return all bindings of a name; empty for builtins, star imports and other expressions."""
        if not isinstance(node, cst.Name) or node not in self.scopes.scope_of:
            return []
        return self.scopes.scope_of[node].lookup(node.value)

    def only_binding(self, node: Node | None) -> Binding | None:
        """Return the binding of a name that has exactly one, else None."""
        result = self.bindings(node)
        return result[0] if len(result) == 1 else None

    def class_named(self, node: Node | None) -> cst.ClassDef | None:
        """Return the class in this file that a name refers to, if the name has one binding."""
        binding = self.only_binding(node)
        definition = binding.node if binding is not None and binding.kind == "class" else None
        return definition if isinstance(definition, cst.ClassDef) else None

    def builtin(self, node: Node | None) -> str | None:
        """Return a name that the file never binds, so that it may refer to a builtin; else None."""
        if not isinstance(node, cst.Name) or self.bindings(node):
            return None
        return node.value

    def _variable_key(self, node: cst.Name) -> object:
        scope = self.scopes.scope_of.get(node)
        return (scope and scope.home(node.value), node.value)

    def _resolve(self, node: Node) -> str | None:
        if isinstance(node, cst.Attribute):
            base = self.path(node.value)
            return f"{base}.{node.attr.value}" if base else None
        results = {self._path_of_binding(binding) for binding in self.bindings(node)}
        results.discard("")
        if len(results) > 1 and None not in results:  # several names of one object
            results = {canonical(path) for path in results if path is not None}
        return results.pop() if len(results) == 1 else None

    def _path_of_binding(self, binding: Binding) -> str | None:
        """Return the dotted name of the bound object; "" for None."""
        if binding.kind in ("import", "from"):
            return binding.path
        if binding.kind == "assign":
            return "" if is_none(binding.value) else self.path(binding.value)
        return None
