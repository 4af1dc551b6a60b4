"""Measures how long a search takes for a decoder of four layers, and what each of its parts takes."""

from __future__ import annotations

import itertools
from typing import Any

import precast
from precast.tuning.tuner import Progress
from tools.tuning_proof.networks import example_decoder

__all__ = ["searched"]


def searched(budget: float, *, tolerance: float) -> dict[str, Any]:
    """A search for the decoder of the examples with four blocks: its answer, and the seconds of its parts."""
    workload = example_decoder(4)
    told: list[Progress] = []
    result = precast.tune(
        workload.model,
        workload.step,
        list(workload.batches),
        optimizer=workload.optimizer,
        tolerance=tolerance,
        budget=budget,
        progress=told.append,
    )
    parts: dict[str, float] = {}
    for one, after in itertools.pairwise(told):
        parts[one.stage] = parts.get(one.stage, 0.0) + after.seconds - one.seconds
    proofs = result.evidence.proofs
    return {
        "network": "decoder of 4 blocks",
        "budget": budget,
        "tolerance": tolerance,
        "seconds": result.evidence.seconds,
        "parts": parts,
        "runs": sum(search.runs for search in result.evidence.searches),
        "answer": result.name,
        "because": result.because,
        "ended": proofs[-1].ended if proofs else "time",
        "is_proven": bool(proofs),
        "comparisons": result.as_dict()["comparisons"],
    }
