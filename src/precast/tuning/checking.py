"""A new measurement of a saved policy, beside float32 and the policy that it was made from.

Invariants:
- a policy holds if it trains, or in inference runs, as well as float32 within the tolerance, and at the objective is
  behind neither float32 nor the base policy. A base policy that is worse than float32 is not compared;
- nothing is searched and no file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch

from precast.policy.policy import Policy
from precast.tuning.judging import Judge
from precast.tuning.options import Objective
from precast.tuning.proof import ComparisonOutcome, Proof, prove
from precast.tuning.setups import FLOAT32, Setup, Workload, preserved_random_states
from precast.tuning.tuner import SearchBudget, task_of

__all__ = ["PolicyCheck", "check"]

Outcome = Literal["holds", "does not hold", "cannot tell"]
_OUTCOMES: Final[dict[ComparisonOutcome, Outcome]] = {
    "better": "holds",
    "equal": "holds",
    "cannot tell": "cannot tell",
    "worse": "does not hold",
}


@dataclass
class PolicyCheck:
    """The result of a check: the outcome, a sentence for each comparison, and the proof."""

    outcome: Outcome
    because: list[str]
    proof: Proof


def check(
    workload: Workload,
    policy: Policy,
    *,
    base: Policy,
    dtype: torch.dtype,
    objective: Objective,
    tolerance: float,
    budget: float,
    progress: Callable[[str], None] = lambda _: None,
) -> PolicyCheck:
    """Train or run copies in float32, under the base policy and under this one, and compare them.

    `dtype` is that of the region; torch.float32 where the answer of the search had none.
    """
    task = task_of(workload)
    limit = SearchBudget(task, budget)
    name, setups = _setups(policy, base, dtype)
    with preserved_random_states():
        progress(f"a {task.words.run} in float32")
        limit.measure_step(len(setups) + 1)
        proof = prove(
            task,
            setups,
            steps=limit.steps_for(len(setups) + 1) or task.steps[0],
            tolerance=tolerance,
            deadline=limit.share(1.0),
            timed=objective == "time",
            progress=progress,
        )
    clauses = list(_comparisons(Judge(objective, proof, task), name))
    because = [text for _, text in clauses]
    if proof.ended == "interrupted":
        because.append("the check was interrupted")
    outcomes = {outcome for outcome, _ in clauses}
    worst: tuple[Outcome, ...] = ("does not hold", "cannot tell", "holds")
    return PolicyCheck(next(filter(outcomes.__contains__, worst), "cannot tell"), because, proof)


def _setups(policy: Policy, base: Policy, dtype: torch.dtype) -> tuple[str, list[Setup]]:
    """Return the name of the checked setup, and the setups beside float32."""
    policy = policy.replace(measured={})  # which would warn about the other machine
    if dtype is torch.float32:
        return FLOAT32.name, [Setup(base.name, base, torch.bfloat16)]
    setups = [Setup(base.name, base, dtype)]
    if (policy.fingerprint, policy.modules) == (base.fingerprint, base.modules):
        return base.name, setups
    name = "tuned" if policy.name in (base.name, FLOAT32.name) else policy.name
    return name, [*setups, Setup(name, policy, dtype)]


def _comparisons(judge: Judge, name: str) -> Iterator[tuple[Outcome | None, str]]:
    """Yield the outcome and a sentence for each comparison of a setup; no outcome for those that do not count."""
    proof = judge.proof
    if name == FLOAT32.name:  # the answer was that the base policy is not better
        [compared] = proof.comparisons
        gain, is_better = judge.gain(compared.name, compared.against)
        is_lost = is_better and compared.is_as_good
        yield "does not hold" if is_lost else "holds", f"{judge.loss_text(compared)}; {gain}"
        return
    for compared in [each for each in proof.comparisons if each.name == name]:
        if compared.against == FLOAT32.name:
            yield _OUTCOMES[compared.loss], judge.loss_text(compared)
        elif not (base := proof.comparison(compared.against)).is_as_good:
            fails = f"{'does' if base.loss == 'worse' else 'may'} not {judge.task.words.does}"
            yield None, f"{base.name} {fails} as well as float32, so it is not compared"
            continue
        text, _ = judge.gain(compared.name, compared.against)
        outcome = _OUTCOMES[compared.time]
        if judge.objective == "memory":
            figures = proof.figures
            is_behind = figures[name].kept_bytes > figures[compared.against].kept_bytes
            outcome = "does not hold" if is_behind else "holds"
        yield outcome, text
