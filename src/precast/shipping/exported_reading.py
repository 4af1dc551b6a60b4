"""What an exported program computes in which dtype, read from its graph alone; and where two programs differ.

Invariants:

- nothing is run, and the model that was exported is not needed: modules are named as the file names them;
- an operation counts by the dtype of its result; casts are counted by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from precast import _torch
from precast._torch import OpOverload

__all__ = ["Contents", "Difference", "Part", "between", "contents"]

_NOT_COMPUTED = ("aten::view", "aten::transpose", "aten::t", "aten::permute", "aten::reshape", "aten::expand",
                 "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select", "aten::detach", "aten::alias",
                 "aten::unflatten", "aten::flatten", "aten::contiguous", "aten::clone", "aten::dropout")  # fmt: skip
_CASTS = ("aten::to", "aten::_to_copy")


@dataclass
class Part:
    """What one module of a program computes.

    Attributes:
        name: of the module, as in the model; "" is the model itself.
        kind: the name of its class.
        operations: dtype -> operation -> how often its result has that dtype.
        casts: (from, to) -> how often a value is converted.
        weights: name of each stored tensor -> its dtype.
    """

    name: str
    kind: str
    operations: dict[str, Counter[str]] = field(default_factory=dict)
    casts: Counter[tuple[str, str]] = field(default_factory=Counter)
    weights: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            "module": self.name,
            "kind": self.kind,
            "operations": {dtype: dict(found) for dtype, found in self.operations.items()},
            "casts": [{"from": a, "to": b, "count": n} for (a, b), n in self.casts.items()],
            "weights": self.weights,
        }


@dataclass
class Contents:
    """All that a program computes, by module.

    Attributes:
        parts: the modules that compute something or have weights, in the order of their names.
        said: what the file says of its policy.
        weight_bytes: dtype -> the bytes of the tensors that are stored in it.
    """

    parts: dict[str, Part]
    said: dict[str, Any]
    weight_bytes: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            **self.said,
            "weight_bytes": self.weight_bytes,
            "modules": [part.as_dict() for part in self.parts.values()],
        }


@dataclass(frozen=True)
class Difference:
    """Where two programs differ: the module, what is compared there, and what each of the two has."""

    module: str
    what: str
    first: str
    second: str


def contents(program: torch.export.ExportedProgram, said: dict[str, Any] | None = None) -> Contents:
    """What a program computes.

    Args:
        program: the program.
        said: what its file says of itself.
    """
    parts: dict[str, Part] = {"": Part("", "model")}
    for node in _calls(program.graph_module):
        _count(node, parts)
    sizes: Counter[str] = Counter()
    known: set[int] = set()
    for name, tensor in [*program.state_dict.items(), *program.constants.items()]:
        if isinstance(tensor, Tensor):
            owner, dtype = name.rpartition(".")[0], _short(tensor.dtype)
            parts.setdefault(owner, Part(owner, "")).weights[name] = dtype
            if id(tensor) not in known:
                known.add(id(tensor))
                sizes[dtype] += tensor.nbytes
    return Contents(dict(sorted(parts.items(), key=_by_components)), said or {}, dict(sizes))


def between(first: Contents, second: Contents) -> list[Difference]:
    """Where two programs differ, in the order of the modules."""
    found: list[Difference] = []
    for name in sorted(first.parts.keys() | second.parts.keys(), key=lambda n: n.split(".")):
        one, other = (each.parts.get(name, Part(name, "")) for each in (first, second))
        for operation in sorted(_operations(one) | _operations(other)):
            mine, theirs = (_dtypes_of(part, operation) for part in (one, other))
            if mine != theirs:
                found.append(Difference(name, operation, mine, theirs))
        for weight in sorted(one.weights.keys() | other.weights.keys()):
            mine, theirs = (part.weights.get(weight, "-") for part in (one, other))
            if mine != theirs:
                found.append(Difference(name, f"weight {weight}", mine, theirs))
        if one.casts != other.casts and not any(each.module == name for each in found):
            found.append(Difference(name, "casts", *(str(p.casts.total()) for p in (one, other))))
    return found


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Every call in a graph and in its branches and loops."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.op == "call_function")


def _count(node: fx.Node, parts: dict[str, Part]) -> None:
    if not isinstance(node.target, OpOverload):
        return
    operation = _torch.schema_of(node.target).name
    dtype = _result_dtype(node)
    if dtype is None or operation in _NOT_COMPUTED:
        return
    name, kind = _module_of(node)
    part = parts.setdefault(name, Part(name, kind))
    part.kind = part.kind or kind
    short = operation.removeprefix("aten::")
    if operation in _CASTS:
        before = next((_result_dtype(each) for each in node.all_input_nodes), None)
        if before is not None and before is not dtype:
            part.casts[_short(before), _short(dtype)] += 1
        return
    part.operations.setdefault(_short(dtype), Counter())[short] += 1


def _result_dtype(node: fx.Node) -> torch.dtype | None:
    leaves = _torch.tree_leaves(node.meta.get("val"))
    floating = (v.dtype for v in leaves if isinstance(v, Tensor) and v.is_floating_point())
    return next(floating, None)


def _module_of(node: fx.Node) -> tuple[str, str]:
    """The innermost module that a node is from, by the name that it has in the model, and its class."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", "model"
    path, kind = stack[-1]
    name = str(path).removeprefix("L['self']").lstrip(".")
    name = name.replace("._modules['", ".").replace("']", "").removeprefix("_modules['")
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return name, kind.rpartition(".")[2]


def _operations(part: Part) -> set[str]:
    return {operation for found in part.operations.values() for operation in found}


def _dtypes_of(part: Part, operation: str) -> str:
    counts = {d: found[operation] for d, found in part.operations.items() if operation in found}
    return ", ".join(f"{n} x {d}" if n > 1 else d for d, n in sorted(counts.items())) or "-"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_components(item: tuple[str, Part]) -> list[str]:
    return item[0].split(".")
