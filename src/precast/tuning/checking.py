"""A new measurement of a saved policy, beside float32 and the policy that it was made from.

Invariants:
- a policy holds if it trains, or in inference runs, as well as float32 within the tolerance, and at the objective is
  behind neither float32 nor the base policy. A base policy that is worse than float32 is not compared;
- nothing is searched and no file is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch

from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning.costs import Objective
from precast.tuning.judging import Judge, duration_text
from precast.tuning.proof import ComparisonOutcome, Proof, SetupComparison, prove
from precast.tuning.setups import FLOAT32, Setup, Workload, preserved_random_states
from precast.tuning.tuner import task_of

__all__ = ["CheckQuestion", "PolicyCheck", "check"]

Outcome = Literal["holds", "does not hold", "cannot tell"]
_OUTCOMES: Final[dict[ComparisonOutcome, Outcome]] = {
    "better": "holds",
    "equal": "holds",
    "cannot tell": "cannot tell",
    "worse": "does not hold",
}
_USED: Final = 0.8
"""The share of the budget for the first seeds."""


@dataclass(frozen=True)
class CheckQuestion:
    """The question that a policy was found for.

    Attributes:
        budget: in seconds.
        dtype: of the region; torch.float32 where the answer had none.
        base: the policy that it was made from.
    """

    objective: Objective
    tolerance: float
    budget: float
    dtype: torch.dtype
    base: Policy


@dataclass
class PolicyCheck:
    """The result of a check: the outcome, a sentence for each comparison, and the proof."""

    outcome: Outcome
    because: list[str]
    proof: Proof


def check(
    workload: Workload,
    policy: Policy,
    question: CheckQuestion,
    progress: Callable[[str], None] = lambda _: None,
) -> PolicyCheck:
    """Train or run copies in float32, under the base policy and under this one, and compare them.

    Raises:
        TuningError: as `precast.tune`; also where the budget is too small.
    """
    start = time.monotonic()
    task = task_of(workload)
    name, setups = _setups(policy, question)
    least, most = task.steps
    with preserved_random_states():
        progress(f"a {task.words.run} in float32")
        seconds = 2 * task.seconds() * task.least_pairs * (len(setups) + 1)
        steps = int(_USED * (start + question.budget - time.monotonic()) / seconds)
        if steps < least:
            needed = duration_text(least * seconds / _USED + time.monotonic() - start)
            raise TuningError(
                f"the budget of {question.budget:g} s is too small: a comparison takes at least about {needed}. Pass a "
                f"budget of {needed} or more"
            )
        proof = prove(
            task,
            setups,
            steps=min(steps, most),
            tolerance=question.tolerance,
            deadline=start + question.budget,
            timed=question.objective == "time",
            progress=progress,
        )
    judge = Judge(question.objective, {question.base.name}, task.words)
    clauses = list(_comparisons(judge, proof, name))
    because = [text for _, text in clauses]
    if proof.ended == "interrupted":
        because.append("the check was interrupted")
    outcomes = {outcome for outcome, _ in clauses}
    worst: tuple[Outcome, ...] = ("does not hold", "cannot tell", "holds")
    return PolicyCheck(next(filter(outcomes.__contains__, worst), "cannot tell"), because, proof)


def _setups(policy: Policy, question: CheckQuestion) -> tuple[str, list[Setup]]:
    """Return the name of the checked setup, and the setups beside float32."""
    policy = policy.replace(measured={})  # which would warn about the other machine
    base = question.base
    if question.dtype is torch.float32:
        return FLOAT32.name, [Setup(base.name, base, torch.bfloat16)]
    setups = [Setup(base.name, base, question.dtype)]
    if (policy.fingerprint, policy.modules) == (base.fingerprint, base.modules):
        return base.name, setups
    name = "tuned" if policy.name in (base.name, FLOAT32.name) else policy.name
    return name, [*setups, Setup(name, policy, question.dtype)]


def _comparisons(judge: Judge, proof: Proof, name: str) -> Iterator[tuple[Outcome | None, str]]:
    """Yield the outcome and a sentence for each comparison of a setup; no outcome for those that do not count."""
    if name == FLOAT32.name:  # the answer was that the base policy is not better
        for compared in proof.comparisons:
            gain, is_better = judge.gain(proof, compared.name, compared.against)
            text, _ = judge.loss_text(compared, proof.tolerance)
            is_lost = is_better and compared.is_as_good
            yield "does not hold" if is_lost else "holds", f"{text}; {gain}"
    for compared in proof.comparisons:
        against = compared.against
        if compared.name != name:
            continue
        if against == FLOAT32.name:
            text, _ = judge.loss_text(compared, proof.tolerance)
            yield _OUTCOMES[compared.loss], text
        elif not (base := proof.comparison(against)).is_as_good:
            verb = "does not" if base.loss == "worse" else "may not"
            does = judge.words.does
            yield None, f"{against} {verb} {does} as well as float32, so it is not compared"
            continue
        yield _gain(judge, proof, compared)


def _gain(judge: Judge, proof: Proof, compared: SetupComparison) -> tuple[Outcome, str]:
    text, _ = judge.gain(proof, compared.name, compared.against)
    if judge.objective == "time":
        return _OUTCOMES[compared.time], text
    mine, other = (proof.figures[name].kept_bytes for name in (compared.name, compared.against))
    return "holds" if mine <= other else "does not hold", text
