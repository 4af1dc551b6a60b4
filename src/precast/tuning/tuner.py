"""`tune`: a search for the best policy of a model on this machine, and its proof.

1. The model's operations are recorded, and their errors, time and memory in 16 bits are measured.
2. A policy is chosen that costs least within the allowed errors.
3. Copies are trained in float32, under the base policy, this policy, and each preset that has other rules for the
   model's operations. For inference copies are run instead, and compared by a metric.

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
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._internal.display import dtype_name
from precast.errors import TuningError
from precast.policy.policy import Policy, Rule, as_policy, expanded_rules
from precast.tuning.chooser import choose
from precast.tuning.costs import Objective, ProgramCosts, measure_costs
from precast.tuning.evidence import SearchSettings, new_evidence
from precast.tuning.float8_products import choose_products, products_of
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
from precast.tuning.tasks import TuningTask
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
_SHARES: Final = (1.0, 0.5, 0.25)
"""The shares of the allowed errors with which a policy is chosen, until its errors together are allowed."""
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
    progress = options.progress or (lambda _: None)
    with preserved_random_states():
        return _PolicySearch(task_of(workload), base, settings, progress).run(candidates)


def task_of(workload: Workload) -> TuningTask:
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


class _PolicySearch:
    """One search, while it runs."""

    def __init__(
        self,
        task: TuningTask,
        base: Policy,
        settings: SearchSettings,
        progress: Callable[[TuningProgress], None],
    ) -> None:
        self._start = time.monotonic()
        self._task = task
        self._base = base
        self._settings = settings
        self._progress = progress
        self._evidence = new_evidence(task.workload, settings)
        self._best: Setup = FLOAT32
        self._evidence.because = "the search was interrupted before anything was proven"
        self._step_seconds = 0.0
        """The time of a step in float32."""

    def run(self, candidates: Sequence[torch.dtype | str]) -> TuningResult:
        """Search, and return the answer."""
        evidence = self._evidence
        try:
            self._search(candidates)
        except KeyboardInterrupt:
            evidence.interrupted = True
        best = self._best
        evidence.answer, evidence.dtype = best.name, dtype_name(best.dtype)
        evidence.seconds = self._elapsed()
        if not evidence.interrupted:
            evidence.traced = self._task.traced(best)
        self._tell("done", evidence.because)
        policy = Policy("float32", {}, "promote") if best.policy is None else best.policy
        policy = policy.replace(measured=evidence.where_measured())
        return TuningResult(policy, best.dtype, evidence.because, evidence)

    def _search(self, candidates: Sequence[torch.dtype | str]) -> None:
        dtypes = [each for each in candidates if isinstance(each, torch.dtype)]
        float8_rules = [str(each) for each in candidates if isinstance(each, str)]
        self._tell("record", f"a {self._task.words.run} in float32")
        self._step_seconds = self._task.seconds()
        self._refuse_too_small_budget()
        setups = self._setups(dtypes or [torch.bfloat16], float8_rules)
        count = next((n for n in range(len(setups), 0, -1) if self._has_time(n + 1)), 0)
        evidence, budget = self._evidence, self._settings.budget
        evidence.untried = [setup.name for setup in setups[count:]]
        if count == 0:
            evidence.because = "measuring errors and costs left no time to compare anything"
            evidence.undecided, evidence.untried = evidence.untried, []
            needed = duration_text(self._elapsed() + self._sufficient_budget(_FEWEST_SETUPS))
            evidence.would_decide = [f"a budget of {needed} or more"]
            return
        start, others = time.monotonic(), OtherPrograms()
        is_timed = self._settings.objective == "time"
        evidence.proof = proof = prove(
            self._task,
            setups[:count],
            steps=self._steps_for(count + 1) or self._task.steps[0],
            tolerance=self._settings.tolerance,
            deadline=self._start + budget,
            timed=is_timed,
            progress=partial(self._tell, "prove"),
        )
        judge = self._judge(proof, setups[:count])
        if self._best is not FLOAT32 or proof.ended == "interrupted":
            return
        names = judge.undecided(proof, setups[:count])
        evidence.undecided = [*names, *evidence.untried]
        if evidence.undecided:
            before, seconds = start - self._start, time.monotonic() - start
            least = before + self._proof_budget(len(setups) + 1)
            spent = SearchTime(
                budget, before, seconds, least, len(evidence.untried), others.share()
            )
            changes = deciding_changes(self._task, proof, names, spent, is_timed=is_timed)
            evidence.would_decide = list(changes)

    # --- measurements and setups ---

    def _setups(self, dtypes: Sequence[torch.dtype], float8_rules: Sequence[str]) -> list[Setup]:
        """Return the setups of the base policy, the chosen ones, and last those of presets.

        First all errors are measured, then all costs.
        """
        budget, count, meter = self._settings.budget, len(dtypes), self._task.meter
        measured = [
            self._measure_errors(dtype, self._start + budget * _ERRORS * number / count)
            for number, dtype in enumerate(dtypes, 1)
        ]
        all_costs = [
            measure_costs(
                program,
                seed=self._settings.seed,
                deadline=self._start + budget * (_ERRORS + _COSTS * number / count),
                progress=partial(self._tell, "costs"),
            )
            for number, (program, _) in enumerate(measured, 1)
        ]
        setups: list[Setup] = []
        presets: list[Setup] = []
        for (program, errors), costs in zip(measured, all_costs, strict=True):
            self._evidence.add_search(program, errors, costs)
            suffix = f" in {dtype_name(program.low)}" if count > 1 else ""
            meter.scale = errors.scale
            base, *others = [
                Setup(f"{policy.name}{suffix}", policy, program.low)
                for policy in (self._base, *_other_presets(self._base, program))
            ]
            setups.append(replace(base, silent=meter.errors(base).silent))
            presets += [replace(other, silent=meter.errors(other).silent) for other in others]
            policy, silent = self._choose(program, errors, costs)
            if _rules_for(policy, program) != _rules_for(self._base, program):
                setups.append(Setup(f"tuned{suffix}", policy, program.low, silent))
            if costs is all_costs[0]:
                setups += [*self._float8_setups(program, setups, float8_rules)]
        return setups + presets

    def _measure_errors(
        self, dtype: torch.dtype, deadline: float
    ) -> tuple[TunedProgram, Sensitivity]:
        task = self._task
        self._tell("record", f"the operations of a {task.words.run}, in {dtype_name(dtype)}")
        program = task.record(self._base, dtype)
        errors = measure_sensitivity(
            task.meter,
            program,
            self._base,
            loss=self._settings.tolerance,
            gradient=task.allowed_change,
            deadline=deadline,
            progress=partial(self._tell, "errors"),
        )
        return program, errors

    def _choose(
        self, program: TunedProgram, errors: Sensitivity, costs: ProgramCosts
    ) -> tuple[Policy, str]:
        """Return the policy that costs least within the allowed errors, and a parameter that it does not train.

        Errors that were measured in groups may add up to more where all operations run together in 16 bits.
        """
        settings = self._settings
        loss, gradient = settings.tolerance**2, self._task.allowed_change**2
        for share in _SHARES:
            chosen = choose(
                program,
                costs,
                errors.sites,
                objective=settings.objective,
                loss=loss * share**2,
                gradient=gradient * share**2,
                seconds=max(1.0, _CHOICE * settings.budget),
            )
            reasons = RowReasons(program, costs, errors, chosen, settings.objective)
            policy = policy_of(chosen.choice, program, self._base, reason=reasons)
            together = self._task.meter.errors(Setup("tuned", policy, program.low))
            if together.fits(loss, gradient):
                break
        return policy, together.silent

    def _float8_setups(
        self, program: TunedProgram, in_16_bits: Sequence[Setup], rules: Sequence[str]
    ) -> Iterator[Setup]:
        """Yield the last 16-bit setup that has products, with some of them under each float8 rule."""
        with_products = [s for s in in_16_bits if s.policy and products_of(program, s.policy)]
        around = [*in_16_bits, *with_products][-1]
        for rule in rules:
            self._tell("costs", f"products in {rule}")
            setup, choice = choose_products(
                self._task.meter,
                program,
                around,
                rule,
                objective=self._settings.objective,
                loss=self._settings.tolerance,
                gradient=self._task.allowed_change,
                seed=self._settings.seed,
                deadline=time.monotonic() + _PRODUCTS * self._settings.budget,
            )
            self._evidence.eight_bits.append(choice)
            if setup is not None:
                yield setup

    # --- the budget ---

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _proof_seconds(self, steps: int, setups: int) -> float:
        """Return the time of a proof up to its first look, if steps take as long as in float32."""
        return steps * self._step_seconds * setups * self._task.least_pairs

    def _proof_budget(self, setups: int) -> float:
        """Return the seconds in which the shortest trainings are tried."""
        return _SAFETY * self._proof_seconds(self._task.steps[0], setups) / _PROOF

    def _sufficient_budget(self, setups: int) -> float:
        """Return a budget that is enough to compare so many setups."""
        proof = self._proof_budget(setups)
        return max(proof / (1 - _ERRORS - _COSTS), proof + self._elapsed())

    def _refuse_too_small_budget(self) -> None:
        """Refuse a budget that is too small even for a proof without measurements.

        The time so far does not count: on a busy machine most of it loads code.
        """
        budget, words = self._settings.budget, self._task.words
        if budget >= self._proof_seconds(self._task.steps[0], _FEWEST_SETUPS):
            return
        needed = duration_text(self._sufficient_budget(_FEWEST_SETUPS))
        raise TuningError(
            f"the budget of {budget:g} s is too small: a {words.run} of this model in float32 takes "
            f"{self._step_seconds:.2g} s now, so a search takes about {needed}. Pass a budget of {needed} or more"
        )

    def _steps_for(self, setups: int) -> int:
        """Return the steps of a training for which there is time; 0 if that is less than the fewest."""
        least, most = self._task.steps
        seconds = self._settings.budget - self._elapsed()
        steps = int(_PROOF * seconds / (_SAFETY * self._proof_seconds(1, setups)))
        return min(steps, most) if steps >= least else 0

    def _has_time(self, setups: int) -> bool:
        return self._steps_for(setups) > 0

    # --- the proof ---

    def _judge(self, proof: Proof, setups: Sequence[Setup]) -> Judge:
        """Set the best setup and the reasons for it."""
        evidence = self._evidence
        bases = {setup.name for setup in setups if setup.policy is self._base}
        judge = Judge(self._settings.objective, bases, self._task.words)
        self._best, text = judge.best(proof, setups)
        names = {setup.name for setup in setups} | {*evidence.untried}
        reasons = [text] if text else []
        reasons += [
            choice.because
            for choice in evidence.eight_bits
            if f"tuned with {choice.rule}" not in names
        ]
        if evidence.untried:
            reasons.append(f"there was no time to try {', '.join(evidence.untried)}")
        if proof.ended == "interrupted":
            evidence.interrupted = True
            reasons.append("the search was interrupted")
        if proof.ended == "time":
            reasons.append("the budget ended")
        evidence.because = "; ".join(reasons)
        return judge

    def _tell(self, stage: Any, text: str) -> None:
        now, budget = self._elapsed(), self._settings.budget
        self._progress(TuningProgress(stage, text, now, budget, self._best.name))


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
    table, _ = expanded_rules(policy, program.device)
    called = {call.overload for site in program.sites for call in site.calls}
    rules = {(name, table[name].rule) for name in called if name in table}
    rows = {(name, rule) for name, rule in rules if rule is not Rule.KEEP}  # the same as no row
    modules = {pattern: repr(rule) for pattern, rule in policy.modules.items()}
    return policy.mixed, rows, modules
