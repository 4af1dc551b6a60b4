"""Storage of each weight of an exported program in the dtypes in which its graph uses it.

Invariants:

- a cast with the same result at each call is computed once, with the same operations, and leaves the graph;
- a weight that the graph writes is not changed;
- a weight is stored once for each dtype, even if it has several names; an unused weight is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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

    def of(self, spec: InputSpec) -> Any:
        """Return the stored tensor of an input."""
        return self._home(spec)[str(spec.target)]

    def put(self, spec: InputSpec, tensor: Tensor) -> None:
        """Store a tensor for an input."""
        self._home(spec)[str(spec.target)] = tensor

    def _home(self, spec: InputSpec) -> dict[str, Any]:
        unsaved = spec.kind is InputKind.BUFFER and spec.persistent is False
        return (
            self.constants if unsaved or spec.kind is InputKind.CONSTANT_TENSOR else self.state_dict
        )


def store_as_used(graph: fx.Graph, weights: StoredInputs) -> StoredInputs:
    """Remove casts of weights from a graph, and return its new inputs; `weights` are those of before."""
    folding = _WeightFolding(graph, weights)
    folding.tie()
    folding.fold()
    return folding.remaining()


@dataclass
class _WeightFolding:
    """The casts of weights that are moved from the graph to its inputs."""

    graph: fx.Graph
    weights: StoredInputs
    inputs: dict[fx.Node, InputSpec] = field(default_factory=dict)
    added: dict[fx.Node, list[tuple[fx.Node, InputSpec, Tensor]]] = field(default_factory=dict)
    """Maps a stored input to the new inputs after it."""
    replaced: dict[fx.Node, Tensor] = field(default_factory=dict)
    """Maps a stored input to its new tensor."""
    outputs: set[fx.Node] = field(default_factory=set)
    """Stored inputs that the graph writes."""

    def __post_init__(self) -> None:
        self.inputs = dict(zip(placeholders(self.graph), self.weights.specs, strict=True))

    def _stored(self) -> list[fx.Node]:
        return [
            node
            for node, spec in self.inputs.items()
            if spec.kind in _KINDS and isinstance(self.weights.of(spec), Tensor)
        ]

    def tie(self) -> None:
        """Use tied weights under the first of their names."""
        first: dict[int, fx.Node] = {}
        for node in self._stored():
            other = first.setdefault(id(self.weights.of(self.inputs[node])), node)
            if other is not node:
                node.replace_all_uses_with(other)

    def fold(self) -> None:
        """Compute casts whose results are the same at each call."""
        stored = self._stored()
        sources, self.outputs = _constant_nodes(self.graph, stored)
        for node in list(self.graph.nodes):
            if node.target is _torch.DTYPE_CHECK and node.args[0] in {*sources, *stored}:
                self.graph.erase_node(node)  # the dtype of a stored tensor is fixed
        computed: dict[fx.Node, Tensor] = {}
        for node in [n for n in sources if _narrows(n)]:
            of = sources[node]
            if node.meta["val"].numel() > sum(each.meta["val"].numel() for each in of):
                continue
            tensor = self._computed(node, computed)
            computed[self._replace(node, tensor, of)] = tensor  # for a cast of this cast
        self._erase(sources)

    def _computed(self, node: fx.Node, cache: dict[fx.Node, Any]) -> Any:
        if node not in cache:
            if node in self.inputs:
                cache[node] = self.weights.of(self.inputs[node])
            else:
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._computed(n, cache))
                with torch.no_grad():
                    cache[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return cache[node]

    def _replace(self, node: fx.Node, tensor: Tensor, of: list[fx.Node]) -> fx.Node:
        """Replace a node by a stored tensor; return the input of the tensor."""
        source, spec = of[0], self.inputs[of[0]]
        tensor = tensor.detach()
        if not tensor.is_contiguous() and tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.preserve_format)
        if spec.kind is InputKind.PARAMETER:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        if cast_source(node) is source and len(source.users) == 1:
            node.replace_all_uses_with(source)
            source.meta = {**source.meta, "val": node.meta["val"]}
            source.meta.pop("tensor_meta", None)
            self.replaced[source] = tensor
            self.graph.erase_node(node)
            return source
        before = self.added.setdefault(source, [])
        suffix = f"_{dtype_name(tensor.dtype)}"
        names = {str(other.target) for other in self.inputs.values()}
        names |= {str(other.target) for several in self.added.values() for _, other, _ in several}
        target, count = f"{spec.target}{suffix}", 1
        while target in names:
            count += 1
            target = f"{spec.target}{suffix}_{count}"
        with self.graph.inserting_after(before[-1][0] if before else source):
            new = self.graph.placeholder(f"{source.name}{target.removeprefix(str(spec.target))}")
        new.meta = {**source.meta, "val": node.meta["val"]}
        new.meta.pop("tensor_meta", None)
        argument = TensorArgument(name=new.name)
        before.append((new, InputSpec(spec.kind, argument, target, spec.persistent), tensor))
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        return new

    def _erase(self, sources: Iterable[fx.Node]) -> None:
        """Erase unused nodes."""
        for node in [n for n in reversed(self.graph.nodes) if n in set(sources)]:
            if not node.users and node.op == "call_function":
                self.graph.erase_node(node)

    def remaining(self) -> StoredInputs:
        """Return the remaining inputs, and erase unused ones from the graph."""
        remaining = StoredInputs([], {}, {})
        for node, spec in self.inputs.items():
            if spec.kind not in _KINDS:
                remaining.specs.append(spec)
                if spec.kind is InputKind.CUSTOM_OBJ:
                    remaining.constants[str(spec.target)] = self.weights.constants[str(spec.target)]
                continue
            added = self.added.get(node, [])
            if node.users or self._is_returned(node):
                remaining.specs.append(spec)
                remaining.put(spec, self._tensor_to_store(node, spec))
            else:
                self.graph.erase_node(node)
            for new, other, tensor in added:
                if new.users:
                    remaining.specs.append(other)
                    remaining.put(other, tensor)
                else:
                    self.graph.erase_node(new)
        return remaining

    def _tensor_to_store(self, node: fx.Node, spec: InputSpec) -> Any:
        """Return the tensor of an input: parameters have no gradient, and tensors that the graph writes are copied."""
        tensor = self.replaced.get(node, self.weights.of(spec))
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(tensor.detach(), requires_grad=False)
        return tensor.clone() if node in self.outputs else tensor

    def _is_returned(self, node: fx.Node) -> bool:
        return any(user.op == "output" for user in node.users)


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
        if writes(node) or _writes_statistics(node):
            outputs |= {source for arg in _written(node) for source in sources.get(arg, [])}
            continue
        inputs = node.all_input_nodes
        if inputs and _is_pure(node) and all(each in sources for each in inputs):
            sources[node] = list(dict.fromkeys(s for each in inputs for s in sources[each]))
    constant = {
        node: of
        for node, of in sources.items()
        if node.op == "call_function" and not outputs.intersection(of)
    }
    return constant, outputs


def _is_pure(node: fx.Node) -> bool:
    if _torch.higher_order_name(node.target) is not None:
        return False
    if isinstance(node.target, OpOverload):
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        return not random and isinstance(node.meta.get("val"), (Tensor, tuple, list))
    return getattr(node.target, "__name__", "") == "getitem"


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node may write."""
    if not isinstance(node.target, OpOverload):
        return _written_in_bodies(node)
    if _writes_statistics(node):
        return node.all_input_nodes
    schema = _torch.schema_of(node.target).arguments
    named = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
    is_written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
    values = [value for name, value in named.items() if name in is_written]
    return [leaf for leaf in _torch.tree_leaves(values) if isinstance(leaf, fx.Node)]


def _written_in_bodies(node: fx.Node) -> list[fx.Node]:
    """Return all arguments of a branch or loop if any operation in it writes."""
    owner = node.graph.owning_module
    bodies = [n for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [getattr(owner, str(body.target), None) for body in bodies] if owner else []
    inside = (
        each
        for module in graphs
        if isinstance(module, fx.GraphModule)
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for each in part.graph.nodes
    )
    writing = any(isinstance(n.target, OpOverload) and writes(n) for n in inside)
    return node.all_input_nodes if writing or None in graphs or not owner else []


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
