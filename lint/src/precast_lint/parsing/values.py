"""Inference of an expression's class from constructors and annotations.

Invariants: the class is None if it is unknown, or if two assignments disagree. A value that may also be None has the
class (`scaler: GradScaler | None`, `scaler = GradScaler() if fp16 else None`). A parameter without an annotation is a
scaler if it is used as one: `x.scale(loss).backward()`, `x.unscale_(...)`. A call of a function in the file has the
class of the values that the function returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from precast_lint.parsing.call_arguments import CallArguments
from precast_lint.parsing.contents import Containers
from precast_lint.parsing.family import Family
from precast_lint.parsing.names import NameTable, canonical, is_none
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.scopes import Binding, elements
from precast_lint.parsing.syntax import (
    Node,
    children,
    cst,
    enclosing_class,
    is_self,
    methods_named,
    string_value,
    walk,
)

__all__ = ["SCALERS", "Values"]

SCALERS = frozenset(
    {
        "torch.amp.GradScaler",
        "torch.cuda.amp.GradScaler",
        "torch.cpu.amp.GradScaler",
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        "fairscale.optim.grad_scaler.ShardedGradScaler",
        "precast.GradScaler",
    }
)
_MAX_DEPTH = 4
_NONE_CLASS = ""  # the class of the value None, compatible with every other class
_AnnotatedValue = tuple[Node | None, Node | None]  # a value and its annotation


class Values:
    """Infers the classes of one file's expressions."""

    def __init__(self, names: NameTable, parents: dict[Node, Node]) -> None:
        self.names = names
        self.parents = parents
        self.call_arguments = CallArguments(names, parents)
        self._in_progress: set[Node] = set()
        self._classes: dict[Node, str | None] = {}
        self._attributes: dict[Node, dict[str, list[_AnnotatedValue]]] = {}
        self._returns: dict[Node, list[Node]] = {}
        self._object_classes: dict[object, cst.ClassDef | None] = {}

    def instance(self, node: Node | None) -> str | None:
        """Return the dotted name of an expression's class, as PyTorch documents it; None if it is unknown."""
        if node is None or self._in_progress:
            return self._canonical_class(node)
        if node not in self._classes:
            self._classes[node] = self._canonical_class(node)
        return self._classes[node]

    def _canonical_class(self, node: Node | None) -> str | None:
        result = self._instance(node)
        return canonical(result) if result else None

    def constructor(self, node: Node | None) -> Node | None:
        """Return the only call that creates an expression's value, found through variables, parameters and results."""
        visited: set[Node] = set()
        while node is not None:
            if node in visited:
                return None
            visited.add(node)
            if isinstance(node, cst.Call):
                results = self.results(node)
                if len(results) != 1:
                    return node
                node = results[0]
                continue
            values = [value for value, _ in self.sources(node) if not is_none(value)]
            value = values[0] if len(values) == 1 else None
            node = value if isinstance(value, cst.Call) or self._is_passed_parameter(node) else None
        return node

    def _is_passed_parameter(self, node: Node) -> bool:
        binding = self.names.only_binding(node)
        return binding is not None and bool(self.call_arguments.for_unannotated(binding))

    def enclosing_class(self, node: Node) -> cst.ClassDef | None:
        """Return the innermost class that a node is in."""
        return enclosing_class(node, self.parents)

    def _instance(self, node: Node | None) -> str | None:
        if node is None or node in self._in_progress:
            return None
        self._in_progress.add(node)
        try:
            return self._infer(node)
        finally:
            self._in_progress.discard(node)

    def _infer(self, node: Node) -> str | None:
        if is_none(node):
            return _NONE_CLASS
        if isinstance(node, cst.Call):
            class_name = self.names.path(node.func) or self._instance(_unchanged_module(node))
            class_name = class_name or self._constructed_scaler(node.func)
            return class_name or _common_class(map(self._instance, self.results(node))) or None
        if isinstance(node, cst.IfExp):
            return _common_class(map(self._instance, (node.body, node.orelse)))
        if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)):
            sources = self.sources(node)
            class_name = _common_class(self._class_of_source(*source) for source in sources)
            if not class_name and self._comes_from_parameter(node, sources):
                return self._class_by_use(node)
            return class_name
        return None

    def _constructed_scaler(self, func: Node) -> str | None:
        """Return the class of a scaler whose class has several bindings, as after a fallback of an import."""
        results = {b.path and canonical(b.path) for b in self.names.bindings(func)}
        return "torch.amp.GradScaler" if len(results) > 1 and results <= SCALERS else None

    def _class_by_use(self, node: Node) -> str | None:
        return "torch.amp.GradScaler" if self.variable(node) in self._used_as_scalers else None

    def _comes_from_parameter(self, node: Node, sources: list[_AnnotatedValue]) -> bool:
        """Return True if a value only comes from parameters that have no annotation, and no default or None."""
        if isinstance(node, cst.Name):
            bindings = self.names.bindings(node)
            return bool(bindings) and all(
                b.kind == "param" and b.annotation is None and (b.value is None or is_none(b.value))
                for b in bindings
            )
        values = [
            value for value, annotation in sources if annotation is None and not is_none(value)
        ]
        return bool(values) and all(
            isinstance(value, cst.Name) and self._comes_from_parameter(value, [])
            for value in values
        )

    def variable(self, node: Node) -> tuple[object, str] | None:
        """Return a key that is equal for all uses of one variable, or of one attribute of self."""
        if isinstance(node, cst.Name):
            scope = self.names.scopes.scope_of.get(node)
            home = scope.home(node.value) if scope else None
            return (home, node.value) if home else None
        if isinstance(node, cst.Attribute) and is_self(node.value):
            class_def = self.enclosing_class(node)
            return (class_def, node.attr.value) if class_def else None
        return None

    @cached_property
    def _used_as_scalers(self) -> set[tuple[object, str] | None]:
        """The variables, and attributes of self, that are used as scalers.

        `unscale_` or `scale(...).backward` is called on them; or their name ends with "scaler", and both `step` and
        `update` are called on them.
        """
        attributes = [n for n in self.parents if type(n) is cst.Attribute]
        owners = (_scaler_of(node) for node in attributes)
        scalers = {self.variable(owner) for owner in owners if owner is not None}
        stepped, updated = (
            {
                self.variable(n.value)
                for n in attributes
                if n.attr.value == name and _is_named_scaler(n.value)
            }
            for name in ("step", "update")
        )
        return (scalers | stepped & updated) - {None}

    def results(self, call: cst.Call) -> list[Node]:
        """Return the values that a call of a function of this file returns; empty if one is unknown."""
        function = self.call_arguments.called_function(call) or self._inherited_method(call)
        if function is None:
            return self._lambda_result(call)
        if function not in self._returns:
            methods = self.family.implementations(function)
            is_known = all(map(self.call_arguments.is_plain, methods))
            results = list(map(returned_by, methods)) if is_known else []
            self._returns[function] = (
                [v for values in results for v in values] if all(results) else []
            )
        return self._returns[function]

    def _lambda_result(self, call: cst.Call) -> list[Node]:
        """Return the result of a lambda without parameters: `amp = lambda: autocast("cuda")`."""
        binding = self.names.only_binding(call.func)
        definition = binding.value if binding is not None and binding.kind == "assign" else None
        if not isinstance(definition, cst.Lambda) or call.args or any(children(definition.params)):
            return []
        return [definition.body]

    def _inherited_method(self, call: cst.Call) -> cst.FunctionDef | None:
        func = call.func
        if not isinstance(func, cst.Attribute) or not is_self(func.value):
            return None
        class_def = self.enclosing_class(call)
        base = self.family.provider(class_def, func.attr.value) if class_def is not None else None
        results = methods_named(base, func.attr.value) if base is not None else []
        return results[0] if len(results) == 1 else None

    def _class_of_source(self, value: Node | None, annotation: Node | None) -> str | None:
        if annotation is not None:
            return self._annotated(annotation)
        return self._instance(value)

    def sources(self, node: Node | None) -> list[_AnnotatedValue]:
        """Return all values that the file assigns to a name or an attribute, each with its annotation.

        An unknown value and a missing annotation are None.
        """
        if isinstance(node, cst.Name):
            return [
                source
                for binding in self.names.bindings(node)
                for source in self._values_of_binding(binding)
            ]
        if isinstance(node, cst.Attribute) and is_self(node.value):
            class_def = self.enclosing_class(node)
            return self._attribute_values(class_def, node.attr.value) if class_def else []
        if isinstance(node, cst.Attribute):
            return self._object_attribute_values(node)
        if isinstance(node, cst.Subscript):
            return [(value, None) for value in self.contents.item(node) or ()]
        return []

    def _attribute_values(self, class_def: cst.ClassDef, name: str) -> list[_AnnotatedValue]:
        """Return the values of an attribute of self in a class, its bases and its subclasses in this file."""
        result = self.attributes(class_def).get(name, [])
        for other in self.family.related(class_def):
            result = result + self.attributes(other).get(name, [])
        return result or self._property_values(class_def, name)

    def _property_values(self, class_def: cst.ClassDef, name: str) -> list[_AnnotatedValue]:
        for definition in (class_def, *self.family.bases(class_def)):
            for line in methods_named(definition, name):
                kinds = [
                    self.names.builtin(d.decorator) or self.names.path(d.decorator)
                    for d in line.decorators
                ]
                is_property = kinds in (["property"], ["functools.cached_property"])
                return [(value, None) for value in returned_by(line)] if is_property else []
        return []

    def _object_attribute_values(self, node: cst.Attribute) -> list[_AnnotatedValue]:
        """Return the values of `cfg.amp`, for an object of a class of this file."""
        name = node.attr.value
        if self.names.path(node.value) is not None or name in self._attributes_set_outside:
            return []  # an attribute of a module, or one whose value depends on other code
        class_def = self._object_class(node.value)
        if class_def is not None:
            return self._attribute_values(class_def, name)
        return self._enum_values(node.value) if name == "value" else []

    def _object_class(self, node: Node) -> cst.ClassDef | None:
        """Return the class in this file that a name refers to, or of which an object is an instance."""
        variable = self.variable(node) or node
        if variable not in self._object_classes:
            self._object_classes[variable] = None  # the result if the definition refers to itself
            self._object_classes[variable] = self.names.class_named(node) or self._class_of(
                node, _MAX_DEPTH
            )
        return self._object_classes[variable]

    def object_class(self, node: Node | None) -> cst.ClassDef | None:
        """Return the class of this file that an object is an instance of; None if unknown, or for a class itself."""
        if not isinstance(node, (cst.Name, cst.Attribute)) or self.names.path(node) is not None:
            return None
        if isinstance(node, cst.Attribute) and node.attr.value in self._attributes_set_outside:
            return None
        binding = self.names.only_binding(node)
        if is_self(node) or (binding is not None and binding.kind == "class"):
            return None
        return self._object_class(node)

    def _enum_values(self, node: Node) -> list[_AnnotatedValue]:
        """Return the values of `node.value` if `node` is a member of an enumeration, as in `Precision.HALF.value`."""
        class_def = self.names.class_named(node.value) if isinstance(node, cst.Attribute) else None
        bases = (
            [self.names.path(base.value) or "" for base in class_def.bases]
            if class_def is not None
            else []
        )
        return self.sources(node) if any(base.startswith("enum.") for base in bases) else []

    @cached_property
    def _attributes_set_outside(self) -> set[str]:
        """The names of attributes that are assigned to other objects than self: `args.device = ...`."""
        targets = [n.target for n in self.parents if type(n) is cst.AssignTarget]
        return {t.attr.value for t in targets if type(t) is cst.Attribute and not is_self(t.value)}

    def _class_of(self, node: Node | None, depth: int) -> cst.ClassDef | None:
        """Return the class in this file of all values of an expression, from their constructors or annotations."""
        if depth == 0 or not isinstance(node, (cst.Name, cst.Attribute, cst.Call)):
            return None
        if isinstance(node, cst.Call):
            values = self.results(node)
            if values:
                results = {self._class_of(value, depth - 1) for value in values}
                return results.pop() if len(results) == 1 else None
            inner = _unchanged_module(node)
            definition = self._class_of(inner, depth - 1) if inner is not None else None
            if definition is not None and self._is_torch_module(definition):
                return definition
            return self.names.class_named(node.func)
        results = {
            self.names.class_named(annotation)
            if annotation is not None
            else self._class_of(value, depth - 1)
            for value, annotation in self.sources(node)
            if annotation is not None or not is_none(value)
        }
        return results.pop() if len(results) == 1 else None

    def _is_torch_module(self, class_def: cst.ClassDef) -> bool:
        bases = [self.names.path(base.value) or "" for base in class_def.bases]
        return any(base in ("torch.nn.Module", "torch.nn.modules.module.Module") for base in bases)

    @cached_property
    def contents(self) -> Containers:
        """The items of this file's lists and dictionaries."""
        return Containers(self)

    @cached_property
    def family(self) -> Family:
        """The inheritance between this file's classes."""
        return Family(self.names)

    def _values_of_binding(self, binding: Binding) -> Iterator[_AnnotatedValue]:
        """Yield the value and annotation of a binding; for a parameter, the arguments of the calls in this file."""
        arguments = self.call_arguments.for_unannotated(binding)
        if arguments:
            yield from ((value, None) for value in arguments)
        elif binding.kind in ("assign", "annotated", "param"):
            yield binding.value, binding.annotation
        else:
            items = self.contents.of_target(binding.node) if binding.kind == "other" else None
            yield from ((value, None) for value in items or (None,))

    def attributes(self, class_def: cst.ClassDef) -> dict[str, list[_AnnotatedValue]]:
        """Return the attributes that a class assigns, each with its values and annotations."""
        if class_def not in self._attributes:
            table: dict[str, list[_AnnotatedValue]] = {}
            for name, value in _attribute_assignments(class_def):
                table.setdefault(name, []).append(value)
            self._attributes[class_def] = table
        return self._attributes[class_def]

    def _annotated(self, node: Node) -> str | None:
        """Return the class that an annotation names, with or without `| None`."""
        if string_value(node) is not None:
            tree = self.names.scopes.quoted_trees.get(node)
            return self._annotated(tree) if tree is not None else None
        if is_none(node):
            return _NONE_CLASS
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.BitOr):
            return _common_class(map(self._annotated, (node.left, node.right)))
        if isinstance(node, cst.Subscript):
            path = self.names.path(node.value) or ""
            inner = node.slice[0].slice
            if path in ("typing.Optional", "typing.Final") and isinstance(inner, cst.Index):
                return self._annotated(inner.value)
            return None
        return self.names.path(node)


