"""Which operations ran in the code between two modules, as far as steps were traced.

Invariants: everything is made of the document alone. Operations inside modules are left out, as the outputs of modules
were watched.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from precast.diagnostics.report.evidence import rows_of
from precast.diagnostics.report.words import joined, plural
from precast.diagnostics.schema import Document, NonfiniteOrigin, Row

__all__ = ["Between", "between", "module_before"]

_MOST_LINES = 4
_OUTPUT = "the output of `"  # so begin a monitor's words for the output of a module with a name
_KEEPS_FINITE = frozenset(
    {"abs", "amax", "amin", "cat", "chunk", "clone", "copy_", "cos", "detach", "flip", "gather"}
    | {"index", "index_select", "max", "min", "neg", "permute", "relu", "relu_", "repeat"}
    | {"_softmax", "gelu", "softmax", "silu"}
    | {"reshape", "roll", "sigmoid", "sign", "sin", "split", "stack", "tanh", "transpose", "view"}
)
"""Operations that give finite numbers wherever they are given finite ones, in every format."""


class Between(NamedTuple):
    """The operations that ran there."""

    rows: list[Row]
    """In the order in which they were first called, never empty."""

    @property
    def owners(self) -> list[str | None]:
        """The modules whose own code it is: "" is the model itself, None the program around."""
        return list(dict.fromkeys(row.module for row in self.rows))

    @property
    def lines(self) -> str:
        """The operations with their lines: "`mul.Tensor` and `matmul` at train.py:10 in forward"."""
        operations: dict[str | None, dict[str, None]] = {}
        for row in self.rows:
            operations.setdefault(row.source, {})[f"`{row.op}`"] = None
        said = [
            joined(names) + (f" at {line}" if line else "") for line, names in operations.items()
        ]
        more = len(said) - _MOST_LINES
        return "; ".join(said[:_MOST_LINES]) + (f"; and {plural(more, 'more line')}" * (more > 0))

    @property
    def casts(self) -> bool:
        """Whether the code casts by itself."""
        return any(row.op == "_to_copy" for row in self.rows)

    def only(self, what: Literal["op", "source"]) -> str | None:
        """The operation, or the line, where there is one only."""
        found = {getattr(row, what) for row in self.rows}
        return found.pop() if len(found) == 1 else None


def between(document: Document, first: NonfiniteOrigin, dtype: str) -> Between | None:
    """What gave numbers of a dtype, which it could not hold, right before a module; None where nothing was traced.

    `first` is an input of that module, which no module made.
    """
    module, before = first.name, module_before(first)
    forward = [row for row in rows_of(document) if row.phase == "forward"]
    forward.sort(key=lambda row: row.order or 0)
    rows = [row for row in forward if dtype in row.output]
    ends = _ends(forward, first, before)
    if ends is None:
        found = _nearest(rows, module, before)
    else:
        inside = {*_around(module), *(_around(before) if before else ()), None}
        after, until = ends
        found = [r for r in rows if r.module in inside and after < (r.order or 0) < until]
    telling = [row for row in found if row.op.partition(".")[0] not in _KEEPS_FINITE]
    return Between(telling or found) if found else None


def module_before(first: NonfiniteOrigin) -> str | None:
    """The module whose output was the last that was finite before; None where there was none with a name."""
    of = (first.inputs[-1].of or "") if first.inputs else ""
    return of.removeprefix(_OUTPUT).rstrip("`") if of.startswith(_OUTPUT) else None


def _ends(forward: list[Row], first: NonfiniteOrigin, before: str | None) -> tuple[int, int] | None:
    """Between which places of the order the code ran.

    None where nobody knows: a module was not traced, or it was a later call of it, while rows tell of the first.
    """
    known = [(row.order, row.module) for row in forward if row.order is not None]
    own = [order for order, module in known if _is_in(module, first.name)]
    if not own or " in its call " in first.message:
        return None
    if before is None:
        return -1, own[0]
    earlier = [order for order, module in known if _is_in(module, before) and order < own[0]]
    return (earlier[-1], own[0]) if earlier else None


def _nearest(rows: list[Row], module: str, before: str | None) -> list[Row]:
    """What the innermost module around both computes itself, or the next one further out that does anything."""
    both = _around(module)
    if before is not None:
        both = [name for name in both if name in {before, *_around(before)}]
    own = ([row for row in rows if row.module == name] for name in reversed(both))
    return next(filter(None, own), [])


def _around(module: str) -> list[str]:
    """The modules that a module is in, the model itself included."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _is_in(name: str | None, module: str) -> bool:
    return name is not None and f"{name}.".startswith(f"{module}.")
