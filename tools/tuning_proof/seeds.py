"""Searches with several seeds, and says whether they give the same policy, or ones that cannot be told apart.

Policies that differ are trained side by side, from the same seeds on the same batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import precast
from precast.policy.policy import Policy
from precast.tuning.proof import LOOKS, compare, prove
from precast.tuning.result import TuningResult
from precast.tuning.training import FLOAT32, Setup, Workload, kept_bytes, random_states_kept
from tools.tuning_proof.networks import example_decoder

__all__ = ["found_by_seeds"]

_STEPS: Final = 24
_WIDTH: Final = 48


def found_by_seeds(
    seeds: Sequence[int],
    seconds: float,
    *,
    objective: Literal["time", "memory"],
    tolerance: float,
) -> dict[str, Any]:
    """What each seed finds for the decoder of the examples, and how the policies that differ compare."""
    workload = example_decoder(2, _WIDTH)
    results = {seed: _tuned(workload, seed, seconds, objective, tolerance) for seed in seeds}
    distinct: dict[str, int] = {}
    for seed, result in results.items():
        distinct.setdefault(_rules(result), seed)
    compared = _compared(
        workload, {seed: results[seed] for seed in distinct.values()}, seconds, objective, tolerance
    )
    return {
        "network": f"decoder of 2 blocks of width {_WIDTH}",
        "objective": objective,
        "tolerance": tolerance,
        "seeds": [
            {
                "seed": seed,
                "answer": result.name,
                "is_proven": bool(result.evidence.proofs),
                "because": result.because,
                "same_as": distinct[_rules(result)],
                "seconds": result.evidence.seconds,
                "policy": result.text,
            }
            for seed, result in results.items()
        ],
        "different": len(distinct),
        "compared": compared,
        "are_proven": all(result.evidence.proofs for result in results.values()),
        "is_same": len(distinct) == 1,
        "within_noise": all(each["within_noise"] for each in compared),
    }


def _tuned(
    workload: Workload,
    seed: int,
    seconds: float,
    objective: Literal["time", "memory"],
    tolerance: float,
) -> TuningResult:
    return precast.tune(
        workload.model,
        workload.step,
        list(workload.batches),
        optimizer=workload.optimizer,
        objective=objective,
        tolerance=tolerance,
        budget=seconds,
        seed=seed,
    )


def _rules(result: TuningResult) -> str:
    """The rules of a policy, without reasons and without where it was measured."""
    policy = result.policy
    modules = {
        pattern: sorted((op, str(row.rule)) for op, row in rule.ops.items())
        for pattern, rule in sorted(policy.modules.items())
    }
    return f"{policy.fingerprint} {modules} {result.dtype}"


def _compared(
    workload: Workload,
    results: Mapping[int, TuningResult],
    seconds: float,
    objective: Literal["time", "memory"],
    tolerance: float,
) -> list[dict[str, Any]]:
    """Each pair of different policies: by how much they differ, and whether that is within the tolerance."""
    if len(results) < 2:
        return []
    setups = [_setup(seed, result) for seed, result in results.items()]
    with random_states_kept():
        kept = {setup.name: kept_bytes(workload, setup) for setup in setups}
        proof = prove(
            workload,
            setups,
            steps=_STEPS,
            tolerance=tolerance,
            deadline=time.monotonic() + seconds,
            timed=objective == "time",
        )
    found = []
    for place, one in enumerate(setups):
        for other in setups[:place]:
            pair = compare(proof, one.name, other.name, len(LOOKS))
            ratio = (
                [pair.ratio.low, pair.ratio.middle, pair.ratio.high]
                if objective == "time"
                else [kept[one.name] / max(1, kept[other.name])] * 3
            )
            found.append(
                {
                    "one": one.name,
                    "other": other.name,
                    "ratio": ratio,
                    "loss": [pair.difference.low, pair.difference.middle, pair.difference.high],
                    "within_noise": ratio[0] <= 1 + tolerance and ratio[2] >= 1 - tolerance,
                }
            )
    return found


def _setup(seed: int, result: TuningResult) -> Setup:
    if result.name == FLOAT32.name:
        return Setup(f"seed {seed}", None, FLOAT32.dtype)
    policy: Policy = result.policy.replace(measured={})
    return Setup(f"seed {seed}", policy, result.dtype)
