"""The result of a comparison: the first difference, its cause, its growth, and what was not compared."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from precast._internal import atomic_write
from precast._internal.version import __version__

__all__ = ["KINDS", "Cause", "GrowthPoint", "RunDifference", "StepDistance", "TokenDistance"]

Kind = Literal[
    "weight", "input", "random", "dtype", "rule", "operation", "mode", "order", "gradient", "optimizer",
    "rank", "unknown",
]  # fmt: skip

KINDS: Final[dict[str, str]] = {
    "weight": "a parameter or buffer has other values, or an operation reads another tensor instead of it",
    "input": "the program got other data, or data of another shape or dtype",
    "random": "an operation drew other random numbers",
    "dtype": "an operation computed in another dtype, or one run lacks a cast",
    "rule": "a policy's rule for an operation is not the same",
    "operation": "another operation, argument or view, or a kernel of lower precision",
    "mode": "a module is in training in one run, and in evaluation in the other",
    "order": "rounding: the same operation, or equivalent ones, in another order of summation",
    "gradient": "gradients were changed between the backward pass and the optimizer, as by clipping",
    "optimizer": "an optimizer has other settings or another state",
    "rank": "one process of several differs from the others",
    "unknown": "the rows of the recordings do not show it",
}
"""The kinds of causes, with their meaning."""


@dataclass(frozen=True)
class Cause:
    """A place where two runs differ.

    Attributes:
        step: the step, counted from 0.
        module: the path of the module; "" for the model itself, and outside of modules.
        operation: the operation, or the name of the parameter.
        source: the line of the program; "" if it is not recorded.
        kind: one of `KINDS`.
        difference: what is different, as text.
        rank: the process; None if there is one.
    """

    step: int
    module: str
    operation: str
    source: str
    kind: Kind
    difference: str
    rank: int | None = None

    def place(self) -> str:
        """Return the place as text."""
        module = f"{self.module}: " if self.module else ""
        source = f", at {self.source}" if self.source else ""
        rank = "" if self.rank is None else f", in rank {self.rank}"
        return f"{module}{self.operation}, step {self.step}{rank}{source}"


@dataclass(frozen=True)
class GrowthPoint:
    """The relative distance of the results of a module, in the first step where any differs."""

    module: str
    distance: float


@dataclass(frozen=True)
class TokenDistance:
    """The difference of the probabilities of tokens in one step, where both runs recorded logits.

    Attributes:
        positions: the number of positions.
        flips: the number of positions where the likeliest token is another one.
        logprob_mean: the mean absolute difference of the logarithms of probabilities.
        logprob_max: the largest one.
        kl: the mean Kullback-Leibler divergence, estimated for distributions that are close to each other.
    """

    positions: int
    flips: int
    logprob_mean: float
    logprob_max: float
    kl: float


@dataclass(frozen=True)
class StepDistance:
    """The relative distances of two runs in one step; None where the step has no such tensors."""

    step: int
    output: float | None = None
    loss: float | None = None
    gradients: float | None = None
    weights: float | None = None
    tokens: TokenDistance | None = None


@dataclass
class RunDifference:
    """The comparison of two runs; returned by `compare` and `compare_settings`.

    Attributes:
        a: the name of the first run.
        b: the name of the second run.
        equal: True if no tensor of both runs differs in a bit.
        bound: the relative distance that was allowed.
        distance: the largest relative distance of the model's results, the losses and the updated weights.
        first_bit: the first tensor that differs in a bit; None if none does.
        cause: the first cause; None if nothing differs.
        causes: further causes, in the order of the program, the first one included.
        growth: the distance along the modules, in the first step where one of them differs.
        steps: the distances in each step.
        cure: the policy that brings the distance under the bound, as text; None without a model.
        cure_seconds: the time of a run under that policy relative to the second run; None without a cure.
        notes: sentences on what was not recorded or not compared.
    """

    a: str
    b: str
    equal: bool
    bound: float
    distance: float
    first_bit: Cause | None
    cause: Cause | None
    causes: list[Cause]
    growth: list[GrowthPoint]
    steps: list[StepDistance]
    cure: str | None = None
    cure_seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def within_bound(self) -> bool:
        """True if the distance is at most the bound."""
        return self.equal or self.distance <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data; a distance that is not finite is None."""
        plain = {**asdict(self), "within_bound": self.within_bound}
        finite: dict[str, Any] = _finite(plain)
        return finite

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON, or as a page if the path ends in ".html".

        Raises:
            MissingExtraError: jinja2 or plotly is not installed, for a page.
            OutputError: the file could not be written. An existing file is not changed.
        """
        if Path(path).suffix == ".html":
            from precast.comparison.page import html

            content = html(self)
        else:
            content = json.dumps({"schema": 1, "precast": __version__, **self.to_dict()})
        atomic_write.replace_own(Path(path), content.encode("utf-8", "replace"))

    def sentences(self) -> list[str]:
        """Return the result as sentences: the first difference, the cause, the growth, the cure."""
        if self.equal:
            return ["Equal: no tensor that both runs recorded differs in a bit.", *self.remarks()]
        assert self.first_bit is not None
        assert self.cause is not None
        verdict = "within" if self.within_bound else "more than"
        lines = [
            f"Different by {self.distance:.2g}, {verdict} the bound {self.bound:g}.",
            f"First bit: {self.first_bit.place()}",
            f"Cause ({self.cause.kind}): {self.cause.place()}",
            f"  {self.cause.difference}",
        ]
        if self.cure is not None:
            time = "" if self.cure_seconds is None else f", {self.cure_seconds:.2f} times its time"
            lines.append(f"Cure: this policy for the second run{time}:\n{self.cure}")
        return [*lines, *self.remarks()]

    def remarks(self) -> list[str]:
        """Return what is said after the cause: the tokens, the search for a cure, and the notes."""
        remarks = []
        tokens = [each.tokens for each in self.steps if each.tokens is not None]
        count = sum(each.positions for each in tokens)
        if count:
            flips = sum(each.flips for each in tokens)
            mean = sum(each.logprob_mean * each.positions for each in tokens) / count
            most = max(each.logprob_max for each in tokens)
            divergence = sum(each.kl * each.positions for each in tokens) / count
            remarks.append(
                f"{flips} of {count} likeliest tokens are others. Logarithms of probabilities differ by {mean:.2g} on "
                f"average and by at most {most:.2g}; the KL divergence is {divergence:.2g}."
            )
        has_answer = self.cure is not None or any(each.startswith("No cure") for each in self.notes)
        if not (self.within_bound or has_answer):
            remarks.append(
                "No cure was searched. Name the model and a batch: --model MODULE:FACTORY --data MODULE:NAME."
            )
        return [*remarks, *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def render(self) -> Any:
        """Return the result for a console of rich: the sentences, the growth and the steps."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = [Text(str(self))]
        if self.growth:
            table = Table("module", "relative distance", title="Along the modules")
            for point in self.growth:
                table.add_row(point.module or "the model", f"{point.distance:.2g}")
            parts.append(table)
        if not self.equal:
            table = Table("step", "output", "loss", "gradients", "weights", title="Steps")
            for each in self.steps:
                cells = (each.output, each.loss, each.gradients, each.weights)
                table.add_row(str(each.step), *("-" if c is None else f"{c:.2g}" for c in cells))
            parts.append(table)
        return Group(*parts)


def _finite(value: Any) -> Any:
    """Return plain data without infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
