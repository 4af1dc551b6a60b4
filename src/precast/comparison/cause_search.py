"""The search for the first cause of a difference: the first row that differs although all that it read is equal.

A *root* is a pair of rows that differ, and whose inputs do not explain it. It is a *cause* if the two runs did not do
the same there (another weight, dtype, rule, argument, operation), or if the results differ by more than rounding.
Otherwise it is rounding: the same operation on the same bits, in another order of summation.

Invariants: a difference of inputs explains every difference of results, except where the operations themselves are
different; an operation that only one run has counts only through a result that both runs have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from precast.comparison.aligned_steps import (
    AlignedStep,
    RunRows,
    StepAligner,
    base_name,
)
from precast.comparison.difference import Cause, Kind
from precast.comparison.recording_file import Row, RowInput

__all__ = ["CauseSearch"]

_AMPLIFICATION: Final = 256.0
"""The largest growth of a relative difference by a product that is not suspicious."""
_PRODUCTS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "convolution", "mkldnn_convolution"}
)
_LEAVES: Final = frozenset({"weight", "buffer", "input"})
_LONGEST_CHAIN: Final = 10_000

_OTHER_RESULT: Final = (
    "the same inputs give results that differ by {effect}; rounding explains {bound:.2g}: another kernel, or "
    "arithmetic of lower precision"
)
_OTHER_UPDATE: Final = (
    "the same gradient and weight give another update, by {effect}: the optimizers have other states or compute "
    "something else"
)


class _Inputs(NamedTuple):
    """A comparison of the tensors that a pair of rows read."""

    are_equal: bool
    differing: tuple[int, ...]
    """The rows of the first run, examined before, that differ and that the inputs depend on."""
    reads_elsewhere: str
    """The difference of views, if one run read other elements of equal memory."""
    alone_a: tuple[int, ...]
    """Rows that only the first run has, and that the inputs were computed by, the earliest first."""
    alone_b: tuple[int, ...]
    weight: Row | None = None
    """The weight that one run reads, where the other one reads a tensor that is no weight."""

    @property
    def is_explained(self) -> bool:
        """True if differences that were examined before reach the inputs."""
        return bool(self.differing)


@dataclass(frozen=True)
class _Root:
    cause: Cause
    is_certain: bool
    """True if the runs did not do the same, or the difference is larger than rounding."""


class CauseSearch:
    """Examines steps in order, and keeps the first difference, the first cause, and further ones."""

    def __init__(self, aligner: StepAligner, most: int = 16) -> None:
        self.first_bit: Cause | None = None
        self.position: tuple[float, int] = (math.inf, 0)
        """The step and the place in it of the first difference."""
        self.causes: list[Cause] = []
        """Certain causes, the first at the beginning."""
        self.rounding: Cause | None = None
        """The first root that is explained by rounding."""
        self._aligner = aligner
        self._a, self._b = aligner.a, aligner.b
        self._most = most
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

    def examine(self, step: AlignedStep) -> None:
        """Examine the rows of a step."""
        self._differed_before = bool(self._differs)
        self._kinds.clear()
        self._backward_began = False
        for place, (a, b) in enumerate(step.order):
            if a is None or b is None:
                continue
            self._backward_began |= self._a.rows[a].phase == "backward"
            if self._a.bits[a] == self._b.bits[b]:
                continue
            root = self._root(a, b)
            self._differs.add(a)
            self._kinds.add(self._a.rows[a].kind)
            if self.first_bit is None:
                kind = root.cause.kind if root else "unknown"
                text = root.cause.difference if root else "the bits differ"
                self.first_bit = self._cause(a, b, kind, text)
                self.position = step.step, place
            if root is None:
                continue
            if self._a.rows[a].kind in _LEAVES:
                self._leaves[a] = root.cause
            elif root.is_certain:
                self._add(root.cause)
            else:
                self.rounding = self.rounding or root.cause

    def _add(self, cause: Cause | None) -> None:
        if cause is not None and len(self.causes) < self._most:
            self.causes.append(cause)

    # --- one pair ---

    def _root(self, a: int, b: int) -> _Root | None:
        row = self._a.rows[a]
        if row.kind in _LEAVES or row.kind == "tensor":
            return self._leaf_root(a, b)
        inputs = self._compare_inputs(row.inputs, self._b.rows[b].inputs)
        for number in inputs.differing:
            self._add(self._leaves.pop(number, None))
        alone = self._alone_root(a, b, inputs)
        if alone is not None:
            return alone
        if row.kind == "gradient":
            return self._gradient_root(a, b, inputs)
        if row.kind == "update":
            return self._update_root(a, b, inputs)
        changed = self._changed(a, b, inputs)
        if changed is not None:
            kind, text = changed
            is_certain = not inputs.is_explained or self._effect(a, b) > self._bound(a, b)
            return _Root(self._cause(a, b, kind, text), is_certain) if is_certain else None
        if inputs.is_explained or self._is_between_modules(row, inputs):
            return self._excess_root(a, b, inputs)
        return self._numeric_root(a, b)

    def _leaf_root(self, a: int, b: int) -> _Root | None:
        """Return the root of a tensor that no recorded operation computed."""
        row, other = self._a.rows[a], self._b.rows[b]
        kind: Kind = "weight" if row.kind in {"weight", "buffer"} else "input"
        if row.kind == "tensor":
            if self._kinds:
                return None  # computed by operations that are not recorded, from values that differ
            kind = "unknown" if row.phase != "backward" else "gradient"
        elif self._differed_before and (kind == "weight" or row.dtype.startswith(("float", "bf"))):
            return None  # it may come from earlier steps
        form = _form_difference(row, other)
        name = f"{row.name} " if kind == "weight" else ""
        if kind == "weight" and row.dtype != other.dtype:
            kind = "dtype"
        text = f"{name}is not the same tensor: {form or self._amount(a, b)}"
        return _Root(self._cause(a, b, kind, text), is_certain=True)

    def _alone_root(self, a: int, b: int, inputs: _Inputs) -> _Root | None:
        """Return the root in operations that only one run has, if the result depends on them."""
        if not (inputs.alone_a or inputs.alone_b) or not self._is_excessive(a, b, inputs):
            return None
        only_a, only_b = (
            [run.rows[each] for each in alone]
            for run, alone in ((self._a, inputs.alone_a), (self._b, inputs.alone_b))
        )
        kind, text, place = self._alone_kind(a, only_a, only_b, inputs.weight)
        effect, count = self._effect(a, b), len(only_a) + len(only_b)
        bound = self._bound(a, b) * (1.0 if count < 4 else 2.0 * math.sqrt(count))
        if effect <= bound:
            numbers = f"{len(only_a)} of the first run, {len(only_b)} of the second"
            text = f"rounding: other operations ({numbers}) compute it, {_relative(effect)}, within {bound:.2g}"
            return _Root(self._cause(a, b, "order", text), is_certain=False)
        text = f"{text}; the results differ by {_relative(effect)}"
        return _Root(_cause_at(self._a.steps[a], place, kind, text), is_certain=True)

    def _alone_kind(
        self, a: int, only_a: list[Row], only_b: list[Row], weight: Row | None
    ) -> tuple[Kind, str, Row]:
        place = (only_b or only_a)[0]
        consumer = self._a.rows[a]
        reader = "second" if only_b else "first"
        if place.kind in {"weight", "buffer"}:
            return (
                "weight",
                f"only the {reader} run has written {place.name} since it was read",
                place,
            )
        if weight is not None:
            text = f"the {reader} run reads another tensor in place of {weight.name}"
            return "weight", text, place
        modes = self._modes_of(place.module)
        text = _alone_text(only_a, only_b)
        if modes is not None:
            return "mode", f"the module is in mode {modes[0]} against {modes[1]}: {text}", place
        if place.phase == "other" and self._backward_began and consumer.kind == "gradient":
            return "gradient", text, place
        casts = [row for row in (*only_a, *only_b) if base_name(row.name) == "_to_copy"]
        if casts:
            return "dtype", text, casts[0]
        return "operation", text, place

    def _modes_of(self, module: str) -> tuple[str, str] | None:
        """Return the modes of a module in both runs, if they differ."""
        pairs = (
            (row, self._b.rows[self._aligner.partner_a[n]])
            for n, row in self._a.rows.items()
            if row.kind == "output" and row.module == module and n in self._aligner.partner_a
        )
        return next(
            ((one.traits, other.traits) for one, other in pairs if one.traits != other.traits), None
        )

    def _gradient_root(self, a: int, b: int, inputs: _Inputs) -> _Root | None:
        row = self._a.rows[a]
        if not self._is_excessive(a, b, inputs) or (
            not row.inputs and self._kinds - {"weight", "buffer"}
        ):
            return None
        text = f"the gradient of {row.name} differs by {_relative(self._effect(a, b))}"
        return _Root(self._cause(a, b, "gradient", text), is_certain=True)

    def _update_root(self, a: int, b: int, inputs: _Inputs) -> _Root | None:
        row, other = self._a.rows[a], self._b.rows[b]
        settings = _argument_difference(row, other)
        if settings:
            return _Root(self._cause(a, b, "optimizer", settings), is_certain=True)
        if inputs.is_explained or self._differed_before:
            return None
        return self._numeric_root(a, b, "optimizer", _OTHER_UPDATE)

    def _changed(self, a: int, b: int, inputs: _Inputs) -> tuple[Kind, str] | None:
        """Return kind and text of what the runs did not do alike in a pair of rows."""
        row, other = self._a.rows[a], self._b.rows[b]
        modes = tuple(_mode(each) for each in (row, other))
        arguments = _argument_difference(row, other)
        if modes[0] != modes[1] and (arguments or not inputs.is_explained):
            extra = f", {arguments}" if arguments else ""
            return "mode", f"the module is in mode {modes[0]} against {modes[1]}{extra}"
        if row.rule != other.rule:
            return (
                "rule",
                f"rule {row.rule or 'none'} against {other.rule or 'none'}{_dtypes(row, other)}",
            )
        if row.dtype != other.dtype:
            return "dtype", f"dtype {row.dtype} against {other.dtype}"
        if arguments:
            if row.phase == "other" and self._backward_began:
                return "gradient", arguments
            return "operation", arguments
        if _overload(row) != _overload(other) and row.kind == "output":
            return "operation", f"{row.name} against {other.name}"
        if row.shape != other.shape:
            return "operation", f"shape {list(row.shape)} against {list(other.shape)}"
        if inputs.reads_elsewhere:
            return "operation", inputs.reads_elsewhere
        is_drawn = "random" in row.traits and (not inputs.is_explained or row.dtype == "bool")
        if is_drawn or (row.kind == "output" and "Dropout" in row.name and not inputs.is_explained):
            return "random", "other random numbers from equal inputs"
        return None

    def _excess_root(self, a: int, b: int, inputs: _Inputs) -> _Root | None:
        """Return the root of a product whose results differ much more than its inputs."""
        is_product = base_name(self._a.rows[a].name) in _PRODUCTS
        if not is_product or not self._is_excessive(a, b, inputs):
            return None
        text = f"the results differ by {_relative(self._effect(a, b))}, far more than the inputs"
        return _Root(self._cause(a, b, "operation", text), is_certain=True)

    def _is_excessive(self, a: int, b: int, inputs: _Inputs) -> bool:
        """Return True if the differences of the inputs do not explain that of the result."""
        if not inputs.differing:
            return True
        step = self._a.steps[a]
        if self.causes or any(self._a.steps[each] != step for each in inputs.differing):
            return False
        before = max(
            self._aligner.relative_distance(each, self._aligner.partner_a[each])
            for each in inputs.differing
        )
        return self._effect(a, b) > max(64.0 * self._bound(a, b), _AMPLIFICATION * before)

    def _numeric_root(
        self, a: int, b: int, kind: Kind = "operation", text: str = _OTHER_RESULT
    ) -> _Root:
        """Return the root of the same operation on equal inputs with other results."""
        effect, bound = self._effect(a, b), self._bound(a, b)
        if effect <= bound:
            return self._rounding_root(a, b, effect, bound)
        text = text.format(effect=_relative(effect), bound=bound)
        return _Root(self._cause(a, b, kind, text), is_certain=True)

    def _rounding_root(self, a: int, b: int, effect: float, bound: float) -> _Root:
        text = (
            f"rounding: the same operation on equal inputs, {_relative(effect)}, within {bound:.2g}"
        )
        return _Root(self._cause(a, b, "order", text), is_certain=False)

    # --- inputs ---

    def _compare_inputs(
        self, inputs_a: tuple[RowInput, ...], inputs_b: tuple[RowInput, ...]
    ) -> _Inputs:
        are_equal, elsewhere = True, ""
        differing: set[int] = set()
        weight: Row | None = None
        alone_a: dict[int, None] = {}
        alone_b: dict[int, None] = {}
        for one, other in itertools.zip_longest(inputs_a, inputs_b, fillvalue=RowInput(())):
            if [self._a.bits[n] for n in one.rows] == [self._b.bits[n] for n in other.rows]:
                if one.views != other.views:
                    elsewhere = f"reads {one.views or 'all elements'} against {other.views or 'all elements'}"
                continue
            are_equal = False
            own_a, differs_a, read_a = self._trace(self._a, one.rows, self._aligner.partner_a)
            own_b, differs_b, read_b = self._trace(self._b, other.rows, self._aligner.partner_b)
            differing |= differs_a | differs_b
            own = [*(self._a.rows[n] for n in own_a), *(self._b.rows[n] for n in own_b)]
            replaced = {**read_a, **read_b}.keys() - (read_a.keys() & read_b.keys())
            if replaced and any(row.kind in {"tensor", "input"} for row in own):
                weight = weight or {**read_a, **read_b}[min(replaced)]
            alone_a |= dict.fromkeys(own_a)
            alone_b |= dict.fromkeys(own_b)
        return _Inputs(
            are_equal, tuple(sorted(differing)), elsewhere,
            tuple(sorted(alone_a)), tuple(sorted(alone_b)), weight,
        )  # fmt: skip

    def _trace(
        self, run: RunRows, rows: tuple[int, ...], partner: dict[int, int]
    ) -> tuple[list[int], set[int], dict[str, Row]]:
        """Return the rows without partners that lead to `rows`, and the differing rows and weights that they read."""
        alone: dict[int, None] = {}
        weights: dict[str, Row] = {}
        waiting, differing = list(rows), set[int]()
        while waiting and len(alone) < _LONGEST_CHAIN:
            number = waiting.pop()
            if number in alone:
                continue
            if number in partner:
                a = number if run is self._a else partner[number]
                if a in self._differs:
                    differing.add(a)
                if run.rows[number].kind in {"weight", "buffer", "update"}:
                    weights[run.rows[number].name] = run.rows[number]
                continue
            alone[number] = None
            waiting += [each for read in run.rows[number].inputs for each in read.rows]
        return list(alone), differing, weights

    def _is_between_modules(self, row: Row, inputs: _Inputs) -> bool:
        """Return True for the gradient of a module's result, whose inputs a recording of modules does not have."""
        return (
            row.kind == "output" and row.phase == "backward" and not row.inputs and inputs.are_equal
        )

    # --- amounts ---

    def _effect(self, a: int, b: int) -> float:
        return self._aligner.relative_distance(a, b)

    def _amount(self, a: int, b: int) -> str:
        return f"{_relative(self._effect(a, b))} apart"

    def _bound(self, a: int, b: int) -> float:
        """Return the relative difference that rounding explains."""
        row, other = self._a.rows[a], self._b.rows[b]
        unit = min(_unit(row.dtype), _unit(other.dtype))
        sizes = sorted(
            (math.prod(self._a.rows[each.rows[-1]].shape) for each in row.inputs), reverse=True
        )
        elements = max(1, math.prod(row.shape))
        terms = sizes[0] / elements if sizes else 1.0
        if len(sizes) > 1:
            terms = max(terms, math.sqrt(sizes[0] * sizes[1] / elements))
        factor = 4.0 if row.kind == "output" else 1.0
        if unit > _unit("float32"):  # kernels sum 16-bit values in float32
            return factor * 4.0 * unit
        return factor * unit * (4.0 + 2.0 * math.sqrt(max(1.0, terms)))

    def _cause(self, a: int, b: int, kind: Kind, difference: str) -> Cause:  # noqa: ARG002
        return _cause_at(self._a.steps[a], self._a.rows[a], kind, difference)


