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
    changed: str  # the quantity whose error in 16 bits is measured
    run: str  # the timed unit
    does: str  # the verb, as in "train without a region"
    needs: str  # the verb for memory, as in "keeps half of the memory"
    memory: str  # the measured memory
    place: str  # the unit on the axis of a curve
    trials: str  # the repetitions that are compared

    def extent(self, pairs: int, each: int) -> str:
        """Return the number of seeds and steps in a proof, or of batches and runs."""
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
