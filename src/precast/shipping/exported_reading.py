"""The operations of an exported program by module and dtype, read from its graph; and the differences of two programs.

Invariants:

- nothing is run, and the exported model is not needed: module names are those in the file;
- an operation is visited under the dtype of its result; casts are visited separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from precast import _torch
from precast._internal.display import dtype_name
from precast._torch import OpOverload

__all__ = ["ModulePart", "ProgramContents", "ProgramDifference", "contents", "differences_between"]

_NOT_COMPUTED = ("aten::view", "aten::transpose", "aten::t", "aten::permute", "aten::reshape", "aten::expand",
                 "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select", "aten::detach", "aten::alias",
                 "aten::unflatten", "aten::flatten", "aten::contiguous", "aten::clone", "aten::dropout")  # fmt: skip
_CASTS = ("aten::to", "aten::_to_copy")


@dataclass
class ModulePart:
    """The operations and weights of one module of a program; the name "" is the model itself.

    Attributes:
        operations: dtype -> operation -> number of results with that dtype.
        casts: (from, to) -> number of casts.
        weights: name of each stored tensor -> its dtype.
    """

    name: str
    kind: str
    operations: dict[str, Counter[str]] = field(default_factory=dict)
    casts: Counter[tuple[str, str]] = field(default_factory=Counter)
    weights: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "module": self.name,
            "kind": self.kind,
            "operations": {dtype: dict(counts) for dtype, counts in self.operations.items()},
            "casts": [{"from": a, "to": b, "count": n} for (a, b), n in self.casts.items()],
            "weights": self.weights,
        }

    def dtypes_by_operation(self) -> dict[str, str]:
        """Return the dtypes of each operation and weight, as text."""
        counts: dict[str, list[str]] = {}
        for dtype, operations in sorted(self.operations.items()):
            for operation, n in operations.items():
                counts.setdefault(operation, []).append(f"{n} x {dtype}" if n > 1 else dtype)
        texts = {operation: ", ".join(counts[operation]) for operation in sorted(counts)}
        return texts | {f"weight {name}": self.weights[name] for name in sorted(self.weights)}

    def lines(self) -> Iterator[str]:
        """Yield the lines that display the module."""
        yield f"{self.name}  {self.kind}".strip()
        for dtype, operations in self.operations.items():
            terms = (f"{op} x{n}" if n > 1 else op for op, n in operations.items())
            yield f"  {dtype}: {', '.join(terms)}"
        for (before, after), count in self.casts.items():
            yield f"  cast {before} -> {after}" + (f" x{count}" if count > 1 else "")
        for dtype in dict.fromkeys(self.weights.values()):
            names = [name.rpartition(".")[2] for name, own in self.weights.items() if own == dtype]
            yield f"  weights in {dtype}: {', '.join(names)}"


@dataclass
class ProgramContents:
    """The contents of a program.

    Attributes:
        parts: the modules with operations or weights, in the order of their names.
        facts: the facts on the policy in the file.
        weight_bytes: dtype -> the bytes of the tensors that are stored in it.
    """

    parts: dict[str, ModulePart]
    facts: dict[str, Any]
    weight_bytes: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        modules = [part.to_dict() for part in self.parts.values()]
        return {**self.facts, "weight_bytes": self.weight_bytes, "modules": modules}

    def __str__(self) -> str:
        sizes = [f"{size:,} bytes {dtype}" for dtype, size in self.weight_bytes.items()]
        lines = [f"weights: {', '.join(sizes) or 'none'}"]
        if self.facts:
            policy = "policy {policy} ({fingerprint}), precast {precast}".format_map(self.facts)
            lines.insert(0, policy)
        return "\n".join([*lines, *(line for part in self.parts.values() for line in part.lines())])


@dataclass(frozen=True)
class ProgramDifference:
    """A difference of two programs: the module, the operation or weight, and the dtypes in both."""

    module: str
    what: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.what}: {self.first} -> {self.second}"


def contents(
    program: torch.export.ExportedProgram, facts: dict[str, Any] | None = None
) -> ProgramContents:
    """Return the contents of a program; `facts` are those in its file."""
    parts: dict[str, ModulePart] = {"": ModulePart("", "model")}
    for module in program.graph_module.modules():  # with branches and loops
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                _count(node, parts)
    sizes: Counter[str] = Counter()
    visited: set[int] = set()
    for name, tensor in [*program.state_dict.items(), *program.constants.items()]:
        if isinstance(tensor, Tensor):
            owner, dtype = name.rpartition(".")[0], dtype_name(tensor.dtype)
            parts.setdefault(owner, ModulePart(owner, "")).weights[name] = dtype
            if id(tensor) not in visited:
                visited.add(id(tensor))
                sizes[dtype] += tensor.nbytes
    in_order = {name: parts[name] for name in sorted(parts, key=lambda n: n.split("."))}
    return ProgramContents(in_order, facts or {}, dict(sizes))


def differences_between(first: ProgramContents, second: ProgramContents) -> list[ProgramDifference]:
    """Return the differences of two programs, in the order of the modules."""
    differences: list[ProgramDifference] = []
    for name in sorted(first.parts.keys() | second.parts.keys(), key=lambda n: n.split(".")):
        parts = [each.parts.get(name, ModulePart(name, "")) for each in (first, second)]
        one, other = (part.dtypes_by_operation() for part in parts)
        own = [
            ProgramDifference(name, what, one.get(what, "-"), other.get(what, "-"))
            for what in dict.fromkeys([*one, *other])
            if one.get(what) != other.get(what)
        ]
        if parts[0].casts != parts[1].casts and not own:
            own = [ProgramDifference(name, "casts", *(str(p.casts.total()) for p in parts))]
        differences += own
    return differences


def _count(node: fx.Node, parts: dict[str, ModulePart]) -> None:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return
    operation = _torch.schema_of(node.target).name
    dtype = _result_dtype(node)
    if dtype is None or operation in _NOT_COMPUTED:
        return
    name, kind = _module_of(node)
    part = parts.setdefault(name, ModulePart(name, kind))
    part.kind = part.kind or kind
    if operation not in _CASTS:
        counts = part.operations.setdefault(dtype, Counter())
        counts[operation.removeprefix("aten::")] += 1
        return
    before = next((_result_dtype(each) for each in node.all_input_nodes), None)
    if before is not None and before != dtype:
        part.casts[before, dtype] += 1


def _result_dtype(node: fx.Node) -> str | None:
    leaves = _torch.tree_leaves(node.meta.get("val"))
    floating = (v.dtype for v in leaves if isinstance(v, Tensor) and v.is_floating_point())
    return next(map(dtype_name, floating), None)


def _module_of(node: fx.Node) -> tuple[str, str]:
    """Return the name and the class of the innermost module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", "model"
    path, kind = stack[-1]
    name = str(path).removeprefix("L['self']").lstrip(".")
    name = name.replace("._modules['", ".").replace("']", "").removeprefix("_modules['")
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return name, kind.rpartition(".")[2]
