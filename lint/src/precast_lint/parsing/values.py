"""Inference of an expression's class from constructors and annotations.

Invariants: None where it is not known, and where two places disagree; a value that may also be None
counts as the class (`scaler: GradScaler | None`, `scaler = GradScaler() if fp16 else None`). What comes from
elsewhere without an annotation is a scaler if it is used as one: `x.scale(loss).backward()`, `x.unscale_(...)`.
A call of a function of the file is what the function returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from precast_lint.parsing.contents import Containers
from precast_lint.parsing.family import Family
from precast_lint.parsing.handed import Handed
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
    strings,
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
_DEEP = 4
_NOTHING = ""  # the value None: compatible with every class


class Values:
    """Infers the classes of one file's expressions."""

    def __init__(self, names: NameTable, parents: dict[Node, Node]) -> None:
        self.names = names
        self.parents = parents
        self.handed = Handed(names, parents)
        self._open: set[Node] = set()
        self._classes: dict[Node, str | None] = {}
        self._attributes: dict[Node, dict[str, list[tuple[Node | None, Node | None]]]] = {}
        self._returns: dict[Node, list[Node]] = {}
        self._objects: dict[object, cst.ClassDef | None] = {}

    def instance(self, node: Node | None) -> str | None:
        """Return the documented dotted name of an expression's class."""
        if node is None or self._open:
            return self._named_class(node)
        if node not in self._classes:
            self._classes[node] = self._named_class(node)
        return self._classes[node]

    def _named_class(self, node: Node | None) -> str | None:
        result = self._instance(node)
        return canonical(result) if result else None

    def constructed(self, node: Node | None) -> Node | None:
        """Return the one call that creates an expression's value, also if a parameter passes it."""
        visited: set[Node] = set()
        while node is not None:
            if node in visited:
                return None
            visited.add(node)
            if isinstance(node, cst.Call):
                returned = self.returned(node)
                if len(returned) != 1:
                    return node
                node = returned[0]
                continue
            sources = [value for value, _ in self.sources(node) if not is_none(value)]
            result = sources[0] if len(sources) == 1 else None
            node = result if isinstance(result, cst.Call) or self._is_handed(node) else None
        return node

    def _is_handed(self, node: Node) -> bool:
        binding = self.names.only_binding(node)
        return binding is not None and bool(self.handed.to(binding))

    def enclosing_class(self, node: Node) -> cst.ClassDef | None:
        """Return the innermost class that a node is in."""
        return enclosing_class(node, self.parents)

    def _instance(self, node: Node | None) -> str | None:
        if node is None or node in self._open:
            return None
        self._open.add(node)
        try:
            return self._infer(node)
        finally:
            self._open.discard(node)

    def _infer(self, node: Node) -> str | None:
        if is_none(node):
            return _NOTHING
        if isinstance(node, cst.Call):
            entry = self.names.path(node.func) or self._instance(_itself(node))
            entry = entry or self._scaler_made(node.func)
            return entry or _agreed(map(self._instance, self.returned(node))) or None
        if isinstance(node, cst.IfExp):
            return _agreed(map(self._instance, (node.body, node.orelse)))
        if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)):
            sources = self.sources(node)
            entry = _agreed(self._source(*source) for source in sources)
            return entry or (self._by_use(node) if self._is_foreign(node, sources) else entry)
        return None

    def _scaler_made(self, func: Node) -> str | None:
        results = {b.path and canonical(b.path) for b in self.names.bindings(func)}
        return "torch.amp.GradScaler" if len(results) > 1 and results <= SCALERS else None

    def _by_use(self, node: Node) -> str | None:
        return "torch.amp.GradScaler" if self.variable(node) in self._used_as_scalers else None

    def _is_foreign(self, node: Node, sources: list[tuple[Node | None, Node | None]]) -> bool:
        """Return True if a value is a parameter or comes from one."""
        if isinstance(node, cst.Name):
            bindings = self.names.bindings(node)
            return bool(bindings) and all(
                b.kind == "param" and b.annotation is None and (b.value is None or is_none(b.value))
                for b in bindings
            )
        values = [value for value, note in sources if note is None and not is_none(value)]
        return bool(values) and all(
            isinstance(value, cst.Name) and self._is_foreign(value, []) for value in values
        )

    def variable(self, node: Node) -> tuple[object, str] | None:
        """Return a key that is equal for all uses of one variable, or of one attribute of self."""
        if isinstance(node, cst.Name):
            scope = self.names.scopes.scope_of.get(node)
            home = scope.home(node.value) if scope else None
            return (home, node.value) if home else None
        if isinstance(node, cst.Attribute) and is_self(node.value):
            home_class = self.enclosing_class(node)
            return (home_class, node.attr.value) if home_class else None
        return None

    @cached_property
    def _used_as_scalers(self) -> set[tuple[object, str] | None]:
        """The variables and attributes that are used as scalers.

        `unscale_` or `scale(...).backward` is called on them; or their name ends with "scaler", and both `step` and
        `update` are called on them.
        """
        attributes = [n for n in self.parents if type(n) is cst.Attribute]
        owners = (_scaler_in(node) for node in attributes)
        results = {self.variable(owner) for owner in owners if owner is not None}
        stepped, updated = (
            {self.variable(n.value) for n in attributes if n.attr.value == name and _named(n.value)}
            for name in ("step", "update")
        )
        return (results | stepped & updated) - {None}

    def returned(self, call: cst.Call) -> list[Node]:
        """Return the values that a call of a function of this file returns; empty if one is unknown."""
        function = self.handed.function_called(call) or self._method_of_base(call)
        if function is None:
            return self._of_lambda(call)
        if function not in self._returns:
            run = self.family.run_by_self(function)
            values = list(map(returned_by, run)) if all(map(self.handed.is_plain, run)) else []
            self._returns[function] = (
                [value for one in values for value in one] if all(values) else []
            )
        return self._returns[function]

    def _of_lambda(self, call: cst.Call) -> list[Node]:
        """Return the result of a lambda without parameters: `amp = lambda: autocast("cuda")`."""
        binding = self.names.only_binding(call.func)
        definition = binding.value if binding is not None and binding.kind == "assign" else None
        if not isinstance(definition, cst.Lambda) or call.args or any(children(definition.params)):
            return []
        return [definition.body]

    def _method_of_base(self, call: cst.Call) -> cst.FunctionDef | None:
        """Return the method of a base in this file that `self.make()` runs."""
        func = call.func
        if not isinstance(func, cst.Attribute) or not is_self(func.value):
            return None
        home = self.enclosing_class(call)
        base = self.family.provider(home, func.attr.value) if home is not None else None
        results = methods_named(base, func.attr.value) if base is not None else []
        return results[0] if len(results) == 1 else None

    def _source(self, value: Node | None, annotation: Node | None) -> str | None:
        if annotation is not None:
            return self._annotated(annotation)
        return self._instance(value)

    def sources(self, node: Node | None) -> list[tuple[Node | None, Node | None]]:
        """Return the values of a name or an attribute of self anywhere in the file, each with its annotation.

        An unknown value is None, as is a missing annotation.
        """
        if isinstance(node, cst.Name):
            return [source for binding in self.names.bindings(node) for source in self._of(binding)]
        if isinstance(node, cst.Attribute) and is_self(node.value):
            home = self.enclosing_class(node)
            return self._of_family(home, node.attr.value) if home else []
        if isinstance(node, cst.Attribute):
            return self._of_object(node)
        if isinstance(node, cst.Subscript):
            return [(value, None) for value in self.contents.item(node) or ()]
        return []

    def _of_family(self, home: Node, name: str) -> list[tuple[Node | None, Node | None]]:
        """Return the values of an attribute of self in a class, its bases and its subclasses in the file."""
        assert isinstance(home, cst.ClassDef)
        result = self.attributes(home).get(name, [])
        for other in self.family.related(home):
            result = result + self.attributes(other).get(name, [])
        return result or self._of_property(home, name)

    def _of_property(self, home: cst.ClassDef, name: str) -> list[tuple[Node | None, Node | None]]:
        """Return the results of a property of a class or of its bases in this file."""
        for place in (home, *self.family.bases(home)):
            for line in methods_named(place, name):
                kinds = [
                    self.names.builtin(d.decorator) or self.names.path(d.decorator)
                    for d in line.decorators
                ]
                is_read = kinds in (["property"], ["functools.cached_property"])
                return [(value, None) for value in returned_by(line)] if is_read else []
        return []

    def _of_object(self, node: cst.Attribute) -> list[tuple[Node | None, Node | None]]:
        """Return the values of `cfg.amp`, for an object of a class of this file."""
        name = node.attr.value
        if self.names.path(node.value) is not None or name in self._stored_outside:
            return []  # of a module; or nobody knows when it gets which value
        home = self._object(node.value)
        if home is not None:
            return self._of_family(home, name)
        return self._of_member(node.value) if name == "value" else []

    def _object(self, node: Node) -> cst.ClassDef | None:
        """Return the class of this file that an object is an instance of, or that a name means."""
        place = self.variable(node) or node
        if place not in self._objects:
            self._objects[place] = None  # what refers to itself is not known
            self._objects[place] = self.names.class_named(node) or self._class_of(node, _DEEP)
        return self._objects[place]

    def object_class(self, node: Node | None) -> cst.ClassDef | None:
        """Return the class of this file that an object is an instance of; None for the class itself, and if unknown."""
        if not isinstance(node, (cst.Name, cst.Attribute)) or self.names.path(node) is not None:
            return None
        if isinstance(node, cst.Attribute) and node.attr.value in self._stored_outside:
            return None
        binding = self.names.only_binding(node)
        if is_self(node) or (binding is not None and binding.kind == "class"):
            return None
        return self._object(node)

    def _of_member(self, node: Node) -> list[tuple[Node | None, Node | None]]:
        """The value of a member of an enumeration: of `Precision.HALF`."""
        home = self.names.class_named(node.value) if isinstance(node, cst.Attribute) else None
        bases = (
            [self.names.path(base.value) or "" for base in home.bases] if home is not None else []
        )
        return self.sources(node) if any(base.startswith("enum.") for base in bases) else []

    @cached_property
    def _stored_outside(self) -> set[str]:
        """The names of attributes that code assigns on other objects than self: `args.device = ...`."""
        targets = [n.target for n in self.parents if type(n) is cst.AssignTarget]
        return {t.attr.value for t in targets if type(t) is cst.Attribute and not is_self(t.value)}

    def _class_of(self, node: Node | None, depth: int) -> cst.ClassDef | None:
        """Return the class of this file that all values of an expression are instances of, or its annotation."""
        if depth == 0 or not isinstance(node, (cst.Name, cst.Attribute, cst.Call)):
            return None
        if isinstance(node, cst.Call):
            returned = self.returned(node)
            if returned:
                results = {self._class_of(value, depth - 1) for value in returned}
                return results.pop() if len(results) == 1 else None
            inner = _itself(node)
            definition = self._class_of(inner, depth - 1) if inner is not None else None
            return (
                definition
                if definition is not None and self._is_module(definition)
                else self.names.class_named(node.func)
            )
        sources = [(v, n) for v, n in self.sources(node) if n is not None or not is_none(v)]
        results = {
            self.names.class_named(note) if note is not None else self._class_of(value, depth - 1)
            for value, note in sources
        }
        return results.pop() if len(results) == 1 else None

    def _is_module(self, home: cst.ClassDef) -> bool:
        bases = [self.names.path(base.value) or "" for base in home.bases]
        return any(base in ("torch.nn.Module", "torch.nn.modules.module.Module") for base in bases)

    @cached_property
    def contents(self) -> Containers:
        """The contents of this file's lists and tables."""
        return Containers(self)

    @cached_property
    def family(self) -> Family:
        """The inheritance between this file's classes."""
        return Family(self.names)

    def _of(self, binding: Binding) -> Iterator[tuple[Node | None, Node | None]]:
        """Yield the value and annotation of a binding; for a parameter, the arguments of the calls in this file."""
        handed = self.handed.to(binding)
        if handed:
            yield from ((value, None) for value in handed)
        elif binding.kind in ("assign", "annotated", "param"):
            yield binding.value, binding.annotation
        else:
            items = self.contents.of_target(binding.node) if binding.kind == "other" else None
            yield from ((value, None) for value in items or (None,))

    def attributes(self, home: Node) -> dict[str, list[tuple[Node | None, Node | None]]]:
        """Return the attributes that a class assigns, each with its values and annotations."""
        if home not in self._attributes:
            table: dict[str, list[tuple[Node | None, Node | None]]] = {}
            for name, source in _stores(home):
                table.setdefault(name, []).append(source)
            self._attributes[home] = table
        return self._attributes[home]

    def _annotated(self, node: Node) -> str | None:
        text = strings(node)
        if text is not None:
            return self._quoted(node)
        if is_none(node):
            return _NOTHING
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.BitOr):
            return _agreed(map(self._annotated, (node.left, node.right)))
        if isinstance(node, cst.Subscript):
            path = self.names.path(node.value) or ""
            inner = node.slice[0].slice
            if path in ("typing.Optional", "typing.Final") and isinstance(inner, cst.Index):
                return self._annotated(inner.value)
            return None
        return self.names.path(node)

    def _quoted(self, node: Node) -> str | None:
        """A quoted annotation that is one name, with or without `| None`."""
        tree = self.names.scopes.quoted_trees.get(node)
        return self._annotated(tree) if tree is not None else None


