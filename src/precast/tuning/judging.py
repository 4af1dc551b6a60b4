"""The answer of a proof, its reasons, and the changes that would decide an undecided one.

Invariants:
- the answer has trained as well as float32, within the tolerance, trains every parameter that float32 trains, and is
  better at the objective than float32 and the base policy for certain. Where no setup is, the answer is the better one
  of these two;
- of several such setups the answer is the one with the least time or memory;
- a change that would not decide a proof is not named.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from precast.tuning.options import Objective
from precast.tuning.proof import Proof, SetupComparison, is_time_decided
from precast.tuning.setups import FLOAT32, MOST_BATCHES, Setup
from precast.tuning.tasks import TuningTask

__all__ = ["Judge"]


@dataclass(frozen=True)
class Judge:
    """Finds the answer of a proof."""

    objective: Objective
    proof: Proof
    task: TuningTask

    def best(self, setups: Collection[Setup], bases: Collection[str]) -> tuple[Setup, str]:
        """Return the answer, and a clause on each of the other setups; `bases` names those of the base policy."""
        reasons = {setup.name: self._refusal(setup) for setup in setups}
        able = [setup for setup in setups if not reasons[setup.name]]
        reference = FLOAT32
        for setup in able:
            if setup.name in bases:
                reasons[setup.name], is_better = self.gain(setup.name, reference.name)
                reference = setup if is_better else reference
        winners = []
        for setup in able:
            if setup.name not in bases:
                reasons[setup.name], is_better = self.gain(setup.name, reference.name)
                compared = self.proof.comparison(setup.name, reference.name)
                if compared.loss == "worse":
                    reasons[setup.name] = self.loss_text(compared)
                elif is_better:
                    winners.append(setup)
        best = min(winners, key=lambda setup: self._spent(setup.name), default=reference)
        return best, "; ".join(filter(None, reasons.values()))

    def undecided(self, setups: Iterable[Setup]) -> list[str]:
        """Return the names of the setups that may be better than float32."""
        names = []
        for setup in setups:
            compared = self.proof.comparison(setup.name)
            _, is_better = self.gain(setup.name, FLOAT32.name)
            may_be_better = is_better
            if self.objective == "time":
                may_be_better = compared.ratio.low <= 1 - self.proof.tolerance
            is_refused = compared.because or compared.loss == "worse" or setup.silent
            if not is_refused and may_be_better and not (compared.is_as_good and is_better):
                names.append(setup.name)
        return names

    def gain(self, name: str, against: str) -> tuple[str, bool]:
        """Return a clause on how a setup compares at the objective, and True if it is better for certain."""
        if self.objective == "memory":
            mine, theirs = (self.proof.figures[each].kept_bytes for each in (name, against))
            share = (
                f"{self.task.words.needs} {mine / max(theirs, 1):.2f} of the memory of {against}"
            )
            if mine < theirs:
                return f"{name} {share}", True
            text = "is worse than" if mine > theirs else "is no better than"
            return f"{name} {text} {against}: it {share}", False
        compared, tolerance = self.proof.comparison(name, against), self.proof.tolerance
        ratio = compared.ratio
        if not math.isfinite(ratio.high):
            return f"too few times were measured to compare {name} with {against}", False
        figures = f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of"
        if ratio.high < 1:
            return f"{name} takes {figures} the time of {against}", True
        text = f"could not tell whether {name} is faster than {against}"
        if ratio.low > 1:
            text = f"{name} is slower than {against}"
        elif is_time_decided(compared, tolerance):
            text = f"{name} is not faster than {against} by more than {tolerance:.2%}"
        return f"{text}: it takes {figures} its time", False

    def loss_text(self, compared: SetupComparison) -> str:
        """Return a clause on the difference of the losses."""
        name, against, words = compared.name, compared.against, self.task.words
        if compared.because:
            return f"{name} fails ({compared.because})"
        low, high = compared.difference.low, compared.difference.high
        if not math.isfinite(high):
            return f"too few {words.trials} were compared to tell the {words.value} of {name}"
        subject, figures = f"the {words.value} of {name}", f"by {low:+.2%} to {high:+.2%}"
        if compared.loss == "worse":
            return f"{subject} is worse than that of {against} {figures}"
        if compared.is_as_good:
            return f"{subject} differs from that of {against} {figures}"
        return (
            f"could not tell whether {subject} is that of {against} within {self.proof.tolerance:.2%}: it differs "
            f"{figures}"
        )

    def deciding_changes(self, names: Collection[str]) -> Iterator[str]:
        """Yield the changes that would decide if one of these setups is better than float32."""
        proof, task = self.proof, self.task
        compared = [c for c in proof.comparisons if c.name in names and c.against == FLOAT32.name]
        losses = [c for c in compared if c.loss == "cannot tell"]
        is_timed = self.objective == "time"
        times = [c for c in compared if is_timed and not is_time_decided(c, proof.tolerance)]
        if proof.ended == "time":
            yield "a longer budget"
        elif times:
            yield "a quieter machine, as the times varied too much"
        if losses and not task.is_training and proof.seeds < MOST_BATCHES:
            yield f"more batches than {proof.seeds}"
        widest = max((c.difference.high for c in losses), default=math.inf)
        if widest < 1:
            value = task.words.value
            yield f"a tolerance of {widest:.2%} or more, within which the {value} is that of float32"

    def _refusal(self, setup: Setup) -> str:
        """Return why a setup cannot be the answer; "" if it can."""
        quality = self.proof.comparison(setup.name)
        if not quality.is_as_good:
            return self.loss_text(quality)
        if not setup.silent:
            return ""
        return f"under {setup.name} the gradient of {setup.silent} is zero, so it is not trained"

    def _spent(self, name: str) -> float:
        """Return the time or memory of a setup, by which setups are ordered."""
        if self.objective == "memory":
            return self.proof.figures[name].kept_bytes
        return self.proof.comparison(name).ratio.middle
