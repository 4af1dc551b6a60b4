"""Storage of each weight of an exported program in the dtypes in which its graph uses it.

Invariants:

- a cast with the same result at each call is computed once, with the same operations, and leaves the graph;
- a weight that the graph writes is not changed;
- a weight is stored once for each dtype, even if it has several names; an unused weight is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.node import map_arg

from precast import _torch
from precast._internal.display import dtype_name
from precast._torch import OpOverload
from precast.shipping.graph_nodes import cast_source, placeholders, writes

__all__ = ["StoredInputs", "store_as_used"]

_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass
class StoredInputs:
    """The inputs of an exported graph that are stored with it.

    Attributes:
        specs: the kind of each input of the graph.
        state_dict: parameters and buffers by name.
        constants: all other stored objects, by name.
    """

    specs: list[InputSpec]
    state_dict: dict[str, Any]
    constants: dict[str, Any]

    def home(self, spec: InputSpec) -> dict[str, Any]:
        """Return the dict that has the stored tensor of an input."""
        is_unsaved = spec.kind is InputKind.BUFFER and spec.persistent is False
        is_constant = is_unsaved or spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ)
        return self.constants if is_constant else self.state_dict


def store_as_used(graph: fx.Graph, weights: StoredInputs) -> StoredInputs:
    """Remove casts of weights from a graph, and return its new inputs; `weights` are those of before."""
    folding = _WeightFolding(graph, weights)
    folding.tie()
    folding.fold()
    return folding.remaining()


class _WeightFolding:
    """The casts of weights that are moved from the graph to its inputs."""

    def __init__(self, graph: fx.Graph, weights: StoredInputs) -> None:
        self.graph = graph
        self.inputs = dict(zip(placeholders(graph), weights.specs, strict=True))
        """All inputs of the graph; new ones come after the input whose cast they are."""
        self.tensors: dict[fx.Node, Any] = {
            node: weights.home(spec)[str(spec.target)]
            for node, spec in self.inputs.items()
            if spec.kind in (*_KINDS, InputKind.CUSTOM_OBJ)
        }
        self.outputs: set[fx.Node] = set()
        """Stored inputs that the graph writes."""

    def _stored(self) -> list[fx.Node]:
        return [node for node, value in self.tensors.items() if isinstance(value, Tensor)]

    def tie(self) -> None:
        """Use tied weights under the first of their names."""
        first: dict[int, fx.Node] = {}
        for node in self._stored():
            other = first.setdefault(id(self.tensors[node]), node)
            if other is not node:
                node.replace_all_uses_with(other)

    def fold(self) -> None:
        """Compute casts whose results are the same at each call."""
        stored = self._stored()
        sources, self.outputs = _constant_nodes(self.graph, stored)
        for node in list(self.graph.nodes):
            if node.target is _torch.DTYPE_CHECK and node.args[0] in {*sources, *stored}:
                self.graph.erase_node(node)  # the dtype of a stored tensor is fixed
        computed: dict[fx.Node, Any] = {node: self.tensors[node] for node in stored}
        for node in [n for n in sources if _narrows(n)]:
            of = sources[node]
            if node.meta["val"].numel() > sum(each.meta["val"].numel() for each in of):
                continue
            tensor = _computed(node, computed)
            computed[self._replace(node, tensor, of[0])] = tensor  # for a cast of this cast
        for node in reversed(list(self.graph.nodes)):
            if node in sources and not node.users:
                self.graph.erase_node(node)

    def _replace(self, node: fx.Node, tensor: Tensor, source: fx.Node) -> fx.Node:
        """Replace a node by a stored tensor; return the input of the tensor."""
        spec = self.inputs[source]
        tensor = tensor.detach()
        if not tensor.is_contiguous() and tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.preserve_format)
        if spec.kind is InputKind.PARAMETER:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        new = source
        if cast_source(node) is not source or len(source.users) > 1:
            suffix = f"_{dtype_name(tensor.dtype)}"
            names, count = {str(other.target) for other in self.inputs.values()}, 1
            while (target := f"{spec.target}{suffix}") in names:
                count += 1
                suffix = f"_{dtype_name(tensor.dtype)}_{count}"
            ordered = list(self.inputs)
            at = ordered.index(source)
            while at + 1 < len(ordered) and ordered[at + 1].meta.get("stored") is source:
                at += 1
            with self.graph.inserting_after(ordered[at]):
                new = self.graph.placeholder(f"{source.name}{suffix}")
            ordered.insert(at + 1, new)
            own = InputSpec(spec.kind, TensorArgument(name=new.name), target, spec.persistent)
            self.inputs = {each: self.inputs.get(each, own) for each in ordered}
        new.meta = {**source.meta, "val": node.meta["val"]}
        new.meta.pop("tensor_meta", None)
        if new is not source:
            new.meta["stored"] = source
        self.tensors[new] = tensor
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        return new

    def remaining(self) -> StoredInputs:
        """Return the remaining inputs, and erase unused ones from the graph."""
        remaining = StoredInputs([], {}, {})
        for node, spec in self.inputs.items():
            node.meta.pop("stored", None)
            if spec.kind in _KINDS and not node.users:
                self.graph.erase_node(node)
                continue
            remaining.specs.append(spec)
            if node in self.tensors:
                remaining.home(spec)[str(spec.target)] = self._tensor_to_store(node)
        return remaining

    def _tensor_to_store(self, node: fx.Node) -> Any:
        """Return the tensor of an input: parameters have no gradient, and tensors that the graph writes are copied."""
        tensor = self.tensors[node]
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(tensor.detach(), requires_grad=False)
        return tensor.clone() if node in self.outputs else tensor


def _computed(node: fx.Node, cache: dict[fx.Node, Any]) -> Any:
    if node not in cache:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _computed(n, cache))
        with torch.no_grad():
            cache[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return cache[node]


def _constant_nodes(
    graph: fx.Graph, stored: list[fx.Node]
) -> tuple[dict[fx.Node, list[fx.Node]], set[fx.Node]]:
    """Return the nodes with the same value at each call, with their stored inputs; and the inputs that are written.

    Nodes that the graph writes, or that may share memory with such nodes, are not constant.
    """
    sources: dict[fx.Node, list[fx.Node]] = {node: [node] for node in stored}
    outputs: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        if writes(node) or _writes_statistics(node):
            outputs |= {source for arg in _written(node) for source in sources.get(arg, [])}
        elif inputs and _is_pure(node) and all(each in sources for each in inputs):
            sources[node] = list(dict.fromkeys(s for each in inputs for s in sources[each]))
    calls = {node: of for node, of in sources.items() if node.op == "call_function"}
    return {node: of for node, of in calls.items() if not outputs.intersection(of)}, outputs


def _is_pure(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        return not random and isinstance(node.meta.get("val"), (Tensor, tuple, list))
    return getattr(node.target, "__name__", "") == "getitem"


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node may write: of a branch or a loop, all arguments if any operation in it writes."""
    if isinstance(node.target, OpOverload) and not _writes_statistics(node):
        schema = _torch.schema_of(node.target).arguments
        named = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
        is_written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        values = [value for name, value in named.items() if name in is_written]
        return [leaf for leaf in _torch.tree_leaves(values) if isinstance(leaf, fx.Node)]
    owner = node.graph.owning_module
    bodies = [
        getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"
    ]
    modules = [
        part for body in bodies if isinstance(body, fx.GraphModule) for part in body.modules()
    ]
    inside = [n for part in modules if isinstance(part, fx.GraphModule) for n in part.graph.nodes]
    is_read = bodies and None not in bodies and not any(_writes_directly(n) for n in inside)
    return [] if is_read else node.all_input_nodes


def _writes_directly(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and writes(node)


def _writes_statistics(node: fx.Node) -> bool:
    """Return True for a normalisation that writes running statistics, which its schema does not declare."""
    return isinstance(node.target, OpOverload) and "batch_norm" in node.target.name()


def _narrows(node: fx.Node) -> bool:
    """Return True if a node casts to a dtype that is not wider."""
    source = cast_source(node)
    if source is None:
        return False
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    return bool(after.itemsize <= before.itemsize and after is not before)
