"""A new measurement of a saved policy, beside float32 and the policy that it was made from.

Invariants:
- a policy holds if it trains, or in inference runs, as well as float32 within the tolerance, and at the objective is
  behind neither float32 nor the base policy. A base policy that is worse than float32 is not compared;
- nothing is searched and no file is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch

from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning.judging import Judge, duration_text
from precast.tuning.proof import Proof, SetupComparison, prove
from precast.tuning.setups import FLOAT32, Setup, Workload, preserved_random_states
from precast.tuning.tuner import task_of

__all__ = ["CheckQuestion", "PolicyCheck", "check"]

Outcome = Literal["holds", "does not hold", "cannot tell"]
_USED: Final = 0.8
"""The share of the budget for the first seeds."""


@dataclass(frozen=True)
class CheckQuestion:
    """The question that a policy was found for.

    Attributes:
        objective: the minimized quantity.
        tolerance: the relative difference that does not count.
        budget: in seconds.
        dtype: of the region; torch.float32 where the answer had none.
        base: the policy that it was made from.
    """

    objective: Literal["time", "memory"]
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
            progress=lambda names, number: progress(f"{task.words.round} {number + 1}: {names}"),
        )
    judge = Judge(question.objective, {question.base.name}, task.words)
    clauses = list(_comparisons(judge, proof, name))
    because = [text for _, text in clauses]
    if proof.ended == "interrupted":
        because.append("the check was interrupted")
    return PolicyCheck(_worst([outcome for outcome, _ in clauses if outcome]), because, proof)


def _setups(policy: Policy, question: CheckQuestion) -> tuple[str, list[Setup]]:
    """Return the name of the checked setup, and the setups beside float32."""
    policy = policy.replace(measured={})  # which would warn about the other machine
    base = question.base
    is_float32 = question.dtype is torch.float32
    low = torch.bfloat16 if is_float32 else question.dtype
    setups = [Setup(base.name, base, low)]
    if is_float32:
        return FLOAT32.name, setups
    if (policy.fingerprint, policy.modules) == (base.fingerprint, base.modules):
        return base.name, setups
    name = "tuned" if policy.name in (base.name, FLOAT32.name) else policy.name
    return name, [*setups, Setup(name, policy, low)]


def _comparisons(judge: Judge, proof: Proof, name: str) -> list[tuple[Outcome | None, str]]:
    """Return the outcome and a sentence for each comparison of a setup; no outcome for those that do not count."""
    if name == FLOAT32.name:  # the answer was that the base policy is not better
        results: list[tuple[Outcome | None, str]] = []
        for compared in proof.comparisons:
            gain, is_better = judge.gain(proof, compared.name, compared.against)
            text = f"{_loss_text(judge, compared)[1]}; {gain}"
            results.append(
                ("does not hold" if is_better and compared.is_as_good else "holds", text)
            )
        return results
    results = []
    for compared in (c for c in proof.comparisons if c.name == name):
        if compared.against == FLOAT32.name:
            results.append(_loss_text(judge, compared))
        elif not (base := proof.comparison(compared.against, FLOAT32.name)).is_as_good:
            verb = "does not" if base.loss == "worse" else "may not"
            does = judge.words.does
            text = f"{compared.against} {verb} {does} as well as float32, so it is not compared"
            results.append((None, text))
            continue
        results.append(_gain(judge, proof, compared))
    return results


def _loss_text(judge: Judge, compared: SetupComparison) -> tuple[Outcome, str]:
    name, value = compared.name, judge.words.value
    if compared.because:
        return "does not hold", f"{name} fails: {compared.because}"
    low, high = compared.difference.low, compared.difference.high
    if not math.isfinite(high):
        return "cannot tell", f"too few {judge.words.trials} to compare the {value} of {name}"
    text = f"the {value} of {name} differs from that of float32 by {low:+.2%} to {high:+.2%}"
    outcomes: dict[str, Outcome] = {"worse": "does not hold", "cannot tell": "cannot tell"}
    return outcomes.get(compared.loss, "holds"), text


def _gain(judge: Judge, proof: Proof, compared: SetupComparison) -> tuple[Outcome, str]:
    text, _ = judge.gain(proof, compared.name, compared.against)
    if judge.objective == "memory":
        mine, other = proof.figures[compared.name], proof.figures[compared.against]
        return ("holds" if mine.kept_bytes <= other.kept_bytes else "does not hold"), text
    outcomes: dict[str, Outcome] = {"worse": "does not hold", "cannot tell": "cannot tell"}
    return outcomes.get(compared.time, "holds"), text


def _worst(outcomes: list[Outcome]) -> Outcome:
    for outcome in ("does not hold", "cannot tell"):
        if outcome in outcomes:
            return outcome
    return "holds" if outcomes else "cannot tell"