def _itself(call: cst.Call) -> Node | None:
    """Return the module in `module.cuda()`, `module.to(device)` and other calls that keep its dtype."""
    func = call.func
    if not isinstance(func, cst.Attribute) or not isinstance(func.value, cst.Call):
        return None
    if func.attr.value in ("cuda", "cpu", "eval", "train", "requires_grad_"):
        return func.value
    to_device = func.attr.value == "to" and len(call.args) == 1 and _is_device(call.args[0].value)
    return func.value if to_device else None


def _is_device(node: Node) -> bool:
    """Return True if a value is a device by its name or as a text."""
    last = node.attr if isinstance(node, cst.Attribute) else node
    named = isinstance(last, cst.Name) and last.value in ("device", "dev", "DEVICE")
    return named or strings(node) is not None


def _scaler_in(method: cst.Attribute) -> Node | None:
    """The x of `x.unscale_`, and of `x.scale(...).backward`."""
    name, owner = method.attr.value, method.value
    if name == "unscale_":
        return owner
    if name == "backward" and isinstance(owner, cst.Call) and isinstance(owner.func, cst.Attribute):
        return owner.func.value if owner.func.attr.value == "scale" else None
    return None


def _named(node: Node) -> bool:
    """Return True if the name of a variable or an attribute ends with "scaler"."""
    last = node.attr if isinstance(node, cst.Attribute) else node
    return isinstance(last, cst.Name) and last.value.lower().endswith("scaler")


