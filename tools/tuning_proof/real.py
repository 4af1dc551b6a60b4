"""Trains real networks under the policy that a search finds, beside what there is without a search.

Beside it are float32, the presets `default` and `lean`, and PyTorch's own `torch.autocast`, from the same seeds on the
same batches, step by step in turns.

Invariants:
- a network takes the seconds that it is given: more than half are the search's budget, and the rest is the comparison;
- the search's own trainings are not used again: what is compared is trained anew.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

import precast
from precast.policy.policy import Policy
from precast.tuning.intervals import Interval, mean_interval
from precast.tuning.proof import LOOKS, Comparison, Proof, compare, prove
from precast.tuning.result import TuningResult
from precast.tuning.training import (
    FLOAT32,
    Setup,
    Workload,
    kept_bytes,
    random_states_kept,
    run_losses,
)
from tools.tuning_proof.networks import NETWORKS

__all__ = ["BEHIND", "tuned_beside"]

BEHIND: Final = 1.01
"""A policy that takes at most this share of another's time is not behind it."""
_SEARCHED: Final = 0.6  # of the seconds
_LOW: Final = torch.bfloat16
_STEPS: Final = (6, 50)
_USED: Final = 0.8  # of what is left for the comparison, for three seeds


@dataclass(frozen=True)
class _TorchAutocast(Setup):
    """PyTorch's own regions, without anything of precast."""

    def region(self, device_type: str) -> AbstractContextManager[object]:
        return torch.autocast(device_type, dtype=self.dtype)


def tuned_beside(
    name: str, seconds: float, *, objective: Literal["time", "memory"], tolerance: float
) -> dict[str, Any]:
    """What a search finds for a network, and how that compares with what there is without it."""
    begun = time.monotonic()
    workload = NETWORKS[name]()
    result = precast.tune(
        workload.model,
        workload.step,
        list(workload.batches),
        optimizer=workload.optimizer,
        objective=objective,
        tolerance=tolerance,
        budget=_SEARCHED * seconds,
    )
    with random_states_kept():
        setups, mine = _setups(result)
        kept = {setup.name: kept_bytes(workload, setup) for setup in (FLOAT32, *setups)}
        steps = _steps(workload, len(setups) + 1, begun + seconds - time.monotonic())
        proof = prove(
            workload,
            setups,
            steps=steps,
            tolerance=tolerance,
            deadline=begun + seconds,
            timed=objective == "time",
        )
    return {
        "network": name,
        "parameters": sum(p.numel() for p in workload.model.parameters()),
        "modules": sum(1 for _ in workload.model.modules()),
        "objective": objective,
        "tolerance": tolerance,
        **_search(result),
        "is": mine,
        "steps": proof.steps,
        "seeds": proof.seeds,
        "ended": proof.ended,
        "setups": [_figures(proof, each, kept) for each in proof.figures],
        "beside": _beside(proof, mine, kept, objective),
        "seconds": time.monotonic() - begun,
    }


def _setups(result: TuningResult) -> tuple[list[Setup], str]:
    """What is compared beside float32, and the name of what the search has found among them."""
    known: list[Setup] = [
        *(Setup(name, Policy.load(name), _LOW) for name in ("default", "lean")),
        _TorchAutocast("torch.autocast", None, _LOW),
    ]
    if result.name in (FLOAT32.name, "default", "lean"):
        return known, result.name
    policy = result.policy.replace(measured={})
    return [*known, Setup("tuned", policy, result.dtype)], "tuned"


def _steps(workload: Workload, setups: int, left: float) -> int:
    """How many steps a training may have, so that three seeds of each setup fit into what is left."""
    step = min(run_losses(workload, FLOAT32, 0, 4).seconds)
    fits = int(_USED * left / (1.5 * step * setups * LOOKS[0]))
    return max(_STEPS[0], min(_STEPS[1], fits))


def _search(result: TuningResult) -> dict[str, Any]:
    seen = result.evidence
    rules, proofs = result.policy.modules.values(), seen.proofs
    return {
        "answer": result.name,
        "because": result.because,
        "policy": result.text,
        "rows": sum(len(rule.ops) for rule in rules),
        "search_seconds": seen.seconds,
        "search_ended": proofs[-1].ended if proofs else "time",
        "untried": seen.untried,
    }


def _figures(proof: Proof, name: str, kept: dict[str, int]) -> dict[str, Any]:
    found = proof.figures[name]
    low, high = found.spread
    against = compare(proof, name, FLOAT32.name, len(LOOKS))
    return {
        "name": name,
        "step": found.median,
        "quartiles": [low, high],
        "kept_bytes": kept[name],
        "loss": _ends(mean_interval(found.finals)),
        "loss_difference": _ends(against.difference) if name != FLOAT32.name else [0.0, 0.0, 0.0],
        "loss_is": against.loss if name != FLOAT32.name else "equal",
        "ratio": _ends(against.ratio) if name != FLOAT32.name else [1.0, 1.0, 1.0],
        "failure": found.failure,
        "seeds": len(found.finals),
        "steps_timed": len(found.seconds),
    }


def _beside(proof: Proof, mine: str, kept: dict[str, int], objective: str) -> dict[str, Any]:
    """The best of the others that train as well, and how what was found compares with it."""
    others = {
        name: compare(proof, mine, name, len(LOOKS)) for name in proof.figures if name != mine
    }
    able = {
        name: compared
        for name, compared in others.items()
        if not proof.figures[name].failure
        and (name == FLOAT32.name or compare(proof, name, FLOAT32.name, len(LOOKS)).loss != "worse")
    }
    if objective == "memory":
        best = min(able, key=lambda name: kept[name])
        ratio = kept[mine] / max(1, kept[best])
        verdict = "yes" if ratio <= BEHIND else "no"
        found: list[float] = [ratio, ratio, ratio]
    else:
        best = max(able, key=lambda name: _middle(able[name]))
        found = _ends(able[best].ratio)
        verdict = _verdict(able[best])
    return {
        "best_of_the_others": best,
        "ratio": found,
        "within": verdict,
        "ratios": {name: _ends(compared.ratio) for name, compared in others.items()},
        "losses": {name: _ends(compared.difference) for name, compared in others.items()},
    }


def _middle(compared: Comparison) -> float:
    """How far behind another one is; unknown is least."""
    return -math.inf if math.isnan(compared.ratio.middle) else compared.ratio.middle


def _verdict(compared: Comparison) -> str:
    """Whether the time is at most `BEHIND` of the other's, by the whole interval."""
    if compared.ratio.high <= BEHIND:
        return "yes"
    return "no" if compared.ratio.low > BEHIND else "cannot tell"


def _ends(interval: Interval) -> list[float]:
    return [interval.low, interval.middle, interval.high]
