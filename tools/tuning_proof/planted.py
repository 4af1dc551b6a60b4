"""Shows that a search finds what is planted in random networks, and holds nothing else back."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from typing import Any, Final, Literal

import precast
from precast.tuning.result import TuningResult
from precast.tuning.training import Workload
from tests.tuning.planted import CASES, PLANTED, Block, Case, workload

__all__ = ["planted"]

_TOLERANCE: Final = 0.02


def planted(networks: int, budget: float) -> Iterator[dict[str, Any]]:
    """For so many networks of each kind: what is held back, what is handed out, and whether that is right."""
    for name, case in CASES.items():
        for seed in range(networks):
            yield {"kind": name, "seed": seed, **_found(case, seed, budget)}
    for seed in range(networks):
        yield {"kind": "casts", "seed": seed, **_slower(seed, budget)}


def _found(case: Case, seed: int, budget: float) -> dict[str, Any]:
    """Right is that the planted module is held back, and nothing else is."""
    begun = time.monotonic()
    result = _tuned(workload(case, seed), case, "memory", budget)
    trials = {trial.name: trial for proof in result.evidence.proofs for trial in proof.trials}
    rules = _rules(trials["tuned"].policy) if "tuned" in trials else {}
    modules = {module.partition(".")[0] for module in rules}
    is_right = modules == {PLANTED} and bool(case.needed & set().union(*rules.values()))
    is_right &= result.name.startswith("tuned") and _is_as_good(result)
    held = {module: sorted(ops) for module, ops in rules.items()}
    return _row(result, is_right, begun) | {"held_back": held}


def _slower(seed: int, budget: float) -> dict[str, Any]:
    """Right is float32 for a network of layers so small that their casts take longer than they do."""
    case, begun = Case(Block, CASES["reduction"].low, frozenset()), time.monotonic()
    result = _tuned(workload(case, seed), case, "time", budget)
    is_right = result.name == "float32" and "is slower" in result.because
    return _row(result, is_right, begun)


def _row(result: TuningResult, is_right: bool, begun: float) -> dict[str, Any]:
    return {
        "is_right": is_right,
        "answer": result.name,
        "because": result.because,
        "seconds": time.monotonic() - begun,
    }


def _tuned(
    given: Workload, case: Case, objective: Literal["time", "memory"], budget: float
) -> TuningResult:
    return precast.tune(
        given.model,
        given.step,
        given.batches,
        optimizer=given.optimizer,
        objective=objective,
        tolerance=_TOLERANCE,
        candidates=[case.low],
        budget=budget,
    )


def _rules(text: str) -> dict[str, set[str]]:
    """Module -> the operations that a policy file holds back there in float32."""
    modules = tomllib.loads(text).get("modules", {})
    return {
        name: {op for op, row in rule.get("ops", {}).items() if _is_fp32(row)}
        for name, rule in modules.items()
    }


def _is_fp32(row: object) -> bool:
    return row == "fp32" or (isinstance(row, dict) and row.get("rule") == "fp32")


def _is_as_good(result: TuningResult) -> bool:
    """In one of its proofs: after that, the budget may end in the middle of another."""
    compared = [each for proof in result.evidence.proofs for each in proof.comparisons]
    found = [c for c in compared if (c.name, c.against) == (result.name, "float32")]
    return any(c.loss in ("better", "equal") for c in found)