def _agreed(results: Iterable[str | None]) -> str | None:
    """Return the class that all results agree on; the empty text if all are None. Stops at the first unknown one."""
    kinds = set()
    for kind in results:
        if kind is None:
            return None
        kinds.add(kind)
    if kinds != {_NOTHING}:
        kinds.discard(_NOTHING)
    if len(kinds) > 1 and {canonical(kind) for kind in kinds} <= SCALERS:
        return "torch.amp.GradScaler"  # of one kind or another, it is used as one
    if len(kinds) > 1 and all(kind.startswith("torch.optim.") for kind in kinds):
        return _common_optimizer(kinds)
    return kinds.pop() if len(kinds) == 1 else None


def _common_optimizer(kinds: set[str]) -> str | None:
    are_schedulers = {kind.startswith("torch.optim.lr_scheduler.") for kind in kinds}
    if are_schedulers == {True}:
        return "torch.optim.lr_scheduler.LRScheduler"
    are_others = any("swa_utils" in kind for kind in kinds)
    return "torch.optim.Optimizer" if are_schedulers == {False} and not are_others else None


def _stores(home: Node) -> Iterator[tuple[str, tuple[Node | None, Node | None]]]:
    """The attributes of self that a class's methods assign, and those of the class itself."""
    assert isinstance(home, cst.ClassDef)
    for line in home.body.body:
        for own in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            if isinstance(own, cst.Assign):
                for target in own.targets:
                    if isinstance(target.target, cst.Name):
                        yield target.target.value, (own.value, None)
            elif isinstance(own, cst.AnnAssign) and isinstance(own.target, cst.Name):
                yield own.target.value, (own.value, own.annotation.annotation)
    stores = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.For, cst.AsName)
    # Python takes long to say that a node is no instance of a class of nodes.
    for node in [n for n in walk(home) if type(n) in stores]:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                yield from _stored(target.target, node.value, None)
        elif isinstance(node, cst.AnnAssign):
            yield from _stored(node.target, node.value, node.annotation.annotation)
        elif isinstance(node, (cst.AugAssign, cst.For)):
            yield from _stored(node.target, None, None)
        elif isinstance(node, cst.AsName):
            yield from _stored(node.name, None, None)


def _stored(
    target: Node, value: Node | None, note: Node | None
) -> Iterator[tuple[str, tuple[Node | None, Node | None]]]:
    if isinstance(target, cst.Attribute) and is_self(target.value):
        yield target.attr.value, (value, note)
    elif isinstance(target, (cst.Tuple, cst.List)):
        values = elements(value, len(target.elements))
        for element, inner in zip(target.elements, values, strict=True):
            yield from _stored(element.value, inner, None)
