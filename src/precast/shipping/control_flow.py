"""The positions of bodies and operands in the branches and loops of an exported graph.

Invariant: the bodies of an unknown operator are rewritten, too; its operands stay as they are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from precast import _torch

__all__ = ["INLINED", "Layout", "layout_of"]

INLINED = {
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


@dataclass(frozen=True)
class Layout:
    """The positions of the bodies and operands of one branch or loop.

    Attributes:
        bodies: the nodes that name the bodies.
        fixed: the position of the argument with the operands that are constant over iterations; None for none.
        before: the number of inputs of the bodies before those operands.
        changing: the initial values of the first of those inputs.
    """

    bodies: tuple[fx.Node, ...]
    fixed: int | None = None
    before: int = 0
    changing: tuple[Any, ...] = ()


def layout_of(node: fx.Node) -> Layout:
    """Return the layout of a node's operator (2.13)."""
    args = node.args
    bodies = tuple(arg for arg in args if isinstance(arg, fx.Node) and arg.op == "get_attr")
    name = _torch.higher_order_name(node.target)
    if name == "cond":
        return Layout(bodies, 3)
    if name == "while_loop":
        return Layout(bodies, 3, len(args[2]), tuple(args[2]))  # type: ignore[arg-type]
    if name == "scan":
        return Layout(bodies, 3, len(args[1]) + len(args[2]), tuple(args[1]))  # type: ignore[arg-type]
    if name == "associative_scan":
        return Layout(bodies, 2, 2 * len(args[1]))  # type: ignore[arg-type]
    if name == "map_impl":
        return Layout(bodies, 2, len(args[1]))  # type: ignore[arg-type]
    return Layout(bodies)
