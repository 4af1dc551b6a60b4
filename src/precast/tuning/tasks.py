"""Training or running copies of a model: the two tasks for which a policy is searched.

Invariant: an error of a copy under a policy is a reason against the policy; one in float32 is the program's own.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from contextlib import closing
from typing import Any, ClassVar, Final

import torch

from precast.attachment.attachment import Attachment
from precast.diagnostics.tracing.tracer import trace
from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.report.saved_trace import data_of
from precast.report.tree import TreeNode, tree
from precast.tuning.error_meter import ErrorMeter
from precast.tuning.recorder import record
from precast.tuning.setups import (
    FLOAT32,
    Setup,
    Workload,
    copy_model,
    current_time,
    exception_text,
)
from precast.tuning.sites import TunedProgram
from precast.tuning.words import TRAINING, TaskWords, words_for

__all__ = ["LEAST_PAIRS", "ModelTrial", "TuningTask"]

LEAST_PAIRS: Final = 3
"""The fewest seeds or batches of a comparison."""
_MOST_TIMED: Final = 16


class ModelTrial(ABC):
    """A copy of the model that trains or runs under one setup.

    Attributes:
        losses: the loss of each step, or the metric of each batch.
        seconds: the time of each.
        failure: why it cannot continue; empty while it can.
    """

    def __init__(self, workload: Workload, setup: Setup) -> None:
        self.workload = workload
        self.setup = setup
        self.model = copy_model(workload.model)
        self.attachment: Attachment | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.failure = ""

    @abstractmethod
    def step(self, place: int) -> tuple[float, float]:
        """Train or run on a batch, and return the loss or metric, and the seconds."""

    @abstractmethod
    def values(self) -> list[float]:
        """Return the values that are compared: the final loss of a training, or the metric of each batch."""

    def close(self) -> None:
        """Detach the policy."""
        if self.attachment is not None:
            self.attachment.detach()

    def run(self, place: int | None = None) -> None:
        """Train or run on a batch, by default on the next one; do nothing after a failure."""
        if self.failure:
            return
        place = len(self.losses) if place is None else place
        try:
            loss, seconds = self.step(place)
        except TuningError:
            raise
        except Exception as error:  # of the program, or of an operation in 16 bits
            if self.setup.policy is None:
                raise
            self.failure = exception_text(error)
            return
        self.losses.append(loss)
        self.seconds.append(seconds)
        if not math.isfinite(loss):
            words = words_for(self.workload.task)
            self.failure = f"the {words.value} of {words.place} {place + 1} is {loss}"


class TuningTask(ABC):
    """Training or running copies of a model.

    Attributes:
        allowed_change: the relative error that a gradient or output may have.
        looks: the numbers of rounds after which intervals are computed.
        warmup: the first steps of a trial, whose times do not count.
        steps: the least and the most steps of a training.
    """

    allowed_change: ClassVar[float]
    looks: tuple[int, ...]
    warmup: ClassVar[int]
    steps: tuple[int, int]

    words: ClassVar[TaskWords]

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @property
    def is_training(self) -> bool:
        """True if each round adds a pair of losses; else only the first round adds pairs, one for each batch."""
        return self.words is TRAINING

    @property
    @abstractmethod
    def meter(self) -> ErrorMeter:
        """The meter of errors, which is made when it is first used."""

    @abstractmethod
    def forward(self, model: Any) -> Any:
        """Run the first batch."""

    @abstractmethod
    def open(self, setup: Setup, number: int) -> ModelTrial:
        """Return the copy that trains or runs under a setup in a round."""

    @abstractmethod
    def needed_bytes(self, setup: Setup) -> int:
        """Return the memory of a setup, in bytes."""

    def release(self, trial: ModelTrial) -> None:
        """Close a copy after its round."""
        trial.close()

    def close(self) -> None:  # noqa: B027 -- trainings share none
        """Close the copies that rounds share."""

    def traced_trial(self, setup: Setup) -> ModelTrial:
        """Return a copy that shows the rules of the policy in a trace."""
        return self.open(setup, 0)

    def record(self, base: Policy, low: torch.dtype) -> TunedProgram:
        """Record the operations of a step or run."""
        workload = self.workload
        return record(
            workload.model,
            self.forward,
            base,
            low=low,
            device=workload.device_type,
            is_inference=not self.is_training,
        )

    def seconds(self) -> float:
        """Return the time of the shortest of the steps or runs in float32 that fit into a second, at least two."""
        trial = self.open(FLOAT32, 0)
        times: list[float] = []
        end = time.monotonic() + 1.0
        for number in range(_MOST_TIMED):
            if times and (trial.failure or (number >= 2 and time.monotonic() > end)):
                break
            start = current_time(self.workload.device_type)
            trial.run(0)
            times.append(current_time(self.workload.device_type) - start)
        self.release(trial)
        return min(times)

    def traced(self, setup: Setup) -> list[TreeNode]:
        """Return the modules of a second step or run, with their dtypes, times and casts."""
        with closing(self.traced_trial(setup)) as trial:
            trial.run(0)
            with trace(trial.model) as recorded:
                trial.run(0)
        return tree(data_of(recorded))
