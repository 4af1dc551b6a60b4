"""The result of a comparison: the first difference, its cause, its growth, and what was not compared."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from precast._internal import atomic_write
from precast._internal.version import __version__

__all__ = ["Cause", "GrowthPoint", "Kind", "RunDifference", "StepDistance", "TokenDistance"]

Kind = Literal[
    "weight", "input", "random", "dtype", "rule", "operation", "mode", "order", "gradient", "optimizer",
    "rank", "unknown",
]  # fmt: skip
"""The kinds of causes; docs/compare.md says what they mean."""


@dataclass(frozen=True)
class Cause:
    """A place where two runs differ.

    Attributes:
        step: the step, counted from 0.
        module: the path of the module; "" for the model itself, and outside of modules.
        operation: the operation, or the name of the parameter.
        source: the line of the program; "" if it is not recorded.
        kind: one of `Kind`.
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
        plain: dict[str, Any] = _finite({**asdict(self), "within_bound": self.within_bound})
        return plain

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON, or as a page if the path ends in ".html".

        Raises:
            MissingExtraError: jinja2 or plotly is not installed, for a page.
            OutputError: the file could not be written. An existing file is not changed.
        """
        if Path(path).suffix == ".html":
            from precast.report.page import page_of

            content = page_of(
                resources.files(__package__).joinpath("compare.html.jinja").read_text("utf-8"),
                self.to_dict(),
                script="",  # that of the charts is in the template
                title=f"precast compare {self.a} {self.b}",
                version=__version__,
                difference=self,
            )
        else:
            content = json.dumps({"schema": 1, "precast": __version__, **self.to_dict()})
        atomic_write.replace_own(Path(path), content.encode("utf-8", "replace"))

    def sentences(self) -> list[str]:
        """Return the result as sentences: the first difference, the cause, the growth, the cure."""
        if self.first_bit is None or self.cause is None:
            return ["Equal: no tensor that both runs recorded differs in a bit.", *self.remarks()]
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
            mean = sum(each.logprob_mean * each.positions for each in tokens) / count
            divergence = sum(each.kl * each.positions for each in tokens) / count
            remarks.append(
                f"{sum(each.flips for each in tokens)} of {count} likeliest tokens are others. Logarithms of "
                f"probabilities differ by {mean:.2g} on average and by at most "
                f"{max(each.logprob_max for each in tokens):.2g}; the KL divergence is {divergence:.2g}."
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

        growth = Table("module", "relative distance", title="Along the modules")
        for point in self.growth:
            growth.add_row(point.module or "the model", f"{point.distance:.2g}")
        steps = Table("step", "output", "loss", "gradients", "weights", title="Steps")
        for each in self.steps:
            cells = (each.output, each.loss, each.gradients, each.weights)
            steps.add_row(str(each.step), *("-" if c is None else f"{c:.2g}" for c in cells))
        tables = [*([growth] if self.growth else []), *([] if self.equal else [steps])]
        return Group(Text(str(self)), *tables)


def _finite(value: Any) -> Any:
    """Return plain data without infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
