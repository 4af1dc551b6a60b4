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
    """The operations and weights of one module of a program.

    Attributes:
        name: name of the module; "" is the model itself.
        kind: the name of its class.
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


@dataclass
class ProgramContents:
    """The contents of a program, by module.

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
        return {
            **self.facts,
            "weight_bytes": self.weight_bytes,
            "modules": [part.to_dict() for part in self.parts.values()],
        }


@dataclass(frozen=True)
class ProgramDifference:
    """A difference of two programs: the module, the operation or weight, and the dtypes in both."""

    module: str
    what: str
    first: str
    second: str


def contents(
    program: torch.export.ExportedProgram, facts: dict[str, Any] | None = None
) -> ProgramContents:
    """Return the contents of a program.

    Args:
        program: the program.
        facts: the facts in its file.
    """
    parts: dict[str, ModulePart] = {"": ModulePart("", "model")}
    for node in _calls(program.graph_module):
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
    in_order = dict(sorted(parts.items(), key=_by_components))
    return ProgramContents(in_order, facts or {}, dict(sizes))


def differences_between(first: ProgramContents, second: ProgramContents) -> list[ProgramDifference]:
    """Return the differences of two programs, in the order of the modules."""
    differences: list[ProgramDifference] = []
    for name in sorted(first.parts.keys() | second.parts.keys(), key=lambda n: n.split(".")):
        one, other = (each.parts.get(name, ModulePart(name, "")) for each in (first, second))
        for operation in sorted(_operations(one) | _operations(other)):
            mine, theirs = (_dtypes_of(part, operation) for part in (one, other))
            if mine != theirs:
                differences.append(ProgramDifference(name, operation, mine, theirs))
        for weight in sorted(one.weights.keys() | other.weights.keys()):
            mine, theirs = (part.weights.get(weight, "-") for part in (one, other))
            if mine != theirs:
                differences.append(ProgramDifference(name, f"weight {weight}", mine, theirs))
        if one.casts != other.casts and not any(each.module == name for each in differences):
            differences.append(
                ProgramDifference(name, "casts", *(str(p.casts.total()) for p in (one, other)))
            )
    return differences


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield every call in a graph and in its branches and loops."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.op == "call_function")


def _count(node: fx.Node, parts: dict[str, ModulePart]) -> None:
    if not isinstance(node.target, OpOverload):
        return
    operation = _torch.schema_of(node.target).name
    dtype = _result_dtype(node)
    if dtype is None or operation in _NOT_COMPUTED:
        return
    name, kind = _module_of(node)
    part = parts.setdefault(name, ModulePart(name, kind))
    part.kind = part.kind or kind
    short = operation.removeprefix("aten::")
    if operation in _CASTS:
        before = next((_result_dtype(each) for each in node.all_input_nodes), None)
        if before is not None and before is not dtype:
            part.casts[dtype_name(before), dtype_name(dtype)] += 1
        return
    part.operations.setdefault(dtype_name(dtype), Counter())[short] += 1


def _result_dtype(node: fx.Node) -> torch.dtype | None:
    leaves = _torch.tree_leaves(node.meta.get("val"))
    floating = (v.dtype for v in leaves if isinstance(v, Tensor) and v.is_floating_point())
    return next(floating, None)


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


def _operations(part: ModulePart) -> set[str]:
    return {operation for counts in part.operations.values() for operation in counts}


def _dtypes_of(part: ModulePart, operation: str) -> str:
    counts = {d: ops[operation] for d, ops in part.operations.items() if operation in ops}
    return ", ".join(f"{n} x {d}" if n > 1 else d for d, n in sorted(counts.items())) or "-"


def _by_components(item: tuple[str, ModulePart]) -> list[str]:
    return item[0].split(".")
