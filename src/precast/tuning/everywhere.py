"""Searches with all processes of a distributed program: each trains its copies, and the slowest counts.

The first process searches as one alone would. Whatever needs a copy of the model is asked of all of them.

Invariants:
- times and memory are those of the process with the most, losses and metrics the means of all, errors the worst;
- a setup that fails in one process has failed;
- only the first process decides, so all have the same answer, which it sends to the others.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from precast.diagnostics.report.tree import Node
from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning.costs import Costs
from precast.tuning.proof import Figures, Proof
from precast.tuning.ranks import Ranks
from precast.tuning.result import TuningResult
from precast.tuning.sensitivity import ErrorMeter, Errors
from precast.tuning.serving import Serving
from precast.tuning.sites import Program
from precast.tuning.tasks import Task, Told
from precast.tuning.timing import Figure
from precast.tuning.training import Setup, Training, Workload
from precast.tuning.words import Words

__all__ = ["Everywhere", "Hands", "slowest", "together"]


def together(make: Callable[[], Task], search: Callable[[Task], TuningResult]) -> TuningResult:
    """Searches with all processes, each of which has to call this; all get the same result, which the first one saves.

    Args:
        make: makes the task in each process.
        search: searches, in the first process.

    Raises:
        TuningError: another process has failed; the one that did raises its own error.
    """
    hands = Hands(make)
    ranks = Ranks(hands.do)
    if ranks.rank:
        found: TuningResult = ranks.follow()
        return replace(found, is_saved_here=False)

    def work() -> TuningResult:
        counts = ranks.ask("begin")
        if len(set(counts)) > 1:
            said = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
            raise TuningError(f"all processes need as many batches: {said}")
        return search(Everywhere(ranks, hands.task))

    result: TuningResult = ranks.lead(work)
    return result


class Hands:
    """What one process does when it is asked to."""

    def __init__(self, make: Callable[[], Task]) -> None:
        """Makes the task when the first process asks for it, so that an error is told to the others."""
        self._make = make
        self.task: Task
        self._meter: ErrorMeter
        self._programs: dict[torch.dtype, Program] = {}
        self._copies: dict[int, Training | Serving] = {}

    def do(self, name: str, args: tuple[Any, ...]) -> Any:
        """Does what is asked by a name."""
        return getattr(self, f"_{name}")(*args)

    def _begin(self) -> int:
        self.task = self._make()
        return len(self.task.workload.batches)

    def _begin_meter(self) -> None:
        self._meter = self.task.meter()

    def _errors(self, setup: Setup, scale: float) -> Errors:
        self._meter.scale = scale
        return self._meter.errors(setup)

    def _find_scale(self, setup: Setup) -> float:
        self._meter.find_scale(setup)
        return self._meter.scale

    def _seconds(self) -> float:
        return self.task.seconds()

    def _record(self, base: Policy, low: torch.dtype) -> Program:
        self._programs[low] = self.task.record(base, low)
        return self._programs[low]

    def _measure(self, low: torch.dtype, seed: int, left: float | None) -> Costs:
        options = {} if left is None else {"deadline": time.monotonic() + left}
        return self.task.measure(self._programs[low], seed=seed, **options)

    def _needed_bytes(self, setup: Setup) -> int | str:
        try:
            return self.task.needed_bytes(setup)
        except Exception as error:  # it cannot run, which is no failure of this process
            return f"{type(error).__name__}: {error}"

    def _traced(self, setup: Setup) -> list[Node]:
        return self.task.traced(setup)

    def _copy(self, number: int, setup: Setup, seed: int | None) -> None:
        workload = self.task.workload
        made = Serving(workload, setup) if seed is None else Training(workload, setup, seed)
        self._copies[number] = made

    def _step(self, number: int) -> tuple[float, float, str]:
        training = self._copies[number]
        assert isinstance(training, Training), "this one is trained"
        training.step()
        loss = training.losses[-1] if training.losses else math.nan
        return loss, training.seconds[-1] if training.seconds else 0.0, training.failure

    def _final(self, number: int) -> float:
        training = self._copies[number]
        assert isinstance(training, Training), "this one is trained"
        return training.final()

    def _run(self, number: int, batch: int) -> tuple[float, float, str]:
        serving = self._copies[number]
        assert isinstance(serving, Serving), "this one is run"
        value = serving.run(batch)
        return value, serving.seconds[-1] if serving.seconds else 0.0, serving.failure

    def _close(self, number: int) -> None:
        self._copies.pop(number).close()


@dataclass
class Everywhere:
    """A task that all processes do together; the first one has it."""

    ranks: Ranks
    local: Task
    _copies: int = field(default=0, init=False)

    @property
    def workload(self) -> Workload:
        """That of the first process."""
        return self.local.workload

    @property
    def words(self) -> Words:
        """Those of the task."""
        return self.local.words

    @property
    def changed(self) -> float:
        """As the task."""
        return self.local.changed

    @property
    def pairs(self) -> int:
        """As the task."""
        return self.local.pairs

    @property
    def round_(self) -> str:
        """As the task."""
        return self.local.round_

    def meter(self) -> ErrorMeter:
        """What compares a setup with float32 in all processes."""
        self.ranks.ask("begin_meter")
        return _Meter(self.ranks)

    def record(self, base: Policy, low: torch.dtype) -> Program:
        """What a step runs in the first process; the others run theirs, as it may have collectives."""
        program: Program = self.ranks.ask("record", base, low)[0]
        return program

    def measure(self, program: Program, *, seed: int, **options: Any) -> Costs:
        """The costs of the program; all processes measure at once, as they work at once."""
        deadline = options.get("deadline", math.inf)
        left = None if deadline == math.inf else deadline - time.monotonic()
        return slowest(self.ranks.ask("measure", program.low, seed, left))

    def seconds(self) -> float:
        """The time of a step in the slowest process."""
        slowest: float = max(self.ranks.ask("seconds"))
        return slowest

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
        begin: Any = None,  # noqa: ARG002 -- it is known here
    ) -> Proof:
        """As the task, with copies in all processes."""
        return self.local.prove(
            setups,
            steps=steps,
            tolerance=tolerance,
            deadline=deadline,
            timed=timed,
            known=known,
            told=told,
            begin=self._begin,
        )

    def needed_bytes(self, setup: Setup) -> int:
        """The memory in the process that needs most; 0 where the setup cannot run."""
        found = self.ranks.ask("needed_bytes", setup)
        known = [each for each in found if isinstance(each, int)]
        return max(known) if len(known) == len(found) else 0

    def traced(self, setup: Setup) -> list[Node]:
        """What runs in the first process."""
        nodes: list[Node] = self.ranks.ask("traced", setup)[0]
        return nodes

    def _begin(self, _: Workload, setup: Setup, seed: int | None = None) -> _Copy:
        self._copies += 1
        return _Copy(self.ranks, self._copies, setup, seed)


class _Meter:
    """Compares setups with float32 in all processes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.scale = 1.0

    def errors(self, setup: Setup) -> Errors:
        """The worst of all."""
        found: list[Errors] = self._ranks.ask("errors", setup, self.scale)
        worst = max(found, key=lambda errors: errors.gradient)
        silent = next((errors.silent for errors in found if errors.silent), "")
        return replace(worst, loss=max(errors.loss for errors in found), silent=silent)

    def find_scale(self, setup: Setup) -> None:
        """The smallest of all."""
        self.scale = min(self._ranks.ask("find_scale", setup))


