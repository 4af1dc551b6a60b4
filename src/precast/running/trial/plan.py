"""The plan of a trial and its outcome: the data that the command and the process of a trial exchange as JSON.

Invariant: nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["TrialEnd", "TrialEnding", "TrialOutcome", "TrialPlan"]


class TrialEnd(BaseException):
    """The trial has ended. Not an `Exception`, so that `except Exception` of the program does not catch it."""


@dataclass(frozen=True)
class TrialPlan:
    """The settings of one trial. Those of the command come first, then those of the trial."""

    program: str
    is_module: bool = False
    arguments: list[str] = field(default_factory=list)
    policy: str = "torch"
    steps: int = 30
    """The number of measured steps, which follow those of `warm_up`."""
    warm_up: int = 5
    seconds: float = 180.0
    """The time after the first step at which the trial ends with the current step."""
    step_function: str | None = None
    """`module:name` of a function each of whose calls is a step."""
    allows_writes: bool = False

    name: str = ""
    folder: str = ""
    """An empty folder of this trial: events, the files that the program writes, temporary files."""
    dtype: str | None = None
    """The 16-bit dtype of the regions that are opened around models; None: no region is opened."""
    disables: bool = False
    """Disable the program's own regions and scalers."""
    seed: int = 0
    """The seed; another than 0 is also added to each seed that the program sets."""
    float32_module: str = ""
    variant: Literal["", "attach", "compile"] = ""
    batch_factor: int = 1
    """Multiplies the batch size of the program's data loaders."""
    sources: dict[str, str] = field(default_factory=dict)
    """Maps the path of a file of the program to the text that is run in its place."""
    is_first: bool = False
    """The first trial of the command, which also measures the processor."""
    examines: bool = False
    """Trace operations and compare the outputs of modules, instead of measuring."""

    @property
    def events(self) -> Path:
        """The file to which the process writes a line of JSON for each event."""
        return Path(self.folder, "events.jsonl")


TrialEnding = Literal["steps", "time", "itself", "error", "killed"]
""""steps": after the planned steps; "time": with the step in which the time ran out; "itself": the program ended;
"error": it failed; "killed": it was stopped from outside."""


@dataclass
class TrialOutcome:
    """The outcome of one trial."""

    ended: TrialEnding = "killed"
    error: str | None = None
    seconds: list[float] = field(default_factory=list)
    """The duration of each step, the first ones too."""
    losses: list[float | None] = field(default_factory=list)
    """The loss of each step; None if there was none or it was not finite. For a program that does not train, the root
    mean square of the outputs."""
    nonfinite: list[int] = field(default_factory=list)
    """The steps whose loss was infinite or NaN."""
    trains: bool = False
    input_seconds: list[float] = field(default_factory=list)
    """The time of each step before its first call of a model."""
    peak_memory: int | None = None
    device: str = "cpu"
    skipped: int = 0
    """Steps that a scaler of the program skipped, or that the trial skipped."""
    region_dtypes: list[str] = field(default_factory=list)
    """The dtypes of the regions that the program opened, and "scaler" if it uses one."""
    stored_dtypes: list[str] = field(default_factory=list)
    """The 16-bit dtypes of parameters."""
    has_loader: bool = False
    speeds: dict[str, float] = field(default_factory=dict)
    """How many times as fast as float32 the CPU multiplies matrices, in 16-bit dtypes."""
    withheld: list[str] = field(default_factory=list)
    started_processes: int = 0
    """Processes that the program started by `multiprocessing`, apart from data loaders' workers."""
    lines: dict[str, list[str]] = field(default_factory=dict)
    """Maps "model", "callers" (of it), "backward", "step" and "clip" to lines, as "path:number"."""
    trainer: str | None = None
    shares: dict[str, float] = field(default_factory=dict)
    """Of an examined trial: shares of the time of operations, by dtype and for casts; "operation", the mean time."""
    modules: dict[str, float] = field(default_factory=dict)
    """Of an examined trial: the largest root mean square of the output of each module, in the order of the calls; -1 if
    an output was not finite."""