def _unchanged_module(call: cst.Call) -> Node | None:
    """Return the module in a call that returns it with the same dtype: `module.cuda()`, `module.to(device)`."""
    func = call.func
    if not isinstance(func, cst.Attribute) or not isinstance(func.value, cst.Call):
        return None
    if func.attr.value in ("cuda", "cpu", "eval", "train", "requires_grad_"):
        return func.value
    to_device = func.attr.value == "to" and len(call.args) == 1 and _is_device(call.args[0].value)
    return func.value if to_device else None


def _is_device(node: Node) -> bool:
    last = node.attr if isinstance(node, cst.Attribute) else node
    is_device = isinstance(last, cst.Name) and last.value in ("device", "dev", "DEVICE")
    return is_device or string_value(node) is not None


def _scaler_of(method: cst.Attribute) -> Node | None:
    name, owner = method.attr.value, method.value
    if name == "unscale_":
        return owner
    if name == "backward" and isinstance(owner, cst.Call) and isinstance(owner.func, cst.Attribute):
        return owner.func.value if owner.func.attr.value == "scale" else None
    return None


def _is_named_scaler(node: Node) -> bool:
    last = node.attr if isinstance(node, cst.Attribute) else node
    return isinstance(last, cst.Name) and last.value.lower().endswith("scaler")


