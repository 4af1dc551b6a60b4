"""Properties of the nodes of exported graphs: casts, writes, and fake values.

Invariant: nothing here changes a graph.
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
"""The operation of a cast in a graph."""


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a graph."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def cast_source(node: fx.Node) -> fx.Node | None:
    """Return the node that a cast converts; None if the node is not a cast."""
    is_cast = node.op == "call_function" and node.target is CAST and len(node.args) == 2
    source = node.args[0] if is_cast and not node.kwargs else None
    return source if isinstance(source, fx.Node) else None


def writes(node: fx.Node) -> bool:
    """Return True if a node may write to one of its arguments."""
    if isinstance(node.target, OpOverload):
        return _torch.schema_of(node.target).is_mutable
    return _torch.higher_order_name(node.target) is not None


def value_of(node: fx.Node) -> Any:
    """Return the fake value of a node."""
    return node.meta["val"]


def filled(argument: Any) -> Any:
    """Return an argument with nodes replaced by their values; its lists are new, so that a call may change them."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    if isinstance(argument, (tuple, list)):
        return (tuple if isinstance(argument, tuple) else list)(map(filled, argument))
    if isinstance(argument, dict):
        return {name: filled(value) for name, value in argument.items()}
    return argument


def dtypes_of(node: Any) -> list[Any]:
    """Return the dtypes of the tensors in the value of a node or of several nodes; None for other values."""
    value = value_of(node) if isinstance(node, fx.Node) else map_arg(node, value_of)
    return [getattr(leaf, "dtype", None) for leaf in _torch.tree_leaves(value)]


def retyped(value: Any, like: Any) -> Any:
    """Return `value` with its tensors cast to the dtypes of those in `like`."""
    leaves, spec = _torch.tree_flatten(value)
    others = _torch.tree_leaves(like)
    if len(leaves) != len(others):
        return value
    return _torch.tree_unflatten(
        [
            old.to(new.dtype)
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.dtype is not new.dtype
            else old
            for old, new in zip(leaves, others, strict=True)
        ],
        spec,
    )
