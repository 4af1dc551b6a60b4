"""What a search does with copies of a model: it trains them, or runs them for inference.

Invariant: a search asks a task and nothing else to run a copy, so both kinds are found, proven and written alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch

from precast.diagnostics.report.tree import Node
from precast.policy.policy import Policy
from precast.tuning.costs import Costs, measure
from precast.tuning.inference_errors import InferenceMeter
from precast.tuning.inference_proof import LEAST_BATCHES, prove_runs
from precast.tuning.proof import LOOKS, Figures, Proof, prove
from precast.tuning.ranks import are_several
from precast.tuning.recording import record
from precast.tuning.sensitivity import ErrorMeter, Meter
from precast.tuning.serving import (
    Serving,
    measured_metric,
    needed_bytes,
    shortest_run,
    traced_run,
)
from precast.tuning.sites import Program
from precast.tuning.studies import Study
from precast.tuning.training import (
    FLOAT32,
    Setup,
    Training,
    Workload,
    kept_bytes,
    run_losses,
    shortest_step,
    traced,
)
from precast.tuning.words import INFERENCE, TRAINING, Words

__all__ = ["InferenceTask", "Task", "TrainingTask", "task_of"]

_GRADIENT: Final = 0.3
"""The relative error that the gradient of a parameter may have at first. Gradients of two batches differ by more."""
_OUTPUT: Final = 0.1
"""The relative error that an output may have at first."""

Told = Callable[[str, int], None]


class Task(Protocol):
    """What is done with copies of the model."""

    @property
    def workload(self) -> Workload:
        """What is trained or run."""

    @property
    def words(self) -> Words:
        """What its parts are called."""

    @property
    def changed(self) -> float:
        """The relative error that gradients or outputs may have at first."""

    @property
    def pairs(self) -> int:
        """After so many pairs the intervals are looked at for the first time."""

    @property
    def round_(self) -> str:
        """What is done again until all is told apart."""

    def meter(self) -> ErrorMeter:
        """What compares a setup with float32."""

    def record(self, base: Policy, low: torch.dtype) -> Program:
        """The operations of the first batch."""

    def measure(self, program: Program, *, seed: int, **options: Any) -> Costs:
        """What the operations cost."""

    def seconds(self) -> float:
        """The shortest time of one step in float32."""

    def prove(
        self,
        setups: Sequence[Setup],
        *,
        steps: int,
        tolerance: float,
        deadline: float,
        timed: bool,
        known: dict[str, Figures] | None = None,
        told: Told | None = None,
        begin: Any = None,
    ) -> Proof:
        """Compares setups with float32 and with each other; `begin` makes copies elsewhere than in this process."""

    def needed_bytes(self, setup: Setup) -> int:
        """The memory that is made small."""

    def traced(self, setup: Setup) -> list[Node]:
        """What runs in each module."""


@dataclass
class TrainingTask:
    """Copies are trained."""

    workload: Workload
    words: Words = TRAINING
    changed: float = _GRADIENT
    pairs: int = LOOKS[0]
    round_: str = "seed"
    study: Study | None = None
    """Where seeds are trained on several machines."""

    def meter(self) -> Meter:
        """What compares gradients and losses, of copies that are not wrapped."""
        return Meter(replace(self.workload, prepare=None))

    def record(self, base: Policy, low: torch.dtype) -> Program:
        """The operations of a step."""
        workload, step = self.workload, self.workload.step
        assert step is not None, "training has a step"
        return record(
            workload.model,
            lambda model: step(model, workload.batches[0]),
            base,
            low=low,
            device=workload.device_type,
        )

    def measure(self, program: Program, *, seed: int, **options: Any) -> Costs:
        """What they cost in both passes."""
        return measure(program, seed=seed, **options)

    def seconds(self) -> float:
        """Return the shortest of the steps that a second is enough for, of which there are at least two.

        Processes that train together take four, as each has to take as many as the others.
        """
        if are_several():
            return min(run_losses(self.workload, FLOAT32, 0, 4).seconds)
        return shortest_step(self.workload, FLOAT32)

    def prove(
        self,
        setups: Sequence[Setup],
        *,
        steps: int,
        tolerance: float,
        deadline: float,
        timed: bool,
        known: dict[str, Figures] | None = None,
        told: Told | None = None,
        begin: Any = None,
    ) -> Proof:
        """Trains them from the same seeds on the same batches."""
        return prove(
            self.workload,
            setups,
            steps=steps,
            tolerance=tolerance,
            deadline=deadline,
            timed=timed,
            known=known,
            told=told,
            begin=begin or Training,
            train=None if self.study is None else self.study.train,
        )

    def needed_bytes(self, setup: Setup) -> int:
        """What autograd keeps for backward."""
        return kept_bytes(self.workload, setup)

    def traced(self, setup: Setup) -> list[Node]:
        """The second step of a training."""
        return traced(self.workload, setup)


@dataclass
class InferenceTask:
    """Copies are run without gradients, and compared by a metric."""

    workload: Workload
    words: Words = INFERENCE
    changed: float = _OUTPUT
    pairs: int = LEAST_BATCHES
    round_: str = "pass"

    def meter(self) -> InferenceMeter:
        """What compares metrics and outputs."""
        return InferenceMeter(self.workload)

    def record(self, base: Policy, low: torch.dtype) -> Program:
        """The operations of a run."""
        workload = self.workload
        program = record(
            workload.model,
            lambda model: measured_metric(workload, model, 0),
            base,
            low=low,
            device=workload.device_type,
        )
        return replace(program, is_inference=True)

    def measure(self, program: Program, *, seed: int, **options: Any) -> Costs:
        """What they cost in one pass."""
        return measure(program, seed=seed, **options)

    def seconds(self) -> float:
        """The shortest of three runs of the first batch."""
        return shortest_run(self.workload, FLOAT32)

    def prove(
        self,
        setups: Sequence[Setup],
        *,
        steps: int,  # noqa: ARG002 -- a batch is run once at a time
        tolerance: float,
        deadline: float,
        timed: bool,
        known: dict[str, Figures] | None = None,
        told: Told | None = None,
        begin: Any = None,
    ) -> Proof:
        """Runs them on the same batches."""
        return prove_runs(
            self.workload,
            setups,
            tolerance=tolerance,
            deadline=deadline,
            timed=timed,
            known=known,
            told=told,
            begin=begin or Serving,
        )

    def needed_bytes(self, setup: Setup) -> int:
        """That of the weights and of what operations make of a batch."""
        return needed_bytes(self.workload, setup)

    def traced(self, setup: Setup) -> list[Node]:
        """A run of the first batch."""
        return traced_run(self.workload, setup)


def task_of(workload: Workload) -> Task:
    """What a workload is for: with a step it is trained, and else run."""
    return InferenceTask(workload) if workload.step is None else TrainingTask(workload)
