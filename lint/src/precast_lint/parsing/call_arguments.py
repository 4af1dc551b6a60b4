"""The arguments that the calls of a file pass to its functions' parameters.

Invariants: a function is known only if each use of its name is a call without starred arguments, and all its
decorators are PyTorch's. Calls in other files are assumed to pass the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.names import NameTable
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.syntax import Node, cst, enclosing_class, is_self, methods_named

__all__ = ["CallArguments"]


class CallArguments:
    """The arguments of one file's calls, by the parameters that get them."""

    def __init__(self, names: NameTable, parents: dict[Node, Node]) -> None:
        self.names = names
        self.parents = parents

    def for_unannotated(self, binding: Binding) -> list[Node | None]:
        """Return the arguments for a parameter without an annotation, one for each call; empty if a call is unknown."""
        return self.for_parameter(binding) if binding.annotation is None else []

    def for_parameter(self, binding: Binding) -> list[Node | None]:
        """Return the arguments for a parameter, one for each call; empty if a call is unknown."""
        if binding.kind != "param":
            return []
        function = self._function(binding.node)
        if function is None:
            return []
        return [self._argument(function, call, binding) for call in self._calls.get(function, ())]

    def calls(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return the calls of a function; empty if its name is also used in other ways."""
        return self._calls.get(function, [])

    def called_function(self, call: cst.Call) -> cst.FunctionDef | None:
        """Return the function of this file, or the method of the same class, that a call runs."""
        if isinstance(call.func, cst.Name):
            binding = self.names.only_binding(call.func)
            node = binding.node if binding is not None and binding.kind == "def" else None
            return node if isinstance(node, cst.FunctionDef) else None
        result = list(self._named(call.func)) if isinstance(call.func, cst.Attribute) else []
        return result[0] if len(result) == 1 else None

    def _function(self, param: Node) -> cst.FunctionDef | None:
        parameters = self.parents.get(param)
        if not isinstance(parameters, cst.Parameters):
            return None
        if param not in (*parameters.params, *parameters.posonly_params, *parameters.kwonly_params):
            return None
        function = self.parents.get(parameters)
        return function if isinstance(function, cst.FunctionDef) else None

    def _argument(self, function: cst.FunctionDef, call: cst.Call, binding: Binding) -> Node | None:
        """Return the argument of a call for a parameter, or else the default value."""
        order = [*function.params.posonly_params, *function.params.params]
        if self._is_method(function) and not self.is_static(function):
            order = order[1:]
        place = next((i for i, param in enumerate(order) if param is binding.node), None)
        result = Arguments.of(call).get(binding.name, place)
        return result if result is not None else binding.value

    def is_static(self, function: cst.FunctionDef) -> bool:
        """Return True if a method is a static method."""
        return any(self.names.builtin(d.decorator) == "staticmethod" for d in function.decorators)

    def _is_method(self, function: cst.FunctionDef) -> bool:
        return isinstance(self.parents.get(self.parents[function]), cst.ClassDef)

    @cached_property
    def _calls(self) -> dict[cst.FunctionDef, list[cst.Call]]:
        results: dict[cst.FunctionDef, list[cst.Call]] = {}
        unknown: set[cst.FunctionDef] = set()
        for node in self.parents:
            if type(node) is not cst.Name and type(node) is not cst.Attribute:
                continue
            for function in self._named(node):
                call = self.parents[node]
                is_call = isinstance(call, cst.Call) and call.func is node
                if isinstance(call, cst.Call) and is_call and not Arguments.of(call).starred:
                    results.setdefault(function, []).append(call)
                else:
                    unknown.add(function)
        return {f: calls for f, calls in results.items() if f not in unknown and self.is_plain(f)}

    def _named(self, node: Node) -> Iterable[cst.FunctionDef]:
        """Return the functions that an expression means: `train`, `self.train`, or `Trainer` for its `__init__`."""
        if isinstance(node, cst.Name) and not isinstance(
            self.parents.get(node), (cst.FunctionDef, cst.ClassDef)
        ):
            binding = self.names.only_binding(node)
            target = binding.node if binding is not None else None
            if (
                binding is not None
                and binding.kind == "def"
                and isinstance(target, cst.FunctionDef)
            ):
                return () if self._is_method(target) else (target,)
            if isinstance(target, cst.ClassDef):
                return methods_named(target, "__init__")
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name):
            is_own = is_self(node.value)
            named = None if is_own else self.names.class_named(node.value)
            home = enclosing_class(node, self.parents) if is_own else named
            return methods_named(home, node.attr.value) if home is not None else ()
        return ()

    def is_plain(self, function: cst.FunctionDef) -> bool:
        """Return True if each decorator is PyTorch's or keeps the function's arguments and results."""
        decorators = [d.decorator for d in function.decorators]
        names = [d.func if isinstance(d, cst.Call) else d for d in decorators]
        return all(
            (self.names.path(name) or "").startswith("torch.")
            or self.names.builtin(name) in ("staticmethod", "classmethod")
            for name in names
        )