def _cause_at(step: int, row: Row, kind: Kind, difference: str) -> Cause:
    """Return a cause at the place of a row."""
    return Cause(step, row.module, row.name, row.source, kind, difference)


def _unit(dtype: str) -> float:
    """Return the unit roundoff of a dtype; 0 for integers."""
    kind = getattr(torch, dtype, None)
    if isinstance(kind, torch.dtype) and (kind.is_floating_point or kind.is_complex):
        return float(torch.finfo(kind).eps) / 2
    return 0.0


def _relative(effect: float) -> str:
    return f"{effect:.2g} of their size" if math.isfinite(effect) else "infinite or NaN elements"


def _mode(row: Row) -> str:
    return next((each for each in row.traits.split() if each in {"train", "eval"}), "")


def _overload(row: Row) -> str:
    return base_name(row.name)


def _dtypes(row: Row, other: Row) -> str:
    return "" if row.dtype == other.dtype else f", dtype {row.dtype} against {other.dtype}"


def _form_difference(row: Row, other: Row) -> str:
    if row.shape != other.shape:
        return f"shape {list(row.shape)} against {list(other.shape)}"
    return f"dtype {row.dtype} against {other.dtype}" if row.dtype != other.dtype else ""


def _argument_difference(row: Row, other: Row) -> str:
    """Return the arguments that differ, as "eps=1e-05 against eps=0.001"."""
    if row.arguments == other.arguments:
        return ""
    one, two = (dict(_arguments(each)) for each in (row, other))
    return ", ".join(
        f"{name}={one.get(name, 'its default')} against {two.get(name, 'its default')}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    )


def _arguments(row: Row) -> Iterator[tuple[str, str]]:
    for part in filter(None, row.arguments.split("; ")):
        name, _, value = part.partition("=")
        yield name, value


def _alone_text(only_a: list[Row], only_b: list[Row]) -> str:
    texts = []
    for number, rows in (("first", only_a), ("second", only_b)):
        names = [
            f"{base_name(row.name)} to {row.dtype}"
            if base_name(row.name) == "_to_copy"
            else base_name(row.name)
            for row in rows
        ]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            texts.append(f"only the {number} run has {', '.join(names[:4])}{more}")
    return ", ".join(texts)
