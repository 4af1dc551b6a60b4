"""Detection of code that only finishes a step, so that the region may end before it.

Invariant: a call is taken to compute nothing that a region would change only if its name is one of those listed here;
every other call may be a forward pass, which has to stay in the region.
"""

from __future__ import annotations

from precast_lint.editing.dedent import move_out
from precast_lint.editing.lines import block_of
from precast_lint.model import Edit
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk

__all__ = ["end_before"]

_FINISHES = {
    "add_scalar",
    "all_reduce",
    "append",
    "backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "cpu",
    "debug",
    "detach",
    "empty_cache",
    "float",
    "format",
    "get_last_lr",
    "get_scale",
    "info",
    "int",
    "item",
    "items",
    "join",
    "keys",
    "len",
    "log",
    "manual_backward",
    "named_parameters",
    "no_grad",
    "parameters",
    "perf_counter",
    "print",
    "range",
    "round",
    "scale",
    "set_description",
    "set_postfix",
    "size",
    "step",
    "str",
    "synchronize",
    "time",
    "unscale_",
    "update",
    "values",
    "write",
    "zero_grad",
}


def end_before(source: Source, block: Node, node: Node) -> tuple[Edit, ...] | None:
    """Edits that end a `with` block before the statement of a node; None if something behind it may need the block."""
    line = source.statement(node)
    siblings = block_of(source, line)
    if line not in siblings or not all(map(_finishes, siblings[siblings.index(line) :])):
        return None
    return move_out(source, block, node)


def _finishes(statement: Node) -> bool:
    return all(_is_harmless(inner) for inner in walk(statement))


def _is_harmless(node: Node) -> bool:
    if isinstance(node, cst.BinaryOperation):
        return not isinstance(node.operator, cst.MatrixMultiply)
    if not isinstance(node, cst.Call):
        return True
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    return isinstance(name, cst.Name) and name.value in _FINISHES
