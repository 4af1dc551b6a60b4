"""`tune`: measures, chooses and proves, until there is a policy that is proven to be better, or the time ends.

1. The model's operations are recorded, and what each costs in 16 bits is measured: time, memory, and errors.
2. Two policies are made: the base policy with those operations in float32 that lose too much, and the choice that costs
   least within the same error, by an integer program.
3. Copies are trained for real: in float32, under the base policy, and under these two. If one trains worse, half the
   error is allowed, and 2. begins again.

Invariants:
- the model is never run or written: copies are;
- what is handed out has trained as well as float32, within the tolerance, and is for certain better at the objective
  than float32 and the base policy. Where nothing is, the answer is the better of these two, and says so;
- a policy under which the gradient of a parameter is zero, and is not in float32, is not handed out either: the other
  parameters may hide it in a short training;
- the time of the budget is kept but for the run that is on its way when it ends, and one step that is traced;
- Ctrl-C ends the search, and what is proven by then is the answer.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._internal.version import __version__
from precast.errors import TuningError
from precast.policy.policy import Policy, as_policy
from precast.tuning import evidence as files
from precast.tuning.cheapest import cheapest
from precast.tuning.costs import Costs, measure
from precast.tuning.evidence import Evidence, Settings
from precast.tuning.held_back import held_back, policy_holding
from precast.tuning.proof import LOOKS, Comparison, Figures, Proof, prove
from precast.tuning.recording import record
from precast.tuning.result import TuningResult
from precast.tuning.sensitivity import Meter, Sensitivity, measure_sensitivity
from precast.tuning.sites import Program
from precast.tuning.training import (
    FLOAT32,
    Setup,
    Workload,
    kept_bytes,
    random_states_kept,
    read_batches,
    run_losses,
    traced,
)

__all__ = ["Progress", "tune"]

Objective = Literal["time", "memory"]

_GRADIENT: Final = 0.3
"""The relative error that the gradient of a parameter may have at first. Gradients of two batches differ by more."""
_MEASURED: Final = 0.4  # of the budget: until then groups are halved
_PROVEN: Final = 0.8  # of what is left: for three seeds
_STEPS: Final = (8, 50)
"""The least and the most steps of a training."""
_ROUNDS: Final = 3


@dataclass(frozen=True)
class Progress:
    """What a search is doing, as plain data.

    Attributes:
        stage: "record", "errors", "costs", "prove" or "done".
        said: what it does now, in a few words.
        seconds: since the search began.
        budget: in seconds.
        best: the name of the best setup that is proven so far.
    """

    stage: Literal["record", "errors", "costs", "prove", "done"]
    said: str
    seconds: float
    budget: float
    best: str


def tune(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor],
    batches: Any,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    objective: Objective = "time",
    tolerance: float = 0.01,
    budget: float = 300.0,
    candidates: Sequence[torch.dtype] = (torch.bfloat16,),
    base: Policy | str | os.PathLike[str] = "default",
    device_type: str | None = None,
    seed: int = 0,
    metric: Callable[[nn.Module, Any], Tensor | float] | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TuningResult:
    """Finds the best policy for training a model on this machine, and proves it by training copies of the model.

    Args:
        model: The model, on its device. It is copied, and stays as it is; so do random states.
        step: ``step(model, batch)`` runs the model that it is given on a batch and returns the loss. It opens no region
            and does not call backward.
        batches: A list of batches or a data loader, or a function that returns an iterator. The first 32 are used, and
            used again where a training needs more.
        optimizer: Makes an optimizer of parameters, as ``functools.partial(torch.optim.SGD, lr=0.1)``; AdamW by
            default.
        objective: What is made small: "time" of a training step, or "memory" that autograd keeps for backward.
        tolerance: The relative difference of the loss, after training, that does not count.
        budget: How many seconds the search may take.
        candidates: The 16-bit dtypes that are tried: torch.bfloat16, torch.float16.
        base: The policy that is changed: a `Policy`, a preset's name or a file's path.
        device_type: That of the model's parameters, if None.
        seed: Of everything that is random.
        metric: ``metric(model, batch)`` is compared at the end of a training instead of the loss; smaller is better.
        resume: The evidence of an earlier search for the same model, a JSON file, to go on with.
        progress: Called with a `Progress` before each part of the search.

    Returns:
        The policy with its evidence. It is the one of float32 or `base` where no better one is proven.

    Raises:
        TuningError: The model cannot be copied, the step returns no scalar loss, there are no batches, the loss reaches
            no parameter, the training in float32 is not finite, or a setting is impossible.
        PolicyError: `base` cannot be read.

    Examples:
        >>> import precast
        >>> model = nn.Linear(8, 1)
        >>> batches = [torch.randn(4, 8) for _ in range(4)]
        >>> result = precast.tune(model, lambda model, x: model(x).square().mean(), batches, budget=2.0)
        >>> result.name in ("float32", "default", "tuned")
        True
    """
    policy = as_policy(base)
    _check(model, step, objective, tolerance, budget, candidates)
    with random_states_kept():
        search = _Search(
            Workload(
                model,
                step,
                read_batches(batches),
                optimizer or torch.optim.AdamW,
                _device_type(model, device_type),
                metric,
                seed,
            ),
            policy,
            objective,
            tolerance,
            budget,
            progress,
        )
        search.evidence = _evidence(search, list(candidates))
        if resume is not None:
            search.earlier = _checked(files.read(resume), search.evidence, resume)
        return search.run(candidates)


def _check(  # noqa: PLR0917 -- in the order of `tune`
    model: object,
    step: object,
    objective: object,
    tolerance: object,
    budget: object,
    candidates: Sequence[torch.dtype],
) -> None:
    """Checks what can be checked before anything runs."""
    if not isinstance(model, nn.Module):
        raise TuningError(f"model is {type(model).__name__}; it has to be a torch.nn.Module")
    if not callable(step):
        raise TuningError(
            f"step is {type(step).__name__}; it has to be a function of a model and a batch"
        )
    if objective not in ("time", "memory"):
        raise TuningError(f'objective is {objective!r}. Allowed: "time", "memory"')
    if not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise TuningError(
            f"tolerance is {tolerance!r}; it has to be a number between 0 and 1, such as 0.01"
        )
    if not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise TuningError(f"budget is {budget!r}; it has to be a number of seconds above 0")
    known = torch.bfloat16, torch.float16
    if not candidates or any(dtype not in known for dtype in candidates):
        raise TuningError(
            f"candidates is {candidates!r}; it has to be a sequence of torch.bfloat16 and torch.float16"
        )


def _device_type(model: nn.Module, given: str | None) -> str:
    if given is not None:
        return given
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def _evidence(search: _Search, candidates: list[torch.dtype]) -> Evidence:
    model, workload = search.workload.model, search.workload
    settings = Settings(
        search.objective,
        search.tolerance,
        search.budget,
        [_name(dtype) for dtype in candidates],
        search.base.name,
        workload.device_type,
        workload.seed,
    )
    return Evidence(
        files.SCHEMA,
        __version__,
        torch.__version__,
        f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        settings,
    )


def _checked(earlier: Evidence, now: Evidence, path: str | os.PathLike[str]) -> Evidence:
    """The evidence of an earlier search, if it is of this model, machine and question."""
    for what in ("model", "parameters", "torch", "machine"):
        was, is_now = getattr(earlier, what), getattr(now, what)
        if was != is_now:
            raise TuningError(
                f"{os.fspath(path)} cannot be gone on with: its {what} is {was!r}, and here it is {is_now!r}"
            )
    for what in ("objective", "tolerance", "base", "device_type", "seed"):
        was, is_now = getattr(earlier.settings, what), getattr(now.settings, what)
        if was != is_now:
            raise TuningError(
                f"{os.fspath(path)} cannot be gone on with: it was made with {what}={was!r}, and here it is {is_now!r}"
            )
    return earlier


@dataclass
class _Search:
    """One search, while it runs."""

    workload: Workload
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
    """The bytes that autograd keeps under each."""
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

    def run(self, candidates: Sequence[torch.dtype]) -> TuningResult:
        """The whole search."""
        try:
            self._run(candidates)
        except KeyboardInterrupt:
            self.because = self.because or "the search was interrupted before anything was proven"
            self.evidence.interrupted = True
        self.evidence.answer = self.best.name
        self.evidence.dtype = _name(self.best.dtype)
        self.evidence.because = self.because
        self.evidence.seconds = time.monotonic() - self.begun
        if not self.evidence.interrupted:
            self.evidence.traced = traced(self.workload, self.best)
        self._tell("done", self.because)
        policy = self.best.policy
        if policy is None:
            policy = Policy("float32", {}, "promote")
        policy = policy.replace(measured=files.where_measured(self.evidence))
        return TuningResult(policy, self.best.dtype, self.because, self.evidence)

    def _run(self, candidates: Sequence[torch.dtype]) -> None:
        self._tell("record", "a step in float32")
        meter = Meter(self.workload)
        seconds = self._seconds_of_a_step()
        found = [self._measured(meter, dtype) for dtype in candidates]
        costs = [self._costs(program) for program, _ in found]
        allowed = [1.0] * len(found)
        for _ in range(_ROUNDS):
            setups = self._chosen(meter, found, costs, allowed, several=len(candidates) > 1)
            if not self._has_time(seconds, len(setups) + 1):
                break
            proof = self._proven(setups)
            self._judge(proof, setups)
            worse = [
                place
                for place, (program, _) in enumerate(found)
                if any(
                    c.loss == "worse"
                    and c.name.startswith("tuned")
                    and self.setups[c.name].dtype is program.low
                    for c in proof.comparisons
                )
            ]
            if not worse or proof.ended != "proven":
                break
            for place in worse:
                allowed[place] /= 2

    def _seconds_of_a_step(self) -> float:
        training = run_losses(self.workload, FLOAT32, 0, 4)
        return min(training.seconds)

    def _measured(self, meter: Meter, dtype: torch.dtype) -> tuple[Program, Sensitivity]:
        """The program in one dtype, and the errors of its sites."""
        self._tell("record", f"the operations of a step, in {_name(dtype)}")
        workload = self.workload

        def step(model: nn.Module) -> Tensor:
            return workload.step(model, workload.batches[0])

        program = record(workload.model, step, self.base, low=dtype, device=workload.device_type)
        earlier = self.earlier.searches if self.earlier else []
        saved = next((search for search in earlier if search.dtype == _name(dtype)), None)
        found = files.sensitivity_of(saved, program) if saved is not None else None
        if found is None:
            found = measure_sensitivity(
                meter,
                program,
                self.base,
                loss=self.tolerance,
                gradient=_GRADIENT,
                deadline=self.begun + _MEASURED * self.budget,
                told=lambda left, runs: self._tell(
                    "errors",
                    f"{_name(dtype)}: {left} of {len(program.sites)} operations left, {runs} runs",
                ),
            )
        self.evidence.searches.append(files.search_of(program, found))
        return program, found

    def _costs(self, program: Program) -> Costs:
        """The time and memory that each site takes."""
        name = _name(program.low)
        return measure(
            program,
            seed=self.workload.seed,
            progress=lambda done, all_, what: self._tell(
                "costs", f"{name}: {done} of {all_}, {what}"
            ),
        )

    def _chosen(
        self,
        meter: Meter,
        found: Sequence[tuple[Program, Sensitivity]],
        costs: Sequence[Costs],
        allowed: list[float],
        *,
        several: bool,
    ) -> list[Setup]:
        """The base policy, the one that holds operations back, and the one that costs least, for each dtype."""
        setups = []
        for place, (program, errors) in enumerate(found):
            meter.scale = errors.scale
            ending = f" in {_name(program.low)}" if several else ""
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
                if setup.policy is not None and not any(
                    _says_as(setup.policy, p) for p in policies
                ):
                    policies.append(setup.policy)
                    setups.append(setup)
        self.setups |= {setup.name: setup for setup in (FLOAT32, *setups)}
        return setups

    def _within(
        self,
        meter: Meter,
        name: str,
        make: Callable[[float], Policy],
        low: torch.dtype,
        share: float,
    ) -> Setup:
        """A setup whose error is what is allowed; what was measured in groups may be more where all run together."""
        for _ in range(_ROUNDS):
            setup = Setup(name, make(share), low)
            joint = meter.errors(setup)
            if joint.fits(self.tolerance**2, _GRADIENT**2):
                break
            share /= 2
        self.silent[name] = joint.silent
        return setup

    def _holding(self, program: Program, errors: Sensitivity, share: float) -> Policy:
        """The base policy with what has to be held back for a share of the allowed error."""
        held = held_back(errors, loss=self.tolerance * share, gradient=_GRADIENT * share)
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
            gradient=_GRADIENT * share,
            seconds=max(1.0, 0.1 * self.budget),
        )

    def _has_time(self, seconds: float, setups: int) -> bool:
        """Chooses how many steps a training takes; returns whether there is time for the least number of seeds."""
        left = self.deadline - time.monotonic()
        step = (
            2 * seconds * setups * LOOKS[0]
        )  # twice, as rules for modules and 16 bits may take longer
        steps = int(_PROVEN * left / step)
        self.steps = max(_STEPS[0], min(steps, _STEPS[1]))
        if steps >= _STEPS[0]:
            return True
        if not self.because:
            self.because = (
                f"the budget of {self.budget:g} s is too small to prove anything: the shortest proof takes about "
                f"{_STEPS[0] * step / _PROVEN + self.budget - left:.0f} s. So it stays float32"
            )
        return False

    def _proven(self, setups: Sequence[Setup]) -> Proof:
        for setup in (FLOAT32, *setups):
            self.kept[setup.name] = self._kept(setup)
        known = self._known(setups)
        proof = prove(
            self.workload,
            setups,
            steps=self.steps,
            tolerance=self.tolerance,
            deadline=self.deadline,
            timed=self.objective == "time",
            known=known,
            told=lambda names, seed: self._tell("prove", f"seed {seed + 1}: {names}"),
        )
        everything = (FLOAT32, *setups)
        self.evidence.proofs.append(files.proof_of(proof, everything, self.kept))
        return proof

    def _kept(self, setup: Setup) -> int:
        try:
            return kept_bytes(self.workload, setup)
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
        before, self.best = (self.best, self.because), FLOAT32
        reasons = []
        for setup in setups:
            against = proof.comparison(setup.name, self.best.name)
            quality = proof.comparison(setup.name, FLOAT32.name)
            if not quality.is_as_good:
                reasons.append(_not_as_good(quality, proof))
                continue
            if silent := self.silent.get(setup.name):
                reasons.append(
                    f"under {setup.name} the gradient of {silent} is zero, so it is not trained"
                )
                continue
            if self.best is not FLOAT32 and not against.is_as_good:
                reasons.append(_not_as_good(against, proof))
                continue
            gain, is_better = self._gain(against, setup)
            if is_better:
                self.best = setup
            reasons.append(f"{setup.name} {gain} {against.against}")
        if proof.ended == "interrupted":
            self.evidence.interrupted = True
            reasons.append("the search was interrupted")
        if proof.ended == "time":
            reasons.append("the budget ended")
        self.because = "; ".join(reasons)
        if self.best is FLOAT32 and proof.ended in ("time", "interrupted"):
            self.best, self.because = (
                before if before[0] is not FLOAT32 else (FLOAT32, self.because)
            )

    def _gain(self, against: Comparison, setup: Setup) -> tuple[str, bool]:
        """How a setup compares at the objective, in words; and whether it is better for certain."""
        if self.objective == "memory":
            mine, theirs = self.kept[setup.name], self.kept[against.against]
            return f"keeps {mine / max(theirs, 1):.2f} of the memory of", mine < theirs
        ratio = against.ratio
        if not math.isfinite(ratio.high):
            return "was timed too seldom to compare it with", False
        figures = f"{ratio.middle:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of the time of"
        if ratio.high < 1:
            return f"takes {figures}", True
        said = "is slower: it takes" if ratio.low > 1 else "is not faster for certain: it takes"
        return f"{said} {figures}", False

    def _tell(
        self, stage: Literal["record", "errors", "costs", "prove", "done"], said: str
    ) -> None:
        if self.told is not None:
            elapsed = time.monotonic() - self.begun
            self.told(Progress(stage, said, elapsed, self.budget, self.best.name))


def _not_as_good(compared: Comparison, proof: Proof) -> str:
    """Why a setup is not handed out."""
    if compared.because:
        return f"{compared.name} fails ({compared.because})"
    difference = compared.difference
    if not math.isfinite(difference.high):
        return f"of {compared.name} nothing is proven"
    figures = f"by {difference.low:+.2%} to {difference.high:+.2%}"
    if compared.loss == "worse":
        return f"the loss of {compared.name} is worse than that of {compared.against} {figures}"
    return (
        f"the loss of {compared.name} cannot be told from that of {compared.against} within {proof.tolerance:.2%}: it "
        f"differs {figures}"
    )


def _says_as(policy: Policy | None, other: Policy) -> bool:
    """Whether two policies have the same rules; reasons may differ."""
    return (
        policy is not None
        and policy.fingerprint == other.fingerprint
        and policy.modules.keys() == other.modules.keys()
        and all(rule.says_as(other.modules[name]) for name, rule in policy.modules.items())
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
