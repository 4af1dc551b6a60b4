"""The search for the first cause of a difference: the first row that differs although all that it read is equal.

A *root* is a pair of rows that differ, and whose inputs do not explain it. It is a *cause* if the two runs did not do
the same there (another weight, dtype, rule, argument, operation), or if the results differ by more than rounding.
Otherwise it is of the kind "order": the same operation on the same bits, in another order of summation.

Invariants: a difference of inputs explains every difference of results, except where the operations themselves are
different; an operation that only one run has counts only through a result that both runs have.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from precast.comparison.aligned_steps import RunRows, StepAligner, base_name
from precast.comparison.difference import Cause, Kind
from precast.comparison.recording_file import Row, RowInput

__all__ = ["CauseSearch"]

_AMPLIFICATION: Final = 256.0
"""The largest growth of a relative difference by a product that is not suspicious."""
_PRODUCTS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "convolution", "mkldnn_convolution"}
)
_WEIGHTS: Final = frozenset({"weight", "buffer"})
_LEAVES: Final = _WEIGHTS | {"input"}
_LONGEST_CHAIN: Final = 10_000
_MOST_CAUSES: Final = 16

_OTHER_RESULT: Final = (
    "the same inputs give results that differ by {effect}; rounding explains {bound:.2g}: another kernel, or "
    "arithmetic of lower precision"
)
_OTHER_UPDATE: Final = (
    "the same gradient and weight give another update, by {effect}: the optimizers have other states or compute "
    "something else"
)


@dataclass
class _Pair:
    """A pair of rows that differ, with their numbers, and a comparison of the tensors that they read."""

    a: int
    b: int
    row: Row
    other: Row
    differing: set[int] = field(default_factory=set)
    """The rows of the first run, examined before, that differ and explain a difference of the inputs."""
    reads_elsewhere: str = ""
    """The difference of views, if one run read other elements of equal memory."""
    alone_a: dict[int, Row] = field(default_factory=dict)
    alone_b: dict[int, Row] = field(default_factory=dict)
    """Rows that only one run has, and that the inputs were computed by."""
    weight: Row | None = None
    """The weight that one run reads, where the other one reads a tensor that is no weight."""


class CauseSearch:
    """Examines steps in order, and keeps the first difference, the first cause, and further ones."""

    def __init__(self, aligner: StepAligner) -> None:
        self.first_bit: Cause | None = None
        self.position: tuple[float, int] = (math.inf, 0)
        """The step and the place in it of the first difference."""
        self.causes: list[Cause] = []
        self.rounding: Cause | None = None
        """The first root that is explained by rounding."""
        self._aligner = aligner
        self._a, self._b = aligner.a, aligner.b
        self._step = 0
        self._differs: set[int] = set()
        """Rows of the first run that differ from their partners."""
        self._kinds: set[str] = set()
        """The kinds of rows of this step that differ."""
        self._leaves: dict[int, Cause] = {}
        """Weights and inputs that differ, until a result that was computed from them differs."""
        self._differed_before = False
        """True if a row of an earlier step differs."""
        self._backward_began = False

    @property
    def cause(self) -> Cause | None:
        """The first cause; if there is none, rounding, or a weight or input that differs without a consequence."""
        for leaf in () if self.causes or self.rounding else self._leaves.values():
            text = f"{leaf.difference}; the results that read it are equal"
            return replace(leaf, difference=text)
        return self.causes[0] if self.causes else self.rounding

    def examine(self, step: int, pairs: list[tuple[int, int]]) -> None:
        """Examine the pairs of rows of a step."""
        self._step = step
        self._differed_before = bool(self._differs)
        self._kinds.clear()
        self._backward_began = False
        for place, (a, b) in enumerate(pairs):
            row = self._a.rows[a]
            self._backward_began |= row.phase == "backward"
            if self._aligner.is_equal(a, b):
                continue
            root = self._root(_Pair(a, b, row, self._b.rows[b]))
            self._differs.add(a)
            self._kinds.add(row.kind)
            if self.first_bit is None:
                same = root or self._cause(row, "unknown", "the bits differ")
                self.first_bit = self._cause(row, same.kind, same.difference)
                self.position = step, place
            if root is not None and row.kind in _LEAVES:
                self._leaves[a] = root
            elif root is not None and root.kind == "order":
                self.rounding = self.rounding or root
            else:
                self._add(root)

    def _add(self, cause: Cause | None) -> None:
        if cause is not None and len(self.causes) < _MOST_CAUSES:
            self.causes.append(cause)

    def _cause(self, row: Row, kind: Kind, difference: str) -> Cause:
        """Return a cause at the place of a row."""
        return Cause(self._step, row.module, row.name, row.source, kind, difference)

    # --- one pair ---

    def _root(self, pair: _Pair) -> Cause | None:
        row = pair.row
        if row.kind in _LEAVES or row.kind == "tensor":
            return self._leaf_root(pair)
        self._compare_inputs(pair)
        for number in sorted(pair.differing):
            self._add(self._leaves.pop(number, None))
        # Optimizers that divide by the size of a gradient make its rounding large where it cancels to nearly nothing.
        is_normalized = row.kind == "update" and bool(pair.differing)
        if (pair.alone_a or pair.alone_b) and not is_normalized and self._is_excessive(pair):
            return self._alone_root(pair)
        if row.kind == "gradient":
            return self._gradient_root(pair)
        if row.kind == "update":
            return self._update_root(pair)
        changed = self._changed(pair)
        if changed is not None:
            is_cause = not pair.differing or self._effect(pair) > self._bound(pair)
            return self._cause(row, *changed) if is_cause else None
        # A recording of modules does not have the inputs of the gradient of a module's result.
        is_between = (row.kind, row.phase) == ("output", "backward")
        if pair.differing or (is_between and not row.inputs and not pair.other.inputs):
            return self._excess_root(pair)
        return self._numeric_root(pair, "operation", _OTHER_RESULT)

    def _leaf_root(self, pair: _Pair) -> Cause | None:
        """Return the root of a tensor that no recorded operation computed."""
        row, other = pair.row, pair.other
        kind: Kind = "weight" if row.kind in _WEIGHTS else "input"
        if row.kind == "tensor":
            if self._kinds:
                return None  # computed by operations that are not recorded, from values that differ
            kind = "unknown" if row.phase != "backward" else "gradient"
        elif self._differed_before and (kind == "weight" or row.dtype.startswith(("float", "bf"))):
            return None  # it may come from earlier steps
        name = f"{row.name} " if kind == "weight" else ""
        if kind == "weight" and row.dtype != other.dtype:
            kind = "dtype"
        form = _against("shape ", [*row.shape], [*other.shape])
        form = form or _against("dtype ", row.dtype, other.dtype)
        text = form or f"{_relative(self._effect(pair))} apart"
        return self._cause(row, kind, f"{name}is not the same tensor: {text}")

    def _alone_root(self, pair: _Pair) -> Cause:
        """Return the root in operations that only one run has, and on which the result depends."""
        only_a, only_b = [*pair.alone_a.values()], [*pair.alone_b.values()]
        effect, count = self._effect(pair), len(only_a) + len(only_b)
        bound = self._bound(pair) * (1.0 if count < 4 else 2.0 * math.sqrt(count))
        if effect <= bound:
            numbers = f"{len(only_a)} of the first run, {len(only_b)} of the second"
            text = f"rounding: other operations ({numbers}) compute it, {_relative(effect)}, within {bound:.2g}"
            return self._cause(pair.row, "order", text)
        place, kind, text = self._alone_cause(pair, only_a, only_b)
        return self._cause(place, kind, f"{text}; the results differ by {_relative(effect)}")

    def _alone_cause(
        self, pair: _Pair, only_a: list[Row], only_b: list[Row]
    ) -> tuple[Row, Kind, str]:
        place = (only_b or only_a)[0]
        reader = "second" if only_b else "first"
        if place.kind in _WEIGHTS:
            text = f"only the {reader} run has written {place.name} since it was read"
            return place, "weight", text
        if pair.weight is not None:
            text = f"the {reader} run reads another tensor in place of {pair.weight.name}"
            return place, "weight", text
        text = ", ".join(filter(None, (_only("first", only_a), _only("second", only_b))))
        modes = self._modes_of(place.module)
        if modes:
            return place, "mode", f"{modes}: {text}"
        if place.phase == "other" and self._backward_began and pair.row.kind == "gradient":
            return place, "gradient", text
        casts = [row for row in (*only_a, *only_b) if base_name(row.name) == "_to_copy"]
        return (casts[0], "dtype", text) if casts else (place, "operation", text)

    def _modes_of(self, module: str) -> str:
        """Return the modes of a module in both runs as text, if they differ."""
        pairs = (
            (row.traits, self._b.rows[self._aligner.partner_a[n]].traits)
            for n, row in self._a.rows.items()
            if row.kind == "output" and row.module == module and n in self._aligner.partner_a
        )
        texts = (_against("the module is in mode ", *modes) for modes in pairs)
        return next(filter(None, texts), "")

    def _gradient_root(self, pair: _Pair) -> Cause | None:
        is_explained = not pair.row.inputs and self._kinds - _WEIGHTS
        if is_explained or not self._is_excessive(pair):
            return None
        text = f"the gradient of {pair.row.name} differs by {_relative(self._effect(pair))}"
        return self._cause(pair.row, "gradient", text)

    def _update_root(self, pair: _Pair) -> Cause | None:
        settings = _argument_difference(pair)
        if settings:
            return self._cause(pair.row, "optimizer", settings)
        if pair.differing or self._differed_before:
            return None
        return self._numeric_root(pair, "optimizer", _OTHER_UPDATE)

    def _changed(self, pair: _Pair) -> tuple[Kind, str] | None:
        """Return kind and text of what the runs did not do alike in a pair of rows."""
        row, other, is_explained = pair.row, pair.other, bool(pair.differing)
        arguments = _argument_difference(pair)
        modes = _against("the module is in mode ", _mode(row), _mode(other))
        if modes and (arguments or not is_explained):
            return "mode", ", ".join(filter(None, (modes, arguments)))
        dtypes = _against("dtype ", row.dtype, other.dtype)
        rules = _against("rule ", row.rule or "none", other.rule or "none")
        if rules:
            return "rule", ", ".join(filter(None, (rules, dtypes)))
        if dtypes:
            return "dtype", dtypes
        if arguments:
            is_of_gradient = row.phase == "other" and self._backward_began
            return "gradient" if is_of_gradient else "operation", arguments
        if row.kind == "output" and base_name(row.name) != base_name(other.name):
            return "operation", _against("", row.name, other.name)
        if row.shape != other.shape:
            return "operation", _against("shape ", [*row.shape], [*other.shape])
        if pair.reads_elsewhere:
            return "operation", pair.reads_elsewhere
        is_drawn = "random" in row.traits and (not is_explained or row.dtype == "bool")
        if is_drawn or (row.kind == "output" and "Dropout" in row.name and not is_explained):
            return "random", "other random numbers from equal inputs"
        return None

    def _excess_root(self, pair: _Pair) -> Cause | None:
        """Return the root of a product, or of a module, whose results differ much more than its inputs."""
        is_module = (pair.row.kind, pair.row.phase) == ("output", "forward")
        is_checked = is_module or base_name(pair.row.name) in _PRODUCTS
        if not is_checked or not self._is_excessive(pair):
            return None
        text = f"the results differ by {_relative(self._effect(pair))}, far more than the inputs"
        return self._cause(pair.row, "operation", text)

    def _is_excessive(self, pair: _Pair) -> bool:
        """Return True if the differences of the inputs do not explain that of the result."""
        if not pair.differing:
            return True
        if self.causes or not pair.differing <= self._a.measurements.keys():  # of earlier steps
            return False
        partners = self._aligner.partner_a
        distances = (self._aligner.relative_distance(n, partners[n]) for n in pair.differing)
        return self._effect(pair) > max(64.0 * self._bound(pair), _AMPLIFICATION * max(distances))

    def _numeric_root(self, pair: _Pair, kind: Kind, text: str) -> Cause:
        """Return the root of the same operation on equal inputs with other results."""
        effect, bound = self._effect(pair), self._bound(pair)
        if effect <= bound:
            kind = "order"
            text = "rounding: the same operation on equal inputs, {effect}, within {bound:.2g}"
        return self._cause(pair.row, kind, text.format(effect=_relative(effect), bound=bound))

    # --- inputs ---

    def _compare_inputs(self, pair: _Pair) -> None:
        """Fill in what the tensors that a pair reads differ in."""
        both = pair.row.inputs, pair.other.inputs
        for one, other in itertools.zip_longest(*both, fillvalue=RowInput(())):
            if self._a.identities(one) == self._b.identities(other):
                pair.reads_elsewhere = pair.reads_elsewhere or _against(
                    "reads ", one.views or "all elements", other.views or "all elements"
                )
                continue
            own_a, read_a = self._trace(self._a, one.rows, self._aligner.partner_a, pair)
            own_b, read_b = self._trace(self._b, other.rows, self._aligner.partner_b, pair)
            replaced = read_a.keys() ^ read_b.keys()
            own = (*own_a.values(), *own_b.values())
            if replaced and any(row.kind in {"tensor", "input"} for row in own):
                pair.weight = pair.weight or {**read_a, **read_b}[min(replaced)]
            pair.alone_a |= own_a
            pair.alone_b |= own_b
        pair.alone_a = dict(sorted(pair.alone_a.items()))
        pair.alone_b = dict(sorted(pair.alone_b.items()))

    def _trace(
        self, run: RunRows, rows: tuple[int, ...], partner: dict[int, int], pair: _Pair
    ) -> tuple[dict[int, Row], dict[str, Row]]:
        """Return the rows without partners that lead to `rows`, and the weights that they read.

        Differing rows that are reached are added to those of the pair.
        """
        alone: dict[int, Row] = {}
        weights: dict[str, Row] = {}
        waiting = list(rows)
        while waiting and len(alone) < _LONGEST_CHAIN:
            number = waiting.pop()
            row = run.rows.get(number)
            if row is None or number in alone:
                continue
            if number not in partner:
                alone[number] = row
                waiting += [each for read in row.inputs for each in read.rows]
                continue
            a = number if run is self._a else partner[number]
            if a in self._differs:
                pair.differing.add(a)
            if row.kind in _WEIGHTS or row.kind == "update":
                weights[row.name] = row
        return alone, weights

    # --- amounts ---

    def _effect(self, pair: _Pair) -> float:
        return self._aligner.relative_distance(pair.a, pair.b)

    def _bound(self, pair: _Pair) -> float:
        """Return the relative difference that rounding explains."""
        row = pair.row
        unit = min(_unit(row.dtype), _unit(pair.other.dtype))
        factor = 4.0 if row.kind == "output" else 1.0
        if unit > _unit("float32"):  # kernels sum 16-bit values in float32
            return factor * 4.0 * unit
        read = (self._a.rows.get(each.rows[-1]) for each in row.inputs if each.rows)
        sizes = [math.prod(each.shape) for each in read if each is not None]
        largest, second = sorted([*sizes, 0, 0])[:-3:-1]
        elements = max(1, math.prod(row.shape))
        terms = max(1.0, largest / elements, math.sqrt(largest * second / elements))
        return factor * unit * (4.0 + 2.0 * math.sqrt(terms))


def _unit(dtype: str) -> float:
    """Return the unit roundoff of a dtype; 0 for integers."""
    kind = getattr(torch, dtype, None)
    if isinstance(kind, torch.dtype) and (kind.is_floating_point or kind.is_complex):
        return float(torch.finfo(kind).eps) / 2
    return 0.0


def _relative(effect: float) -> str:
    return f"{effect:.2g} of their size" if math.isfinite(effect) else "infinite or NaN elements"


def _against(name: str, one: object, other: object) -> str:
    """Return two values as text, if they differ."""
    return "" if one == other else f"{name}{one} against {other}"


def _mode(row: Row) -> str:
    return next((each for each in row.traits.split() if each in {"train", "eval"}), "")


def _argument_difference(pair: _Pair) -> str:
    """Return the arguments that differ, as "eps=1e-05 against 0.001"."""
    if pair.row.arguments == pair.other.arguments:
        return ""
    one, other = (
        {
            name: value
            for name, _, value in (each.partition("=") for each in row.arguments.split("; "))
        }
        for row in (pair.row, pair.other)
    )
    default = "its default"
    names = filter(None, one | other)
    texts = (_against(f"{n}=", one.get(n, default), other.get(n, default)) for n in names)
    return ", ".join(filter(None, texts))


def _only(number: str, rows: list[Row]) -> str:
    """Return the operations that only one run has, as text."""
    casts = (f" to {row.dtype}" if base_name(row.name) == "_to_copy" else "" for row in rows)
    names = [base_name(row.name) + cast for row, cast in zip(rows, casts, strict=True)]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"only the {number} run has {', '.join(names[:4])}{more}" if names else ""
