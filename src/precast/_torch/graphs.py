"""Exported graphs: the operators that stand for regions, branches and loops, and what composite operations call.

Invariants:

- nothing here imports what `torch.export` needs before a program exports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["fake_mode_of", "higher_order_name", "run_composite", "updated_program"]


def fake_mode_of(nodes: Iterable[torch.fx.Node]) -> Any:
    """The mode that the values of an exported graph's inputs belong to, which have no numbers (2.13)."""
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return torch._guards.detect_fake_mode(values)


def higher_order_name(target: Any) -> str | None:
    """The name of an operator that takes graphs, such as "cond"; None for all else (2.13)."""
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else None


def run_composite(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls what a composite operation is made of, as C++ does it (2.13).

    `OpOverload.decompose` takes Python's version of it where there is one, whose results have other bits for recurrent
    layers. That one is for sizes without numbers, which C++ refuses. A function mode would call the operation itself.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    try:
        with torch._C.DisableTorchFunction():
            return overload._op_dk(key, *args, **kwargs)
    except RuntimeError:
        in_python = overload.py_kernels.get(key)
        if in_python is None:
            raise
        return in_python(*args, **kwargs)


def updated_program(program: Any, **changes: Any) -> Any:
    """An exported program with another graph, signature, weights and constants; only a private method makes one (2.13).

    Args:
        program: the program that it is made of.
        changes: `graph_module`, `graph_signature`, `state_dict` and `constants`.
    """
    return program._update(**changes)
