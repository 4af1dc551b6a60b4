"""Where branches and loops of an exported graph keep their bodies and operands.

Invariants:

- an operator that is not known here still has its bodies rewritten; only its operands stay as they are.
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
"""Operators that call one body, whose results are those of the body: name -> position of the body.

A program that serves computes no gradients, so nothing is lost where their bodies stand in their place.
"""


@dataclass(frozen=True)
class Layout:
    """Where one branch or loop has its bodies and operands.

    Attributes:
        bodies: the nodes that name the bodies.
        fixed: the position of the argument with the operands that no iteration changes; None for none.
        before: how many inputs the bodies take before those.
        changing: the operands that the first of those inputs begin as.
    """

    bodies: tuple[fx.Node, ...]
    fixed: int | None = None
    before: int = 0
    changing: tuple[Any, ...] = ()


def layout_of(node: fx.Node) -> Layout:
    """The layout of a node's operator (2.13)."""
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
