"""Says which setup is handed out after a proof, and why, in words with figures.

Invariants:
- what is handed out has trained as well as float32, within the tolerance, trains every parameter that float32 trains,
  and is for certain better at the objective than float32 and the base policy. Where nothing is, the answer is the
  better of these two;
- of several that are, it is the one with the least time or memory; where these are equal, the first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from precast.tuning.proof import Comparison, Proof, is_time_known
from precast.tuning.training import FLOAT32, Setup
from precast.tuning.words import TRAINING, Words

__all__ = ["Judge"]


@dataclass(frozen=True)
class Judge:
    """What a proof is judged by.

    Attributes:
        objective: what is made small.
        kept: the bytes that autograd keeps under each setup.
        silent: under each setup, a parameter whose gradient is zero, or nothing.
        bases: the names of the base policy's setups.
        words: what is compared, and the verb for memory.
    """

    objective: Literal["time", "memory"]
    kept: Mapping[str, int]
    silent: Mapping[str, str]
    bases: Collection[str]
    words: Words = TRAINING

    def best(self, proof: Proof, setups: Iterable[Setup]) -> tuple[Setup, str]:
        """The setup that is handed out, and a sentence on each of the others."""
        reasons: dict[str, str] = {}
        able = []
        for setup in setups:
            reasons[setup.name] = self._refused(proof, setup)
            if not reasons[setup.name]:
                able.append(setup)
        reference = FLOAT32
        for setup in able:
            if setup.name in self.bases:
                compared = proof.comparison(setup.name, reference.name)
                reasons[setup.name], is_better = self._gain(compared, proof.tolerance)
                if is_better:
                    reference = setup
        winners = []
        for setup in able:
            if setup.name not in self.bases:
                compared = proof.comparison(setup.name, reference.name)
                reasons[setup.name], is_better = self._gain(compared, proof.tolerance)
                if compared.loss == "worse":
                    reasons[setup.name] = self._not_as_good(compared, proof)
                elif is_better:
                    winners.append(setup)
        best = min(winners, key=lambda setup: self._spent(proof, setup), default=reference)
        reasons |= self._slower(proof, best, list(reasons))
        return best, "; ".join(reasons.values())

    def undecided(self, proof: Proof, setups: Iterable[Setup]) -> list[str]:
        """Return the names of the setups of which nobody can tell whether they are better than float32."""
        names = []
        for setup in setups:
            compared = proof.comparison(setup.name, FLOAT32.name)
            is_open = not compared.because and compared.loss != "worse"
            if not is_open or self.silent.get(setup.name):
                continue
            if self.objective == "memory":
                can_be_better = self.kept[setup.name] < self.kept[FLOAT32.name]
                is_known = compared.is_as_good
            else:
                can_be_better = compared.ratio.low <= 1 - proof.tolerance
                is_known = compared.is_as_good and compared.ratio.high < 1
            if can_be_better and not is_known:
                names.append(setup.name)
        return names

    def _refused(self, proof: Proof, setup: Setup) -> str:
        """Why a setup is out of the question; "" if it is not."""
        quality = proof.comparison(setup.name, FLOAT32.name)
        if not quality.is_as_good:
            return self._not_as_good(quality, proof)
        if silent := self.silent.get(setup.name):
            return f"under {setup.name} the gradient of {silent} is zero, so it is not trained"
        return ""

    def _gain(self, against: Comparison, tolerance: float) -> tuple[str, bool]:
        """Return a sentence on how a setup compares at the objective; and True if it is better for certain."""
        name, other = against.name, against.against
        if self.objective == "memory":
            mine, theirs = self.kept[name], self.kept[other]
            share = f"{mine / max(theirs, 1):.2f}"
            return f"{name} {self.words.needs} {share} of the memory of {other}", mine < theirs
        ratio = against.ratio
        if not math.isfinite(ratio.high):
            return f"too few times were measured to compare {name} with {other}", False
        figures = f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of"
        if ratio.high < 1:
            return f"{name} takes {figures} the time of {other}", True
        if ratio.low > 1:
            return f"{name} is slower than {other}: it takes {figures} its time", False
        if is_time_known(against, tolerance):
            return (
                f"{name} is not faster than {other} by more than {tolerance:.2%}: it takes {figures} its time",
                False,
            )
        return (
            f"could not tell whether {name} is faster than {other}: it takes {figures} its time",
            False,
        )

    def _spent(self, proof: Proof, setup: Setup) -> float:
        """What a setup spends of the objective, so that setups can be compared."""
        if self.objective == "memory":
            return float(self.kept[setup.name])
        return proof.comparison(setup.name, FLOAT32.name).ratio.middle

    def _slower(self, proof: Proof, best: Setup, names: Iterable[str]) -> dict[str, str]:
        """Return the setups whose loss is undecided because they were too slow to continue, and how slow each is."""
        found: dict[str, str] = {}
        for compared in proof.comparisons if self.objective == "time" else ():
            others = {compared.name, compared.against} - {best.name, FLOAT32.name}
            if len(others) != 1 or best.name not in (compared.name, compared.against):
                continue
            [name] = others & {*names} or {""}
            if name and proof.comparison(name, FLOAT32.name).loss == "cannot tell":
                gain, is_better = self._gain(compared, proof.tolerance)
                if compared.name == name and compared.ratio.low > 1:
                    found[name] = gain
                elif compared.name == best.name and is_better:
                    found[name] = f"{name} is slower: {gain}"
        return found

    def _not_as_good(self, compared: Comparison, proof: Proof) -> str:
        """Why a setup is not handed out."""
        if compared.because:
            return f"{compared.name} fails ({compared.because})"
        difference = compared.difference
        if not math.isfinite(difference.high):
            return f"too few {self.words.trials} were compared to tell the {self.words.value} of {compared.name}"
        figures = f"by {difference.low:+.2%} to {difference.high:+.2%}"
        if compared.loss == "worse":
            return f"the {self.words.value} of {compared.name} is worse than that of {compared.against} {figures}"
        return (
            f"could not tell whether the {self.words.value} of {compared.name} is that of {compared.against} within "
            f"{proof.tolerance:.2%}: it differs {figures}"
        )
