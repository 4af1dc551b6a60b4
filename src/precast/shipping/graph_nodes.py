"""What the nodes of exported graphs say: casts, writes, and values without numbers.

Invariants: nothing here changes a graph.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from precast import _torch
from precast._torch import OpOverload

__all__ = [
    "CAST",
    "cast_source",
    "dtypes_of",
    "filled",
    "placeholders",
    "retyped",
    "value_of",
    "writes",
]

CAST: Final = torch.ops.aten.to.dtype
"""The operation that a cast in a graph is."""


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def cast_source(node: fx.Node) -> fx.Node | None:
    """The node whose value a cast converts; None for a node that is no cast."""
    is_cast = node.op == "call_function" and node.target is CAST and len(node.args) == 2
    source = node.args[0] if is_cast and not node.kwargs else None
    return source if isinstance(source, fx.Node) else None


def writes(node: fx.Node) -> bool:
    """Whether a node may write to one of its arguments."""
    if isinstance(node.target, OpOverload):
        return _torch.schema_of(node.target).is_mutable
    return _torch.higher_order_name(node.target) is not None


def value_of(node: fx.Node) -> Any:
    """The value of a node, without numbers."""
    return node.meta["val"]


def filled(argument: Any) -> Any:
    """An argument with values in the place of nodes; lists can be changed, as those of a call can."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    if isinstance(argument, (tuple, list)):
        return (tuple if isinstance(argument, tuple) else list)(map(filled, argument))
    if isinstance(argument, dict):
        return {name: filled(value) for name, value in argument.items()}
    return argument


def dtypes_of(node: Any) -> list[Any]:
    """The dtypes of the tensors in a node's value, or in the values of several; None for what is no tensor."""
    value = value_of(node) if isinstance(node, fx.Node) else map_arg(node, value_of)
    return [getattr(leaf, "dtype", None) for leaf in _torch.tree_leaves(value)]


def retyped(known: Any, value: Any) -> Any:
    """A known value, whose tensors get the dtypes of those in another."""
    known_leaves, spec = _torch.tree_flatten(known)
    leaves = _torch.tree_leaves(value)
    if len(leaves) != len(known_leaves):
        return known
    return _torch.tree_unflatten(
        [
            old.to(new.dtype)
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.dtype is not new.dtype
            else old
            for old, new in zip(known_leaves, leaves, strict=True)
        ],
        spec,
    )
