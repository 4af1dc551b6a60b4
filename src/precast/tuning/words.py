"""What the parts of a search are called in messages, files and pages: by whether a model is trained or only run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from precast._internal.display import size

__all__ = ["INFERENCE", "TRAINING", "Words", "words_for"]


@dataclass(frozen=True)
class Words:
    """The words for one kind of task.

    Attributes:
        value: what is compared at the end.
        changed: what 16 bits change beside it.
        run: what is timed.
        does: what a copy does, as in "train without a region".
        needs: the verb for memory, as in "keeps half of the memory".
        memory: which memory is counted.
        trial: what is paired.
        trials: several of these.
    """

    value: str
    changed: str
    run: str
    does: str
    needs: str
    memory: str
    trial: str
    trials: str

    def extent(self, pairs: int, each: int) -> str:
        """How much was trained or run: so many seeds of so many steps, or so many batches so many times."""
        if self is TRAINING:
            return f"{pairs} seeds of {each} steps"
        return f"{size(pairs, self.trial, self.trials)}, run {size(each, 'time')}"


TRAINING: Final = Words(
    "loss", "gradients", "step", "train", "keeps", "kept for backward", "seed", "seeds"
)
INFERENCE: Final = Words(
    "metric", "outputs", "run", "run", "needs", "weights and results", "batch", "batches"
)


def words_for(task: str) -> Words:
    """The words for a task, by its name."""
    return INFERENCE if task == "inference" else TRAINING
