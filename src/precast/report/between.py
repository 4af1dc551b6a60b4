"""The operations of the code between two modules, if steps were traced.

Invariants: everything follows from the document alone. Operations inside modules are excluded, because the outputs of
modules were watched.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from precast._internal.events import NonfiniteOrigin
from precast.report.evidence import rows_of
from precast.report.schema import OperationRow, RunDocument
from precast.report.words import joined, plural

__all__ = ["CodeBetween", "between", "module_before"]

_MOST_LINES = 4
_OUTPUT = "the output of `"  # the prefix of a monitor's text for the output of a named module
_KEEPS_FINITE = frozenset(
    {"abs", "amax", "amin", "cat", "chunk", "clone", "copy_", "cos", "detach", "flip", "gather"}
    | {"index", "index_select", "max", "min", "neg", "permute", "relu", "relu_", "repeat"}
    | {"_softmax", "gelu", "softmax", "silu"}
    | {"reshape", "roll", "sigmoid", "sign", "sin", "split", "stack", "tanh", "transpose", "view"}
)
"""Operations that return finite values for finite inputs, in every format."""


class CodeBetween(NamedTuple):
    """The operations between two modules."""

    rows: list[OperationRow]
    """In the order in which they were first called, never empty."""

    @property
    def owners(self) -> list[str | None]:
        """The modules with this code: "" is the model itself, None the program around it."""
        return list(dict.fromkeys(row.module for row in self.rows))

    @property
    def lines(self) -> str:
        """The operations with their lines: "`mul.Tensor` and `matmul` at train.py:10 in forward"."""
        operations: dict[str | None, dict[str, None]] = {}
        for row in self.rows:
            operations.setdefault(row.source, {})[f"`{row.op}`"] = None
        texts = [
            joined(names) + (f" at {line}" if line else "") for line, names in operations.items()
        ]
        more = len(texts) - _MOST_LINES
        return "; ".join(texts[:_MOST_LINES]) + (f"; and {plural(more, 'more line')}" * (more > 0))

    @property
    def casts(self) -> bool:
        """True if the code has explicit casts."""
        return any(row.op == "_to_copy" for row in self.rows)

    def only(self, what: Literal["op", "source"]) -> str | None:
        """Return the operation, or the line, if there is exactly one."""
        values = {getattr(row, what) for row in self.rows}
        return values.pop() if len(values) == 1 else None


def between(document: RunDocument, first: NonfiniteOrigin, dtype: str) -> CodeBetween | None:
    """Return the operations with results of a dtype right before a module; None if they were not traced.

    `first` is an input of that module that no module returned.
    """
    module, before = first.name, module_before(first)
    forward = [row for row in rows_of(document) if row.phase == "forward"]
    forward.sort(key=lambda row: row.order or 0)
    rows = [row for row in forward if dtype in row.output]
    ends = _ends(forward, first, before)
    if ends is None:
        candidates = _nearest(rows, module, before)
    else:
        inside = {*_around(module), *(_around(before) if before else ()), None}
        after, until = ends
        candidates = [r for r in rows if r.module in inside and after < (r.order or 0) < until]
    telling = [row for row in candidates if row.op.partition(".")[0] not in _KEEPS_FINITE]
    return CodeBetween(telling or candidates) if candidates else None


def module_before(first: NonfiniteOrigin) -> str | None:
    """Return the module of the last finite output before; None if it has no name."""
    of = (first.inputs[-1].of or "") if first.inputs else ""
    return of.removeprefix(_OUTPUT).rstrip("`") if of.startswith(_OUTPUT) else None


def _ends(
    forward: list[OperationRow], first: NonfiniteOrigin, before: str | None
) -> tuple[int, int] | None:
    """Return the range of the order in which the code ran.

    None if a module was not traced, or for a later call of a module, because rows have the order of the first call.
    """
    ordered = [(row.order, row.module) for row in forward if row.order is not None]
    own = [order for order, module in ordered if _is_in(module, first.name)]
    if not own or " in its call " in first.message:
        return None
    if before is None:
        return -1, own[0]
    earlier = [order for order, module in ordered if _is_in(module, before) and order < own[0]]
    return (earlier[-1], own[0]) if earlier else None


def _nearest(rows: list[OperationRow], module: str, before: str | None) -> list[OperationRow]:
    """Return the operations of the innermost module around both, or of the next one further out with some."""
    both = _around(module)
    if before is not None:
        both = [name for name in both if name in {before, *_around(before)}]
    own = ([row for row in rows if row.module == name] for name in reversed(both))
    return next(filter(None, own), [])


def _around(module: str) -> list[str]:
    """Return the modules around a module, including the model itself."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _is_in(name: str | None, module: str) -> bool:
    return name is not None and f"{name}.".startswith(f"{module}.")
