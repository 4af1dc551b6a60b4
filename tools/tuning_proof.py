"""Shows that `precast.tune` finds what is planted in random networks, and holds nothing else back.

    python -m tools.tuning_proof [NETWORKS]

Prints a line for each network: what was held back, and what was handed out. The exit status is 1 where an operation was
missed or held back without need, or where a policy was handed out that trains worse than float32.
"""

from __future__ import annotations

import sys
import time
import tomllib

import precast
from precast.tuning.result import TuningResult
from precast.tuning.training import Workload
from tools.tuning_cases import CASES, PLANTED, Block, Case, workload

__all__ = ["main"]

_TOLERANCE = 0.02


def main(networks: int) -> int:
    """Searches in so many networks of each kind; returns how many searches went wrong."""
    wrong = 0
    for name, case in CASES.items():
        for seed in range(networks):
            wrong += not _is_found(name, case, seed)
    for seed in range(networks):
        wrong += not _is_slower(seed)
    print(f"{wrong} of {networks * (len(CASES) + 1)} searches went wrong")
    return wrong


def _is_found(name: str, case: Case, seed: int) -> bool:
    """Whether the planted module is held back, and nothing else is."""
    given, begun = workload(case, seed), time.monotonic()
    result = _tuned(given, case, "memory")
    trials = {trial.name: trial for proof in result.evidence.proofs for trial in proof.trials}
    rules = _rules(trials["tuned"].policy) if "tuned" in trials else {}
    modules = {module.partition(".")[0] for module in rules}
    is_right = modules == {PLANTED} and bool(case.needed & set().union(*rules.values()))
    is_right &= result.name.startswith("tuned") and _is_as_good(result)
    held = ", ".join(f"{module}: {' '.join(sorted(ops))}" for module, ops in rules.items())
    _say(name, seed, is_right, f"held back {held or 'nothing'}; {result.name}", begun)
    return is_right


def _is_slower(seed: int) -> bool:
    """Whether float32 is the answer for a network of layers so small that their casts take longer than they do."""
    case, begun = Case(Block, CASES["reduction"].low, frozenset()), time.monotonic()
    result = _tuned(workload(case, seed), case, "time")
    is_right = result.name == "float32" and "is slower" in result.because
    _say("casts", seed, is_right, result.because, begun)
    return is_right


def _tuned(given: Workload, case: Case, objective: str) -> TuningResult:
    return precast.tune(
        given.model,
        given.step,
        given.batches,
        optimizer=given.optimizer,
        objective="time" if objective == "time" else "memory",
        tolerance=_TOLERANCE,
        candidates=[case.low],
        budget=60.0,
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
    compared = result.evidence.proofs[-1].comparisons
    [found] = [c for c in compared if (c.name, c.against) == (result.name, "float32")]
    return found.loss in ("better", "equal")


def _say(name: str, seed: int, is_right: bool, what: str, begun: float) -> None:
    mark = "ok   " if is_right else "WRONG"
    print(f"{mark} {name} {seed} ({time.monotonic() - begun:.0f} s): {what}", flush=True)


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)))