class _Copy:
    """A copy in each process, in the place of one `Training` or `Serving`."""

    def __init__(self, ranks: Ranks, number: int, setup: Setup, seed: int | None) -> None:
        self._ranks = ranks
        self._number = number
        self.setup = setup
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.failure = ""
        ranks.ask("copy", number, setup, seed)

    def step(self) -> None:
        """Trains all of them on their next batches; does nothing after a failure."""
        if not self.failure:
            self.losses.append(self._note(self._ranks.ask("step", self._number)))

    def run(self, batch: int) -> float:
        """Runs all of them; the mean of their metrics."""
        if self.failure:
            return math.nan
        return self._note(self._ranks.ask("run", self._number, batch))

    def final(self) -> float:
        """The mean of what they have reached."""
        if self.failure:
            return math.nan
        return statistics.fmean(self._ranks.ask("final", self._number))

    def close(self) -> None:
        """Ends all of them."""
        self._ranks.ask("close", self._number)

    def _note(self, found: list[tuple[float, float, str]]) -> float:
        values, seconds, failures = zip(*found, strict=True)
        self.seconds.append(max(seconds))
        self.failure = next(
            (f"{why} (rank {rank})" for rank, why in enumerate(failures) if why), ""
        )
        return statistics.fmean(values)


def slowest(found: Sequence[Costs]) -> Costs:
    """The costs of the first process, each as much as in the process where it is most."""
    first = found[0]
    sites = {
        site: {dtype: _most(found, lambda c: c.sites.get(site, {}).get(dtype)) for dtype in known}  # noqa: B023
        for site, known in first.sites.items()
    }
    casts: Mapping[bool, Mapping[int, Figure]] = {
        down: {size: _most(found, lambda c: c.casts.get(down, {}).get(size)) for size in figures}  # noqa: B023
        for down, figures in first.casts.items()
    }
    return replace(first, sites=sites, casts=casts, hook=max(costs.hook for costs in found))


def _most(found: Sequence[Costs], part: Callable[[Costs], Any]) -> Any:
    return max(filter(None, map(part, found)), key=lambda each: each.seconds)
