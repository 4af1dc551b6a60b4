"""Words for training and inference in messages, files and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from precast._internal.display import plural

__all__ = ["INFERENCE", "TRAINING", "TaskWords", "words_for"]


@dataclass(frozen=True)
class TaskWords:
    """The words for one kind of task."""

    value: str  # the compared quantity
    changed: str  # the other quantity that 16 bits change
    run: str  # the timed unit
    does: str  # the verb of a copy, as in "train without a region"
    needs: str  # the verb for memory, as in "keeps half of the memory"
    memory: str  # the counted memory
    place: str  # the unit of a curve
    trials: str  # the compared units

    def extent(self, pairs: int, each: int) -> str:
        """Return the extent of a proof: the seeds and steps, or the batches and runs."""
        if self is TRAINING:
            return f"{plural(pairs, 'seed')} of {plural(each, 'step')}"
        return f"{plural(pairs, 'batch', 'batches')}, run {plural(each, 'time')}"


TRAINING: Final = TaskWords(
    "loss", "gradients", "step", "train", "keeps", "kept for backward", "step", "seeds"
)
INFERENCE: Final = TaskWords(
    "metric", "outputs", "run", "run", "needs", "weights and results", "batch", "batches"
)


def words_for(task: str) -> TaskWords:
    """Return the words for a task, by its name."""
    return INFERENCE if task == "inference" else TRAINING
