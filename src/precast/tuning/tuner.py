"""`tune`: measures, chooses and proves, until there is a policy that is proven to be better, or the time ends.

1. The model's operations are recorded, and what each costs in 16 bits is measured: time, memory, and errors.
2. Two policies are made: the base policy with those operations in float32 that lose too much, and the choice that costs
   least within the same error, by an integer program.
3. Copies are trained for real: in float32, under the base policy, under these two, and under each preset that says
   something else of the model's operations. If one of the two trains worse, half the error is allowed, and 2. begins
   again. For inference copies are run instead, and compared by a metric.

Invariants:
- the model is never run or written: copies are;
- what is handed out has trained as well as float32, within the tolerance, and is for certain better at the objective
  than float32 and the base policy. Where nothing is, the answer is the better of these two, and says so;
- a policy under which the gradient of a parameter is zero, and is not in float32, is not handed out either: the other
  parameters may hide it in a short training;
- the time of the budget is kept but for the run that is on its way when it ends, and one step that is traced. Errors
  and costs have a share of it each, and a budget that no proof fits into is refused;
- where 16 bits may be better than an answer of float32, the search is undecided, and says what would decide it;
- Ctrl-C ends the search, and what is proven by then is the answer.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._internal.display import dtype_name
from precast.autocast_mode.arguments import dtype_of
from precast.errors import TuningError
from precast.policy.policy import Policy, as_policy
from precast.tuning import asked, everywhere, studies
from precast.tuning import evidence as files
from precast.tuning.cheapest import cheapest
from precast.tuning.costs import Costs
from precast.tuning.eight_bits import in_8_bits, named, with_products
from precast.tuning.evidence import Evidence
from precast.tuning.held_back import held_back, policy_holding
from precast.tuning.inference_proof import LEAST_BATCHES
from precast.tuning.judging import Judge
from precast.tuning.presets import presets_beside, says_as
from precast.tuning.progress import Progress
from precast.tuning.proof import Figures, Proof
from precast.tuning.ranks import are_several
from precast.tuning.result import TuningResult
from precast.tuning.resuming import begun, checked
from precast.tuning.sensitivity import ErrorMeter, Sensitivity, measure_sensitivity
from precast.tuning.sites import Program
from precast.tuning.tasks import Task, TrainingTask, task_of
from precast.tuning.training import (
    FLOAT32,
    Setup,
    Workload,
    random_states_kept,
    read_batches,
)
from precast.tuning.undecided import (
    OtherPrograms,
    SearchTime,
    budget_text,
    conditions,
    refuse_too_small,
)

__all__ = ["Progress", "tune"]

Objective = Literal["time", "memory"]

_ERRORS: Final = 0.3  # of the budget: until then groups are halved
_COSTS: Final = 0.15  # of the budget, after that: until then calls are measured
_PRODUCTS: Final = 0.1  # of the budget, for each float8 rule
_CHOICE: Final = 0.05  # of the budget, for each choice
_PROVEN: Final = 0.8  # of what is left: for three seeds
_STEPS: Final = (8, 50)
"""The least and the most steps of a training."""
_ONCE: Final = (1, 1)
_ROUNDS: Final = 3
_FEWEST_SETUPS: Final = 3
"""Float32, the base policy, and one that is found."""


def tune(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    batches: Any = None,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    objective: Objective = "time",
    tolerance: float = 0.01,
    budget: float = 300.0,
    candidates: Sequence[torch.dtype | str] = (torch.bfloat16,),
    base: Policy | str | os.PathLike[str] = "default",
    device_type: str | None = None,
    seed: int = 0,
    metric: Callable[[nn.Module, Any], Tensor | float] | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    study: str | os.PathLike[str] | None = None,
    worker: bool = False,
) -> TuningResult:
    """Finds the best policy for a model on this machine, and proves it by training or running copies of the model.

    Without a step it is the best policy for inference: copies are run without gradients, and compared by their metrics.
    Under a policy a copy is converted, as by `precast.convert`; where it cannot be, it is attached.

    Args:
        model: The model, on its device. It is copied, and stays as it is; so do random states.
        step: ``step(model, batch)`` runs the model that it is given on a batch and returns the loss. It opens no region
            and does not call backward. None searches for inference, and needs a metric.
        batches: A list of batches or a data loader, or a function that returns an iterator. The first 32 are used, and
            used again where a training needs more.
        optimizer: Makes an optimizer of parameters, as ``functools.partial(torch.optim.SGD, lr=0.1)``; AdamW by
            default.
        objective: What is made small: "time" of a training step, or "memory" that autograd keeps for backward. For
            inference: "time" of the model's calls, or "memory" of its weights with the results of its operations.
        tolerance: The relative difference of the loss, after training, or of the metric, that does not count.
        budget: How many seconds the search may take. One in which nothing can be compared is refused at once.
        candidates: The 16-bit dtypes that are tried: torch.bfloat16, torch.float16; and float8 rules, as
            "float8_rowwise": products of a policy in the first of these dtypes are tried under them.
        base: The policy that is changed: a `Policy`, a preset's name or a file's path.
        device_type: That of the model's parameters, if None.
        seed: Of everything that is random.
        metric: ``metric(model, batch)`` is compared at the end of a training instead of the loss; smaller is better.
            For inference it is a number that the model's results for a batch are worth.
        resume: The evidence of an earlier search for the same model, a JSON file, to go on with.
        progress: Called with a `Progress` before each part of the search.
        prepare: ``prepare(model)`` wraps or shards each copy that is trained and returns what step is given, as
            `DistributedDataParallel` and `fully_shard` do. In a distributed program every process calls `tune`, with a
            model that is neither wrapped nor sharded.
        study: A journal file of Optuna on a disk that other machines of the same kind share. They train some of the
            seeds of a proof, if they call `tune` with the same arguments and ``worker=True``.
        worker: Whether this process only trains seeds for the search in `study`, as long as that lasts. It waits for
            `budget` seconds for something to do, and returns what the search has found.

    Returns:
        The policy with its evidence. It is the one of float32 or `base` where no better one is proven; where the
        measurements leave open whether another is better than float32, `is_decided` is False. In a distributed program
        all processes get the same one, and the first one saves it.

    Raises:
        TuningError: The model cannot be copied, the step returns no scalar loss, there are no batches, the loss reaches
            no parameter, the training or the metric in float32 is not finite, the budget is too small, or a setting is
            impossible.
        PolicyError: `base` cannot be read.

    Examples:
        >>> import precast
        >>> model = nn.Linear(8, 1)
        >>> batches = [torch.randn(4, 8) for _ in range(4)]
        >>> result = precast.tune(model, lambda model, x: model(x).square().mean(), batches, budget=60.0)
        >>> result.name in ("float32", "default", "tuned")
        True
    """
    if not isinstance(candidates, str):  # which is refused
        candidates = [dtype_of(candidate) for candidate in candidates]

    def make() -> Task:
        """What is trained or run; in each process of a distributed program."""
        asked.check(model, step, objective, tolerance, budget, candidates, metric)
        asked.check_task(step, optimizer, prepare)
        workload = Workload(
            model,
            step,
            read_batches(batches),
            optimizer or torch.optim.AdamW,
            asked.device_type_of(model, device_type),
            metric,
            seed,
            prepare,
        )
        if step is None and len(workload.batches) < LEAST_BATCHES:
            raise TuningError(
                f"batches has {len(workload.batches)}: without training, metrics of at least {LEAST_BATCHES} batches "
                "are compared. Divide them into more"
            )
        return task_of(workload)

    def search(task: Task) -> TuningResult:
        search = _Search(task, as_policy(base), objective, tolerance, budget, progress)
        names = [*map(dtype_name, candidates)]
        search.evidence = begun(
            task.workload, objective, tolerance, budget, names, search.base.name
        )
        if resume is not None:
            search.earlier = checked(files.read(resume), search.evidence, resume)
        if study is None:
            return search.run(candidates)
        journal = studies.Journal(os.fspath(study))
        if worker:
            return studies.work_for(journal, task.workload, search)
        return _studied(journal, task, search, candidates)

    asked.check_study(study, step, worker=worker)
    with random_states_kept():
        return everywhere.together(make, search) if are_several() else search(make())


def _studied(
    journal: studies.Journal, task: Task, search: _Search, candidates: Sequence[torch.dtype | str]
) -> TuningResult:
    """Searches, while other machines train some of the seeds."""
    assert isinstance(task, TrainingTask), "only trainings are spread"
    task.study = studies.Study(journal, search.evidence, task.workload)
    task.study.begin()
    try:
        return search.run(candidates)
    finally:
        task.study.end()


@dataclass
class _Search:
    """One search, while it runs."""

    task: Task
    base: Policy
    objective: Objective
    tolerance: float
    budget: float
    told: Callable[[Progress], None] | None
    begun: float = field(default_factory=time.monotonic)
    earlier: Evidence | None = None
    setups: dict[str, Setup] = field(default_factory=dict)
    """All that were tried, by their names."""
    kept: dict[str, int] = field(default_factory=dict)
    """The memory that each needs, in bytes."""
    rules: dict[str, float] = field(default_factory=dict)
    """The float8 rules that are tried, and which share of the allowed error each has."""
    declined: dict[str, str] = field(default_factory=dict)
    """Why a float8 rule is not tried in a training."""
    silent: dict[str, str] = field(default_factory=dict)
    """Under each, a parameter whose gradient is zero, or nothing."""
    best: Setup = FLOAT32
    because: str = ""
    steps: int = _STEPS[0]
    evidence: Evidence = field(init=False)

    @property
    def deadline(self) -> float:
        """When the budget ends, on `time.monotonic`'s clock."""
        return self.begun + self.budget

    def run(self, candidates: Sequence[torch.dtype | str]) -> TuningResult:
        """The whole search."""
        try:
            dtypes = [each for each in candidates if isinstance(each, torch.dtype)]
            self.rules = {str(rule): 1.0 for rule in candidates if isinstance(rule, str)}
            self._run(dtypes or [torch.bfloat16])
        except KeyboardInterrupt:
            self.because = self.because or "the search was interrupted before anything was proven"
            self.evidence.interrupted = True
        self.evidence.answer = self.best.name
        self.evidence.dtype = dtype_name(self.best.dtype)
        self.evidence.because = self.because
        self.evidence.seconds = time.monotonic() - self.begun
        if not self.evidence.interrupted:
            self.evidence.traced = self.task.traced(self.best)
        self.tell("done", self.because)
        policy = self.best.policy
        if policy is None:
            policy = Policy("float32", {}, "promote")
        policy = policy.replace(measured=files.where_measured(self.evidence))
        return TuningResult(policy, self.best.dtype, self.because, self.evidence)

    def _run(self, candidates: Sequence[torch.dtype]) -> None:
        self.tell("record", f"a {self.task.words.run} in float32")
        seconds = self.task.seconds()
        refuse_too_small(self.budget, self._least(seconds), seconds, self.task.words)
        meter = self.task.meter()
        count = len(candidates)
        found = [
            self._measured(meter, dtype, _ERRORS * place / count)
            for place, dtype in enumerate(candidates, 1)
        ]
        costs = [
            self._costs(program, _ERRORS + _COSTS * place / count)
            for place, (program, _) in enumerate(found, 1)
        ]
        allowed = [1.0] * len(found)
        for _ in range(_ROUNDS):
            setups = self._chosen(meter, found, costs, allowed, several=len(candidates) > 1)
            setups = self._affordable(seconds, setups)
            if not setups:
                break
            began, others = time.monotonic(), OtherPrograms()
            proof = self._proven(setups)
            self._judge(proof, setups)
            self._note_undecided(proof, setups, seconds, began, others.share())
            by_name = {named(rule): rule for rule in self.rules}
            too_much = {
                by_name[c.name]
                for c in proof.comparisons
                if c.loss == "worse" and c.name in by_name
            }
            worse = [
                place
                for place, (program, _) in enumerate(found)
                if any(
                    c.loss == "worse"
                    and c.name.startswith("tuned")
                    and c.name not in by_name
                    and self.setups[c.name].dtype is program.low
                    for c in proof.comparisons
                )
            ]
            if not (worse or too_much) or proof.ended != "proven":
                break
            self.rules |= {rule: self.rules[rule] / 2 for rule in too_much}
            for place in worse:
                allowed[place] /= 2

    def _measured(
        self, meter: ErrorMeter, dtype: torch.dtype, until: float
    ) -> tuple[Program, Sensitivity]:
        """The program in one dtype, and the errors of its sites; by when, as a share of the budget."""
        self.tell("record", f"the operations of a {self.task.words.run}, in {dtype_name(dtype)}")
        program = self.task.record(self.base, dtype)
        earlier = self.earlier.searches if self.earlier else []
        saved = next((search for search in earlier if search.dtype == dtype_name(dtype)), None)
        found = files.sensitivity_of(saved, program) if saved is not None else None
        if found is None:
            found = measure_sensitivity(
                meter,
                program,
                self.base,
                loss=self.tolerance,
                gradient=self.task.changed,
                deadline=self.begun + until * self.budget,
                told=lambda left, runs: self.tell(
                    "errors",
                    f"{dtype_name(dtype)}: {left} of {len(program.sites)} operations left, {runs} runs",
                ),
            )
        if program.is_inference:
            found.sites = {s: replace(e, is_inference=True) for s, e in found.sites.items()}
        self.evidence.searches.append(files.search_of(program, found))
        return program, found

    def _costs(self, program: Program, until: float) -> Costs:
        """The time and memory that each site takes; by when, as a share of the budget."""
        name = dtype_name(program.low)
        costs = self.task.measure(
            program,
            seed=self.task.workload.seed,
            deadline=self.begun + until * self.budget,
            progress=lambda done, all_, what: self.tell(
                "costs", f"{name}: {done} of {all_}, {what}"
            ),
        )
        for search in self.evidence.searches:
            if search.dtype == name:
                files.add_costs(search, costs)
        return costs

    def _chosen(
        self,
        meter: ErrorMeter,
        found: Sequence[tuple[Program, Sensitivity]],
        costs: Sequence[Costs],
        allowed: list[float],
        *,
        several: bool,
    ) -> list[Setup]:
        """The base policy, the one that holds operations back, and the one that costs least; and at the end presets."""
        setups: list[Setup] = []
        presets: list[Setup] = []
        for place, (program, errors) in enumerate(found):
            meter.scale = errors.scale
            ending = f" in {dtype_name(program.low)}" if several else ""
            bare = Setup(f"{self.base.name}{ending}", self.base, program.low)
            self.silent[bare.name] = meter.errors(bare).silent
            setups.append(bare)
            makers: list[tuple[str, Callable[[float], Policy]]] = [
                ("tuned", functools.partial(self._holding, program, errors)),
                (
                    f"tuned for {self.objective}",
                    functools.partial(self._cheapest, program, errors, costs[place]),
                ),
            ]
            policies = [self.base]
            for name, make in makers:
                setup = self._within(meter, f"{name}{ending}", make, program.low, allowed[place])
                if setup.policy is not None and not any(says_as(setup.policy, p) for p in policies):
                    policies.append(setup.policy)
                    setups.append(setup)
            if place == 0 and self.rules:
                setups += self._in_8_bits(meter, program, with_products(program, setups))
            for preset in presets_beside(self.base, program):
                setup = Setup(f"{preset.name}{ending}", preset, program.low)
                self.silent[setup.name] = meter.errors(setup).silent
                presets.append(setup)
        setups += presets
        self.setups |= {setup.name: setup for setup in (FLOAT32, *setups)}
        return setups

    def _in_8_bits(self, meter: ErrorMeter, program: Program, around: Setup) -> list[Setup]:
        """The policy that was found in 16 bits with some of its products under each float8 rule."""
        setups = []
        self.evidence.eight_bits = []
        for rule, share in self.rules.items():
            self.tell("costs", f"products in {rule}")
            found = in_8_bits(
                meter,
                program,
                around,
                rule,
                objective=self.objective,
                loss=self.tolerance * share,
                gradient=self.task.changed * share,
                seed=self.task.workload.seed,
                deadline=time.monotonic() + _PRODUCTS * self.budget,
            )
            self.evidence.eight_bits.append(files.eight_bits_of(found))
            if found.policy is None:
                self.declined[rule] = found.because
                continue
            self.declined.pop(rule, None)
            setup = Setup(named(rule), found.policy, program.low)
            self.silent[setup.name] = found.silent
            setups.append(setup)
        return setups

    def _within(
        self,
        meter: ErrorMeter,
        name: str,
        make: Callable[[float], Policy],
        low: torch.dtype,
        share: float,
    ) -> Setup:
        """A setup whose error is what is allowed; what was measured in groups may be more where all run together."""
        for _ in range(_ROUNDS):
            setup = Setup(name, make(share), low)
            joint = meter.errors(setup)
            if joint.fits(self.tolerance**2, self.task.changed**2):
                break
            share /= 2
        self.silent[name] = joint.silent
        return setup

    def _holding(self, program: Program, errors: Sensitivity, share: float) -> Policy:
        """The base policy with what has to be held back for a share of the allowed error."""
        held = held_back(errors, loss=self.tolerance * share, gradient=self.task.changed * share)
        return policy_holding(held, errors, program, self.base, "tuned")

    def _cheapest(
        self, program: Program, errors: Sensitivity, costs: Costs, share: float
    ) -> Policy:
        """The policy that costs least within a share of the allowed error."""
        return cheapest(
            program,
            errors,
            costs,
            self.base,
            objective=self.objective,
            loss=self.tolerance * share,
            gradient=self.task.changed * share,
            seconds=max(1.0, _CHOICE * self.budget),
        )

    def _has_time(self, seconds: float, setups: int) -> bool:
        """Chooses how many steps a training takes; returns whether there is time for the least number of seeds."""
        left, (least, most) = self.deadline - time.monotonic(), self._limits
        steps = int(_PROVEN * left / self._seconds(seconds, setups))
        self.steps = max(least, min(steps, most))
        return steps >= least

    @property
    def _limits(self) -> tuple[int, int]:
        """The least and the most steps of a training; a batch is run once."""
        return _ONCE if self.task.workload.step is None else _STEPS

    def _seconds(self, step: float, setups: int) -> float:
        """What one step of the fewest pairs takes; twice, as rules for modules and 16 bits may take longer."""
        return 2 * step * setups * self.task.pairs

    def _least(self, seconds: float) -> float:
        """Return the least budget in which float32, the base policy and one that is found can be compared."""
        proof = self._limits[0] * self._seconds(seconds, _FEWEST_SETUPS) / _PROVEN
        elapsed = time.monotonic() - self.begun
        measured = self.earlier is not None and bool(self.earlier.searches)
        return proof + elapsed if measured else max(proof / (1 - _ERRORS - _COSTS), proof + elapsed)

    def _affordable(self, seconds: float, setups: list[Setup]) -> list[Setup]:
        """The setups that there is time for: presets are left out first, then policies that were found; maybe none."""
        for count in range(len(setups), 0, -1):
            if self._has_time(seconds, count + 1):
                self.evidence.untried = [setup.name for setup in setups[count:]]
                return setups[:count]
        if not self.evidence.proofs:
            self.because = "measuring errors and costs left no time to compare anything"
            self.evidence.undecided = [setup.name for setup in setups]
            least = time.monotonic() - self.begun + self._least(seconds)
            self.evidence.would_decide = [f"a budget of {budget_text(least)} or more"]
        return []

    def _note_undecided(
        self,
        proof: Proof,
        setups: Sequence[Setup],
        seconds: float,
        began: float,
        other_programs: float | None,
    ) -> None:
        """Record which setups may be better than an answer of float32, and what would decide it."""
        self.evidence.undecided, self.evidence.would_decide = [], []
        if self.best is not FLOAT32 or proof.ended == "interrupted":
            return
        names = self._judge_of(setups).undecided(proof, setups)
        untried = self.evidence.untried
        if not names and not untried:
            return
        self.evidence.undecided = [*names, *untried]

        def steps_for(remaining: float) -> int:
            steps = int(
                _PROVEN * remaining / self._seconds(seconds, len(setups) + len(untried) + 1)
            )
            return min(steps, self._limits[1]) if steps >= self._limits[0] else 0

        before, spent = began - self.begun, time.monotonic() - began
        search = SearchTime(self.budget, before, spent, steps_for, len(untried), other_programs)
        is_timed = self.objective == "time"
        self.evidence.would_decide = conditions(
            proof, names, search, self.task.words, is_timed=is_timed
        )

    def _proven(self, setups: Sequence[Setup]) -> Proof:
        for setup in (FLOAT32, *setups):
            self.kept[setup.name] = self._kept(setup)
        known = self._known(setups)
        proof = self.task.prove(
            setups,
            steps=self.steps,
            tolerance=self.tolerance,
            deadline=self.deadline,
            timed=self.objective == "time",
            known=known,
            told=lambda names, number: self.tell(
                "prove", f"{self.task.round_} {number + 1}: {names}"
            ),
        )
        everything = (FLOAT32, *setups)
        self.evidence.proofs.append(files.proof_of(proof, everything, self.kept))
        return proof

    def _kept(self, setup: Setup) -> int:
        try:
            return self.task.needed_bytes(setup)
        except TuningError:
            raise
        except Exception:  # it cannot run, which its training will say
            return 0

    def _known(self, setups: Sequence[Setup]) -> dict[str, Figures] | None:
        """The trainings of an earlier search, if they were of the same setups."""
        if self.earlier is None or not self.earlier.proofs:
            return None
        saved = self.earlier.proofs[-1]
        found = files.figures_of(saved, (FLOAT32, *setups))
        if found is None or saved.ended == "proven":
            return None
        self.steps = saved.steps
        return found

    def _judge(self, proof: Proof, setups: Sequence[Setup]) -> None:
        """Sets the best setup, and why it is."""
        before = self.best, self.because
        self.best, said = self._judge_of(setups).best(proof, setups)
        reasons = [*[said] * bool(said), *self.declined.values()]
        if self.evidence.untried:
            reasons.append(f"there was no time to try {', '.join(self.evidence.untried)}")
        if proof.ended == "interrupted":
            self.evidence.interrupted = True
            reasons.append("the search was interrupted")
        if proof.ended == "time":
            reasons.append("the budget ended")
        self.because = "; ".join(reasons)
        interrupted = proof.ended in ("time", "interrupted")
        if interrupted and self.best is FLOAT32 and before[0] is not FLOAT32:
            self.best, self.because = before

    def _judge_of(self, setups: Sequence[Setup]) -> Judge:
        bases = {setup.name for setup in setups if setup.policy is self.base}
        return Judge(self.objective, self.kept, self.silent, bases, self.task.words)

    def tell(self, stage: Literal["record", "errors", "costs", "prove", "done"], said: str) -> None:
        """Report the progress of the search, if somebody listens."""
        if self.told is not None:
            elapsed = time.monotonic() - self.begun
            self.told(Progress(stage, said, elapsed, self.budget, self.best.name))
