"""Detection of tests of a counter, which are true only in some iterations or calls."""

from __future__ import annotations

from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["counts"]


def counts(source: Source, test: Node, depth: int = 2) -> bool:
    """Return True if a test is of a counter."""
    function = source.function(test)
    added = {
        key(source, line.target)
        for line in source.all(cst.AugAssign)
        if source.function(line) is function and isinstance(line.operator, cst.AddAssign)
    }
    for inner in walk(test):
        if isinstance(inner, cst.Modulo):
            return True
        if isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, cst.Modulo):
            return True
        if isinstance(inner, cst.Comparison) and key(source, inner.left) in added:
            return True
        if depth and isinstance(inner, cst.Call):
            returned = source.values.returned(inner)
            if returned and all(counts(source, value, depth - 1) for value in returned):
                return True
        binding = source.names.only_binding(inner) if isinstance(inner, cst.Name) else None
        value = binding.value if binding is not None and binding.kind == "assign" else None
        if value is not None and depth and counts(source, value, depth - 1):
            return True
    return False
