"""Deprecated names of PyTorch's AMP, and every use of them in a file.

`old_names.py` says what has to change at a use besides its name; `move_fixes.py` makes the fixes.

Invariant: a use is listed only if its expression certainly means a deprecated name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from precast_lint.model import Edit, Fix
from precast_lint.parsing.names import canonical
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = [
    "MODULES",
    "OLD",
    "NameUse",
    "Old",
    "expressions",
    "is_bound_here",
    "is_deprecated",
    "is_in_old_module",
    "new_name",
    "reference_kind",
    "root",
]

MODULES = ("torch.cuda.amp", "torch.cpu.amp")
"""The deprecated modules. Their names are in `torch.amp` now."""


@dataclass(frozen=True)
class Old:
    """A deprecated name.

    Attributes:
        device: The device type that the new name has to be given.
        kind: How the arguments change: autocast, scaler, custom, cast or same.
        since: The first PyTorch that has the new name.
        code: The rule for calls of it.
    """

    device: str
    kind: str
    since: str
    code: str


OLD = {
    "torch.cuda.amp.autocast": Old("cuda", "autocast", "1.12", "AMP001"),
    "torch.cpu.amp.autocast": Old("cpu", "autocast", "1.12", "AMP002"),
    "torch.cuda.amp.GradScaler": Old("cuda", "scaler", "2.3", "AMP003"),
    "torch.cpu.amp.GradScaler": Old("cpu", "scaler", "2.3", "AMP003"),
    "torch.cuda.amp.custom_fwd": Old("cuda", "custom", "2.4", "AMP004"),
    "torch.cuda.amp.custom_bwd": Old("cuda", "custom", "2.4", "AMP004"),
    "torch.cuda.amp._cast": Old("cuda", "cast", "2.4", "AMP010"),
    "torch.cuda.amp._refresh_per_optimizer_state": Old("cuda", "same", "2.3", "AMP010"),
    "torch.cuda.amp._MultiDeviceReplicator": Old("cuda", "same", "2.3", "AMP010"),
}


def is_in_old_module(path: str | None) -> bool:
    """Return True if a dotted name is one of the deprecated modules or in one of them."""
    return path is not None and path.startswith(MODULES) and path.split(".")[2] == "amp"


def new_name(path: str) -> str:
    """`torch.cuda.amp.autocast` -> `torch.amp.autocast`."""
    return ".".join(["torch", *path.split(".")[2:]])


def is_deprecated(path: str | None) -> bool:
    """Return True if a dotted name is a deprecated name or a deprecated module."""
    return path is not None and (canonical(path) in OLD or canonical(path) in MODULES)


@dataclass(eq=False)
class NameUse:
    """One place where a deprecated name is used.

    Attributes:
        node: the expression.
        place: the node that is reported.
        origin: the deprecated name.
        kind: the kind of use: call, decorator, import ...
        code: the rule that reports it; empty if none does.
        edits: the changes here besides the name; None if the use cannot be changed.
        unsafe: True if the change may change the program's results.
        followers: the uses of the alias that is bound here.
    """

    node: Node
    place: Node
    origin: str
    kind: str
    code: str
    edits: tuple[Edit, ...] | None
    unsafe: bool = False
    fix: Fix | None = None
    followers: list[NameUse] = field(default_factory=list)


def root(node: Node) -> Node:
    """The first name of a dotted name."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def expressions(source: Source) -> Iterator[tuple[Node, str]]:
    """Yield each expression that means a deprecated name, with the name."""
    for node in [*source.all(cst.Attribute), *source.all(cst.Name)]:
        if isinstance(node, cst.Name) and node not in source.scopes.scope_of:
            continue
        origin = source.origin(node)
        counts = origin in OLD or _is_module_alias(source, node)
        # `autocast.__init__` is not listed, so its group counts it as foreign.
        inside = isinstance(source.parents.get(node), cst.Attribute)
        if origin and counts and not inside and not is_bound_here(source, node):
            yield node, origin


def is_bound_here(source: Source, node: Node) -> bool:
    """Return True if a name is being assigned, not read."""
    return isinstance(node, cst.Name) and any(b.node is node for b in source.names.bindings(node))


def _is_module_alias(source: Source, node: Node) -> bool:
    """`amp = torch.cuda.amp`."""
    parent = source.parents.get(node)
    is_value = isinstance(parent, cst.Assign) and parent.value is node
    return is_value and source.names.path(node) in MODULES


def reference_kind(source: Source, node: Node) -> str:
    """Return the kind of use of a name that is not called."""
    parent = source.parents[node]
    notes = (cst.Annotation, cst.TypeAlias, cst.TypeParam)
    if any(isinstance(outer, notes) for outer in source.around(node)):
        return "annotation"
    if isinstance(parent, cst.Element):  # isinstance(x, (A, B))
        parent = source.parents[source.parents[parent]]
    if isinstance(parent, cst.Arg):
        return _argument_kind(source, node, parent)
    if isinstance(parent, cst.DictElement) and parent.value is node:
        return "value"
    if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
        return "alias" if isinstance(parent.targets[0].target, cst.Name) else "reference"
    return "reference"


def _argument_kind(source: Source, node: Node, arg: cst.Arg) -> str:
    call = source.parents[arg]
    if not isinstance(call, cst.Call):
        return "subclass"
    if source.names.builtin(call.func) in ("isinstance", "issubclass"):
        return "isinstance"
    first = call.args[0] is arg and arg.value is node and not arg.star
    is_partial = first and source.origin(call.func) == "functools.partial"
    return "partial" if is_partial else "argument"