def _common_class(results: Iterable[str | None]) -> str | None:
    """Return the class of all results, without those of the value None; None if one is unknown or they differ."""
    kinds = set()
    for kind in results:
        if kind is None:
            return None
        kinds.add(kind)
    if kinds != {_NONE_CLASS}:
        kinds.discard(_NONE_CLASS)
    if len(kinds) > 1 and {canonical(kind) for kind in kinds} <= SCALERS:
        return "torch.amp.GradScaler"  # all of them have its methods
    if len(kinds) > 1 and all(kind.startswith("torch.optim.") for kind in kinds):
        return _common_optimizer(kinds)
    return kinds.pop() if len(kinds) == 1 else None


def _common_optimizer(kinds: set[str]) -> str | None:
    """Return the base of schedulers or of optimizers; None for a mixture, or with a class of `swa_utils`."""
    are_schedulers = {kind.startswith("torch.optim.lr_scheduler.") for kind in kinds}
    if are_schedulers == {True}:
        return "torch.optim.lr_scheduler.LRScheduler"
    if are_schedulers == {False} and not any("swa_utils" in kind for kind in kinds):
        return "torch.optim.Optimizer"
    return None


def _attribute_assignments(class_def: cst.ClassDef) -> Iterator[tuple[str, _AnnotatedValue]]:
    """Yield the attributes that the body of a class and its methods assign, each with value and annotation."""
    for line in class_def.body.body:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(statement, cst.Assign):
                for target in statement.targets:
                    if isinstance(target.target, cst.Name):
                        yield target.target.value, (statement.value, None)
            elif isinstance(statement, cst.AnnAssign) and isinstance(statement.target, cst.Name):
                annotation = statement.annotation.annotation
                yield statement.target.value, (statement.value, annotation)
    assignments = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.For, cst.AsName)
    # `isinstance` of all nodes would be slow: node classes are abstract.
    for node in [n for n in walk(class_def) if type(n) in assignments]:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                yield from _self_assignments(target.target, node.value, None)
        elif isinstance(node, cst.AnnAssign):
            yield from _self_assignments(node.target, node.value, node.annotation.annotation)
        elif isinstance(node, (cst.AugAssign, cst.For)):
            yield from _self_assignments(node.target, None, None)
        elif isinstance(node, cst.AsName):
            yield from _self_assignments(node.name, None, None)


def _self_assignments(
    target: Node, value: Node | None, annotation: Node | None
) -> Iterator[tuple[str, _AnnotatedValue]]:
    if isinstance(target, cst.Attribute) and is_self(target.value):
        yield target.attr.value, (value, annotation)
    elif isinstance(target, (cst.Tuple, cst.List)):
        values = elements(value, len(target.elements))
        for element, inner in zip(target.elements, values, strict=True):
            yield from _self_assignments(element.value, inner, None)
