"""Measures a policy again, beside float32 and the policy that it was made from, and says whether it still holds.

Invariants:
- a policy holds if it trains, or for inference runs, as well as float32 within the tolerance, and at the objective is
  neither behind float32 nor behind the base policy; what an interval leaves open is neither held nor refuted;
- a base policy that is worse than float32 is no measure of time or memory;
- nothing is searched and no file is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning import evidence as files
from precast.tuning.evidence import ProofEvidence
from precast.tuning.proof import Comparison, Proof
from precast.tuning.tasks import Task, task_of
from precast.tuning.training import FLOAT32, Setup, Workload, random_states_kept
from precast.tuning.undecided import budget_text
from precast.tuning.words import Words

__all__ = ["Check", "Question", "check"]

Outcome = Literal["holds", "does not hold", "cannot tell"]
_STEPS: Final = (8, 50)
_ONCE: Final = (1, 1)
_USED: Final = 0.8  # of the budget, for the first seeds


@dataclass(frozen=True)
class Question:
    """What a policy is asked: what it was found for."""

    objective: Literal["time", "memory"]
    tolerance: float
    budget: float
    """In seconds."""
    dtype: torch.dtype
    """Of the region; torch.float32 where the answer was no region."""
    base: Policy


@dataclass
class Check:
    """What was found.

    Attributes:
        outcome: whether the policy holds.
        because: a sentence for each comparison.
        proof: the trainings.
    """

    outcome: Outcome
    because: list[str] = field(default_factory=list)
    proof: ProofEvidence | None = None


def check(
    workload: Workload,
    policy: Policy,
    asked: Question,
    told: Callable[[str], None] = lambda _: None,
) -> Check:
    """Trains or runs copies in float32, under the base policy and under this one, and compares them.

    Args:
        workload: what is trained or run.
        policy: what is checked.
        asked: for what it was found.
        told: called with what is done now.

    Raises:
        TuningError: as `precast.tune`; also where the budget is too small.
    """
    start = time.monotonic()
    deadline = start + asked.budget
    mine, setups = _setups(policy, asked)
    task = task_of(workload)
    least, most = _STEPS if workload.step is not None else _ONCE
    with random_states_kept():
        told(f"a {task.words.run} in float32")
        shortest = 2 * task.seconds() * task.pairs * (len(setups) + 1)
        steps = int(_USED * (deadline - time.monotonic()) / shortest)
        if steps < least:
            needed = budget_text(least * shortest / _USED + time.monotonic() - start)
            raise TuningError(
                f"the budget of {asked.budget:g} s is too small: a comparison takes at least about {needed}. Give a "
                f"budget of {needed} or more"
            )
        everything = (FLOAT32, *setups)
        kept = {setup.name: _kept(task, setup) for setup in everything}
        proof = task.prove(
            setups,
            steps=min(steps, most),
            tolerance=asked.tolerance,
            deadline=deadline,
            timed=asked.objective == "time",
            told=lambda names, number: told(f"{task.round_} {number + 1}: {names}"),
        )
    found = _Judge(kept, asked.objective, task.words).judged(proof, mine)
    found.proof = files.proof_of(proof, everything, kept)
    return found


def _setups(policy: Policy, asked: Question) -> tuple[str, list[Setup]]:
    """The name of what is checked, and what is trained beside float32."""
    bare = policy.replace(measured={})  # or it would warn of what is being done about it
    low = torch.bfloat16 if asked.dtype is torch.float32 else asked.dtype
    base = Setup(asked.base.name, asked.base, low)
    if asked.dtype is torch.float32:
        return FLOAT32.name, [base]
    if (bare.fingerprint, bare.modules) == (asked.base.fingerprint, asked.base.modules):
        return base.name, [base]
    name = "tuned" if bare.name in (base.name, FLOAT32.name) else bare.name
    return name, [base, Setup(name, bare, low)]


def _kept(task: Task, setup: Setup) -> int:
    try:
        return task.needed_bytes(setup)
    except Exception:
        if setup is FLOAT32:
            raise
        return 0  # it cannot run, which its training will say


@dataclass
class _Judge:
    """Says of what was compared whether it holds."""

    kept: dict[str, int]
    """The memory that each setup needs."""
    objective: str
    words: Words

    def judged(self, proof: Proof, mine: str) -> Check:
        """Whether the setup of that name holds."""
        outcomes: list[Outcome] = []
        because = []
        against = [c for c in proof.comparisons if c.name == mine]
        for compared in against:
            if compared.against == FLOAT32.name:
                outcome, said = self._quality(compared)
                outcomes.append(outcome)
                because.append(said)
            elif not (base := proof.comparison(compared.against, FLOAT32.name)).is_as_good:
                does_not = f"{compared.against} does not {self.words.does} as well as float32"
                could_not = f"could not tell whether {compared.against} {self.words.does}s as well as float32"
                reason = does_not if base.loss == "worse" else could_not
                because.append(f"{reason}, so nothing is compared with it")
                continue
            outcome, said = self._objective(compared)
            outcomes.append(outcome)
            because.append(said)
        for compared in proof.comparisons if mine == FLOAT32.name else ():
            better, said = self._is_better(compared)
            outcomes.append("does not hold" if better else "holds")
            because.append(said)
        if proof.ended == "interrupted":
            because.append("it was interrupted")
        return Check(_worst(outcomes), because)

    def _quality(self, compared: Comparison) -> tuple[Outcome, str]:
        name, value = compared.name, self.words.value
        if compared.because:
            return "does not hold", f"{name} fails: {compared.because}"
        if not math.isfinite(compared.difference.high):
            return "cannot tell", f"too few {self.words.trials} to compare the {value} of {name}"
        figures = f"{compared.difference.low:+.2%} to {compared.difference.high:+.2%}"
        said = f"the {value} of {name} differs from that of float32 by {figures}"
        outcomes: dict[str, Outcome] = {"worse": "does not hold", "cannot tell": "cannot tell"}
        return outcomes.get(compared.loss, "holds"), said

    def _objective(self, compared: Comparison) -> tuple[Outcome, str]:
        name, other, kept = compared.name, compared.against, self.kept
        if self.objective == "memory":
            share = f"{kept[name] / max(kept[other], 1):.2f}"
            said = f"{name} {self.words.needs} {share} of the memory of {other}"
            return ("holds" if kept[name] <= kept[other] else "does not hold"), said
        ratio = compared.ratio
        if not math.isfinite(ratio.high):
            return "cannot tell", f"too few times were measured to compare {name} with {other}"
        said = f"{name} takes {ratio.low:.2f} to {ratio.high:.2f} of the time of {other}"
        if compared.time == "worse":
            return "does not hold", said
        return ("cannot tell" if compared.time == "cannot tell" else "holds"), said

    def _is_better(self, compared: Comparison) -> tuple[bool, str]:
        """Whether the base policy is better than the float32 that was the answer, and in which words."""
        _, quality = self._quality(compared)
        outcome, gain = self._objective(compared)
        if self.objective == "memory":
            is_ahead = self.kept[compared.name] < self.kept[compared.against]
        else:
            is_ahead = outcome == "holds" and compared.ratio.high < 1
        return compared.is_as_good and is_ahead, f"{quality}; {gain}"


def _worst(outcomes: list[Outcome]) -> Outcome:
    for outcome in ("does not hold", "cannot tell"):
        if outcome in outcomes:
            return outcome
    return "holds" if outcomes else "cannot tell"
