"""The plan of a trial and its outcome: the data that the command and the process of a trial exchange as JSON.

Invariant: nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["TrialEnd", "TrialEnding", "TrialOutcome", "TrialPlan"]

TrialEnding = Literal["steps", "time", "itself", "error", "killed"]
""""steps": after the planned steps; "time": with the step in which the time ran out; "itself": the program ended;
"error": it failed; "killed": it was stopped from outside."""


class TrialEnd(BaseException):
    """The trial has ended. Not an `Exception`, so that `except Exception` of the program does not catch it."""


@dataclass(frozen=True)
class TrialPlan:
    """The settings of one trial. Those of the command come first, then those of the trial."""

    program: str
    is_module: bool = False
    arguments: list[str] = field(default_factory=list)
    policy: str = "torch"
    steps: int = 30  # measured, after those of `warm_up`
    warm_up: int = 5
    seconds: float = (
        180.0  # from the first step; the trial ends with the step in which they run out
    )
    step_function: str | None = None  # `module:name` of a function each of whose calls is a step
    allows_writes: bool = False

    name: str = ""
    folder: str = ""
    """An empty folder of this trial: events, the files that the program writes, temporary files."""
    dtype: str | None = None
    """The 16-bit dtype of the regions that are opened around models; None: no region is opened."""
    disables: bool = False  # the program's own regions and scalers
    seed: int = 0  # another than 0 is also added to each seed that the program sets
    float32_module: str = ""
    variant: Literal["", "attach", "compile"] = ""
    batch_factor: int = 1  # multiplies the batch size of the program's data loaders
    sources: dict[str, str] = field(default_factory=dict)
    """Maps the path of a file of the program to the text that is run in its place."""
    is_first: bool = False  # the first trial of the command, which also measures the processor
    examines: bool = (
        False  # traces operations and compares outputs of modules, instead of measuring
    )

    @property
    def events(self) -> Path:
        """The file to which the process writes a line of JSON for each event."""
        return Path(self.folder, "events.jsonl")


@dataclass
class TrialOutcome:
    """The outcome of one trial."""

    ended: TrialEnding = "killed"
    error: str | None = None
    warm_up: int = 5  # as planned
    seconds: list[float] = field(default_factory=list)  # of each step, the first ones too
    losses: list[float | None] = field(default_factory=list)
    """The loss of each step; None if there was none or it was not finite. For a program that does not train, the root
    mean square of the outputs."""
    nonfinite: list[int] = field(default_factory=list)  # the steps whose loss was infinite or NaN
    trains: bool = False
    input_seconds: list[float] = field(
        default_factory=list
    )  # of each step, before it calls a model
    peak_memory: int | None = None
    device: str = "cpu"
    skipped: int = 0  # steps, by a scaler of the program or by the trial
    region_dtypes: dict[str, int] = field(default_factory=Counter)
    """Regions that the program opened, by dtype; "scaler" counts steps of its scalers."""
    stored_dtypes: list[str] = field(default_factory=list)  # the 16-bit dtypes of parameters
    has_loader: bool = False
    speeds: dict[str, float] = field(default_factory=dict)
    """How many times as fast as float32 the CPU multiplies matrices, in 16-bit dtypes."""
    withheld: list[str] = field(default_factory=list)
    starts_processes: bool = False  # by `multiprocessing`, other than by a fork
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Maps "model", "callers" (of it), "backward", "step" and "clip" to files, and these to numbers of lines."""
    trainer: str | None = None
    shares: dict[str, float] = field(default_factory=dict)
    """Of an examined trial: shares of the time of operations, by dtype and for casts; "operation", the mean time."""
    modules: dict[str, float] = field(default_factory=dict)
    """Of an examined trial: the largest root mean square of the output of each module, in the order of the calls; -1 if
    an output was not finite."""

    def unmeasured(self, steps: int) -> int:
        """Return the number of first steps that are not measured: two at most, if `steps` is no more than `warm_up`.

        On a CPU the second step is slow, as memory is counted in it.
        """
        return self.warm_up if steps > self.warm_up else min(2, max(0, steps - 1))

    def last(self, steps: int) -> int:
        """Return the number of steps whose loss counts: the last third of those that are measured."""
        return max(1, (steps - self.unmeasured(steps)) // 3) if steps else 0

    def loss(self, steps: int) -> float | None:
        """Return the mean loss of the last of the first `steps` steps; None if one is not finite."""
        values = self.losses[steps - self.last(steps) : steps]
        finite = [each for each in values if each is not None]
        return statistics.fmean(finite) if len(finite) == len(values) > 0 else None
