"""Words for training and inference in messages, files and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from precast._internal.display import plural

__all__ = ["INFERENCE", "TRAINING", "TaskWords", "words_for"]


@dataclass(frozen=True)
class TaskWords:
    """The words for one kind of task.

    Attributes:
        value: the compared quantity.
        changed: the other quantity that 16 bits change.
        run: the timed unit.
        does: the verb of a copy, as in "train without a region".
        needs: the verb for memory, as in "keeps half of the memory".
        memory: the counted memory.
        place: the unit of a curve.
        trial: the unit of a pair.
        trials: its plural.
        round: the repeated unit.
    """

    value: str
    changed: str
    run: str
    does: str
    needs: str
    memory: str
    place: str
    trial: str
    trials: str
    round: str

    def extent(self, pairs: int, each: int) -> str:
        """Return the extent of a proof: the seeds and steps, or the batches and runs."""
        if self is TRAINING:
            return f"{pairs} seeds of {each} steps"
        return f"{plural(pairs, self.trial, self.trials)}, run {plural(each, 'time')}"


TRAINING: Final = TaskWords(
    *("loss", "gradients", "step", "train", "keeps", "kept for backward"),
    *("step", "seed", "seeds", "seed"),
)
INFERENCE: Final = TaskWords(
    *("metric", "outputs", "run", "run", "needs", "weights and results"),
    *("batch", "batch", "batches", "pass"),
)


def words_for(task: str) -> TaskWords:
    """Return the words for a task, by its name."""
    return INFERENCE if task == "inference" else TRAINING
