"""`tune`: a search for the best policy of a model on this machine, and its proof.

1. The model's operations are recorded, and their errors, time and memory in 16 bits are measured.
2. A policy is chosen that costs least within the allowed errors.
3. Copies are trained in float32, under the base policy, this policy, and each preset that has other rules for the
   model's operations. If the chosen policy trains worse, half the error is allowed, and 2. starts again. For inference
   copies are run instead, and compared by a metric.

Invariants:
- the model is never run or written, only copies of it;
- the answer has trained as well as float32, within the tolerance, and is better at the objective than float32 and the
  base policy for certain. Where no policy is, the answer is the better one of these two;
- a policy under which the gradient of a parameter is zero, and is not in float32, is never the answer;
- the budget is kept, apart from the step that runs when it ends, and one that is traced. A budget that is too small for
  any proof is refused;
- Ctrl-C ends the search, and the best policy that is proven by then is the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._internal.display import dtype_name
from precast.errors import TuningError
from precast.policy.policy import Policy, Rule, as_policy
from precast.tuning import evidence as files
from precast.tuning.chooser import Objective, choose
from precast.tuning.costs import ProgramCosts, measure_costs
from precast.tuning.evidence import SearchSettings
from precast.tuning.float8_products import choose_products, products_of, setup_name
from precast.tuning.inference import InferenceTask
from precast.tuning.judging import (
    Judge,
    OtherPrograms,
    SearchTime,
    deciding_changes,
    duration_text,
)
from precast.tuning.options import TuningOptions, TuningProgress, check_arguments, check_options
from precast.tuning.policy_rows import policy_of
from precast.tuning.proof import Proof, prove
from precast.tuning.reasons import RowReasons
from precast.tuning.result import TuningResult
from precast.tuning.sensitivity import Sensitivity, measure_sensitivity
from precast.tuning.setups import FLOAT32, Setup, Workload, preserved_random_states, read_batches
from precast.tuning.sites import TunedProgram
from precast.tuning.training import TrainingTask

__all__ = ["task_of", "tune"]

_ERRORS: Final = 0.3
"""The share of the budget after which groups are not halved any more."""
_COSTS: Final = 0.15
"""The share of the budget, after that, for costs."""
_PRODUCTS: Final = 0.1
"""The share of the budget for each float8 rule."""
_CHOICE: Final = 0.05
"""The share of the budget for each choice."""
_PROOF: Final = 0.8
"""The share of the remaining time for the first look at a proof."""
_SAFETY: Final = 2
"""The factor by which steps under a policy may be slower than in float32."""
_ROUNDS: Final = 3
_FEWEST_SETUPS: Final = 3
"""Float32, the base policy, and the chosen one."""
_PRESETS: Final = ("default", "lean", "torch")
"""Presets that are compared; `torch` computes what `torch.autocast` does, bit for bit."""


def tune(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor] | None,
    batches: Any,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    objective: Objective = "time",
    tolerance: float = 0.01,
    budget: float = 300.0,
    options: TuningOptions | None = None,
) -> TuningResult:
    """Find the best policy for a model on this machine, and prove it by training or running copies of the model.

    Args:
        model: The model, on its device. It is copied and does not change; nor do random states.
        step: ``step(model, batch)`` runs its model on a batch and returns the loss. It opens no region and does not
            call backward. None searches for inference: copies are run without gradients, and compared by the metric in
            `options`. Under a policy they are converted, as by `precast.convert`, or attached where they cannot be.
        batches: A list of batches or a data loader, or a function that returns an iterator. The first 32 are used, and
            used again where a training needs more.
        optimizer: Makes an optimizer of parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``; AdamW by
            default.
        objective: The quantity to minimize: "time" of a training step, or "memory" that autograd keeps for the backward
            pass. For inference: "time" of the model's calls, or "memory" of its weights with the results of operations.
        tolerance: The relative difference of the loss, after training, or of the metric, that does not count.
        budget: The most seconds that the search takes. One that is too small for any comparison is refused at once.
        options: Rarely used arguments: a metric, candidates, the base policy, the random seed.

    Returns:
        The policy with its evidence. It is the one of float32 or the base policy where no better one is proven. Where
        the measurements leave open whether another is better than float32, `is_decided` is False.

    Raises:
        TuningError: The model cannot be copied, the step returns no scalar loss, there are no batches, the loss reaches
            no parameter, the training or the metric in float32 is not finite, the budget is too small, or an argument
            is impossible.
        PolicyError: The base policy cannot be read.

    Examples:
        >>> import precast
        >>> model = nn.Linear(8, 1)
        >>> batches = [torch.randn(4, 8) for _ in range(4)]
        >>> result = precast.tune(model, lambda model, x: model(x).square().mean(), batches, budget=60.0)
        >>> result.name in ("float32", "default", "tuned")
        True
    """
    options = options or TuningOptions()
    check_arguments(model, step, optimizer, objective, tolerance, budget)
    candidates = check_options(step, options)
    device_type = options.device_type or next((p.device.type for p in model.parameters()), "cpu")
    workload = Workload(
        model,
        step,
        read_batches(batches),
        optimizer or torch.optim.AdamW,
        device_type,
        options.metric,
        options.seed,
    )
    base = as_policy(options.base)
    settings = SearchSettings(
        objective,
        tolerance,
        budget,
        [dtype_name(candidate) for candidate in candidates],
        base.name,
        device_type,
        options.seed,
        "inference" if step is None else "training",
    )
    with preserved_random_states():
        return _PolicySearch(task_of(workload), base, settings, options.progress).run(candidates)


def task_of(workload: Workload) -> TrainingTask | InferenceTask:
    """Return the task of a workload: training if it has a step, else inference.

    Raises:
        TuningError: there are too few batches to compare metrics.
    """
    if workload.step is not None:
        return TrainingTask(workload)
    task, count = InferenceTask(workload), len(workload.batches)
    if count < task.least_pairs:
        raise TuningError(
            f"batches has {count}: for inference, the metrics of at least {task.least_pairs} batches are compared. "
            "Divide them into more"
        )
    return task


@dataclass
class _DtypeCandidate:
    """The measurements in one 16-bit dtype, and the share of the allowed error that its policy may have."""

    program: TunedProgram
    errors: Sensitivity
    costs: ProgramCosts = field(default_factory=lambda: ProgramCosts({}))
    share: float = 1.0


class _PolicySearch:
    """One search, while it runs."""

    def __init__(
        self,
        task: TrainingTask | InferenceTask,
        base: Policy,
        settings: SearchSettings,
        progress: Callable[[TuningProgress], None] | None,
    ) -> None:
        self._start = time.monotonic()
        self._task = task
        self._base = base
        self._settings = settings
        self._progress = progress
        self._evidence = files.new_evidence(task.workload, settings)
        self._float8_shares: dict[str, float] = {}
        """The share of the allowed error of each float8 rule."""
        self._declined: dict[str, str] = {}
        """Why a float8 rule is not tried in a training."""
        self._best: Setup = FLOAT32
        self._because = ""
        self._step_seconds = 0.0
        """The time of a step in float32."""

    def run(self, candidates: Sequence[torch.dtype | str]) -> TuningResult:
        """Search, and return the answer."""
        evidence = self._evidence
        try:
            self._search(candidates)
        except KeyboardInterrupt:
            self._because = self._because or "the search was interrupted before anything was proven"
            evidence.interrupted = True
        best = self._best
        evidence.answer, evidence.dtype = best.name, dtype_name(best.dtype)
        evidence.because = self._because
        evidence.seconds = self._elapsed()
        if not evidence.interrupted:
            evidence.traced = self._task.traced(best)
        self._tell("done", self._because)
        policy = Policy("float32", {}, "promote") if best.policy is None else best.policy
        policy = policy.replace(measured=files.where_measured(evidence))
        return TuningResult(policy, best.dtype, self._because, evidence)

    def _search(self, names: Sequence[torch.dtype | str]) -> None:
        dtypes = [name for name in names if isinstance(name, torch.dtype)] or [torch.bfloat16]
        self._float8_shares = {str(name): 1.0 for name in names if isinstance(name, str)}
        self._tell("record", f"a {self._task.words.run} in float32")
        self._step_seconds = self._task.seconds()
        self._refuse_too_small_budget()
        candidates = list(self._measure(dtypes))
        for _ in range(_ROUNDS):
            setups = self._affordable(self._setups(candidates))
            if not setups:
                break
            start, others = time.monotonic(), OtherPrograms()
            proof = self._prove(setups)
            judge = self._judge(proof, setups)
            self._record_undecided(judge, proof, setups, start, others.share())
            if proof.ended != "proven" or not self._reduce_errors(proof, setups, candidates):
                break

    # --- measurements ---

    def _measure(self, dtypes: Sequence[torch.dtype]) -> Iterator[_DtypeCandidate]:
        """Yield the measurements in each dtype; first all errors are measured, then all costs."""
        candidates = []
        for number, dtype in enumerate(dtypes, 1):
            until = self._start + self._settings.budget * _ERRORS * number / len(dtypes)
            candidates.append(self._measure_errors(dtype, until))
        for number, candidate in enumerate(candidates, 1):
            share = _ERRORS + _COSTS * number / len(candidates)
            program, name = candidate.program, dtype_name(candidate.program.low)
            candidate.costs = measure_costs(
                program,
                seed=self._settings.seed,
                deadline=self._start + self._settings.budget * share,
                progress=lambda done, count, what, name=name: self._tell(  # type: ignore[misc]
                    "costs", f"{name}: {done} of {count}, {what}"
                ),
            )
            self._evidence.searches.append(
                files.dtype_evidence(program, candidate.errors, candidate.costs)
            )
            yield candidate

    def _measure_errors(self, dtype: torch.dtype, deadline: float) -> _DtypeCandidate:
        name, task = dtype_name(dtype), self._task
        self._tell("record", f"the operations of a {task.words.run}, in {name}")
        program = task.record(self._base, dtype)
        count = len(program.sites)
        errors = measure_sensitivity(
            task.meter,
            program,
            self._base,
            loss=self._settings.tolerance,
            gradient=task.allowed_change,
            deadline=deadline,
            progress=lambda remaining, runs: self._tell(
                "errors", f"{name}: {remaining} of {count} operations left, {runs} runs"
            ),
        )
        return _DtypeCandidate(program, errors)

    # --- setups ---

    def _setups(self, candidates: Sequence[_DtypeCandidate]) -> list[Setup]:
        """Return the setups of the base policy, the chosen ones, and last those of presets."""
        setups: list[Setup] = []
        presets: list[Setup] = []
        for candidate in candidates:
            program = candidate.program
            suffix = f" in {dtype_name(program.low)}" if len(candidates) > 1 else ""
            self._task.meter.scale = candidate.errors.scale
            base = self._with_silent(Setup(f"{self._base.name}{suffix}", self._base, program.low))
            in_16_bits = [base]
            tuned = self._tuned(f"tuned{suffix}", candidate)
            if tuned.policy is not None and not _has_rules_of(tuned.policy, self._base):
                in_16_bits.append(tuned)
            setups += in_16_bits
            if candidate is candidates[0] and self._float8_shares:
                setups += self._float8_setups(program, in_16_bits)
            presets += (
                self._with_silent(Setup(f"{preset.name}{suffix}", preset, program.low))
                for preset in _other_presets(self._base, program)
            )
        return setups + presets

    def _with_silent(self, setup: Setup) -> Setup:
        return replace(setup, silent=self._task.meter.errors(setup).silent)

    def _tuned(self, name: str, candidate: _DtypeCandidate) -> Setup:
        """Return the setup that costs least within the allowed errors.

        Errors that were measured in groups may add up to more where all operations run together in 16 bits.
        """
        settings, program = self._settings, candidate.program
        loss, gradient = settings.tolerance**2, self._task.allowed_change**2
        share = candidate.share
        for _ in range(_ROUNDS):
            chosen = choose(
                program,
                candidate.costs,
                candidate.errors.sites,
                objective=settings.objective,
                loss=loss * share**2,
                gradient=gradient * share**2,
                seconds=max(1.0, _CHOICE * settings.budget),
            )
            reasons = RowReasons(
                program, candidate.costs, candidate.errors, chosen, settings.objective
            )
            policy = policy_of(chosen.choice, program, self._base, reason=reasons)
            setup = Setup(name, policy, program.low)
            errors = self._task.meter.errors(setup)
            if errors.fits(loss, gradient):
                break
            share /= 2
        return replace(setup, silent=errors.silent)

    def _float8_setups(self, program: TunedProgram, in_16_bits: Sequence[Setup]) -> Iterator[Setup]:
        """Yield the last 16-bit setup that has products, with some of them under each float8 rule."""
        with_products = [s for s in in_16_bits if s.policy and products_of(program, s.policy)]
        around = with_products[-1] if with_products else in_16_bits[-1]
        self._evidence.eight_bits = []
        for rule, share in self._float8_shares.items():
            self._tell("costs", f"products in {rule}")
            choice = choose_products(
                self._task.meter,
                program,
                around,
                rule,
                objective=self._settings.objective,
                loss=self._settings.tolerance * share,
                gradient=self._task.allowed_change * share,
                seed=self._settings.seed,
                deadline=time.monotonic() + _PRODUCTS * self._settings.budget,
            )
            self._evidence.eight_bits.append(files.float8_evidence(choice))
            self._declined.pop(rule, None)
            if choice.setup is None:
                self._declined[rule] = choice.because
            else:
                yield choice.setup

    # --- the budget ---

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _proof_seconds(self, steps: int, setups: int) -> float:
        """Return the time of a proof up to its first look, if steps take as long as in float32."""
        return steps * self._step_seconds * setups * self._task.least_pairs

    def _recommended_budget(self) -> float:
        """Return a budget that is enough to compare float32, the base policy and the chosen one."""
        proof = _SAFETY * self._proof_seconds(self._task.steps[0], _FEWEST_SETUPS) / _PROOF
        return max(proof / (1 - _ERRORS - _COSTS), proof + self._elapsed())

    def _refuse_too_small_budget(self) -> None:
        """Refuse a budget that is too small even for a proof without measurements.

        The time so far does not count: on a busy machine most of it loads code.
        """
        budget, words = self._settings.budget, self._task.words
        if budget >= self._proof_seconds(self._task.steps[0], _FEWEST_SETUPS):
            return
        needed = duration_text(self._recommended_budget())
        raise TuningError(
            f"the budget of {budget:g} s is too small: a {words.run} of this model in float32 takes "
            f"{self._step_seconds:.2g} s now, so a search takes about {needed}. Pass a budget of {needed} or more"
        )

    def _steps_for(self, seconds: float, setups: int) -> int:
        """Return the steps of a training for which there is time; 0 if that is less than the fewest."""
        least, most = self._task.steps
        steps = int(_PROOF * seconds / (_SAFETY * self._proof_seconds(1, setups)))
        return min(steps, most) if steps >= least else 0

    def _has_time(self, setups: int) -> bool:
        return self._steps_for(self._settings.budget - self._elapsed(), setups) > 0

    def _affordable(self, setups: list[Setup]) -> list[Setup]:
        """Return the first setups that there is time for; maybe none."""
        evidence = self._evidence
        for count in range(len(setups), 0, -1):
            if self._has_time(count + 1):
                evidence.untried = [setup.name for setup in setups[count:]]
                return setups[:count]
        if not evidence.proofs:
            self._because = "measuring errors and costs left no time to compare anything"
            evidence.undecided = [setup.name for setup in setups]
            needed = self._elapsed() + self._recommended_budget()
            evidence.would_decide = [f"a budget of {duration_text(needed)} or more"]
        return []

    # --- the proof ---

    def _prove(self, setups: Sequence[Setup]) -> Proof:
        settings, words = self._settings, self._task.words
        proof = prove(
            self._task,
            setups,
            steps=self._steps_for(settings.budget - self._elapsed(), len(setups) + 1)
            or self._task.steps[0],
            tolerance=settings.tolerance,
            deadline=self._start + settings.budget,
            timed=settings.objective == "time",
            progress=lambda names, number: self._tell(
                "prove", f"{words.round} {number + 1}: {names}"
            ),
        )
        self._evidence.proofs.append(proof)
        return proof

    def _judge(self, proof: Proof, setups: Sequence[Setup]) -> Judge:
        """Set the best setup and the reasons for it."""
        before = self._best, self._because
        bases = {setup.name for setup in setups if setup.policy is self._base}
        judge = Judge(self._settings.objective, bases, self._task.words)
        self._best, text = judge.best(proof, setups)
        reasons = [*filter(None, [text]), *self._declined.values()]
        if self._evidence.untried:
            reasons.append(f"there was no time to try {', '.join(self._evidence.untried)}")
        if proof.ended == "interrupted":
            self._evidence.interrupted = True
            reasons.append("the search was interrupted")
        if proof.ended == "time":
            reasons.append("the budget ended")
        self._because = "; ".join(reasons)
        is_partial = proof.ended in ("time", "interrupted")
        if is_partial and self._best is FLOAT32 and before[0] is not FLOAT32:
            self._best, self._because = before
        return judge

    def _record_undecided(
        self,
        judge: Judge,
        proof: Proof,
        setups: Sequence[Setup],
        start: float,
        other_programs: float | None,
    ) -> None:
        """Record the setups that may be better than an answer of float32, and the changes that would decide it."""
        evidence = self._evidence
        evidence.undecided, evidence.would_decide = [], []
        if self._best is not FLOAT32 or proof.ended == "interrupted":
            return
        names, untried = judge.undecided(proof, setups), evidence.untried
        if not names and not untried:
            return
        evidence.undecided = [*names, *untried]
        count = len(setups) + len(untried) + 1
        spent = SearchTime(
            self._settings.budget,
            start - self._start,
            time.monotonic() - start,
            lambda seconds: self._steps_for(seconds, count),
            len(untried),
            other_programs,
        )
        evidence.would_decide = deciding_changes(
            proof,
            names,
            spent,
            self._task.looks,
            self._task.words,
            is_timed=self._settings.objective == "time",
        )

    def _reduce_errors(
        self, proof: Proof, setups: Sequence[Setup], candidates: Sequence[_DtypeCandidate]
    ) -> bool:
        """Halve the allowed errors of the chosen policies that trained worse; return False if there are none."""
        worse = {c.name for c in proof.comparisons if c.loss == "worse" and not c.because} | {
            name for name, figures in proof.figures.items() if figures.failure
        }
        is_changed = False
        for rule in self._float8_shares:
            if setup_name(rule) in worse:
                self._float8_shares[rule] /= 2
                worse.discard(setup_name(rule))
                is_changed = True
        chosen = [setup for setup in setups if setup.name.startswith("tuned")]
        dtypes = {setup.dtype for setup in chosen}
        # Without a chosen policy in a dtype, the choice was the base policy.
        chosen += [s for s in setups if s.policy is self._base and s.dtype not in dtypes]
        for setup in chosen:
            if setup.name in worse:
                for candidate in candidates:
                    if candidate.program.low is setup.dtype:
                        candidate.share /= 2
                        is_changed = True
        return is_changed

    def _tell(
        self, stage: Literal["record", "errors", "costs", "prove", "done"], text: str
    ) -> None:
        if self._progress is not None:
            self._progress(
                TuningProgress(stage, text, self._elapsed(), self._settings.budget, self._best.name)
            )


def _other_presets(base: Policy, program: TunedProgram) -> Iterator[Policy]:
    """Yield the presets whose rules for a program differ from those of the base policy and of earlier presets."""
    earlier = [_rules_for(base, program)]
    for name in _PRESETS:
        preset = Policy.load(name)
        rules = _rules_for(preset, program)
        if rules not in earlier:
            earlier.append(rules)
            yield preset


def _rules_for(policy: Policy, program: TunedProgram) -> object:
    """Return the rules of a policy that change how a program runs."""
    table, _ = policy.expand(program.device)
    called = {call.overload for site in program.sites for call in site.calls}
    rules = {(name, table[name].rule) for name in called if name in table}
    rows = {(name, rule) for name, rule in rules if rule is not Rule.KEEP}  # the same as no row
    modules = {pattern: repr(rule) for pattern, rule in policy.modules.items()}
    return policy.mixed, rows, modules


def _has_rules_of(policy: Policy, other: Policy) -> bool:
    """Return True if two policies have the same rules; reasons may differ."""
    return (
        policy.fingerprint == other.fingerprint
        and policy.modules.keys() == other.modules.keys()
        and all(rule.agrees_with(other.modules[name]) for name, rule in policy.modules.items())
    )
