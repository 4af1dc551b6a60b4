"""Properties of the nodes of exported graphs: casts, writes, fake values, and the bodies of branches and loops.

Invariant: nothing here changes a graph.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from precast import _torch
from precast._torch import OpOverload

__all__ = [
    "CAST",
    "INLINED",
    "cast_source",
    "dtypes_of",
    "filled",
    "layout_of",
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
    pairs = zip(leaves, others, strict=True)
    cast = [
        a.to(b.dtype) if isinstance(a, Tensor) and isinstance(b, Tensor) else a for a, b in pairs
    ]
    return _torch.tree_unflatten(cast, spec)


INLINED: Final = {
    "wrap_with_autocast": 4,
    "wrap_with_set_grad_enabled": 1,
    "tag_activation_checkpoint": 0,
    "invoke_subgraph": 0,
    "wrap": 0,
    "strict_mode": 0,
}
"""Operators that call one body and return its results: name -> position of the body.

A program for serving computes no gradients, so the body can replace the operator.
"""


class BodyLayout(NamedTuple):
    """The positions of the bodies and operands of one branch or loop.

    Attributes:
        bodies: the nodes that name the bodies.
        fixed: the operands that are constant over iterations.
        before: the number of inputs of the bodies before those operands.
        changing: the initial values of the first of those inputs.
    """

    bodies: tuple[fx.Node, ...]
    fixed: tuple[Any, ...] = ()
    before: int = 0
    changing: tuple[Any, ...] = ()


def layout_of(node: fx.Node) -> BodyLayout:
    """Return the layout of a node's operator (2.13); operands of an unknown one stay as they are recorded."""
    args: Any = node.args
    bodies = tuple(arg for arg in args if isinstance(arg, fx.Node) and arg.op == "get_attr")
    name = _torch.higher_order_name(node.target)
    if name == "cond":
        return BodyLayout(bodies, args[3])
    if name == "while_loop":
        return BodyLayout(bodies, args[3], len(args[2]), tuple(args[2]))
    if name == "scan":
        return BodyLayout(bodies, args[3], len(args[1]) + len(args[2]), tuple(args[1]))
    if name == "associative_scan":
        return BodyLayout(bodies, args[2], 2 * len(args[1]))
    if name == "map_impl":
        return BodyLayout(bodies, args[2], len(args[1]))
    return BodyLayout(bodies)
